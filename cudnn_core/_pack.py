"""Operands of a run: from whatever the caller passes to checked addresses in canonical order.

``Layout`` is made once per plan; ``Layout.read`` turns ``{tensor | uid | name: buffer}`` into addresses and checks every
one: presence, device, data type, shape, strides, alignment, aliasing. Nothing has been written when it raises. A torch
tensor takes the fast road (attributes compared with objects remembered from the first call), a numpy array one like it,
everything else is described by ``_buffers``. Imported by the plan.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._arguments import as_int, as_list, as_number
from ._bounds import Bounds, Placed
from ._buffers import array_layout, describe, encode_scalar, same_array
from ._dims import match_sizes
from ._engine import Operand, VariantPack
from ._errors import ExecutionError, GraphError, nearest
from ._slot import Slot, in_elements

if TYPE_CHECKING:
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph

__all__ = ["Layout"]

_NO_OWNERS: list[object] = []
_PASSED_LIMIT = 256

_Seen = dict[object, tuple[int, Any, tuple[Any, ...], tuple[int, ...] | None]]
_Found = tuple[int, tuple[int, ...], tuple[int, ...]]  # slot, shape and strides in elements


class Layout:
    """The operand slots of one plan and the ways to name them.

    ``defaults`` are buffers and numbers bound while the graph was built: used where the caller passes none, before the
    graph's own defaults.
    """

    __slots__ = (
        "_addresses",
        "_aliases",
        "_default_slots",
        "_device_index",
        "_device_type",
        "_fixed",
        "_ignored",
        "_keys",
        "_on_cpu",
        "_seen",
        "defaults",
        "dims",
        "operands",
        "slots",
    )

    def __init__(
        self,
        graph: FrozenGraph,
        device: DeviceInfo,
        defaults: Mapping[int, object],
        aliases: Mapping[tuple[int, int], int],
        ignored: Mapping[object, str],
    ) -> None:
        self.operands = graph.operands
        self.dims = graph.dims
        tensors = graph.operand_tensors()
        self.slots = tuple(Slot(tensor, operand) for tensor, operand in zip(tensors, graph.operands, strict=True))
        self._device_type = device.type
        self._device_index = device.ordinal or 0
        self._on_cpu = device.type == "cpu"
        self._fixed = not graph.dims
        # Whether an int is an address, whatever slot it is for, and all that a call must tell.
        self._addresses = self._fixed and not any(slot.number for slot in self.slots)
        self._aliases = aliases
        # Per key that named a torch tensor: (slot, torch dtype, shape, strides or None where packed) as accepted; per key that
        # named an array: (slot, None, its ``array_layout``, None). With runtime
        # sizes: those of the last call that passed, whole. Then the sizes and the bounds at them, and the addresses that passed
        # the checks: a model's layers share a plan and come with their own weights.
        self._seen: tuple[_Seen, dict[str, int] | None, Bounds | None, dict[tuple[int, ...], Placed]]
        self._seen = ({}, None, self._bounds(None) if self._fixed else None, {})
        self._keys: dict[object, int] = {}
        self._ignored = dict(ignored)
        names: dict[str, list[int]] = {}
        for i, slot in enumerate(self.slots):
            self._keys[slot.operand.uid] = i
            if slot.operand.name:
                names.setdefault(slot.operand.name, []).append(i)
        for name, found in names.items():
            if len(found) == 1:
                self._keys[name] = found[0]
            else:
                self._ignored[name] = f"{len(found)} operands have this name; name them by tensor or uid"
        bound = [defaults.get(tensor.uid, tensor.default) for tensor in tensors]
        self.defaults = {i: value for i, value in enumerate(bound) if value is not None}
        self._default_slots = tuple(self.defaults)

    def add_key(self, key: object, uid: int) -> None:
        """Let ``key`` (a Tensor descriptor) name the operand with ``uid``."""
        index = self._keys.get(uid)
        if index is not None:
            self._keys[key] = index

    # --- reading
    def read(
        self, values: dict[Any, Any], overrides: Mapping[int, Sequence[int]] | None = None
    ) -> tuple[Sequence[int], Placed, list[object]]:
        """(addresses, what passed the checks, objects to keep alive while they are used) for the buffers in ``values``."""
        # The fast roads: addresses, or torch tensors, each compared with what was accepted under its key before. Where the
        # declared strides are packed, is_contiguous says the same as a comparison of strides, at half the cost. Whatever is
        # irregular is left to the general road, which also words the errors.
        pointers: list[Any] = [None] * len(self.slots)
        rest: list[tuple[Any, Any]] = []
        seen, _, bounds, passed = self._seen
        first = None
        for first in values.values():  # noqa: B007  half the price of next(iter(...))
            break
        addresses = type(first) is int and self._addresses
        if addresses:
            keys = self._keys
            try:
                for key, value in values.items():
                    if type(value) is not int:
                        raise KeyError
                    pointers[keys[key]] = value
            except KeyError:
                addresses, pointers = False, [None] * len(pointers)
        if not addresses:
            on_cpu, device = self._on_cpu, self._device_index
            for key, value in values.items():
                try:
                    index, dtype, shape, stride = seen[key]
                    if (
                        value.dtype is dtype
                        and value.shape == shape
                        and (
                            value.is_contiguous() if stride is None else value.stride() == stride and not value.is_neg()
                        )
                        and (value.is_cpu if on_cpu else value.get_device() == device)
                    ):
                        pointers[index] = value.data_ptr()
                        continue
                except Exception:  # noqa: S110  no tensor, a new key, no memory: the general road says which
                    pass
                rest.append((key, value))
        owners = _NO_OWNERS
        if rest:
            owners = []
            rest = [item for item in rest if not self._array(item, seen, pointers, owners)]
        regular = not rest and not overrides and len(values) == len(pointers)
        if regular:
            found = tuple(pointers)
            placed = passed.get(found)
            if placed is not None:
                return found, placed, owners
        matched = len(pointers) - pointers.count(None)
        # Not so if two keys name one operand, or if a view must not be read as it is.
        sound = matched == len(values) - len(rest) and not any(map(_is_lazy, values.values()))
        if regular and sound and bounds is not None:
            placed = bounds.check(found)
            if len(passed) >= _PASSED_LIMIT:
                passed.clear()
            passed[found] = placed
            return found, placed, owners
        if not (sound and self._fixed):  # with runtime sizes: what was accepted was accepted at other ones
            pointers, rest, owners = [None] * len(pointers), list(values.items()), []
        return self._read_rest(pointers, rest, overrides, [*owners])

    def _array(self, item: tuple[Any, Any], seen: _Seen, pointers: list[Any], owners: list[object]) -> bool:
        """Take an array with the layout that was accepted under its key before."""
        try:
            index, dtype, layout, _ = seen[item[0]]
            found = same_array(item[1], layout) if dtype is None else None
        except Exception:  # as above
            return False
        if found is None or pointers[index] is not None:
            return False
        pointers[index] = found[0]
        owners.append(found[1])
        return True

    def _read_rest(
        self,
        pointers: list[Any],
        rest: Iterable[tuple[Any, Any]],
        overrides: Mapping[int, Sequence[int]] | None,
        owners: list[object],
    ) -> tuple[list[int], Placed, list[object]]:
        """The general road, for what the fast ones left."""
        seen: _Seen = {}
        found: list[_Found] = []
        for key, value in rest:
            index = self._keys.get(key)
            if index is None:
                self._unknown(key, value)
                continue
            if pointers[index] is not None:
                label = self.slots[index].label
                raise ExecutionError(f"operand {label} is given twice", operand=label)
            pointers[index] = self._one(index, value, owners, found, seen, key)
        for index in self._default_slots:
            if pointers[index] is None:
                pointers[index] = self._one(index, self.defaults[index], owners, found, {}, None)
        if None in pointers:
            missing = self.slots[pointers.index(None)].label
            raise ExecutionError(f"operand {missing} is missing", operand=missing)
        shapes = [(index, shape) for index, shape, _ in found] + self._overridden(overrides)
        sizes = None if self._fixed else self._sizes(shapes)
        bounds = self._seen[2] if sizes is None else self._bounds(sizes)
        assert bounds is not None
        self._check_layouts(bounds, shapes, found)
        placed = bounds.check(pointers)
        if sizes is None:
            self._seen[0].update(seen)
        elif len(seen) == len(self.slots):
            self._seen = (seen, sizes, bounds, {})
        return pointers, placed, owners

    def _unknown(self, key: Any, value: object) -> None:
        uid = getattr(key, "uid", key)
        from ._graph._tensor import Tensor

        why = self._ignored.get(key) or self._ignored.get(uid)
        foreign = isinstance(key, Tensor) and key not in self._ignored
        if key is None or (why == "unused" and not foreign):
            return  # as in the frontend, whose programs also pass absent optional tensors as None
        label = getattr(key, "name", None) or repr(uid)
        if foreign:
            raise ExecutionError(
                f"operand {label}: the tensor belongs to another graph, or was added after the plan was made; operands go by"
                " name and uid too",
                operand=str(label),
            )
        if why:
            raise ExecutionError(f"operand {label}: {why}", operand=str(label))
        names = [slot.operand.name for slot in self.slots if slot.operand.name]
        hint = nearest(key, names) if isinstance(key, str) else ""
        raise ExecutionError(f"the plan has no operand {label}{hint}", operand=str(label))

    def _one(self, index: int, value: Any, owners: list[object], found: list[_Found], seen: _Seen, key: object) -> int:
        """The address in ``value``, checked but for shape and strides, which go to ``found``; what keeps its memory goes to
        ``owners``, and a torch tensor leaves its layout in ``seen``."""
        slot = self.slots[index]
        label = slot.label
        if value is None:
            raise ExecutionError(f"operand {label} is missing: None was given", operand=label)
        number = as_number(value)
        if number is not None and slot.number:
            host = ctypes.create_string_buffer(encode_scalar(number, slot.dtype, label), 16)
            owners.append(host)
            return ctypes.addressof(host)
        if type(number) is int:
            return number
        try:
            view = describe(value, f"operand {label}")
        except GraphError as error:
            raise ExecutionError(str(error), operand=label) from error.__cause__
        owners.append(view.owner)
        want_device = "cpu" if slot.by_value else self._device_type
        if view.device_type != want_device or (want_device == "cuda" and view.device_index != self._device_index):
            where = want_device if want_device == "cpu" else f"cuda:{self._device_index}"
            have = view.device_type if view.device_type == "cpu" else f"cuda:{view.device_index}"
            raise ExecutionError(f"operand {label} is on {have}, the plan needs {where}", operand=label)
        if view.readonly and slot.operand.role != "input":
            raise ExecutionError(f"operand {label} is an output in a read-only buffer", operand=label)
        shape, stride = in_elements(slot, view)
        if slot.number:
            if view.elements != 1:
                raise ExecutionError(f"operand {label} is passed by value, got {view.elements} elements", operand=label)
        elif not slot.ragged:
            found.append((index, shape, stride))
        # A Parameter counts as a torch tensor; its module is torch.nn.parameter.
        if want_device == self._device_type and type(value).__module__.partition(".")[0] == "torch":
            raw = tuple(value.shape)
            packed = slot.packed and raw == slot.shape and view.elements > 1
            seen[key] = (index, value.dtype, raw, None if packed else tuple(value.stride()))
        elif want_device == "cpu" and not slot.number and not slot.ragged and view.device_type == "cpu":
            layout = array_layout(value, writable=slot.operand.role != "input")
            if layout is not None:
                seen[key] = (index, None, layout, None)
        return view.address

    def _overridden(self, overrides: Any) -> list[tuple[int, tuple[int, ...]]]:
        """(slot, shape) of ``override_shapes``."""
        if not overrides:
            return []
        if not isinstance(overrides, Mapping):
            raise ExecutionError(f"override_shapes maps uids to shapes, got {type(overrides).__name__}")
        shapes = []
        for uid, shape in overrides.items():
            index = self._keys.get(uid)
            if index is None:
                raise ExecutionError(f"override_shapes names no operand: {uid!r}", operand=str(uid))
            slot = self.slots[index]
            try:
                sizes = tuple(as_int(size, "a size") for size in as_list(shape, "a shape"))
            except GraphError as error:
                raise ExecutionError(f"operand {slot.label}: override_shapes: {error}", operand=slot.label) from None
            if slot.shape is not None and sizes != slot.shape:
                raise ExecutionError(
                    f"operand {slot.label}: shape {sizes} overrides fixed sizes {slot.shape};"
                    " declare a Dim where sizes vary",
                    operand=slot.label,
                )
            shapes.append((index, sizes))
        return shapes

    def _sizes(self, shapes: Iterable[tuple[int, tuple[int, ...]]]) -> dict[str, int]:
        """The runtime sizes that the shapes tell."""
        sizes: dict[str, int] = {}
        for index, shape in shapes:
            match_sizes(self.slots[index].dim, shape, sizes, self.slots[index].label)
        for dim in self.dims:
            if dim not in sizes:
                raise ExecutionError(
                    f"the size of {dim} is unknown: pass a tensor that has it, or override_shapes", operand=dim
                )
        return sizes

    def _check_layouts(
        self, bounds: Bounds, shapes: Iterable[tuple[int, tuple[int, ...]]], found: Iterable[_Found]
    ) -> None:
        """Every shape and stride against the declared ones, now that all sizes are known."""
        for index, shape in shapes:
            if shape != bounds.dims[index]:
                label = self.slots[index].label
                raise ExecutionError(f"operand {label} has shape {shape}, needs {bounds.dims[index]}", operand=label)
        for index, shape, stride in found:
            want = bounds.strides[index]
            differ = (a != b and size > 1 for a, b, size in zip(stride, want, shape, strict=True))
            if stride != want and 0 not in shape and any(differ):
                label = self.slots[index].label
                raise ExecutionError(f"operand {label} has strides {stride}, needs {want}", operand=label)

    def _bounds(self, sizes: dict[str, int] | None) -> Bounds:
        return Bounds(self.slots, self._aliases, sizes, self._device_type)

    # --- packs
    def operands_at(self, pointers: Sequence[int], placed: Placed) -> tuple[Operand, ...]:
        """The operands with actual sizes and the alignment of their addresses."""
        return tuple(
            slot.operand._replace(dim=dim, stride=stride, alignment=min(256, (pointer & -pointer) or 256))
            for slot, pointer, dim, stride in zip(
                self.slots, pointers, placed.bounds.dims, placed.bounds.strides, strict=True
            )
        )

    def pack(self, values: dict[Any, Any], overrides: Mapping[int, Sequence[int]] | None = None) -> VariantPack:
        """A reusable checked pack that keeps its buffers alive."""
        pointers, placed, owners = self.read(values, overrides)
        made = VariantPack(
            self.operands_at(pointers, placed), tuple(pointers), (*owners, *values.values(), *self.defaults.values())
        )
        made.placed = placed
        return made


def _is_lazy(value: Any) -> bool:
    """Whether a torch tensor's memory holds the negative of its value. Asked once per address where the strides are packed:
    such views have gaps, or one element, unless they are made with torch's private functions."""
    try:
        return bool(value.is_neg())
    except Exception:  # no torch tensor
        return False
