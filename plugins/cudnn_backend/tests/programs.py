"""What the programs of the tests share, which run with the fake libcudnn: graphs, and what the fake was asked."""

from __future__ import annotations

import ctypes
import os

import cudnn_core
from cudnn_core import ExecutionContext, Operand, PlanConfig

DEVICE = cudnn_core.DeviceInfo.preset("H200")
CTX = ExecutionContext(None, DEVICE)


class Fake:
    """The variables of ``fake_cudnn.c``, as the process has them."""

    def __init__(self) -> None:
        folder = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0]
        self.library = ctypes.CDLL(f"{folder}/libcudnn.so.9")

    def get(self, name: str) -> int:
        kind = ctypes.c_int if name in _INTS else ctypes.c_void_p if name in _POINTERS else ctypes.c_long
        return kind.in_dll(self.library, f"fake_{name}").value or 0

    def set(self, name: str, value: int) -> None:
        kind = ctypes.c_int if name in _INTS else ctypes.c_long
        kind.in_dll(self.library, f"fake_{name}").value = value

    def last(self) -> dict[str, object]:
        """What cudnnBackendExecute was given last."""
        count = self.get("last_count")
        uids = list((ctypes.c_int64 * count).in_dll(self.library, "fake_last_uids"))
        pointers = [pointer or 0 for pointer in (ctypes.c_void_p * count).in_dll(self.library, "fake_last_pointers")]
        return {
            "pointers": dict(zip(uids, pointers, strict=True)),
            "workspace": self.get("last_workspace"),
            "stream": self.get("last_stream"),
            "engine": self.get("last_engine"),
        }

    def device_json(self) -> str:
        return bytes((ctypes.c_char * 8192).in_dll(self.library, "fake_device_json")).split(b"\0", 1)[0].decode()


_INTS = {"engine_count", "heuristics_fail", "native_graph", "execute_status", "create_status"}
_POINTERS = {"last_workspace", "last_handle", "last_stream", "last_graph"}


class FakeDriver:
    """The fills that ``fake_cuda.c`` was asked for."""

    FIELDS = ("pointer", "pitch", "value", "bits", "width", "height", "stream", "executions")

    def __init__(self) -> None:
        folder = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0]
        self.library = ctypes.CDLL(f"{folder}/libcuda.so.1")

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, f"fake_{name}").value = value

    def filled(self) -> list[dict[str, int]]:
        """In their order; ``executions`` is how many runs of the fake libcudnn came before."""
        count, width = ctypes.c_long.in_dll(self.library, "fake_fills").value, len(self.FIELDS)
        numbers = list((ctypes.c_uint64 * (count * width)).in_dll(self.library, "fake_filled"))
        return [dict(zip(self.FIELDS, numbers[at : at + width], strict=True)) for at in range(0, len(numbers), width)]


def matmul(m: object = 64, k: int = 32, n: int = 16, dtype: str = "float16") -> cudnn_core.Graph:
    """relu(A @ B): the operands A, B and C."""
    graph = cudnn_core.Graph(io_data_type=dtype, intermediate_data_type="float32", compute_data_type="float32")
    c = graph.matmul(A=graph.tensor(dim=(1, m, k), name="A"), B=graph.tensor(dim=(1, k, n), name="B"))
    graph.relu(input=c).set_output(True).set_data_type(dtype).set_name("C")
    return graph


def config(variant: str = "", **knobs: str) -> PlanConfig:
    return PlanConfig("cudnn_backend:graph@1", {"heuristics": "A", "engine_knobs": "", **knobs}, variant)


def build(graph: cudnn_core.Graph, chosen: PlanConfig | None = None, device: cudnn_core.DeviceInfo = DEVICE):
    """What the engine builds."""
    from cudnn_backend.engines import BackendGraph

    return BackendGraph().build_plan(graph.freeze("cuda"), chosen or config(), ExecutionContext(None, device))


def layout(graph: cudnn_core.Graph, alignment: int = 16, **sizes: int) -> tuple[Operand, ...]:
    """The operands at these sizes, at addresses of an alignment."""
    frozen = graph.freeze("cuda")
    return tuple(operand._replace(alignment=alignment) for operand in frozen.at(sizes).operands)


def present_gpu():
    """A machine with one H200, by a driver that answers from its preset."""
    from cudnn_core import _driver

    attributes = {
        "COMPUTE_CAPABILITY_MAJOR": 9,
        "COMPUTE_CAPABILITY_MINOR": 0,
        "MULTIPROCESSOR_COUNT": DEVICE.sm_count,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": DEVICE.shared_memory_per_block_optin,
        "L2_CACHE_SIZE": DEVICE.l2_cache_bytes,
    }

    class Driver:
        device_count = staticmethod(lambda: 1)
        attribute = staticmethod(lambda name, ordinal: attributes[name])
        name = staticmethod(lambda ordinal: DEVICE.device_name)
        total_memory = staticmethod(lambda ordinal: DEVICE.memory_bytes)
        current_device = staticmethod(lambda: 0)
        make_current = staticmethod(lambda ordinal: None)
        driver_version = staticmethod(lambda: 13000)
        runtime_version = staticmethod(lambda: 13000)

    return _driver.use_driver(Driver())
