"""The frontend's enumerations, with its member names and numbers.

A member *is* its name as a string (``reduction_mode.ADD == "ADD"``), which is how attributes stand in graph JSON; ``int()``
gives the frontend's number. Imported by the graph's builders and the public table.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from ._errors import GraphError, nearest

__all__ = [
    "FrontendEnum",
    "as_member",
    "attention_implementation",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "cuda_graph_retention",
    "diagonal_alignment",
    "heur_mode",
    "knob_type",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "reduction_mode",
    "reshape_mode",
    "scalar_type",
    "tensor_reordering",
]

E = TypeVar("E", bound="FrontendEnum")


class FrontendEnum(str, Enum):
    """Base: members are declared as ``NAME = "NAME", number``."""

    number: int

    def __new__(cls, name: str, number: int) -> FrontendEnum:  # noqa: PYI034  # one member type per subclass
        member = str.__new__(cls, name)
        member._value_ = name
        member.number = number
        return member

    def __int__(self) -> int:
        return self.number

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


def as_member(kind: type[E], value: object) -> E:
    """``value`` (a member, or its name in any case) as a member of ``kind``; GraphError otherwise."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        name = str(value)
        for member in kind:
            if member.value == name or member.value.lower() == name.lower():
                return member
        raise GraphError(f"{name!r} is no {kind.__name__}{nearest(name.upper(), [m.value for m in kind])}")
    raise GraphError(f"{value!r} is no {kind.__name__}")


class attention_implementation(FrontendEnum):
    """How attention is to be realised."""

    AUTO = "AUTO", 0
    COMPOSITE = "COMPOSITE", 1
    UNIFIED = "UNIFIED", 2


class behavior_note(FrontendEnum):
    """What an engine does beside computing."""

    RUNTIME_COMPILATION = "RUNTIME_COMPILATION", 1
    REQUIRES_FILTER_INT8x32_REORDER = "REQUIRES_FILTER_INT8x32_REORDER", 2
    REQUIRES_BIAS_INT8x32_REORDER = "REQUIRES_BIAS_INT8x32_REORDER", 3
    SUPPORTS_CUDA_GRAPH_NATIVE_API = "SUPPORTS_CUDA_GRAPH_NATIVE_API", 4
    CUBLASLT_DEPENDENCY = "CUBLASLT_DEPENDENCY", 5


class build_plan_policy(FrontendEnum):
    """How many plans build_plans builds."""

    HEURISTICS_CHOICE = "HEURISTICS_CHOICE", 0
    ALL = "ALL", 1


class convolution_mode(FrontendEnum):
    """Whether the filter is flipped."""

    CONVOLUTION = "CONVOLUTION", 1
    CROSS_CORRELATION = "CROSS_CORRELATION", 2


class cuda_graph_retention(FrontendEnum):
    """Who keeps native CUDA graph nodes alive."""

    PER_GRAPH = "PER_GRAPH", 0
    NONE = "NONE", 1


class diagonal_alignment(FrontendEnum):
    """Which corner the diagonal of attention bounds starts from."""

    TOP_LEFT = "TOP_LEFT", 0
    BOTTOM_RIGHT = "BOTTOM_RIGHT", 1


class heur_mode(FrontendEnum):
    """Which heuristic proposes plans."""

    A = "A", 0
    B = "B", 1
    FALLBACK = "FALLBACK", 2
    OPENSOURCE = "OPENSOURCE", 3


class knob_type(FrontendEnum):
    """Tuning knobs of the cuDNN backend, and from 1000 on of the frontend."""

    NOT_SET = "NOT_SET", 0
    SWIZZLE = "SWIZZLE", 1
    TILE_SIZE = "TILE_SIZE", 2
    EDGE = "EDGE", 3
    MULTIPLY = "MULTIPLY", 4
    SPLIT_K_BUF = "SPLIT_K_BUF", 5
    TILEK = "TILEK", 6
    STAGES = "STAGES", 7
    REDUCTION_MODE = "REDUCTION_MODE", 8
    SPLIT_K_SLC = "SPLIT_K_SLC", 9
    IDX_MODE = "IDX_MODE", 10
    SPECFILT = "SPECFILT", 11
    KERNEL_CFG = "KERNEL_CFG", 12
    WORKSPACE = "WORKSPACE", 13
    TILE_CGA_M = "TILE_CGA_M", 14
    TILE_CGA_N = "TILE_CGA_N", 15
    BLOCK_SIZE = "BLOCK_SIZE", 16
    OCCUPANCY = "OCCUPANCY", 17
    ARRAY_SIZE_PER_THREAD = "ARRAY_SIZE_PER_THREAD", 18
    SPLIT_COLS = "SPLIT_COLS", 19
    TILE_ROWS = "TILE_ROWS", 20
    TILE_COLS = "TILE_COLS", 21
    LOAD_SIZE = "LOAD_SIZE", 22
    CTA_COUNT = "CTA_COUNT", 23
    STREAM_K = "STREAM_K", 24
    SPLIT_P_SLC = "SPLIT_P_SLC", 25
    TILE_M = "TILE_M", 26
    TILE_N = "TILE_N", 27
    WARP_SPEC_CFG = "WARP_SPEC_CFG", 28
    SWAP_AB = "SWAP_AB", 29
    INPUT_TMA_ENABLE = "INPUT_TMA_ENABLE", 30
    OUTPUT_TMA_ENABLE = "OUTPUT_TMA_ENABLE", 31
    TILE_CGA = "TILE_CGA", 32
    SCHED_POLICY = "SCHED_POLICY", 1000
    PACK_GQA = "PACK_GQA", 1001
    SPLIT_KV = "SPLIT_KV", 1002
    PIPELINE_ARCH = "PIPELINE_ARCH", 1003
    MMA_TILE_M = "MMA_TILE_M", 1004
    MMA_TILE_N = "MMA_TILE_N", 1005
    MMA_TILE_K = "MMA_TILE_K", 1006
    CTA_GROUP = "CTA_GROUP", 1007
    WARPS_M = "WARPS_M", 1008
    WARPS_N = "WARPS_N", 1009


class moe_grouped_matmul_mode(FrontendEnum):
    """How tokens reach the experts and return."""

    NONE = "NONE", 1
    GATHER = "GATHER", 2
    SCATTER = "SCATTER", 3
    COMBINE = "COMBINE", 4


class norm_forward_phase(FrontendEnum):
    """Whether a norm also gives its statistics."""

    NOT_SET = "NOT_SET", 0
    INFERENCE = "INFERENCE", 1
    TRAINING = "TRAINING", 2


class numerical_note(FrontendEnum):
    """What an engine does to the numbers."""

    TENSOR_CORE = "TENSOR_CORE", 1
    DOWN_CONVERT_INPUTS = "DOWN_CONVERT_INPUTS", 2
    REDUCED_PRECISION_REDUCTION = "REDUCED_PRECISION_REDUCTION", 3
    FFT = "FFT", 4
    NONDETERMINISTIC = "NONDETERMINISTIC", 5
    WINOGRAD = "WINOGRAD", 6
    WINOGRAD_TILE_4x4 = "WINOGRAD_TILE_4x4", 7
    WINOGRAD_TILE_6x6 = "WINOGRAD_TILE_6x6", 8
    WINOGRAD_TILE_13x13 = "WINOGRAD_TILE_13x13", 9
    STRICT_NAN_PROP = "STRICT_NAN_PROP", 10


class reduction_mode(FrontendEnum):
    """Reduction operators."""

    NOT_SET = "NOT_SET", 0
    ADD = "ADD", 1
    MUL = "MUL", 2
    MIN = "MIN", 3
    MAX = "MAX", 4
    AMAX = "AMAX", 5
    AVG = "AVG", 6
    NORM1 = "NORM1", 7
    NORM2 = "NORM2", 8
    MUL_NO_ZEROS = "MUL_NO_ZEROS", 9


class reshape_mode(FrontendEnum):
    """Whether a reshape may move data."""

    VIEW_ONLY = "VIEW_ONLY", 1
    LOGICAL = "LOGICAL", 2


class scalar_type(FrontendEnum):
    """Whether a scalar is part of the graph."""

    RUNTIME_PARAM = "RUNTIME_PARAM", 0
    COMPILE_TIME_CONST = "COMPILE_TIME_CONST", 1


class tensor_reordering(FrontendEnum):
    """Element orders that strides cannot express."""

    NONE = "NONE", 0
    INT8x32 = "INT8x32", 1
    F16x16 = "F16x16", 2
    F8_128x4 = "F8_128x4", 3
