"""The engines of the manifest: one for each generation of matrix instructions. Named by ``cudnn_plugin.toml``.

A graph is supported if ``lower`` makes a program of it, the launch's rules admit its sizes and strides, and at least one
configuration has a layout: the very functions that ``build_plan`` uses, so that the two can't disagree. Nothing here imports the DSL
before a plan is built.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, Decline, Declined, Estimate, PlanConfig, Support, checks

from .config import TileConfig
from .facts import ArchFacts, arch_facts
from .launch import broken, layout_words, rules
from .layout import LayoutError, plan_layout
from .lower import FP8, Lowered, lower, transposed_bytes
from .model import Model, Shape, coefficients, machine, work
from .ops import REDUCTIONS
from .select import choose

if TYPE_CHECKING:
    from cudnn_core import CompiledPlan, DeviceInfo, ExecutionContext, FrozenGraph

    from .binding import Binding
    from .ir import Program
    from .plan import GemmPlan

__all__ = ["Sm90Wgmma", "Sm100Tcgen05"]

KNOBS = ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "split_k", "swap_ab", "stages", "raster")  # of both

_rules = lru_cache(maxsize=64)(rules)  # no size is in them: graphs that differ in sizes alone share them
_knobs = lru_cache(maxsize=1024)(TileConfig.knobs)

ERRORS = "calibration/errors.json"  # of the estimates, by architecture


class _Gemm:
    """What the engines share. ``mma`` is the matrix instruction; ``sm``, ``knobs`` and ``notes`` are as in the manifest, but for the note
    deterministic, which not every plan has."""

    mma = ""
    sm: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        verdicts: dict[Any, Support | Declined] = graph.facts(_Verdicts)
        key = (self.mma, ctx.device)
        found = verdicts.get(key)
        if found is None:
            found = verdicts[key] = self._verdict(graph, ctx)
        return found

    def estimate(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> Estimate | None:
        """The model's time of a graph with fixed sizes; None for one that is not supported."""
        lowered, facts = graph.facts(lower), self._facts(ctx.device)
        if lowered.program is None or lowered.binding is None or facts is None:
            return None
        c = coefficients(facts.target, facts.mma)
        shape = _shape(graph, lowered.binding)
        gpu = machine(ctx.device, facts, c)
        us = Model(work(lowered.program), shape, gpu, c).us(TileConfig.from_knobs(config.knobs))
        calibrated = Path(__file__).with_name("calibration").joinpath("errors.json").is_file()
        return Estimate(us, "model", ERRORS) if calibrated else Estimate(us)

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan:
        """Compile for ``ctx.device``, present or not. Raises BuildError, also for knobs that can't be honoured exactly."""
        from .compile import compiled
        from .plan import GemmPlan

        facts = self._facts(ctx.device)
        if facts is None:
            raise BuildError(f"there are no kernels for {ctx.device!r}")
        tile = TileConfig.from_knobs(config.knobs)
        program, binding = _program_of(graph.facts(lower), tile)
        try:
            layout = plan_layout(program, tile, facts)
        except LayoutError as error:
            decline = _decline(error.swapped() if tile.swap_ab else error, graph.facts(lower))
            raise BuildError(f"these knobs don't fit the graph: {decline}", decline=decline) from error
        plan = GemmPlan(program, binding, tile, compiled(program, tile, layout, facts, config.engine))
        return _ready(plan, ctx.device)

    def load_plan(
        self, header: dict[str, Any], payloads: dict[str, bytes], graph: FrozenGraph, ctx: ExecutionContext
    ) -> CompiledPlan:
        from .plan import restored

        facts = self._facts(ctx.device)
        if facts is None:
            raise BuildError(f"there are no kernels for {ctx.device!r}")
        plan = restored(header, payloads, facts, lambda tile: _program_of(graph.facts(lower), tile))
        return _ready(plan, ctx.device)

    def _facts(self, device: DeviceInfo) -> ArchFacts | None:
        facts = arch_facts(device)
        return facts if facts is not None and facts.mma == self.mma else None

    def _verdict(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined:
        c = checks(graph, ctx)
        lowered = graph.facts(lower)
        c.declines.extend(lowered.declines)
        on_gpu = c.device("cuda") and c.sm(*self.sm)
        facts = self._facts(ctx.device)
        program, binding = lowered.program, lowered.binding
        if program is None or binding is None or not on_gpu or facts is None:
            return c.result(Support(()))
        words = layout_words(binding, graph.operands)
        for rule, value in broken(_rules(program), words):
            c.require(False, rule.code, lowered.subjects.get(rule.subject, rule.subject), rule.expected, value)
        if self.mma == "wgmma":
            for subject in transposed_bytes(lowered):
                c.require(False, "layout.order", subject, "stride 1 along K: wgmma transposes 16-bit operands alone")
        if c.declines:
            return c.result(Support(()))
        found = choose(program, _shape(graph, binding), facts, ctx.device)
        if isinstance(found, LayoutError):
            return Declined((_decline(found, lowered),))
        configs = tuple(PlanConfig("", dict(_knobs(choice.config, self.knobs))) for choice in found)
        return Support(configs, workspace=0, notes=frozenset(self.notes) | _notes(program, facts))


class Sm90Wgmma(_Gemm):
    """wgmma: Hopper."""

    mma = "wgmma"
    sm = ("90a",)
    notes = ("cuda_graph", "ran_on_h200")
    knobs = (*KNOBS, "schedule")


class Sm100Tcgen05(_Gemm):
    """tcgen05: Blackwell and Rubin."""

    mma = "tcgen05"
    sm = ("100f",)
    notes = ("cuda_graph", "emulated_only")
    knobs = (*KNOBS, "cta_group")


class _Verdicts(dict[Any, Any]):
    """Answers by engine and device, kept with the graph's other facts; made empty."""

    def __init__(self, graph: FrozenGraph) -> None:
        super().__init__()


def _program_of(lowered: Lowered, tile: TileConfig) -> tuple[Program, Binding]:
    """A graph's program and binding as the kernel sees them. Raises BuildError if there are none."""
    program, binding = lowered.program, lowered.binding
    if program is None or binding is None:
        raise BuildError("; ".join(map(str, lowered.declines)), decline=lowered.declines[0])
    return (program.swapped(), binding.swapped()) if tile.swap_ab else (program, binding)


def _shape(graph: FrozenGraph, binding: Binding) -> Shape:
    """The sizes, of runtime ones the hint."""
    fixed = graph.at(graph.hint_sizes())
    return Shape(**binding.sizes([operand.dim for operand in fixed.operands]))


def _notes(program: Program, facts: ArchFacts) -> frozenset[str]:
    """The notes of this program's plans alone. Floats that several CTAs add up come in any order; minima, maxima and integers don't mind.
    Promotion adds what fp8 MMAs give in float32, and can't add what they have dropped."""
    loose = (r for r in program.reductions if r.dtype != "int32" and REDUCTIONS[r.mode].combine not in ("min", "max"))
    notes = set() if any(loose) else {"deterministic"}
    if facts.fp8_sum_bits and any(matrix.mma_dtype in FP8 for matrix in (*program.a, *program.b)):
        notes.add("reduced_precision_reduction")
    return frozenset(notes)


def _decline(error: LayoutError, lowered: Lowered) -> Decline:
    return Decline(error.code, lowered.subjects.get(error.subject.lower(), error.subject), error.expected, error.actual)


def _ready(plan: GemmPlan, device: DeviceInfo) -> GemmPlan:
    """For a device that is here, link the object now: the first run should not pay for it."""
    if not device.synthetic:
        plan.function()
    return plan
