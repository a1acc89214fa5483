"""From a prefill's problem to a compiled kernel: its name and its key. The core's ``cute_dsl`` compiles. Imports no DSL.

Imported by ``prefill_engine`` and ``plan``, when a plan is built.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from cudnn_core import cute_dsl

from .problem import Problem

if TYPE_CHECKING:
    from cudnn_core import CompileCache

__all__ = ["TARGET", "compiled", "kernel_name"]

TARGET = "sm_90a"
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def kernel_name(problem: Problem) -> str:
    """What the symbols that profilers show begin with, such as "gdn_prefill_sm90_bf16_128x128_3f2a91c4": type of q, K x V; the
    tail tells kernels of different modes apart."""
    digest = hashlib.sha256(problem.canonical().encode()).hexdigest()[:8]
    return f"{problem.variant}_prefill_sm90_{_SHORT[problem.io]}_{problem.key}x{problem.value}_{digest}"


def compiled(problem: Problem, engine: str, cache: CompileCache | None = None) -> cute_dsl.CompiledKernel:
    """The kernels of a problem as one object, through the compile cache. Needs no GPU. Raises BuildError.

    ``engine`` is "plugin:engine@revision".
    """

    def make() -> Any:
        from .kernels.host import PrefillHost

        return PrefillHost(problem)

    return cute_dsl.compiled(
        make,
        name=kernel_name(problem),
        target=TARGET,
        engine=engine,
        program={"problem": json.loads(problem.canonical()), "class": "PrefillHost"},
        package="linear_attention",
        cache=cache,
    )
