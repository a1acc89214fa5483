"""The plan of ``acme_cpu:row_norm``. Imported by ``build_plan`` and ``load_plan``.

Rows are normalised ``block_rows`` at a time: the output holds the centred block, the workspace its squares and its gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cudnn_core import Carver

from ._memory import Array, array_at, collapse, ints, viewer
from ._patterns import norm_facts
from .engines import carve_norm, norm_workspace

if TYPE_CHECKING:
    from cudnn_core import ExecutionContext, FrozenGraph, Operand, VariantPack

__all__ = ["NormPlan"]

_ONE = np.float32(1.0)


class NormPlan:
    """Immutable; may run from many threads, each with its own workspace."""

    def __init__(self, graph: FrozenGraph, knobs: Mapping[str, Any]) -> None:
        facts, declines = graph.facts(norm_facts)
        if facts is None:
            raise ValueError(f"not a graph for this plan: {'; '.join(map(str, declines))}")
        self._facts = facts
        self._block_rows = int(knobs["block_rows"])
        self._slots = {tensor.index: slot for slot, tensor in enumerate(graph.operand_tensors())}
        self.workspace_size = norm_workspace(graph, facts, knobs)

    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        return {"format": 1, "engine": "row_norm", "knobs": {"block_rows": self._block_rows}}, {}

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        self.bind(pack.operands)(pack.pointers, ctx.workspace, ctx.stream)

    def bind(self, layout: tuple[Operand, ...]) -> Callable[[Sequence[int], int, int], None]:
        facts, size = self._facts, self.workspace_size
        dim = ints(layout[self._slots[facts.x]].dim)
        total, columns = math.prod(dim[: facts.first]), math.prod(dim[facts.first :])
        rows = min(self._block_rows, total)
        inverse_columns = np.float32(1.0 / columns) if columns else np.float32(np.nan)
        view: dict[str, Callable[[Sequence[int]], Array]] = {}
        for name in ("x", "gate", "y", "mean", "inverse"):
            index = getattr(facts, name)
            if index is not None:
                view[name] = _rows_viewer(self._slots[index], layout[self._slots[index]], facts.first, total)
        for name in ("scale", "bias"):
            index = getattr(facts, name)
            if index is not None:
                view[name] = viewer(self._slots[index], (columns,), (1,))
        epsilon_of: Callable[[Sequence[int]], Array] | None = None
        if not isinstance(facts.epsilon, float):
            slot = self._slots[facts.epsilon]
            epsilon_of = viewer(slot, (1,), (1,), str(layout[slot].dtype))
        centred = facts.op == "layernorm"

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            x, y, scale = view["x"](pointers), view["y"](pointers), view["scale"](pointers)
            bias, gate, mean_out, inverse_out = (
                view[name](pointers) if name in view else None for name in ("bias", "gate", "mean", "inverse")
            )
            epsilon = np.float32(facts.epsilon if epsilon_of is None else epsilon_of(pointers)[0])
            at = carve_norm(rows, columns, Carver(workspace, size))
            scratch = array_at(at[0], rows, columns)
            means, inverses = array_at(at[1], rows, 1), array_at(at[2], rows, 1)
            with np.errstate(all="ignore"):
                for start in range(0, total, max(rows, 1)):
                    count = min(start + rows, total) - start
                    block = slice(start, start + count)
                    result, square, inverse = y[block], scratch[:count], inverses[:count]
                    if centred:
                        mean = means[:count]
                        np.add.reduce(x[block], axis=1, keepdims=True, out=mean)
                        np.multiply(mean, inverse_columns, out=mean)
                        np.subtract(x[block], mean, out=result)
                        np.multiply(result, result, out=square)
                        if mean_out is not None:
                            np.copyto(mean_out[block], mean)
                    else:
                        np.multiply(x[block], x[block], out=square)
                    np.add.reduce(square, axis=1, keepdims=True, out=inverse)
                    np.multiply(inverse, inverse_columns, out=inverse)
                    np.add(inverse, epsilon, out=inverse)
                    np.sqrt(inverse, out=inverse)
                    np.divide(_ONE, inverse, out=inverse)
                    if inverse_out is not None:
                        np.copyto(inverse_out[block], inverse)
                    np.multiply(result if centred else x[block], inverse, out=result)
                    np.multiply(result, scale, out=result)
                    if bias is not None:
                        np.add(result, bias, out=result)
                    if gate is not None:
                        _multiply_by_silu(result, gate[block], square)

        return run


def _multiply_by_silu(result: Array, gate: Array, scratch: Array) -> None:
    np.negative(gate, out=scratch)
    np.exp(scratch, out=scratch)
    np.add(scratch, _ONE, out=scratch)
    np.divide(gate, scratch, out=scratch)
    np.multiply(result, scratch, out=result)


def _rows_viewer(slot: int, operand: Operand, first: int, rows: int) -> Callable[[Sequence[int]], Array]:
    """The operand as [rows, columns]; its layout was accepted by check_support."""
    dim, stride = ints(operand.dim), ints(operand.stride)
    columns = math.prod(dim[first:])
    if 0 in dim:
        return viewer(slot, (rows, columns), (columns, 1))
    even = collapse(dim[:first], stride[:first])
    assert even is not None
    return viewer(slot, (rows, columns), (even[1], 1))
