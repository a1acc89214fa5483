"""Host time of a bound run against a bare driver launch of the very same kernel. Used by gemm.py; needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._bare_launch import bare_launch
from ._gemm_cases import Case
from ._gpu_timing import host_times
from ._harness import Row

__all__ = ["host_rows"]

_SMALL = Case(128, 256, 256, "bfloat16", kind="bias_gelu")
_BUDGET = 1.25  # of the bare launch


def host_rows(planned: Callable[[Any], Any]) -> Iterator[Row]:
    import cudnn_core

    setup = _SMALL.setup()
    plan = planned(setup.graph)
    pack = cudnn_core.pack(plan, {setup.names[name]: t for name, t in setup.sets[0].items()})
    run, pointers = plan.bind(pack), pack.pointers
    workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    address, where = workspace.data_ptr(), stream.cuda_stream
    run(pointers, address, where)
    torch.cuda.synchronize()
    bare = bare_launch(lambda s: run(pointers, address, s), where)
    y = setup.sets[0]["y"]
    expected = y.clone()
    y.zero_()
    torch.cuda.synchronize()
    bare()
    torch.cuda.synchronize()
    if not torch.equal(y, expected):
        raise RuntimeError("the bare launch does not compute what the plan does")
    a, b, out = (setup.sets[0][name][0] for name in ("x", "w", "y"))
    times = host_times(
        {
            "run": lambda: run(pointers, address, where),
            "driver": bare,
            "mm": lambda: torch.mm(a, b, out=out),
        }
    )
    yield Row("bound run, against the driver's launch of that kernel", "us", times["run"], times["driver"],
              "cuLaunchKernelEx", budget=_BUDGET, gate="ratio")  # fmt: skip
    yield Row("bound run, against torch.mm(out=)", "us", times["run"], times["mm"], "torch.mm")
