"""The plan of ``acme_cpu:fused_matmul``. Imported by ``build_plan`` and ``load_plan``.

Leading axes are batches, or, where B has none, further rows. Rows are taken ``block_rows`` at a time: product, bias and
activation of one block before the next, in the output's own memory or in a tile of the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cudnn_core import Carver

from ._activations import activate
from ._memory import Array, array_at, collapse, ints, viewer
from ._patterns import ACTIVATIONS, matmul_facts
from .engines import carve_matmul, matmul_workspace

if TYPE_CHECKING:
    from cudnn_core import ExecutionContext, FrozenGraph, Operand, VariantPack

__all__ = ["MatmulPlan"]

Layout = tuple[tuple[int, ...], tuple[int, ...]]


class MatmulPlan:
    """Immutable; may run from many threads, each with its own workspace."""

    def __init__(self, graph: FrozenGraph, knobs: Mapping[str, Any]) -> None:
        facts, declines = graph.facts(matmul_facts)
        if facts is None:
            raise ValueError(f"not a graph for this plan: {'; '.join(map(str, declines))}")
        self._facts = facts
        self._block_rows = int(knobs["block_rows"])
        self._pack = bool(knobs["pack"])
        self._slots = {tensor.index: slot for slot, tensor in enumerate(graph.operand_tensors())}
        self.workspace_size = matmul_workspace(graph, facts, knobs)

    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        knobs = {"block_rows": self._block_rows, "pack": self._pack}
        return {"format": 1, "engine": "fused_matmul", "knobs": knobs}, {}

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        self.bind(pack.operands)(pack.pointers, ctx.workspace, ctx.stream)

    def bind(self, layout: tuple[Operand, ...]) -> Callable[[Sequence[int], int, int], None]:
        facts, size, pack = self._facts, self.workspace_size, self._pack
        slot = {"out": self._slots[facts.out], "a": self._slots[facts.a], "b": self._slots[facts.b]}
        if isinstance(facts.bias, int):
            slot["bias"] = self._slots[facts.bias]
        shape = ints(layout[slot["out"]].dim)
        tails = {"out": shape[-2:], "a": (shape[-2], 0), "b": (0, shape[-1]), "bias": shape[-2:]}
        views = {name: _broadcast(layout[slot[name]], shape[:-2], tails[name]) for name in slot}
        k = views["a"][0][-1]
        views = _fold(views)
        *batch, m, n = views["out"][0]
        rows = min(self._block_rows, m)
        view = {name: viewer(slot[name], *views[name], str(layout[slot[name]].dtype)) for name in slot}
        constant = np.float32(facts.bias) if isinstance(facts.bias, float) else None
        starts = range(0, m, max(rows, 1))

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            a, b, out = view["a"](pointers), view["b"](pointers), view["out"](pointers)
            bias = view["bias"](pointers) if "bias" in view else constant
            at = carve_matmul(facts, rows, n, k, pack, Carver(workspace, size))
            packed_b = array_at(at["b"], k, n) if "b" in at else None
            packed_a = array_at(at["a"], rows, k) if "a" in at else None
            tile = array_at(at["tile"], rows, n) if "tile" in at else None
            scratch = [array_at(at[f"t{i}"], rows, n) for i in range(ACTIVATIONS[facts.activation])]
            with np.errstate(all="ignore"):
                for place in np.ndindex(*batch):
                    weights, result = _copied(b[place], packed_b), out[place]
                    for start in starts:
                        count = min(rows, m - start)
                        block = slice(start, start + count)
                        target = result[block] if tile is None else tile[:count]
                        source = _copied(a[place][block], None if packed_a is None else packed_a[:count])
                        np.matmul(source, weights, out=target)
                        if bias is not None:
                            np.add(target, bias[place][block] if "bias" in view else bias, out=target)
                        activate(facts.activation, target, [buffer[:count] for buffer in scratch])
                        if tile is not None:
                            np.copyto(result[block], target)

        return run


def _copied(source: Array, target: Array | None) -> Array:
    if target is None:
        return source
    np.copyto(target, source)
    return target


def _broadcast(operand: Operand, batch: tuple[int, ...], tail: tuple[int, ...]) -> Layout:
    """The operand's shape and strides with the batch axes of the output; a ``tail`` size of 0 keeps the operand's own."""
    rank = len(batch) + 2
    dim, stride = ints(operand.dim), ints(operand.stride)
    dim, stride = (1,) * (rank - len(dim)) + dim, (0,) * (rank - len(stride)) + stride
    shape = (*batch, *(want or have for want, have in zip(tail, dim[-2:], strict=True)))
    return shape, tuple(
        0 if have == 1 and want != 1 else step for have, want, step in zip(dim, shape, stride, strict=True)
    )


def _fold(views: dict[str, Layout]) -> dict[str, Layout]:
    """The views with the batch axes taken as further rows, where B has no batches and everything else steps evenly."""
    folded: dict[str, Layout] = {}
    for name, (shape, stride) in views.items():
        if name == "b":
            if any(step and size != 1 for size, step in zip(shape[:-2], stride[:-2], strict=True)):
                return views
            folded[name] = shape[-2:], stride[-2:]
            continue
        rows = collapse(shape[:-1], stride[:-1])
        if rows is None or 0 in shape:
            return views
        folded[name] = (rows[0], shape[-1]), (rows[1], stride[-1])
    return folded
