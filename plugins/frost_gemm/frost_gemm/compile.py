"""From a program and its configuration to a compiled kernel: its name and its key. The core's ``cute_dsl`` compiles.

``compiled(...)`` needs neither a GPU nor a driver, and the DSL on a cache miss alone. Imported by ``engines``, when a plan is built.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cudnn_core import CompileCache, cute_dsl

from .config import TileConfig
from .facts import ArchFacts
from .ir import Matrix, Program
from .layout import BITS, KernelLayout

__all__ = ["compiled", "kernel_name"]

KERNELS = {"wgmma": "frost_gemm.kernels.wgmma:WgmmaKernel", "tcgen05": "frost_gemm.kernels.tcgen05:Tcgen05Kernel"}


def compiled(
    program: Program,
    config: TileConfig,
    layout: KernelLayout,
    facts: ArchFacts,
    engine: str,
    *,
    cache: CompileCache | None = None,
    kernel_class: Callable[..., Any] | None = None,
) -> cute_dsl.CompiledKernel:
    """The kernel of a program, as the kernel sees it: swapped already where ``config.swap_ab`` says so.

    ``engine`` is "plugin:engine@revision". ``kernel_class`` is called with (program, config, layout, facts) and has the
    ``@cute.jit`` method ``host(words, stream)``; default: the one of the MMA generation.

    Raises BuildError if the DSL is missing, can't compile the kernel, or compiled it for another target.
    """
    return cute_dsl.compiled(
        lambda: (kernel_class or _kernel_class(facts.mma))(program, config, layout, facts),
        name=kernel_name(program, config, facts),
        target=facts.target,
        engine=engine,
        program={
            "program": json.loads(program.canonical()),
            "config": asdict(config),
            "layout": json.loads(json.dumps(asdict(layout))),  # tuples as lists
            "facts": asdict(facts),
            "class": getattr(kernel_class, "__qualname__", KERNELS[facts.mma]),
        },
        package="frost_gemm",
        cache=cache,
    )


def kernel_name(program: Program, config: TileConfig, facts: ArchFacts) -> str:
    """The symbol that profilers show, such as "frost_sm90_bf16_bf16_128x256x64_1x2_pingpong_3f2a91c4".

    Types, tile (elements; K too), cluster, then what differs from a plain kernel; the tail tells epilogues apart.
    """
    a, b = program.a[0], program.b[0]
    tile_k = config.tile_k * 8 // BITS[a.mma_dtype]
    parts = [
        "frost",
        facts.target.removesuffix("a").replace("_", ""),
        *dict.fromkeys((_operand_name(a), _operand_name(b))),
        f"{config.tile_m}x{config.tile_n}x{tile_k}",
        f"{config.cluster_m}x{config.cluster_n}",
    ]
    if len(program.gemms) > 1:
        parts.append(f"gemms{len(program.gemms)}")
    if config.cta_group > 1:
        parts.append(f"{config.cta_group}cta")
    if config.schedule != "cooperative":
        parts.append(config.schedule)
    if config.split_k > 1:
        parts.append(f"split{config.split_k}")
    if config.swap_ab:
        parts.append("swap")
    parts.append(hashlib.sha256(program.canonical().encode()).hexdigest()[:8])
    return "_".join(parts)


def _operand_name(matrix: Matrix) -> str:
    """The data type of a matrix; "int8tobf16" where a prologue converts it."""
    kinds = dict.fromkeys((matrix.dtype, matrix.mma_dtype))
    return "to".join(_SHORT.get(kind, kind) for kind in kinds)


_SHORT = {"bfloat16": "bf16", "float16": "f16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def _kernel_class(mma: str) -> Callable[..., Any]:
    module, _, name = KERNELS[mma].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
