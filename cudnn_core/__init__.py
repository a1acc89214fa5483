"""Plugin-based engine registry for deep-learning graphs on NVIDIA GPUs.

A graph of operations goes in; the best installed engine for that graph on that device runs it. Names are resolved on first
use (PEP 562), so that the import itself loads nothing but this file.
"""

# No import at all, not even of __future__: tests/overhead/test_import.py.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import cute_dsl, op_schema
    from ._cache import CacheKey, CompileCache
    from ._checks import Carver, Checks, checks
    from ._config import ConfigWarning, configure
    from ._context import build_device, create_device_properties
    from ._decision import Decision, DecisionError, EngineDecision
    from ._declines import Decline
    from ._device import DeviceInfo, device_info
    from ._dims import Dim, Extent
    from ._dtypes import as_dtype, bits, data_type, nbytes
    from ._engine import (
        API,
        Artifact,
        Buffers,
        CompiledPlan,
        Declined,
        Engine,
        Estimate,
        ExecutionContext,
        HostBlock,
        Operand,
        PlanConfig,
        Runner,
        Support,
        VariantPack,
    )
    from ._enums import (
        attention_implementation,
        behavior_note,
        build_plan_policy,
        convolution_mode,
        cuda_graph_retention,
        diagonal_alignment,
        heur_mode,
        knob_type,
        moe_grouped_matmul_mode,
        norm_forward_phase,
        numerical_note,
        reduction_mode,
        reshape_mode,
        scalar_type,
        tensor_reordering,
    )
    from ._env import (
        backend_version,
        backend_version_string,
        create_kernel_cache,
        driver_version,
        get_last_error_string,
        runtime_version,
    )
    from ._errors import (
        BuildError,
        ConfigError,
        CudnnCoreError,
        DriverError,
        ExecutionError,
        GraphError,
        GraphTypeError,
        HandleError,
        HandleTypeError,
        ManifestError,
        NoEngineError,
    )
    from ._graph._frozen import FrozenGraph, FrozenNode, FrozenTensor
    from ._graph._graph import Graph
    from ._graph._tensor import Tensor
    from ._handle import Handle, create_handle, destroy_handle, get_stream, set_stream, to_backend_handle
    from ._hooks import Check, EngineFailure, Registrar
    from ._knobs import KnobError
    from ._ops._table import lookup as lookup_op
    from ._plan import Plan, pack
    from ._registry import EngineBroken, EngineLookupError, refresh, registry

    handle = Handle
    pygraph = Graph
    tensor = Tensor
    cudnnGraphNotSupportedError = NoEngineError

__version__ = "0.1.0"

# public name -> (module, name there); the frontend's names stand beside ours.
_PUBLIC = {
    "API": "_engine",
    "Artifact": "_engine",
    "Buffers": "_engine",
    "BuildError": "_errors",
    "CacheKey": "_cache",
    "Carver": "_checks",
    "Check": "_hooks",
    "Checks": "_checks",
    "CompileCache": "_cache",
    "CompiledPlan": "_engine",
    "ConfigError": "_errors",
    "ConfigWarning": "_config",
    "CudnnCoreError": "_errors",
    "Decision": "_decision",
    "DecisionError": "_decision",
    "Decline": "_declines",
    "Declined": "_engine",
    "DeviceInfo": "_device",
    "Dim": "_dims",
    "DriverError": "_errors",
    "Engine": "_engine",
    "EngineBroken": "_registry",
    "EngineDecision": "_decision",
    "EngineFailure": "_hooks",
    "EngineLookupError": "_registry",
    "Estimate": "_engine",
    "ExecutionContext": "_engine",
    "ExecutionError": "_errors",
    "Extent": "_dims",
    "FrozenGraph": "_graph._frozen",
    "FrozenNode": "_graph._frozen",
    "FrozenTensor": "_graph._frozen",
    "Graph": "_graph._graph",
    "GraphError": "_errors",
    "GraphTypeError": "_errors",
    "Handle": "_handle",
    "HandleError": "_errors",
    "HandleTypeError": "_errors",
    "HostBlock": "_engine",
    "KnobError": "_knobs",
    "ManifestError": "_errors",
    "NoEngineError": "_errors",
    "Operand": "_engine",
    "Plan": "_plan",
    "PlanConfig": "_engine",
    "Registrar": "_hooks",
    "Runner": "_engine",
    "Support": "_engine",
    "Tensor": "_graph._tensor",
    "VariantPack": "_engine",
    "as_dtype": "_dtypes",
    "attention_implementation": "_enums",
    "backend_version": "_env",
    "backend_version_string": "_env",
    "behavior_note": "_enums",
    "bits": "_dtypes",
    "build_device": "_context",
    "build_plan_policy": "_enums",
    "checks": "_checks",
    "configure": "_config",
    "convolution_mode": "_enums",
    "create_device_properties": "_context",
    "create_handle": "_handle",
    "create_kernel_cache": "_env",
    "cuda_graph_retention": "_enums",
    "data_type": "_dtypes",
    "destroy_handle": "_handle",
    "device_info": "_device",
    "diagonal_alignment": "_enums",
    "driver_version": "_env",
    "get_last_error_string": "_env",
    "get_stream": "_handle",
    "heur_mode": "_enums",
    "knob_type": "_enums",
    "moe_grouped_matmul_mode": "_enums",
    "nbytes": "_dtypes",
    "norm_forward_phase": "_enums",
    "numerical_note": "_enums",
    "pack": "_plan",
    "reduction_mode": "_enums",
    "refresh": "_registry",
    "registry": "_registry",
    "reshape_mode": "_enums",
    "runtime_version": "_env",
    "scalar_type": "_enums",
    "set_stream": "_handle",
    "tensor_reordering": "_enums",
    "to_backend_handle": "_handle",
}
_ALIASES = {
    "cudnnGraphNotSupportedError": ("_errors", "NoEngineError"),
    "handle": ("_handle", "Handle"),
    "lookup_op": ("_ops._table", "lookup"),
    "pygraph": ("_graph._graph", "Graph"),
    "tensor": ("_graph._tensor", "Tensor"),
}
_MODULES = {"cute_dsl": "cute_dsl", "op_schema": "op_schema"}

__all__ = [
    "API",
    "Artifact",
    "Buffers",
    "BuildError",
    "CacheKey",
    "Carver",
    "Check",
    "Checks",
    "CompileCache",
    "CompiledPlan",
    "ConfigError",
    "ConfigWarning",
    "CudnnCoreError",
    "Decision",
    "DecisionError",
    "Decline",
    "Declined",
    "DeviceInfo",
    "Dim",
    "DriverError",
    "Engine",
    "EngineBroken",
    "EngineDecision",
    "EngineFailure",
    "EngineLookupError",
    "Estimate",
    "ExecutionContext",
    "ExecutionError",
    "Extent",
    "FrozenGraph",
    "FrozenNode",
    "FrozenTensor",
    "Graph",
    "GraphError",
    "GraphTypeError",
    "Handle",
    "HandleError",
    "HandleTypeError",
    "HostBlock",
    "KnobError",
    "ManifestError",
    "NoEngineError",
    "Operand",
    "Plan",
    "PlanConfig",
    "Registrar",
    "Runner",
    "Support",
    "Tensor",
    "VariantPack",
    "__version__",
    "as_dtype",
    "attention_implementation",
    "backend_version",
    "backend_version_string",
    "behavior_note",
    "bits",
    "build_device",
    "build_plan_policy",
    "checks",
    "configure",
    "convolution_mode",
    "create_device_properties",
    "create_handle",
    "create_kernel_cache",
    "cuda_graph_retention",
    "cudnnGraphNotSupportedError",
    "cute_dsl",
    "data_type",
    "destroy_handle",
    "device_info",
    "diagonal_alignment",
    "driver_version",
    "get_last_error_string",
    "get_stream",
    "handle",
    "heur_mode",
    "knob_type",
    "lookup_op",
    "moe_grouped_matmul_mode",
    "nbytes",
    "norm_forward_phase",
    "numerical_note",
    "op_schema",
    "pack",
    "pygraph",
    "reduction_mode",
    "refresh",
    "registry",
    "reshape_mode",
    "runtime_version",
    "scalar_type",
    "set_stream",
    "tensor",
    "tensor_reordering",
    "to_backend_handle",
]


def __getattr__(name: str) -> object:
    module, attribute = _ALIASES.get(name, (_PUBLIC.get(name), name))
    if module is None and name not in _MODULES:
        raise AttributeError(f"module 'cudnn_core' has no attribute {name!r}")
    import importlib

    if name in _MODULES:
        found: object = importlib.import_module(f".{_MODULES[name]}", __name__)
    else:
        found = getattr(importlib.import_module(f".{module}", __name__), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
