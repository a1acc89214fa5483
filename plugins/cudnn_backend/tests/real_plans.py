"""Builds plans with a real libcudnn and a driver that has no device. Run by ``test_real_library`` in a child process.

python real_plans.py plans NAME...    one JSON object: case name -> engine, or what the plugin said instead
python real_plans.py crash NAME       gives a vetoed graph to the planner, and prints "survived" if the process does
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from backend_cases import CASES, Build, conv, out

import cudnn_core
from cudnn_core import BuildError, ExecutionContext, FrozenGraph, PlanConfig

H200 = cudnn_core.DeviceInfo.preset("H200")
B200 = cudnn_core.DeviceInfo.preset("B200")
CONFIG = PlanConfig("cudnn_backend:graph@1", {"heuristics": "A", "engine_knobs": ""})


def plan(graph: Any, device: Any) -> str:
    from cudnn_backend.engines import BackendGraph

    engine, frozen, ctx = BackendGraph(), graph.freeze("cuda"), ExecutionContext(None, device)
    support = engine.check_support(frozen, ctx)
    if not support:
        return "declined: " + "; ".join(map(str, support.reasons))
    try:
        built = engine.build_plan(frozen, CONFIG, ctx)
    except BuildError as error:
        return f"none: {error.decline}"
    return f"plan: {built!r}, {built.workspace_size} bytes"


def plans(names: list[str]) -> dict[str, str]:
    cases = {case.name: case for case in CASES}
    return {name: plan(cases[name].graph(), B200 if cases[name].sm >= 100 else H200) for name in names}


# --- what the vetoes are for


def _matmul(m: int, k: int) -> FrozenGraph:
    b = Build()
    b.graph()
    out(b.g.matmul(b.input((1, m, k)), b.input((1, k, 64))))
    return b.g.freeze("cuda")


def _sdpa(heads: int, queries: int) -> FrozenGraph:
    b = Build()
    b.graph()
    q, k, v = b.input((2, heads, queries, 64)), b.input((2, heads, 64, 64)), b.input((2, heads, 64, 64))
    made = b.g.sdpa(q=q, k=k, v=v)
    out(made[0] if isinstance(made, (list, tuple)) else made)
    return b.g.freeze("cuda")


def _conv() -> FrozenGraph:
    """The core does not let such a convolution into a graph."""
    b = Build()
    out(conv(b), "float16")
    graph = b.g.freeze("cuda")
    nodes = tuple(replace(node, attrs={**node.attrs, "stride": (0, 1)}) for node in graph.nodes)
    return FrozenGraph(name=graph.name, key="0" * 64, tensors=graph.tensors, nodes=nodes)


class Unsized:
    """A ``backend_graph`` that is told no sizes of results, as a program may leave them to the binding."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return method if name != "conv_fprop" else lambda **given: _Unsized(method(**given))


class _Unsized:
    def __init__(self, made: Any) -> None:
        self._made = made

    def set_dim(self, dim: Any) -> Any:
        return self

    def set_stride(self, stride: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


CRASHES = {
    "matmul without rows": lambda: _matmul(0, 64),
    "matmul without K": lambda: _matmul(64, 0),
    "attention without heads": lambda: _sdpa(0, 64),
    "attention without queries": lambda: _sdpa(2, 0),
    "convolution that does not move": _conv,
}


def crash(name: str) -> None:
    """As the plugin does it, but for the vetoes."""
    from cudnn_backend import device_json, library, lower

    graph = CRASHES[name]()
    assert lower.unsupported(graph, H200, 0), "nothing keeps this graph from the planner"
    loaded = library.load()
    module = loaded.module
    types = {key: getattr(module.data_type, value) for key, value in lower.GRAPH_TYPES.items()}
    properties = device_json.device_properties(loaded, H200)
    target = module.backend_graph(name="g", device_property=properties, sm_version=90, **types)
    try:
        lower.lower(graph, module, Unsized(target))
        target.build([module.heur_mode.A, module.heur_mode.FALLBACK])
    except Exception as error:
        print("survived:", type(error).__name__)
    else:
        print("survived: a plan")


if __name__ == "__main__":
    if sys.argv[1] == "plans":
        print(json.dumps(plans(sys.argv[2:])))
    else:
        crash(sys.argv[2])
