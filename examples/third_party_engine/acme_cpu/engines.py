"""The engines of this package: what they accept, what they predict, what they build. Named by the manifest.

This side imports neither numpy nor anything heavy: it decides from the frozen graph alone. The plans, which compute, are
imported by ``build_plan`` and ``load_plan``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cudnn_core import Carver, Declined, Estimate, PlanConfig, Support, checks

from ._patterns import ACTIVATIONS, MatmulFacts, NormFacts, matmul_facts, norm_facts

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, ExecutionContext, FrozenGraph

__all__ = ["FusedMatmul", "RowNorm", "carve_matmul", "carve_norm"]

FLOAT = 4  # bytes

# The estimates' constants: what a core does in a product, what memory gives, what a call and a block of it cost in Python.
# calibration.json says how far off the estimates were where they were measured (benchmarks/calibrate.py).
_FLOPS_PER_CORE = 70e9
_BYTES_PER_S = 30e9
_US_PER_CALL = 12.0
_US_PER_BLOCK = 10.0
_CALIBRATION = "calibration.json"

_BLOCK_BYTES = 512 << 10  # a block of output and its scratch should stay in a core's second-level cache


class FusedMatmul:
    """``acme_cpu:fused_matmul``: matmul, then optionally a bias or residual, then optionally an activation."""

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        return _verdict(graph, ctx, graph.facts(_matmul_verdict))

    def estimate(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> Estimate | None:
        facts, _ = graph.facts(matmul_facts)
        assert facts is not None
        batch, m, n, k = matmul_sizes(graph, facts)
        blocks = batch * -(-m // config.knobs["block_rows"])
        passes = {"": 0, "relu": 1, "gelu_approx_tanh": 8, "gelu": 40}[facts.activation]
        return _estimate(graph, ctx, 2.0 * batch * m * n * k, passes * batch * m * n, blocks)

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        from ._matmul import MatmulPlan

        return MatmulPlan(graph, config.knobs)

    def load_plan(
        self, header: dict[str, Any], payloads: dict[str, bytes], graph: FrozenGraph, ctx: ExecutionContext
    ) -> CompiledPlan:
        from ._matmul import MatmulPlan

        return MatmulPlan(graph, _knobs(header, "fused_matmul"))


class RowNorm:
    """``acme_cpu:row_norm``: layernorm, rmsnorm or acme_rmsnorm_gated over the last axes."""

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        return _verdict(graph, ctx, graph.facts(_norm_verdict))

    def estimate(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> Estimate | None:
        facts, _ = graph.facts(norm_facts)
        assert facts is not None
        rows, columns = norm_sizes(graph, facts)
        return _estimate(graph, ctx, 0.0, 10 * rows * columns, -(-rows // config.knobs["block_rows"]))

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        from ._norm import NormPlan

        return NormPlan(graph, config.knobs)

    def load_plan(
        self, header: dict[str, Any], payloads: dict[str, bytes], graph: FrozenGraph, ctx: ExecutionContext
    ) -> CompiledPlan:
        from ._norm import NormPlan

        return NormPlan(graph, _knobs(header, "row_norm"))


# --- workspaces: the same function measures (address 0) and cuts


def carve_matmul(facts: MatmulFacts, rows: int, n: int, k: int, pack: bool, carver: Carver) -> dict[str, int]:
    """Addresses of the scratch buffers for blocks of ``rows`` rows: ``a`` ``b`` ``tile`` ``t0`` ``t1`` ``t2`` as needed."""
    found = {}
    if pack and facts.pack_b:
        found["b"] = carver.take(k * n * FLOAT)
    if pack and facts.pack_a:
        found["a"] = carver.take(rows * k * FLOAT)
    if facts.tile:
        found["tile"] = carver.take(rows * n * FLOAT)
    for number in range(ACTIVATIONS[facts.activation]):
        found[f"t{number}"] = carver.take(rows * n * FLOAT)
    return found


def carve_norm(rows: int, columns: int, carver: Carver) -> tuple[int, int, int]:
    """Addresses of a block, of its means and of its inverse deviations."""
    return carver.take(rows * columns * FLOAT), carver.take(rows * FLOAT), carver.take(rows * FLOAT)


def matmul_workspace(graph: FrozenGraph, facts: MatmulFacts, knobs: Mapping[str, Any]) -> int:
    """Bytes for the largest admissible sizes."""
    batch, m, n, k = matmul_sizes(graph.at(graph.largest_sizes()), facts)
    carver = Carver(0)
    carve_matmul(facts, min(knobs["block_rows"], batch * m), n, k, knobs["pack"], carver)
    return carver.used


def norm_workspace(graph: FrozenGraph, facts: NormFacts, knobs: Mapping[str, Any]) -> int:
    rows, columns = norm_sizes(graph.at(graph.largest_sizes()), facts)
    carver = Carver(0)
    carve_norm(min(knobs["block_rows"], rows), columns, carver)
    return carver.used


def matmul_sizes(graph: FrozenGraph, facts: MatmulFacts) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a graph with fixed sizes."""
    *batch, m, n = _fixed(graph.tensors[facts.out].dim)
    return math.prod(batch), m, n, _fixed(graph.tensors[facts.a].dim)[-1]


def norm_sizes(graph: FrozenGraph, facts: NormFacts) -> tuple[int, int]:
    """(rows, columns) of a graph with fixed sizes."""
    dim = _fixed(graph.tensors[facts.x].dim)
    return math.prod(dim[: facts.first]), math.prod(dim[facts.first :])


# --- shared


def _matmul_verdict(graph: FrozenGraph) -> Support | Declined:
    facts, declines = matmul_facts(graph)
    if facts is None:
        return Declined(declines)
    _, _, n, _ = matmul_sizes(graph.at(graph.hint_sizes()), facts)
    buffers = 1 + ACTIVATIONS[facts.activation]
    rows = _power_of_two(_BLOCK_BYTES // max(n * FLOAT * buffers, 1), 16, 1024)
    offered = [{"block_rows": rows, "pack": True}, {"block_rows": min(4 * rows, 1024), "pack": True}]
    if facts.pack_a or facts.pack_b:
        offered.append({"block_rows": rows, "pack": False})
    return _support(offered, (matmul_workspace(graph, facts, knobs) for knobs in offered))


def _norm_verdict(graph: FrozenGraph) -> Support | Declined:
    facts, declines = norm_facts(graph)
    if facts is None:
        return Declined(declines)
    _, columns = norm_sizes(graph.at(graph.hint_sizes()), facts)
    rows = _power_of_two(_BLOCK_BYTES // max(3 * columns * FLOAT, 1), 1, 4096)
    offered = [{"block_rows": rows}, {"block_rows": min(8 * rows, 65536)}]
    return _support(offered, (norm_workspace(graph, facts, knobs) for knobs in offered))


def _support(offered: list[dict[str, Any]], workspaces: Iterable[int]) -> Support:
    # An engine id of "" is filled in by the core, so that the revision is stated in the manifest alone.
    return Support(tuple(PlanConfig("", knobs) for knobs in offered), workspace=max(workspaces))


def _verdict(graph: FrozenGraph, ctx: ExecutionContext, found: Support | Declined) -> Support | Declined:
    """``found``, which is a fact of the graph, and what depends on the device."""
    c = checks(graph, ctx)
    c.device("cpu")
    if isinstance(found, Declined):
        return Declined((*c.declines, *found.reasons))
    return c.result(found)


def _estimate(graph: FrozenGraph, ctx: ExecutionContext, flops: float, elements: float, blocks: int) -> Estimate:
    """``flops`` of matrix products on all cores, ``elements`` of elementwise passes on one, the operands' bytes, the calls."""
    moved = FLOAT * (sum(math.prod(_fixed(operand.dim)) for operand in graph.operands) + elements)
    seconds = flops / (_FLOPS_PER_CORE * max(ctx.device.sm_count, 1)) + moved / _BYTES_PER_S
    return Estimate(seconds * 1e6 + _US_PER_CALL + blocks * _US_PER_BLOCK, "model", _CALIBRATION)


def _power_of_two(limit: int, least: int, most: int) -> int:
    """The largest power of two up to ``limit``, inside [least, most]."""
    return min(max(1 << max(limit.bit_length() - 1, 0), least), most)


def _fixed(dim: Iterable[Any]) -> list[int]:
    return [int(size) for size in dim]


def _knobs(header: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """What ``serialize`` of a plan wrote; ValueError for another format (the core reports it as a BuildError)."""
    if header.get("format") != 1 or header.get("engine") != engine:
        raise ValueError(f"a plan of format {header.get('format')!r} of {header.get('engine')!r}, not 1 of {engine!r}")
    return dict(header["knobs"])
