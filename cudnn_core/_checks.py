"""Helpers for engines: ``checks`` collects declines with uniform fields, ``Carver`` cuts a workspace into buffers.

A plugin's ``check_support`` reads

    c = checks(graph, ctx)
    c.device("cuda"); c.sm("90a"); c.ops("matmul", "add")
    c.dtype("A", A, "bfloat16", "float16"); c.multiple_of("k", A.dim[-1], 8)
    return c.result(Support((PlanConfig(ENGINE, {}),)))

Every method returns whether its condition holds, so that what would only follow from an earlier failure can be left out.
Nothing is allocated while conditions hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from ._declines import Decline, check_code
from ._dims import Dim, Extent, Product, packed_strides
from ._engine import Declined, ExecutionContext
from ._errors import CudnnCoreError, ExecutionError

if TYPE_CHECKING:
    from ._graph._frozen import FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["Carver", "Checks", "checks"]

S = TypeVar("S")


class Checks:
    """A collector. ``subject`` arguments are the names that a reader of the decline knows: ``"A"``, ``"k"``."""

    __slots__ = ("_ctx", "declines", "graph")

    def __init__(self, graph: FrozenGraph, ctx: ExecutionContext | None = None) -> None:
        self.graph = graph
        self._ctx = ctx
        self.declines: list[Decline] = []

    @property
    def ctx(self) -> ExecutionContext:
        """The context; only the device's methods need it, so ``graph.facts`` functions collect without one."""
        if self._ctx is None:
            raise CudnnCoreError("checks(graph) without a context can't look at the device: pass ctx")
        return self._ctx

    def __bool__(self) -> bool:
        """Whether every condition so far holds."""
        return not self.declines

    def require(
        self,
        condition: object,
        code: str,
        subject: str = "",
        expected: object = None,
        actual: object = None,
        hint: str = "",
    ) -> bool:
        """Any condition; ``code`` is of the catalogue or ``x.<plugin>.<slug>``."""
        if condition:
            return True
        check_code(code)
        self.declines.append(Decline(code, subject, expected, actual, hint))
        return False

    def device(self, *types: str) -> bool:
        """The device's type is one of ``types``."""
        have = self.ctx.device.type
        return have in types or self.require(False, "device.type", "device", list(types), have)

    def sm(self, *patterns: str) -> bool:
        """The device's architecture matches one of ``patterns`` ("90a", "100f", "80+", as in a manifest)."""
        from ._sm import parse_sm, sm_decline

        device = self.ctx.device
        decline = sm_decline([parse_sm(text) for text in patterns], device.compute_capability, device.arch)
        if decline is not None:
            self.declines.append(decline)
        return decline is None

    def smem(self, nbytes: int) -> bool:
        """A block may use ``nbytes`` of shared memory."""
        have = self.ctx.device.shared_memory_per_block_optin
        return nbytes <= have or self.require(False, "device.smem", "device", nbytes, have)

    def ops(self, *names: str) -> bool:
        """Every node is one of ``names``; one decline for each op that is not."""
        wrong = dict.fromkeys(node.op for node in self.graph.nodes if node.op not in names)
        for op in wrong:
            self.declines.append(Decline("op.unsupported", op, list(names), op))
        return not wrong

    def op(self, node: FrozenNode, *names: str) -> bool:
        """``node`` is one of ``names``."""
        return node.op in names or self.require(False, "op.unsupported", node.op, list(names), node.op)

    def attr(self, node: FrozenNode, name: str, *values: object) -> bool:
        """Attribute ``name`` of ``node`` has one of ``values``."""
        have = node.attrs[name]
        return have in values or self.require(False, "op.attribute", f"{node.op}.{name}", list(values), have)

    def dtype(self, subject: str, tensor: FrozenTensor, *dtypes: str) -> bool:
        """``tensor`` has one of ``dtypes``."""
        return tensor.dtype in dtypes or self.require(
            False, "dtype.unsupported", subject, list(dtypes), str(tensor.dtype)
        )

    def rank(self, subject: str, tensor: FrozenTensor, *ranks: int) -> bool:
        """``tensor`` has one of ``ranks`` dimensions."""
        return len(tensor.dim) in ranks or self.require(False, "shape.rank", subject, list(ranks), len(tensor.dim))

    def multiple_of(self, subject: str, size: Extent, factor: int) -> bool:
        """``size`` is a multiple of ``factor``: for a runtime size, by its declared ``multiple_of``."""
        return _divisor(size) % factor == 0 or self.require(
            False, "shape.multiple_of", subject, {"multiple_of": factor}, _shown(size)
        )

    def between(self, subject: str, size: Extent, low: int, high: int) -> bool:
        """``low <= size <= high``, over the whole range of a runtime size."""
        least, most = _bounds(size)
        return (low <= least and most <= high) or self.require(
            False, "shape.range", subject, {"min": low, "max": high}, _shown(size)
        )

    def no_dynamic(self, subject: str = "", *sizes: Extent) -> bool:
        """None of ``sizes`` is a runtime size; without arguments, the graph has none."""
        dims = [str(size) for size in sizes if not isinstance(size, int)] if subject else list(self.graph.dims)
        return not dims or self.require(False, "shape.dynamic", subject or "graph", "fixed sizes", dims)

    def contiguous(self, subject: str, tensor: FrozenTensor, order: Sequence[int] | None = None) -> bool:
        """``tensor`` is dense; ``order`` lists its axes from slowest to fastest (default: row-major).

        The stride of an axis of size 1 does not count.
        """
        packed = packed_strides(tensor.dim, order)
        same = all(a == b or size == 1 for a, b, size in zip(tensor.stride, packed, tensor.dim, strict=True))
        return same or self.require(
            False, "layout.stride", subject, [_shown(item) for item in packed], [_shown(item) for item in tensor.stride]
        )

    def result(self, support: S) -> S | Declined:
        """``support`` if every condition holds, else all the declines."""
        return Declined(tuple(self.declines)) if self.declines else support


checks = Checks


class Carver:
    """Cuts a workspace into aligned buffers: ``take`` returns addresses, ``used`` says how far it got.

    ``Carver(0)`` measures: take the same buffers in build_plan, and ``used`` is the plan's ``workspace_size``.
    """

    __slots__ = ("_base", "_size", "used")

    def __init__(self, workspace: int, size: int | None = None) -> None:
        self._base = workspace
        self._size = size
        self.used = 0

    def take(self, nbytes: int, align: int = 256) -> int:
        """The address of the next ``nbytes`` bytes, a multiple of ``align``. ExecutionError if they don't fit."""
        if nbytes < 0 or align < 1 or align & (align - 1):
            raise ValueError(f"need nbytes >= 0 and a power of two, got {nbytes} and {align}")
        address = -(-(self._base + self.used) // align) * align
        used = address - self._base + nbytes
        if self._size is not None and used > self._size:
            raise ExecutionError(f"workspace: {used} bytes are needed, {self._size} were given", operand="workspace")
        self.used = used
        return address


def _divisor(size: Extent) -> int:
    """The largest number that is known to divide ``size`` (0: every number does)."""
    if isinstance(size, int):
        return size
    if isinstance(size, Dim):
        return size.multiple_of
    result = size.factor
    for dim in size.dims:
        result *= dim.multiple_of
    return result


def _bounds(size: Extent) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, Dim):
        return size.smallest, size.largest
    least = most = size.factor
    for dim in size.dims:
        least, most = least * dim.smallest, most * dim.largest
    return least, most


def _shown(size: Extent) -> object:
    """``size`` as JSON-able data."""
    if isinstance(size, int):
        return size
    if isinstance(size, Dim) and size.multiple_of != 1:
        return f"{size.name} (a multiple of {size.multiple_of})"
    if isinstance(size, (Dim, Product)):
        return str(size)
    return size
