"""Layout algebra: how a tensor of the graph is declared to the backend. Pure; sizes may be Dims.

A *frame* maps the axes of a graph (those of its highest rank, lower ranks padded on the left) to the axes that the backend
wants: groups of graph axes, each of which becomes one axis. A frame changes sizes and strides only, never an address, so that
a tensor that can't be seen through it has no view. ``fold`` gives the layout in which an operand's memory is the input or the
result of a transpose, reshape or slice. Imported by ``program``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cudnn_core import Dim

if TYPE_CHECKING:
    from cudnn_core import Extent, FrozenNode

__all__ = ["Frame", "Layout", "column", "fold_input", "fold_output", "groups_of", "packed", "pad", "typical"]


class Layout(NamedTuple):
    """Sizes and strides in elements."""

    dim: tuple[Extent, ...]
    stride: tuple[Extent, ...]


class Frame(NamedTuple):
    """``axes[i]`` lists the graph axes that become axis i of the backend, slowest first; () is an axis of size 1.

    rank    graph axes
    order   the backend's axes from slowest to fastest, for the strides of axes of size 1
    """

    axes: tuple[tuple[int, ...], ...]
    rank: int
    order: tuple[int, ...]

    @classmethod
    def identity(cls, rank: int, least: int = 0) -> Frame:
        """Every axis by itself, behind enough axes of size 1 for ``least`` axes."""
        axes = ((),) * (least - rank) + tuple((axis,) for axis in range(rank))
        return cls(axes, rank, tuple(range(len(axes))))

    @classmethod
    def row_major(cls, groups: Sequence[tuple[int, ...]], rank: int, least: int) -> Frame:
        axes = ((),) * (least - len(groups)) + tuple(groups)
        return cls(axes, rank, tuple(range(len(axes))))

    @classmethod
    def swapped(cls, groups: Sequence[tuple[int, ...]], rank: int) -> Frame:
        """Three axes, of which the first has the second place in memory."""
        slowest, middle, fastest = groups
        return cls((middle, slowest, fastest), rank, (1, 0, 2))

    @classmethod
    def channels_last(cls, groups: Sequence[tuple[int, ...]], rank: int, least: int) -> Frame:
        """[slowest, fastest, the others]: what the backend calls NHWC, of at least ``least`` axes."""
        middle = list(groups[1:-1])
        middle += [()] * (least - 2 - len(middle))
        first, last = (groups[0], groups[-1]) if len(groups) > 1 else ((), groups[0] if groups else ())
        axes = (first, last, *middle)
        return cls(axes, rank, (0, *range(2, len(axes)), 1))

    def view(self, layout: Layout, *, virtual: bool = False) -> Layout | None:
        """The layout through the frame, or None. A virtual tensor has no memory: only its sizes need fit."""
        padded = pad(layout, self.rank)
        merged = [_merge(padded, group, virtual) for group in self.axes]
        pairs = [pair for pair in merged if pair is not None]
        if len(pairs) < len(merged):
            return None
        dim = tuple(size for size, _ in pairs)
        if virtual:
            return Layout(dim, packed(dim, self.order))
        return _filled(Layout(dim, tuple(step for _, step in pairs)), self.order)

    def fits(self, layout: Layout, *, virtual: bool, among: Iterable[tuple[Layout, bool]]) -> bool:
        """Whether the layout has a view, and broadcasts along whole axes of the frame only."""
        full: list[Extent] = [1] * self.rank
        for other, _ in among:
            dim = pad(other, self.rank).dim
            full = [size if have == 1 else have for size, have in zip(dim, full, strict=True)]
        padded = pad(layout, self.rank)
        whole = all(_whole(padded, group, full) for group in self.axes)
        return whole and self.view(layout, virtual=virtual) is not None

    def axis(self, axis: int, rank: int, dim: Sequence[Extent]) -> int | None:
        """Where ``axis`` of a tensor of ``rank`` axes and the sizes ``dim`` is, if no other axis shares its place."""
        at = axis + self.rank - rank
        for place, group in enumerate(self.axes):
            if at in group:
                others = (dim[other - self.rank + rank] for other in group if other != at and other >= self.rank - rank)
                return place if all(size == 1 for size in others) else None
        return None


def pad(layout: Layout, rank: int) -> Layout:
    """Axes of size 1 in front, up to ``rank``."""
    missing = rank - len(layout.dim)
    if missing <= 0:
        return layout
    reach = layout.stride[0] * layout.dim[0] if layout.dim else 1
    return Layout((1,) * missing + layout.dim, (reach,) * missing + layout.stride)


def column(layout: Layout, rank: int) -> Layout:
    """A vector as a column: axes of size 1 behind, up to ``rank``."""
    missing = rank - len(layout.dim)
    return layout if missing <= 0 else Layout(layout.dim + (1,) * missing, layout.stride + (1,) * missing)


def packed(dim: Sequence[Extent], order: Sequence[int]) -> tuple[Extent, ...]:
    """Strides of a dense tensor; ``order`` lists the axes from slowest to fastest."""
    stride: list[Extent] = [1] * len(dim)
    running: Extent = 1
    for axis in reversed(order):
        stride[axis] = running
        running = running * dim[axis]
    return tuple(stride)


def _merge(layout: Layout, group: tuple[int, ...], virtual: bool) -> tuple[Extent, Extent] | None:
    """Size and stride of several axes as one, if a walk along it is a walk along them."""
    axes = [axis for axis in group if layout.dim[axis] != 1]
    if not axes:
        return 1, 1
    size: Extent = layout.dim[axes[-1]]
    step = layout.stride[axes[-1]]
    for axis in reversed(axes[:-1]):
        if not virtual and layout.stride[axis] != step * size:
            return None
        size = layout.dim[axis] * size
    return size, step


def _whole(layout: Layout, group: tuple[int, ...], full: Sequence[Extent]) -> bool:
    """Whether a tensor has all the axes of a group or none of them: else it broadcasts along a part of the merged axis."""
    have = [layout.dim[axis] != 1 for axis in group if full[axis] != 1]
    return all(have) or not any(have)


def typical(value: Extent) -> int:
    """A size to order strides by: that of the largest admissible Dims."""
    if isinstance(value, int):
        return value
    dims = (value,) if isinstance(value, Dim) else value.dims
    factor = 1 if isinstance(value, Dim) else value.factor
    for dim in dims:
        factor *= dim.largest
    return factor


def groups_of(
    layouts: Iterable[tuple[Layout, bool]], rank: int, *, alone: Iterable[int] = (), sort: bool = False, keep: int = 1
) -> list[tuple[int, ...]]:
    """The fewest groups of neighbouring axes through which all ``layouts`` (with: whether virtual) can be seen.

    alone  axes that stay by themselves
    sort   neighbours in memory (of the layout with the most elements) instead of neighbours in the graph
    keep   stop merging at this many groups; the fastest axes are merged last
    """
    padded = [(pad(layout, rank), virtual) for layout, virtual in layouts]
    full: list[Extent] = [1] * rank
    for layout, _ in padded:
        full = [size if have == 1 else have for size, have in zip(layout.dim, full, strict=True)]
    order = [axis for axis in range(rank) if full[axis] != 1 or axis in alone]
    if sort:
        real = [layout for layout, virtual in padded if not virtual] or [layout for layout, _ in padded]
        most = max(real, key=lambda layout: sum(size != 1 for size in layout.dim))
        order.sort(key=lambda axis: -typical(most.stride[axis]) if most.dim[axis] != 1 else 0)
        # Axes that this layout lacks stay in front: nothing is known of their place.
        order.sort(key=lambda axis: most.dim[axis] != 1)
    groups: list[tuple[int, ...]] = [(axis,) for axis in order]
    barred = frozenset(alone)
    at = 0
    while at + 1 < len(groups) and len(groups) > keep:
        merged = groups[at] + groups[at + 1]
        fits = not barred.intersection(merged) and all(
            _whole(layout, merged, full) and _merge(layout, merged, virtual) is not None for layout, virtual in padded
        )
        if fits:
            groups[at : at + 2] = [merged]
        else:
            at += 1
    return groups


# Transposes, reshapes and slices as layouts


def fold_input(node: FrozenNode, source: Layout) -> Layout | None:
    """The layout of the result of a transpose, reshape or slice in the memory of its input, or None."""
    if node.op == "transpose":
        return _permuted(source, node.attrs["permutation"])
    if node.op == "slice":
        return _sliced(node, source)
    if node.op == "reshape":
        out = node.outputs["Y"]
        if node.attrs["reshape_mode"] == "VIEW_ONLY":
            # Both are dense and the element at offset i is the same in both: the input's memory, read as the result is.
            given = node.inputs["input"]
            return Layout(out.dim, out.stride) if source == (given.dim, given.stride) else None
        return _reshaped(source, out.dim)
    return None


def fold_output(node: FrozenNode, result: Layout) -> Layout | None:
    """The layout of the input of a transpose or reshape in the memory of its result, or None."""
    given = node.inputs["input"]
    if node.op == "transpose":
        permutation = node.attrs["permutation"]
        return _permuted(result, [permutation.index(axis) for axis in range(len(permutation))])
    if node.op == "reshape":
        if node.attrs["reshape_mode"] == "VIEW_ONLY":
            out = node.outputs["Y"]
            return Layout(given.dim, given.stride) if result == (out.dim, out.stride) else None
        return _reshaped(result, given.dim)
    if node.op == "slice" and given.dim == node.outputs["Y"].dim:
        return result
    return None


def _permuted(layout: Layout, permutation: Sequence[int]) -> Layout:
    return Layout(tuple(layout.dim[i] for i in permutation), tuple(layout.stride[i] for i in permutation))


def _sliced(node: FrozenNode, source: Layout) -> Layout | None:
    """A slice that begins at the first element; another one would need another address."""
    out = node.outputs["Y"]
    if any(start for start, _, _ in node.attrs["slices"]):
        return None
    steps = (1 if step is None else step for _, _, step in node.attrs["slices"])
    return Layout(out.dim, tuple(stride * step for stride, step in zip(source.stride, steps, strict=True)))


def _reshaped(source: Layout, dim: tuple[Extent, ...]) -> Layout | None:
    """The row-major order of indices under another shape without a copy: runs of axes with equal products are regrouped."""
    if not all(isinstance(size, int) for size in (*source.dim, *dim)):
        return None
    axes = [axis for axis, size in enumerate(source.dim) if size != 1]
    stride: list[Extent] = [0] * len(dim)
    at, target = len(axes), len(dim)
    while target > 0:
        if dim[target - 1] == 1:
            target -= 1
            continue
        if at == 0:
            return None
        first, have = at - 1, typical(source.dim[axes[at - 1]])
        begin, want = target - 1, typical(dim[target - 1])
        while have != want:
            if have < want and first > 0:
                first -= 1
                have *= typical(source.dim[axes[first]])
            elif have > want and begin > 0:
                begin -= 1
                want *= typical(dim[begin])
            else:
                return None
        merged = _merge(source, tuple(axes[first:at]), False)
        if merged is None:
            return None
        running = merged[1]
        for axis in reversed(range(begin, target)):
            stride[axis] = running
            running = running * dim[axis]
        at, target = first, begin
    return _filled(Layout(dim, tuple(stride)), range(len(dim)))


def _filled(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout with packed strides on the axes of size 1; ``order`` lists the axes from slowest to fastest."""
    stride = list(layout.stride)
    reach: Extent = 1
    for axis in reversed(order):
        if layout.dim[axis] == 1:
            stride[axis] = reach
        else:
            reach = max(reach, stride[axis] * layout.dim[axis], key=typical)
    return Layout(layout.dim, tuple(stride))
