"""From a decode problem to a compiled kernel: target, name and key. The core's ``cute_dsl`` compiles. Imports no DSL.

Imported by ``decode_engine``, which asks ``target_of`` in check_support and the rest when a plan is built.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .decode_problem import DecodeConfig, DecodeProblem

if TYPE_CHECKING:
    from cudnn_core import CompileCache, DeviceInfo
    from cudnn_core.cute_dsl import CompiledKernel

__all__ = ["compiled", "kernel_name", "target_of"]

# Compute capability -> what the DSL calls it. Code of sm_8x runs on a later minor of 8 too.
TARGETS = {
    (8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_87", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a",
    (10, 3): "sm_103a", (10, 7): "sm_107a", (11, 0): "sm_110a", (12, 0): "sm_120a", (12, 1): "sm_121a",
}  # fmt: skip
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def target_of(device: DeviceInfo) -> str | None:
    """The compiler's target for a device; None: it has none."""
    major, minor = device.compute_capability
    if major == 8:
        minor = max(have for family, have in TARGETS if family == 8 and have <= minor)
    return TARGETS.get((major, minor))


def kernel_name(problem: DecodeProblem, config: DecodeConfig, target: str) -> str:
    """The symbol that profilers show, such as "gdn_decode_sm90_bf16_f32_128x128_r32w4_3f2a91c4": types of q and of states, K x V,
    rows and warps of a CTA; the tail tells kernels of different modes apart."""
    digest = hashlib.sha256(problem.canonical().encode()).hexdigest()[:8]
    state = _SHORT.get(problem.state_dtype, "none")
    tokens = [f"t{problem.most}"] if problem.most > 1 else []
    parts = [
        problem.variant, "decode", target.rstrip("af").replace("_", ""), _SHORT[problem.io], state,
        f"{problem.key}x{problem.value}", *tokens, f"r{config.rows}w{config.warps}", digest,
    ]  # fmt: skip
    return "_".join(parts)


def compiled(
    problem: DecodeProblem, config: DecodeConfig, target: str, engine: str, cache: CompileCache | None = None
) -> CompiledKernel:
    """The kernel, through the compile cache. Needs no GPU. Raises BuildError."""
    from cudnn_core import cute_dsl

    def make() -> Any:
        from .kernels.decode import DecodeKernel

        return DecodeKernel(problem, config, target)

    return cute_dsl.compiled(
        make,
        name=kernel_name(problem, config, target),
        target=target,
        engine=engine,
        program={"problem": json.loads(problem.canonical()), "config": asdict(config), "class": "DecodeKernel"},
        package="linear_attention",
        cache=cache,
    )
