"""Planning cases of host_overhead.py: the graph's key, check_support of every installed engine, plans without compiling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import cudnn_core
from benchmarks._harness import Report, Row
from cudnn_core._filter import filter_graph
from cudnn_core.testing import temporary_plugin

__all__ = ["checks", "graphs", "noop_engines", "planning"]

_SPLIT = "matmul of a long K"
_DEVICES = ("cpu", "A100", "H200", "B200", "R200", "RTX_PRO_6000")


class NoopPlan:
    """Runs nothing; ``bind`` hands out one launcher, which keeps the addresses that it was last called with."""

    def __init__(self, workspace_size: int = 0) -> None:
        self.workspace_size = workspace_size
        seen = self.seen = [()]

        def launch(pointers: Any, workspace: int, stream: int) -> None:
            seen[0] = pointers

        self.launch = launch

    def execute(self, pack: Any, ctx: Any) -> None:
        self.launch(pack.pointers, ctx.workspace, ctx.stream)

    def bind(self, layout: Any) -> Callable[[Any, int, int], None]:
        return self.launch


class NoopEngine:
    """Supports everything and compiles nothing."""

    workspace_size = 0

    def check_support(self, graph: Any, ctx: Any) -> cudnn_core.Support:
        return cudnn_core.Support((cudnn_core.PlanConfig("", {}),), workspace=self.workspace_size)

    def build_plan(self, graph: Any, config: Any, ctx: Any) -> NoopPlan:
        return NoopPlan(self.workspace_size)


class NoopEngineWithWorkspace(NoopEngine):
    workspace_size = 256


@contextmanager
def noop_engines(
    count: int = 1, *, factory: Callable[[], Any] = NoopEngine, isolated: bool = True
) -> Iterator[cudnn_core.Graph]:
    """``count`` engines that support everything; ``isolated`` hides what is installed."""
    names = [f"noop_{index}" for index in range(count)]
    knobs = {"tile_m": {"type": "int", "choices": [64, 128, 256], "default": 64}}
    rows = [
        {"name": name, "ops": ["*"], "anchors": ["*"], "devices": ["cpu", "cuda"], "efficiency": 0.5 + 0.001 * i,
         "maturity": "stable", "aot": True, "knobs": knobs}
        for i, name in enumerate(names)
    ]  # fmt: skip
    with temporary_plugin(
        {"plugin": "noop", "engine": rows}, dict.fromkeys(names, factory), isolated=isolated
    ) as found:
        yield found


def graphs() -> dict[str, Callable[[int], cudnn_core.Graph]]:
    """One small graph for every kind of engine, as a function of a size (graphs of two sizes have two keys)."""

    def graph(dtype: str = "bfloat16") -> cudnn_core.Graph:
        return cudnn_core.Graph(io_data_type=dtype, intermediate_data_type="float32", compute_data_type="float32")

    def matmul(m: int) -> cudnn_core.Graph:
        g = graph()
        a, b, bias = g.tensor(dim=(1, m, 512)), g.tensor(dim=(1, 512, 1024)), g.tensor(dim=(1, 1, 1024))
        g.gelu(g.bias(g.matmul(a, b), bias)).set_output(True)
        return g

    def long_k(m: int) -> cudnn_core.Graph:
        """So few rows and columns that an engine may split K among many SMs: the most settings to choose from."""
        g = graph()
        a, b = g.tensor(dim=(1, 256, 32768 + m)), g.tensor(dim=(1, 32768 + m, 512))
        g.matmul(a, b).set_output(True)
        return g

    def layernorm(m: int) -> cudnn_core.Graph:
        g = graph()
        x, scale, bias = (g.tensor(dim=(rows, 512, 1, 1)) for rows in (m, 1, 1))
        phase = cudnn_core.norm_forward_phase.INFERENCE
        g.layernorm(norm_forward_phase=phase, input=x, scale=scale, bias=bias, epsilon=1e-5)[0].set_output(True)
        return g

    def sdpa(m: int) -> cudnn_core.Graph:
        g = graph()
        q, k, v = (g.tensor(dim=(2, 8, m, 64)) for _ in "qkv")
        g.sdpa(q=q, k=k, v=v, generate_stats=False, attn_scale=0.125)[0].set_output(True)
        return g

    def conv(m: int) -> cudnn_core.Graph:
        g = graph()
        image = g.tensor(dim=(m, 64, 28, 28), stride=(64 * 28 * 28, 1, 28 * 64, 64))
        weight = g.tensor(dim=(64, 64, 3, 3), stride=(64 * 9, 1, 3 * 64, 64))
        g.conv_fprop(image=image, weight=weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
        return g

    def linear_attention(op: str) -> Callable[[int], cudnn_core.Graph]:
        def build(m: int) -> cudnn_core.Graph:
            g = graph()
            q, k, v = (g.tensor(dim=(m, 4, 128)) for _ in "qkv")
            gate = g.tensor(dim=(m, 4) if op == "gdn" else (m, 4, 128), data_type="float32")
            beta = g.tensor(dim=(m, 4), data_type="float32")
            cu = g.tensor(dim=(3,), data_type="int32")
            getattr(g, op)(q=q, k=k, v=v, g=gate, beta=beta, cu_seqlens=cu)[0].set_output(True)
            return g

        return build

    return {
        "matmul + bias + gelu": matmul,
        _SPLIT: long_k,
        "layernorm": layernorm,
        "sdpa": sdpa,
        "conv_fprop": conv,
        "gdn": linear_attention("gdn"),
        "kda": linear_attention("kda"),
    }


def planning(report: Report) -> None:
    report.section("Planning, without compiling")
    builders = graphs()
    serial = iter(range(16, 1 << 20, 8))

    def fresh(kind: str) -> cudnn_core.Graph:
        return builders[kind](next(serial))

    for kind in ("matmul + bias + gelu", "sdpa"):
        report.add(Row(f"freeze and key, {kind}", "us", _each(lambda k=kind: fresh(k), lambda g: g.key()) / 1e3))
    with noop_engines(10):
        took = _each(lambda: fresh("matmul + bias + gelu"), lambda g: g.plan(device="cpu"))
        report.add(Row("plan of a new graph, 10 candidates", "ms", took / 1e6, budget=2))
        graph = fresh("matmul + bias + gelu")
        again = report.medians({"": lambda: graph.plan(device="cpu")})[""]
        report.add(Row("plan of a known graph, 10 candidates", "ms", again / 1e6))
    with noop_engines(50):
        took = _each(lambda: fresh("matmul + bias + gelu"), lambda g: g.explain(device="H200"))
        report.add(Row("explain of a new graph, 50 engines", "ms", took / 1e6))


def checks(report: Report) -> None:
    """Warm check_support of every engine, and what the first graph of its kind costs each plugin."""
    report.section("check_support of the installed engines: medians, the slowest of all graphs and devices")
    cases = list(_checkable())
    devices = {name: _device(name) for name in _DEVICES}
    worst: dict[str, tuple[float, str]] = {}
    for entry, kind, build, device in cases:
        graph = build(256).freeze("cuda")
        ctx = cudnn_core.ExecutionContext(None, devices[device])
        took = (
            report.medians({"": partial(entry.instance().check_support, graph, ctx)}, seconds=0.001, rounds=2)[""] / 1e3
        )
        if took > worst.get(entry.id, (0.0, ""))[0]:
            worst[entry.id] = (took, f"{kind} on {device}")
    for engine_id, (took, where) in worst.items():
        report.add(Row(f"check_support {engine_id}", "us", took, budget=20))
        report.note(f"    at {where}")
    known = {entry.id for entry in cudnn_core.registry().engines}
    if known - set(worst):
        report.note(f"no graph here passes the manifest of: {', '.join(sorted(known - set(worst)))}")

    first: dict[tuple[str, str], tuple[float, str]] = {}
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for entry, kind, _, device in cases:
        groups.setdefault((entry.plugin, kind, device), []).append(entry.instance())
    for (plugin, kind, device), engines in groups.items():
        sizes = iter(range(64, 1 << 20, 64))
        ctx = cudnn_core.ExecutionContext(None, devices[device])

        def ask(graph: Any, engines: Any = engines, ctx: Any = ctx) -> None:
            for engine in engines:
                engine.check_support(graph, ctx)

        build = graphs()[kind]
        took = _each(lambda build=build, sizes=sizes: build(next(sizes)).freeze("cuda"), ask) / 1e3
        row = plugin, _SPLIT if kind == _SPLIT else "graph"
        if took > first.get(row, (0.0, ""))[0]:
            first[row] = (took, f"{kind} on {device}")
    for (plugin, subject), (took, where) in first.items():
        report.add(Row(f"first analysis of a {subject}, all engines of {plugin}", "us", took, budget=500))
        report.note(f"    at {where}")


def _checkable() -> Iterator[tuple[Any, str, Callable[[int], cudnn_core.Graph], str]]:
    """(engine, graph, device) that the manifest lets through: what check_support is asked for in earnest."""
    for entry in cudnn_core.registry().engines:
        if entry.spec is None or entry.state == "quarantined":
            continue
        for kind, build in graphs().items():
            for device in _DEVICES:
                if not filter_graph(entry.spec, build(256).freeze("cuda"), _device(device)):
                    yield entry, kind, build, device


def _device(name: str) -> cudnn_core.DeviceInfo:
    return cudnn_core.device_info("cpu") if name == "cpu" else cudnn_core.DeviceInfo.preset(name)


def _each(make: Callable[[], Any], call: Callable[[Any], object], *, turns: int = 30, rounds: int = 3) -> float:
    """Nanoseconds of ``call(make())``, ``make`` not counted: the smallest of ``rounds`` medians."""
    best = float("inf")
    for turn in range(rounds + 1):
        samples = []
        for _ in range(turns if turn else 3):
            subject = make()
            start = time.perf_counter_ns()
            call(subject)
            samples.append(time.perf_counter_ns() - start)
        best = min(best, statistics.median(samples)) if turn else best  # the first round warms up
    return best
