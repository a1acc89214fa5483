"""A driver launch of the one kernel that a callable enqueues. Used by the GPU benchmarks; needs cuda-python and a GPU.

The launch takes the kernel, its parameters and its attributes from a CUDA graph that captured the callable, so that both launch the
same thing and only what happens before the driver differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["bare_launch"]


def bare_launch(capture: Callable[[int], object], stream: int) -> Callable[[], object]:
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
