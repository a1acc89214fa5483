"""CuTe DSL kernels of plugins: compiled for any target without a GPU, kept in the compile cache, loaded without the compiler.

A kernel class has a method ``@cute.jit host(words, stream)``, which launches its ``@cute.kernel`` methods: ``words`` is the host
address of a block of 8-byte words, the arguments. ``compiled`` makes an object of it, with the GPU code inside, and ``load`` a
function of the object. What a cache hit and a miss run is the same: the exported object.

Used by plugins in build_plan and load_plan. Neither this module nor a cache hit imports the DSL; a miss and ``load`` do.
See docs/writing-an-engine.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._cache import CacheKey, CompileCache
from ._cute_compile import Function, compile_class, cubin_sm, load_code, load_function
from ._engine import Artifact
from ._errors import BuildError

if TYPE_CHECKING:
    from ._engine import ExecutionContext, Operand, Runner, VariantPack

__all__ = [
    "BoundRuns",
    "CompiledKernel",
    "Function",
    "compiled",
    "cubin_sm",
    "load",
    "load_code",
    "runtime_versions",
    "sources_digest",
    "toolchain",
]

_DSL = "nvidia-cutlass-dsl"
_COMPILER = (f"{_DSL}-libs-base", f"{_DSL}-libs-core", f"{_DSL}-libs-cu12", f"{_DSL}-libs-cu13")
_RUNTIME = (_DSL, "apache-tvm-ffi")  # what an object calls where it is loaded

_BOUND_LIMIT = 64  # layouts whose runs are kept

_HERE = Path(__file__).parent
_OWN = tuple(_HERE / name for name in ("_cute_compile.py", "_cute_host.py", "cute_dsl.py"))  # a part of every kernel


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel class.

    name    the host function's name in ``object``, and the beginning of the kernels' symbols, which profilers show
    arch    like "90a"
    entry   the symbol of the main kernel
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

    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Fields for the header of a saved plan (name, arch, entry, runtime), and payloads (object, cubin, ptx)."""
        header = {"name": self.name, "arch": self.arch, "entry": self.entry, "runtime": runtime_versions()}
        return header, {"object": self.object, "cubin": self.cubin, "ptx": self.ptx.encode()}

    @classmethod
    def restored(cls, header: Mapping[str, Any], payloads: Mapping[str, bytes], target: str) -> CompiledKernel:
        """The kernel of ``serialize``, for ``target``; whether ``name`` is the expected one is the caller's to check.

        Raises BuildError for other fields, another architecture or another runtime than this process has.
        """
        try:
            name, arch, entry, runtime = (header[field] for field in ("name", "arch", "entry", "runtime"))
            found = cls(name, arch, entry, payloads["cubin"], payloads["ptx"].decode(), payloads["object"])
        except (KeyError, TypeError, UnicodeDecodeError) as error:
            raise BuildError(f"not a plan with a compiled kernel: {type(error).__name__}: {error}") from error
        for what, have, want in (
            ("architecture", arch, target.removeprefix("sm_")),
            ("runtime", runtime, runtime_versions()),
        ):
            if have != want:
                raise BuildError(f"the plan's kernel {name} is of another {what}: {have}, not {want}")
        if not isinstance(name, str) or not isinstance(entry, str) or not entry.startswith(name):
            raise BuildError(f"the plan's kernel {name} has another one's entry: {entry}")
        if found.cubin not in found.object:
            raise BuildError(f"the object of the plan's kernel {name} does not hold its cubin")
        return found


def compiled(
    make: Callable[[], Any],
    *,
    name: str,
    target: str,
    engine: str,
    program: Mapping[str, Any],
    package: str,
    cache: CompileCache | None = None,
) -> CompiledKernel:
    """The kernel class that ``make()`` returns an instance of, compiled for ``target``; from the cache if it is there.

    name     a C identifier. The kernel ``kernel`` is called NAME_<n>, a method ``m`` NAME_m_<n>, where n counts launches.
             If the instance has ``kernel_parts``, a mapping, then the kernels of its value at ``p``, an object of
             another class, are called NAME_p_<n>, NAME_p_m_<n>. ``entry`` is the first of ``kernel``, else the first
    target   "sm_90a"; no GPU of it is needed
    engine   "plugin:engine@revision"; without ``cache``, the plugin's is used
    program  JSON: all that ``make`` puts into the kernel, its class included
    package  the importable package whose sources the kernel is traced from. A digest of them is part of the key; the
             ``sources_digest`` of further packages belongs into ``program``

    ``make`` is called on a miss alone, under the DSL's lock: it may import kernels, and must not compile or load any.
    Raises BuildError if the DSL is missing, can't compile the kernel, or compiled it for another target.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise BuildError(f"{name!r} is not a name for a kernel: letters, digits and underscores")
    if not re.fullmatch(r"sm_\d+[af]?", target, re.ASCII):
        raise BuildError(f"{target!r} is not a target for {name}, such as sm_90a")
    arch = target.removeprefix("sm_")
    key = CacheKey(
        program={"name": name, "program": program, "sources": sources_digest(package)},
        engine=engine,
        arch=arch,
        toolchain=toolchain(),
    )

    def build() -> dict[str, bytes]:
        made = compile_class(make, name, target)
        meta = json.dumps({"name": name, "entry": made.entry}).encode()
        return {"cubin": made.cubin, "ptx": made.ptx.encode(), "object": made.object, "meta": meta}

    found = (cache or CompileCache(engine.partition(":")[0])).get(key, build)
    meta = json.loads(found["meta"])
    return CompiledKernel(meta["name"], arch, meta["entry"], found["cubin"], found["ptx"].decode(), found["object"])


def load(kernel: CompiledKernel) -> Function:
    """The host function of an object, linked in this process. Loads no GPU code before it is called the first time.

    Raises BuildError for an object that can't be linked, or without the DSL's runtime.
    """
    return load_function(kernel.object, kernel.name)


class BoundRuns:
    """``execute`` of a plan by its ``bind``: the run of a layout of operands is made once and kept. Runs from many threads."""

    def __init__(self, bind: Callable[[tuple[Operand, ...]], Runner]) -> None:
        self._bind = bind
        self._kept: dict[tuple[Operand, ...], Runner] = {}

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        run = self._kept.get(pack.operands)
        if run is None:
            run = self._bind(pack.operands)
            if len(self._kept) >= _BOUND_LIMIT:
                self._kept.clear()
            self._kept[pack.operands] = run
        run(pack.pointers, ctx.workspace, ctx.stream)


def toolchain() -> dict[str, str]:
    """Versions of what an object depends on, read from metadata: nothing is imported.

    Variables that steer the DSL's compiler belong to it: set by hand, they must not leave their mark in everybody's cache.
    """
    versions = {dist: version for dist in (*_RUNTIME, *_COMPILER) if (version := _version(dist))}
    steering = {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")}
    if steering:
        versions["environment"] = hashlib.sha256(json.dumps(steering, sort_keys=True).encode()).hexdigest()
    return versions


def runtime_versions() -> dict[str, str]:
    """Versions of what an object calls where it is loaded, by distribution; "" for what is not installed. A saved
    kernel needs the same ones."""
    return {dist: _version(dist) for dist in _RUNTIME}


@lru_cache(maxsize=64)
def sources_digest(package: str) -> str:
    """Digest of a package's modules, or of one module: a kernel depends on the helpers that it is traced with, not on
    its own file alone. What wraps every kernel, here, is in it too. Raises BuildError where no source is found."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as error:
        raise BuildError(f"the sources of {package} are not found: {error}") from error
    roots = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    files = [(path.relative_to(root).as_posix(), path) for root in roots for path in sorted(root.rglob("*.py"))]
    if spec and not roots and spec.has_location and spec.origin:
        files = [(Path(spec.origin).name, Path(spec.origin))]
    if not files:
        raise BuildError(f"the sources of {package} are not found")
    digest = hashlib.sha256()
    for label, path in [*files, *((path.name, path) for path in _OWN)]:
        digest.update(f"{label}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(dist: str) -> str:
    from importlib import metadata  # not at import: resolving the core's public names must not load it

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(dist)
    return ""
