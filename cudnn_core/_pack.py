"""Operands of a run: from whatever the caller passes to checked addresses in canonical order.

``Layout`` is made once per plan; ``Layout.read`` turns ``{tensor | uid | name: buffer}`` into addresses and checks every
one: presence, device, data type, shape, strides, alignment, aliasing. Nothing has been written when it raises. A torch
tensor takes the fast road (attributes compared with objects remembered from the first call), everything else is described by
``_buffers``. Imported by the plan.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._buffers import describe, encode_scalar
from ._dims import dims_of, evaluate, match_sizes
from ._engine import Operand, VariantPack
from ._errors import ExecutionError, nearest
from ._slot import Slot, extent_bytes, same_storage, unpack

if TYPE_CHECKING:
    from ._device import DeviceInfo
    from ._graph._frozen import FrozenGraph

__all__ = ["Layout"]

_NO_OWNERS: list[object] = []
_PASSED_LIMIT = 256
_POINTER_ALIGN = 16  # the alignment class that a runner is bound for when every address has it

# The bytes of every operand, and every pair that must not overlap, once: (output slot, its bytes, ((other slot, bytes), ...)).
_Bounds = tuple[tuple[int, ...], tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]]
_Seen = dict[object, tuple[int, Any, tuple[int, ...], tuple[int, ...] | None]]


class Layout:
    """The operand slots of one plan and the ways to name them.

    ``defaults`` are buffers and numbers bound while the graph was built: used where the caller passes none.
    """

    __slots__ = (
        "_aliases",
        "_bounds",
        "_default_slots",
        "_device_index",
        "_device_type",
        "_fixed",
        "_ignored",
        "_keys",
        "_on_cpu",
        "_outputs",
        "_plain",
        "_seen",
        "defaults",
        "dims",
        "graph",
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
        self.graph = graph
        self.operands = graph.operands
        self.dims = graph.dims
        self.slots = tuple(
            Slot(tensor, operand) for tensor, operand in zip(graph.operand_tensors(), graph.operands, strict=True)
        )
        self._device_type = device.type
        self._device_index = device.ordinal or 0
        self._fixed = not graph.dims
        # Every operand is a buffer: what the fast roads can read.
        self._plain = bool(self.slots) and not any(slot.by_value for slot in self.slots)
        self._aliases = aliases
        self._outputs = tuple(i for i, slot in enumerate(self.slots) if slot.operand.role != "input")
        self._bounds = self._bounds_of([slot.extent for slot in self.slots])
        # Per key that named a torch tensor: (slot, torch dtype, shape, strides or None where packed) as accepted. With runtime
        # sizes: those of the last call that passed, whole. Then the sizes, the bounds at them, and the addresses (with their
        # bits or-ed) that passed the checks: a model's layers share a plan and come with their own weights.
        self._seen: tuple[_Seen, dict[str, int] | None, _Bounds, dict[tuple[int, ...], int]]
        self._seen = ({}, None, self._bounds, {})
        self._on_cpu = device.type == "cpu"
        self._keys: dict[object, int] = {}
        names: dict[str, int] = {}
        for i, slot in enumerate(self.slots):
            self._keys[slot.operand.uid] = i
            if slot.operand.name:
                names[slot.operand.name] = -1 if slot.operand.name in names else i
        self._keys.update({name: i for name, i in names.items() if i >= 0})
        self._ignored = ignored
        self.defaults = {
            i: defaults[slot.operand.uid] for i, slot in enumerate(self.slots) if slot.operand.uid in defaults
        }
        self._default_slots = tuple(self.defaults)

    def add_key(self, key: object, uid: int) -> None:
        """Let ``key`` (a Tensor descriptor) name the operand with ``uid``."""
        slot = self._keys.get(uid)
        if slot is not None:
            self._keys[key] = slot

    # --- reading
    def read(
        self, values: Mapping[Any, Any], overrides: Mapping[int, Sequence[int]] | None = None
    ) -> tuple[Sequence[int], int, dict[str, int] | None, list[object]]:
        """(addresses, their bits or-ed, sizes of the Dims or None, objects to keep alive) for the buffers in ``values``."""
        # The fast roads: as many addresses, or torch tensors, as operands; each tensor compared with what was accepted in its
        # slot before. Where the declared strides are packed, is_contiguous says the same as a comparison of strides, at half
        # the cost. Whatever is irregular starts over on the general road, which also words the errors.
        if len(values) == len(self.slots) and self._plain and not overrides:
            pointers: list[Any] = [None] * len(values)
            on_cpu = self._on_cpu
            seen, sizes, bounds, passed = self._seen
            try:
                for value in values.values():  # noqa: B007  half the price of next(iter(...))
                    break
                if type(value) is int:
                    keys = self._keys
                    for key, value in values.items():
                        if type(value) is not int or not self._fixed:
                            return self._read_any(values, overrides)
                        pointers[keys[key]] = value
                else:
                    for key, value in values.items():
                        index, dtype, shape, stride = seen[key]
                        if (
                            value.dtype is not dtype
                            or value.shape != shape
                            or not (value.is_contiguous() if stride is None else value.stride() == stride)
                            or not (value.is_cpu if on_cpu else value.get_device() == self._device_index)
                        ):
                            return self._read_any(values, overrides)
                        pointers[index] = value.data_ptr()
                found = tuple(pointers)
                merged = passed.get(found)
                if merged is not None:
                    return found, merged, sizes, _NO_OWNERS
                if None not in found:
                    merged = self._check_addresses(pointers, bounds)
                    if len(passed) >= _PASSED_LIMIT:
                        passed.clear()
                    passed[found] = merged
                    return found, merged, sizes, _NO_OWNERS
            except (AttributeError, KeyError, TypeError):
                pass
        return self._read_any(values, overrides)

    def _read_any(
        self, values: Mapping[Any, Any], overrides: Mapping[int, Sequence[int]] | None
    ) -> tuple[list[int], int, dict[str, int] | None, list[object]]:
        pointers: list[Any] = [None] * len(self.slots)
        owners: list[object] = []
        sizes: dict[str, int] | None = None if self._fixed else {}
        seen: _Seen = self._seen[0] if self._fixed else {}
        for key, value in values.items():
            index = self._keys.get(key)
            if index is None:
                self._unknown(key, value)
                continue
            slot = self.slots[index]
            if pointers[index] is not None:
                raise ExecutionError(f"operand {slot.label} is given twice", operand=slot.label)
            if type(value) is int and not slot.by_value:
                pointers[index] = value
            elif key in seen and self._matches(value, *seen[key]):
                pointers[index] = value.data_ptr()
            else:
                pointers[index] = self._slow(index, value, sizes, owners, seen, key)
        for index in self._default_slots:
            if pointers[index] is None:
                pointers[index] = self._slow(index, self.defaults[index], sizes, owners, {}, None)
        if None in pointers:
            missing = self.slots[pointers.index(None)].label
            raise ExecutionError(f"operand {missing} is missing", operand=missing)
        if overrides:
            self._override(overrides, sizes)
        if sizes is None:
            return pointers, self._check_addresses(pointers, self._bounds), None, owners
        bounds = self._bounds_of(self._extents_at(sizes))
        merged = self._check_addresses(pointers, bounds)
        if len(seen) == len(self.slots):
            self._seen = (seen, sizes, bounds, {})
        return pointers, merged, sizes, owners

    def _matches(self, value: Any, _index: int, dtype: Any, shape: Any, stride: Any) -> bool:
        """Whether ``value`` is a tensor like the one that was accepted before."""
        try:
            return (
                value.dtype is dtype
                and value.shape == shape
                and (value.is_contiguous() if stride is None else value.stride() == stride)
                and (value.is_cpu if self._on_cpu else value.get_device() == self._device_index)
            )
        except (AttributeError, TypeError):
            return False

    def _unknown(self, key: object, value: object) -> None:
        if key is None:
            return  # the frontend ignores absent optional tensors, which its programs pass as None
        why = self._ignored.get(key)
        if why == "unused":
            return
        uid = getattr(key, "uid", key)
        why = why or self._ignored.get(uid)
        label = getattr(key, "name", None) or repr(uid)
        if why == "unused":
            return
        if why:
            raise ExecutionError(f"operand {label}: {why}", operand=str(label))
        names = [slot.operand.name for slot in self.slots if slot.operand.name]
        hint = nearest(str(key), names) if isinstance(key, str) else ""
        raise ExecutionError(f"the plan has no operand {label}{hint}", operand=str(label))

    def _slow(
        self, index: int, value: Any, sizes: dict[str, int] | None, owners: list[object], seen: _Seen, key: object
    ) -> int:
        """The address in ``value`` after every check, with the general means; a torch tensor leaves its layout in ``seen``."""
        slot = self.slots[index]
        label = slot.label
        if slot.by_value and isinstance(value, (bool, int, float)):
            host = ctypes.create_string_buffer(encode_scalar(value, slot.dtype, label), 16)
            owners.append(host)
            return ctypes.addressof(host)
        if value is None:
            raise ExecutionError(f"operand {label} is missing: None was given", operand=label)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        try:
            view = describe(value, f"operand {label}")
        except TypeError as error:
            raise ExecutionError(str(error), operand=label) from None
        want_device = "cpu" if slot.by_value else self._device_type
        if view.device_type != want_device or (want_device == "cuda" and view.device_index != self._device_index):
            where = want_device if want_device == "cpu" else f"cuda:{self._device_index}"
            have = view.device_type if view.device_type == "cpu" else f"cuda:{view.device_index}"
            raise ExecutionError(f"operand {label} is on {have}, the plan needs {where}", operand=label)
        if view.readonly and slot.operand.role != "input":
            raise ExecutionError(f"operand {label} is an output in a read-only buffer", operand=label)
        shape, stride = view.shape, view.stride
        if view.dtype != slot.dtype:
            if not same_storage(view.dtype, slot.dtype):
                raise ExecutionError(f"operand {label} has data type {view.dtype}, needs {slot.dtype}", operand=label)
            shape, stride = unpack(slot, view, shape, stride)
        if slot.by_value:
            if view.elements != 1:
                raise ExecutionError(f"operand {label} is passed by value, got {view.elements} elements", operand=label)
        else:
            want: Any = slot.stride
            if sizes is not None:
                match_sizes(slot.dim, shape, sizes, label)
                want = tuple(evaluate(v, sizes) for v in want) if _known(want, sizes) else None
            elif tuple(shape) != slot.shape:
                raise ExecutionError(f"operand {label} has shape {tuple(shape)}, needs {slot.shape}", operand=label)
            if (
                want is not None
                and stride != want
                and any(a != b and size > 1 for a, b, size in zip(stride, want, shape, strict=True))
                and 0 not in shape
            ):
                raise ExecutionError(f"operand {label} has strides {tuple(stride)}, needs {want}", operand=label)
        # A Parameter counts as a torch tensor; its module is torch.nn.parameter.
        if not slot.by_value and view.dtype == slot.dtype and type(value).__module__.partition(".")[0] == "torch":
            seen[key] = (index, value.dtype, view.shape, None if slot.packed else view.stride)
        if hasattr(value, "__dlpack__") and not hasattr(value, "data_ptr"):
            owners.append(value)
        return view.address

    def _override(self, overrides: Mapping[int, Sequence[int]], sizes: dict[str, int] | None) -> None:
        for uid, shape in overrides.items():
            index = self._keys.get(uid)
            if index is None:
                raise ExecutionError(f"override_shapes names no operand: {uid!r}", operand=str(uid))
            slot = self.slots[index]
            if sizes is None:
                if tuple(shape) != slot.shape:
                    raise ExecutionError(
                        f"operand {slot.label}: shape {tuple(shape)} overrides fixed sizes {slot.shape};"
                        " declare a Dim where sizes vary",
                        operand=slot.label,
                    )
            else:
                match_sizes(slot.dim, tuple(shape), sizes, slot.label)

    def _extents_at(self, sizes: Mapping[str, int]) -> list[int]:
        """The bytes of every operand at ``sizes``; ExecutionError for a size that no operand told."""
        for dim in self.dims:
            if dim not in sizes:
                raise ExecutionError(
                    f"the size of {dim} is unknown: pass a tensor that has it, or override_shapes", operand=dim
                )
        return [
            extent_bytes(s.dtype, [evaluate(v, sizes) for v in s.dim], [evaluate(v, sizes) for v in s.stride])
            for s in self.slots
        ]

    def _check_addresses(self, pointers: list[int], bounds: _Bounds) -> int:
        """The addresses or-ed, after null, alignment and overlap have been ruled out."""
        extents, overlaps = bounds
        merged = 0
        for pointer in pointers:
            merged |= pointer
        if merged & (_POINTER_ALIGN - 1) or 0 in pointers or merged < 0:
            for slot, pointer, extent in zip(self.slots, pointers, extents, strict=True):
                if pointer % slot.align:
                    raise ExecutionError(
                        f"operand {slot.label} is at {pointer:#x}, not aligned to {slot.align} bytes",
                        operand=slot.label,
                    )
                if pointer <= 0 and extent:
                    raise ExecutionError(f"operand {slot.label} has a null address", operand=slot.label)
        for out, extent, others in overlaps:
            low = pointers[out]
            high = low + extent
            for other, size in others:
                pointer = pointers[other]
                if pointer < high and low < pointer + size and pointer - low != self._aliases.get((out, other)):
                    label, place = self.slots[out].label, self._aliases.get((out, other))
                    raise ExecutionError(
                        f"operand {label} overlaps operand {self.slots[other].label}"
                        + ("" if place is None else f", which may only lie {place} bytes after its start"),
                        operand=label,
                    )
        return merged

    def _bounds_of(self, extents: Sequence[int]) -> _Bounds:
        return tuple(extents), tuple(
            (
                out,
                extents[out],
                tuple(
                    (other, extents[other])
                    for other, slot in enumerate(self.slots)
                    if other != out and not slot.by_value and not (other in self._outputs and other < out)
                ),
            )
            for out in self._outputs
        )

    # --- packs
    def operands_at(self, pointers: Sequence[int], sizes: dict[str, int] | None) -> tuple[Operand, ...]:
        """The operands with actual sizes and the alignment of their addresses."""
        result = []
        for slot, pointer in zip(self.slots, pointers, strict=True):
            alignment = (pointer & -pointer) or 256
            dim = slot.dim if sizes is None else tuple(evaluate(v, sizes) for v in slot.dim)
            stride = slot.stride if sizes is None else tuple(evaluate(v, sizes) for v in slot.stride)
            result.append(slot.operand._replace(dim=dim, stride=stride, alignment=min(256, alignment)))
        return tuple(result)

    def pack(self, values: Mapping[Any, Any], overrides: Mapping[int, Sequence[int]] | None = None) -> VariantPack:
        """A reusable checked pack that keeps its buffers alive."""
        pointers, _, sizes, owners = self.read(values, overrides)
        keep = (*owners, *values.values(), *self.defaults.values())
        return VariantPack(self.operands_at(pointers, sizes), tuple(pointers), keep)


def _known(values: Sequence[Any], sizes: dict[str, int]) -> bool:
    return all(dim.name in sizes for dim in dims_of(values))
