"""From a program and its configuration to a compiled kernel, through the compile cache; and from its object to a function.

``compiled(...)`` needs neither a GPU nor a driver: the target is an argument of the compiler and part of the cache key. The
DSL is imported on a cache miss and when an object is loaded, and at no other time. Imported by ``engines``, when a plan is built.

What a hit and a miss run is the same: the exported object, with the GPU code inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cudnn_core import Artifact, BuildError, CacheKey, CompileCache

from .config import TileConfig
from .facts import ArchFacts
from .ir import Matrix, Program
from .layout import KernelLayout

__all__ = ["CompiledKernel", "Function", "compiled", "cubin_sm", "kernel_name", "load"]

# A compiled host function: (address of the argument words, stream). Address 0 loads the GPU code and launches nothing.
Function = Callable[[int, int], object]

KERNELS = {"wgmma": "frost_gemm.kernels.wgmma:WgmmaKernel", "tcgen05": "frost_gemm.kernels.tcgen05:Tcgen05Kernel"}
DSL = "nvidia-cutlass-dsl"
TOOLCHAIN = (DSL, f"{DSL}-libs-base", f"{DSL}-libs-core", f"{DSL}-libs-cu12", f"{DSL}-libs-cu13", "apache-tvm-ffi")

_ELF = b"\x7fELF"
_SAID = 400  # characters of a compiler's message that an error repeats
_CUBIN_ABI_8 = 8  # EI_ABIVERSION of CUDA 13: the SM is in bits 8 to 15 of e_flags; before, in bits 0 to 7
# The DSL keeps the function that is traced, its options and its kernel counter on one object of the process.
_dsl_lock = threading.Lock()


def _after_fork() -> None:
    """A child has none of its parent's other threads, so nobody would release a lock that one of them held."""
    global _dsl_lock
    _dsl_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel.

    name    what profilers show, and the host function's name in ``object``
    arch    like "90a"
    entry   the kernel's symbol
    object  host code (an ELF object that contains the cubin); ``load`` makes it callable
    """

    name: str
    arch: str
    entry: str
    cubin: bytes
    ptx: str
    object: bytes

    @property
    def artifact(self) -> Artifact:
        return Artifact(self.name, self.arch, self.entry, self.cubin, self.ptx, self.object)


def compiled(
    program: Program,
    config: TileConfig,
    layout: KernelLayout,
    facts: ArchFacts,
    engine: str,
    *,
    cache: CompileCache | None = None,
    kernel_class: Callable[..., Any] | None = None,
) -> CompiledKernel:
    """The kernel of a program, as the kernel sees it: swapped already where ``config.swap_ab`` says so.

    ``engine`` is "plugin:engine@revision". ``kernel_class`` is called with (program, config, layout, facts) and has the
    ``@cute.jit`` method ``host(words, stream)``; default: the one of the MMA generation.

    Raises BuildError if the DSL is missing, can't compile the kernel, or compiled it for another target.
    """
    name = kernel_name(program, config, facts)
    arch = facts.target.removeprefix("sm_")
    key = CacheKey(
        program={
            "program": json.loads(program.canonical()),
            "config": asdict(config),
            "layout": json.loads(json.dumps(asdict(layout))),  # tuples as lists
            "facts": asdict(facts),
            "sources": sources_digest(),
            "class": getattr(kernel_class, "__qualname__", KERNELS[facts.mma]),
        },
        engine=engine,
        arch=arch,
        toolchain=toolchain(),
    )

    def build() -> dict[str, bytes]:
        with _dsl_lock:
            made = _compile(
                (kernel_class or _kernel_class(facts.mma))(program, config, layout, facts), name, facts.target
            )
        meta = {"name": made.name, "entry": made.entry}
        return {"cubin": made.cubin, "ptx": made.ptx.encode(), "object": made.object, "meta": json.dumps(meta).encode()}

    found = (cache or CompileCache("frost_gemm")).get(key, build)
    meta = json.loads(found["meta"])
    return CompiledKernel(meta["name"], arch, meta["entry"], found["cubin"], found["ptx"].decode(), found["object"])


def kernel_name(program: Program, config: TileConfig, facts: ArchFacts) -> str:
    """The symbol that profilers show, such as "frost_sm90_bf16_bf16_128x256x64_1x2_pingpong_3f2a91c4".

    Types, tile (elements; K too), cluster, then what differs from a plain kernel; the tail tells epilogues apart.
    """
    from .layout import BITS

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


def toolchain() -> dict[str, str]:
    """Versions of what the object depends on, read from metadata: nothing is imported.

    Variables that steer the DSL's compiler belong to it: set by hand, they must not leave their mark in everybody's cache.
    """
    versions = {dist: version for dist in TOOLCHAIN if (version := _version(dist))}
    steering = {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")}
    if steering:
        versions["environment"] = hashlib.sha256(json.dumps(steering, sort_keys=True).encode()).hexdigest()
    return versions


def _version(dist: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(dist)
    return ""


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Digest of the package's modules: a kernel depends on the helpers that it is traced with, not on its own file alone."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cubin_sm(cubin: bytes) -> int:
    """The SM version that a cubin's ELF header states, such as 103; BuildError for what is no cubin."""
    if cubin[:4] != _ELF or len(cubin) < 52:
        raise BuildError("the compiler returned no cubin: ptxas failed")
    flags = int.from_bytes(cubin[48:52], "little")
    return flags >> 8 & 0xFF if cubin[8] >= _CUBIN_ABI_8 else flags & 0xFF


def load(kernel: CompiledKernel) -> Function:
    """The host function of an object, linked in this process. Loads no GPU code before it is called the first time.

    Raises BuildError for an object that can't be linked.
    """
    with _dsl_lock:
        return _load(kernel.object, kernel.name)


@lru_cache(maxsize=256)
def _load(code: bytes, name: str) -> Function:
    runtime = _import("cutlass.cute.runtime")
    with tempfile.TemporaryDirectory(prefix="frost_gemm-") as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(code)
        try:
            function: Function = runtime.load_module(str(path), enable_tvm_ffi=True)[name]
        except Exception as error:
            raise BuildError(f"the object of {name} can't be loaded: {_said(error)}") from error
    return function


def _compile(kernel: Any, name: str, target: str) -> CompiledKernel:
    """Compile ``kernel.host`` for ``target``. The caller holds the DSL's lock."""
    cutlass, cute, runtime = _import("cutlass"), _import("cutlass.cute"), _import("cutlass.cute.runtime")
    host = _import("frost_gemm.kernels.host").Host(kernel)
    for method in dir(type(kernel)):
        rename = getattr(getattr(kernel, method), "set_name_prefix", None)
        if rename is not None and method != "host":
            suffix = "" if method == "kernel" else f"_{method}"
            rename(f"{name}{suffix}", remove_cutlass_symbol=True, keep_mangled_name=False)
    with tempfile.TemporaryDirectory(prefix="frost_gemm-") as folder, warnings.catch_warnings():
        options = f"--gpu-arch {target} --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {shlex.quote(folder)}"
        # What the DSL deprecates is this plugin's business, not that of a caller who turns warnings into errors.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            function = cute.compile(host.host, cutlass.Int64(0), runtime.make_fake_stream(), options=options)
            path = Path(folder, "kernel.o")
            function.export_to_c(str(path), function_name=name)
            cubin, ptx, code = function.__cubin__, function.__ptx__, path.read_bytes()
        except Exception as error:  # the DSL's errors have no common base, and a refused option is a plain ValueError
            raise BuildError(f"{name} does not compile for {target}: {_said(error)}") from error
    # A failed ptxas can leave the dump's path in place of the bytes.
    if not isinstance(cubin, bytes) or not isinstance(ptx, str) or code[:4] != _ELF:
        raise BuildError(f"{name} does not compile for {target}: ptxas made no cubin")
    _check_target(cubin, ptx, target)
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    entry = next((symbol for symbol in entries if symbol.startswith(name)), "")
    if not entry:
        raise BuildError(f"{name} has no kernel of that name, only {', '.join(entries) or 'none'}")
    return CompiledKernel(name, target.removeprefix("sm_"), entry, cubin, ptx, code)


def _check_target(cubin: bytes, ptx: str, target: str) -> None:
    """A compiler that follows the GPU at hand and not its option must not serve another architecture's plan."""
    stated = re.search(r"^\s*\.target\s+(\w+)", ptx, re.MULTILINE)
    found = stated[1] if stated else "no target"
    if found != target or f"sm_{cubin_sm(cubin)}" != target.rstrip("af"):
        raise BuildError(
            f"the DSL compiled for {found} (cubin: sm_{cubin_sm(cubin)}) and not for {target}: it can't pin its target"
        )


def _kernel_class(mma: str) -> Callable[..., Any]:
    module, _, name = KERNELS[mma].partition(":")
    found: Callable[..., Any] = getattr(_import(module), name)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BuildError(f"{name} can't be imported: {error} (pip install '{DSL}>=4.7')") from error


def _said(error: BaseException) -> str:
    """What an error of the DSL says, on one line: without colours, without advice on its own debugging options."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("suggestion:")[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:_SAID]}".rstrip(": ")
