"""``cudnn-core run``: the best engine's plan, executed once and checked against the reference.

``--executor NAME`` runs the plan's artifacts by other means: the object that the entry point NAME of the group
``cudnn_core.executors`` names is called as ``executor(plan, pack, workspace, **options)``. ``pack`` is a VariantPack whose
pointers are host addresses in the order of ``plan.operands``, ``workspace`` a host address, ``options`` what
``--executor-option`` sets; it returns when the outputs are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._errors import CudnnCoreError
from ._executors import executor_named
from ._load import device_named, load_graph, sizes_named
from ._output import Failure, aligned, emit_json

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph
    from ._arena import Arena
    from ._reference import Comparison, Oracle

__all__ = ["run"]


def run(options: Any) -> int:
    from ._inputs import need_numpy

    need_numpy()
    from ._arena import Arena, require_device
    from ._inputs import load_arrays, make_inputs, sizes_from_arrays
    from ._reference import compare, oracle

    graph = load_graph(options.graph)
    device = device_named(options.device)
    executor, settings = executor_named(options.executor, options.executor_option)
    if executor is None:
        require_device(device, "run")
    sizes = sizes_named(graph, device, options.size)
    arrays = load_arrays(options.inputs) if options.inputs else None
    if arrays is not None:
        sizes.update(sizes_from_arrays(graph.freeze(device.type), arrays))
    plan = graph.plan(device=device, hint=sizes)
    sizes = plan.graph.hint_sizes(sizes)
    fixed = plan.graph.at(sizes)
    inputs = make_inputs(fixed, options.seed, arrays)
    arena = Arena(plan, fixed, inputs, on_host=executor is not None)
    _execute(arena, executor, options.executor, settings)
    outputs = arena.outputs()
    expected = oracle(graph, sizes, inputs)
    results = compare(fixed, outputs, expected.outputs)
    if options.outputs:
        _save(options.outputs, fixed, outputs)
    ok = all(result.ok for result in results)
    if options.json:
        emit_json(_document(arena, options, settings, sizes, expected, results, ok))
    else:
        print(_report(arena, options, sizes, expected, results))
    return 0 if ok else 1


def _execute(arena: Arena, executor: Any, name: str | None, settings: Mapping[str, Any]) -> None:
    """One run. What a plan or an executor raises at run time is a finding about it."""
    try:
        if executor is not None:
            executor(arena.plan, arena.pack(), arena.workspace, **settings)
        else:
            arena.execute()
    except CudnnCoreError:
        raise
    except Exception as error:
        who = f"executor {name}" if name else f"engine {arena.plan.engine}"
        raise Failure(f"{who} raised {type(error).__name__}: {error}") from error


def _document(
    arena: Arena,
    options: Any,
    settings: Mapping[str, Any],
    sizes: Mapping[str, int],
    expected: Oracle,
    results: list[Comparison],
    ok: bool,
) -> dict[str, Any]:
    plan = arena.plan
    return {
        "schema": 1,
        "ok": ok,
        "graph_key": plan.graph.key,
        "engine": plan.engine,
        "knobs": dict(plan.knobs),
        "variant": plan.variant,
        "executor": options.executor,
        "executor_options": dict(settings),
        "device": plan.device.to_dict(),
        "sizes": dict(sizes),
        "inputs": options.inputs,
        "seed": None if options.inputs else options.seed,
        "workspace": plan.workspace_size,
        "reference": {"engine": expected.engine, "precision": expected.precision},
        "outputs": [result._asdict() for result in results],
        "decision_digest": plan.decision.digest,
    }


def _report(arena: Arena, options: Any, sizes: Mapping[str, int], expected: Oracle, results: list[Comparison]) -> str:
    plan = arena.plan
    knobs = ", ".join(f"{name}={value}" for name, value in plan.knobs.items())
    by = f" by executor {options.executor}" if options.executor else ""
    facts = [
        ("graph", plan.decision.summary),
        ("device", plan.device.device_name or plan.device.type),
        ("engine", f"{plan.engine}{f' [{knobs}]' if knobs else ''}{by}"),
        ("reference", f"{expected.engine} on the CPU, arithmetic in the {expected.precision} type"
            if expected.precision == "declared" else f"{expected.engine} on the CPU, arithmetic in fp64"),
        ("inputs", options.inputs or f"random, seed {options.seed}"),
    ]  # fmt: skip
    if sizes:
        facts.append(("sizes", " ".join(f"{name}={size}" for name, size in sizes.items())))
    rows = [
        (
            result.name or result.uid,
            result.dtype,
            "x".join(map(str, result.shape)),
            f"{result.max_abs:.3g}",
            f"{result.max_rel:.3g}",
            f"{result.tolerance:.3g}",
            "ok" if result.ok else "DIFFERS" + (f" ({result.strays} NaN or infinite)" if result.strays else ""),
        )
        for result in results
    ]
    header = ("output", "type", "shape", "max abs error", "max rel error", "tolerance", "")
    return f"{aligned(facts)}\n\n{aligned(rows, header, right=(3, 4, 5))}"


def _save(name: str, graph: FrozenGraph, outputs: Mapping[int, Any]) -> None:
    """The outputs as arrays of their shapes; types that numpy lacks as their codes, reordered ones as bytes."""
    import numpy as np

    from ..testing._memory import Layout

    arrays: dict[str, Any] = {}
    for tensor in graph.operand_tensors():
        if tensor.role == "input":
            continue
        key = tensor.name if tensor.name and tensor.name not in arrays else str(tensor.uid)
        arrays[key] = outputs[tensor.uid]
        if tensor.reordering == "NONE" and not tensor.dtype.startswith(("int8x", "uint8x")):
            dim: Any = tensor.dim
            stride: Any = tensor.stride
            codes = Layout(str(tensor.dtype), dim, stride).read(outputs[tensor.uid], 0)
            native = {"boolean": "bool"}.get(tensor.dtype, str(tensor.dtype))
            known = native in ("bool", "float64", "float32", "float16", "int64", "int32", "int8", "uint8")
            arrays[key] = codes.view(native) if known else codes
    np.savez(name, **arrays)
