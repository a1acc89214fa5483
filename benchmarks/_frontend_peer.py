"""The cuDNN frontend's own ``pygraph.execute`` as a benchmark peer, with an engine that launches nothing.

Used by the execute benchmark to time our ``execute`` against nvidia-cudnn-frontend on any machine: no GPU, no
libcudnn and no kernel. ``import cudnn`` happens on first use. Of the frontend these parts run unchanged, on every
call: key resolution, engine lookup, stream lookup, normalisation into a ``VariantPack`` and the dispatch to the plan.

Replaced, and why:

* the engine: a class that accepts everything and whose plan keeps the pack and returns. It is installed as the only
  candidate of the graph, because the frontend has no registration call and its engines need a GPU.
* planning: the plan list is written instead of ranked, because ranking lowers the graph to the cuDNN library.
  ``build_plans`` then runs as usual.
* ``ensure_current_context``: a no-op for the whole process, because there may be no driver to ask. This makes the
  peer faster than it is in production.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

__all__ = ["execute_callable", "make_noop_graph", "seen_pointers"]

_ENGINE_ID = 99_999  # in the frontend's range for Python engines, far above the ids that it ships
_EXTENT = 64  # every operand is a bfloat16 [1, n * 64, 64]: small enough that buffers cost nothing


def _frontend() -> Any:
    try:
        import cudnn
    except ImportError as error:
        raise RuntimeError("the frontend peer needs the package: pip install nvidia-cudnn-frontend==1.32.0") from error
    if not hasattr(cudnn, "pygraph") or not hasattr(cudnn.pygraph, "_normalize"):
        version = getattr(cudnn, "__version__", "unknown")
        raise RuntimeError(f"cudnn {version} has another execute path: pip install nvidia-cudnn-frontend==1.32.0")
    return cudnn


def make_noop_graph(n_operands: int, *, with_handle: bool = False) -> tuple[Any, tuple[int, ...]]:
    """A built graph with ``n_operands`` operands (the last is the output) and their uids.

    One concatenate node holds them: it takes any number of inputs and Python engines may serve it. Buffers have the
    dtype and size of ``graph.find_tensor(uid)``: bfloat16, inputs ``[1, 64, 64]``, the output the inputs in a row.
    ``with_handle`` adds a handle on stream 0 of device 0 that is never dereferenced: its lookups are then timed too.
    Raises RuntimeError without the frontend, ValueError for less than two operands.
    """
    if n_operands < 2:
        raise ValueError(f"a graph has at least one input and one output, got n_operands={n_operands}")
    cudnn = _frontend()
    from cudnn import _pygraph
    from cudnn.engines.base import BaseEngine, CompiledPlan, PlanConfig

    class NoopPlan(CompiledPlan):
        takes_variant_pack = True
        pack: Any = None

        def execute(self, graph: Any, variant_pack: Any, ctx: Any) -> None:
            self.pack = variant_pack

    class NoopEngine(BaseEngine):
        name = "noop"
        engine_id = _ENGINE_ID

        def build_plan(self, graph: Any, plan: Any, ctx: Any = None) -> Any:
            return NoopPlan()

    _pygraph.ensure_current_context = lambda stream=None, device=None: None

    handle = cudnn.Handle(1, 0, 0) if with_handle else None
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, handle=handle)
    inputs = [graph.tensor([1, _EXTENT, _EXTENT], name=f"x{i}") for i in range(n_operands - 1)]
    output = graph.concatenate(inputs=inputs, axis=1, out_dims=[1, _EXTENT * len(inputs), _EXTENT], name="cat")
    output.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)

    graph._is_validated = True
    graph._freeze()
    graph._candidates = [NoopEngine()]
    graph._plans = [PlanConfig(_ENGINE_ID)]
    graph._planning_done = True
    graph.build_plans()
    return graph, tuple(tensor.get_uid() for tensor in (*inputs, output))


def execute_callable(
    graph: Any, mapping: Mapping[Any, Any], workspace: Any, *, ordered: bool = False
) -> Callable[[], None]:
    """``graph.execute`` bound to its arguments.

    Keys of ``mapping`` are tensors, uids or names, its values anything that the frontend takes: torch tensors, other
    DLPack producers, device addresses. ``ordered`` passes the frontend's prepared form instead, a tuple of buffers
    and ``tensor_uids``, made here once from a mapping with tensors or uids as keys.
    """
    if not ordered:
        return partial(graph.execute, dict(mapping), workspace)
    uids = tuple(key if isinstance(key, int) else key.get_uid() for key in mapping)
    return partial(graph.execute, tuple(mapping.values()), workspace, tensor_uids=uids)


def seen_pointers(graph: Any) -> dict[int, int]:
    """``{uid: address}`` that reached the plan in the last execute: the proof that nothing was skipped."""
    pack = graph._compiled_plans[0].pack
    return {uid: pack.ptr(uid) for uid in pack.uids}


def _median_us(calls: Mapping[str, Callable[[], None]], repeats: int, iterations: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():  # interleaved, so that a slow phase of the machine hits every case
            for _ in range(50):
                call()
            start = time.perf_counter_ns()
            for _ in range(iterations):
                call()
            samples[name].append((time.perf_counter_ns() - start) / iterations / 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def main(argv: list[str] | None = None) -> int:
    """Print the median of one execute in microseconds for each form of its operands."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--operands", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--handle", action="store_true", help="execute on a graph that has a handle")
    args = parser.parse_args(argv)

    import torch

    graph, uids = make_noop_graph(args.operands, with_handle=args.handle)
    tensors = {uid: torch.empty(tuple(graph.find_tensor(uid).get_dim()), dtype=torch.bfloat16) for uid in uids}
    addresses = {uid: tensor.data_ptr() for uid, tensor in tensors.items()}
    workspace = torch.empty(256, dtype=torch.uint8)
    calls = {
        "torch, by tensor": execute_callable(graph, {graph.find_tensor(u): t for u, t in tensors.items()}, workspace),
        "torch, by uid": execute_callable(graph, tensors, workspace),
        "torch, ordered": execute_callable(graph, tensors, workspace, ordered=True),
        "addresses, by uid": execute_callable(graph, addresses, workspace.data_ptr()),
        "addresses, ordered": execute_callable(graph, addresses, workspace.data_ptr(), ordered=True),
    }
    for name, call in calls.items():
        call()
        if seen_pointers(graph) != addresses:
            print(f"{name}: the plan saw other addresses than the operands'", file=sys.stderr)
            return 1
    for name, median in _median_us(calls, args.repeats, args.iterations).items():
        print(f"{name:20} {median:8.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
