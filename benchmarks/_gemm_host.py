"""Host time of a bound run against a bare driver launch of the very same kernel. Used by gemm.py; needs a GPU.

The driver's launch takes the kernel, its parameters and its attributes from a CUDA graph that captured the bound run, so that both
launch the same thing and only what happens before the driver differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

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
    bare = _bare_launch(lambda s: run(pointers, address, s), where)
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


def _bare_launch(capture: Callable[[int], object], stream: int) -> Callable[[], object]:
    """``cuLaunchKernelEx`` of the one kernel that ``capture`` enqueues, with everything prepared."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"driver: {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    captured = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    checked(driver.cuStreamBeginCapture(captured, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    capture(int(captured))
    graph = checked(driver.cuStreamEndCapture(captured))
    nodes, count = checked(driver.cuGraphGetNodes(graph, 64))
    kernels = [
        n
        for n in nodes[:count]
        if checked(driver.cuGraphNodeGetType(n)) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    ]
    if len(kernels) != 1:
        raise RuntimeError(f"the bound run enqueues {len(kernels)} kernels")
    params = checked(driver.cuGraphKernelNodeGetParams(kernels[0]))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = params.gridDimX, params.gridDimY, params.gridDimZ
    config.blockDimX, config.blockDimY, config.blockDimZ = params.blockDimX, params.blockDimY, params.blockDimZ
    config.sharedMemBytes, config.hStream = params.sharedMemBytes, driver.CUstream(stream)
    ids = driver.CUlaunchAttributeID
    cluster = driver.CUlaunchAttribute()
    cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value = checked(driver.cuGraphKernelNodeGetAttribute(kernels[0], cluster.id))
    dependent = driver.CUlaunchAttribute()
    dependent.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    config.attrs = [cluster, dependent] if cluster.value.clusterDim.x else [dependent]
    config.numAttrs = len(config.attrs)
    function, arguments = params.func, params.kernelParams
    success = driver.CUresult.CUDA_SUCCESS

    def launch() -> None:
        (status,) = driver.cuLaunchKernelEx(config, function, arguments, 0)
        if status != success:
            raise RuntimeError(f"driver: {status}")

    launch.graph = graph  # type: ignore[attr-defined]  # owns the parameters
    return launch
