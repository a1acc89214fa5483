"""Builds the host runtime (`_runtime.c`) and links host objects against it, with the system's C compiler.

Contract: `runtime_library()` returns the shared library for this source and this compiler, built at most once and kept
in the user's cache folder under a name made of their hash; a folder that somebody else could write to is refused.
`link_object(raw, folder)` makes a loadable library of a host object. Both raise `EmulationError` with the compiler's
own words. Imported by `_launch` (in the parent); the child only loads the results.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from ._elf import read_object
from ._findings import EmulationError

__all__ = ["HostFunction", "cache_folder", "compiler", "host_function", "link_object", "runtime_library"]

_SOURCE = Path(__file__).with_name("_runtime.c")
_FLAGS = ("-std=c11", "-O1", "-shared", "-fPIC")
_CACHE_VARIABLE = "PTX_EMULATOR_CACHE_DIR"
_SECONDS = 60.0
_NEEDS = ("_cu", "cuda_dialect", "CuteDSLRT", "TVMFFI")  # beginnings of the symbols that a runtime gives
_FFI = "__tvm_ffi_"  # then the name; TVM-FFI's own symbols have a third underscore (tvm/ffi/c_api.h)


class HostFunction(NamedTuple):
    """Symbols of an exported object.

    `call(void **args, int32 count)` with `init` and `load`, which set up its kernels; or, with `ffi`, a TVM-FFI function
    `call(void *self, const TVMFFIAny *args, int32 count, TVMFFIAny *result)`, which sets them up itself.
    """

    call: str
    init: str = ""
    load: str = ""
    ffi: bool = False


def host_function(raw: bytes, entry: str | None = None) -> HostFunction:
    """The host function of an exported object: the only one, or the one whose symbol contains `entry`.

    An object that was compiled for TVM-FFI has a plain entry too (`__cute_internal_...`); what callers use is the other.
    """
    names, missing = read_object(raw)
    offered = set(read_object(runtime_library().read_bytes()).defined)
    lacking = sorted(n for n in missing if n.startswith(_NEEDS) and n not in offered)
    if lacking:
        raise EmulationError(f"the host function needs what the emulator's runtime does not have: {', '.join(lacking)}")
    prefixes = [
        n[len("_mlir_") : -len("_cuda_init")] for n in names if n.startswith("_mlir_") and n.endswith("_cuda_init")
    ]
    found = [
        HostFunction(n, f"_mlir_{p}_cuda_init", f"_mlir_{p}_cuda_load_to_device")
        for p in prefixes
        for n in names
        if n.startswith(f"_mlir_{p}__mlir_ciface_")
    ]
    found += [HostFunction(n, ffi=True) for n in names if n.startswith(_FFI) and not n.startswith(f"{_FFI}_")]
    found = [f for f in found if entry is None or entry in f.call]
    if len(found) != 1:
        listed = ", ".join(f.call for f in found) or "none"
        which = "" if entry is None else f" whose name contains {entry!r}"
        raise EmulationError(
            f"the object must have one host function{which}, as export_to_c writes it; found: {listed}"
        )
    return found[0]


def cache_folder() -> Path:
    """`$PTX_EMULATOR_CACHE_DIR`, else `ptx_emulator` in `$XDG_CACHE_HOME` or `~/.cache`; made private to the user."""
    named = os.environ.get(_CACHE_VARIABLE)
    if named:
        folder = Path(named)
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        folder = (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "ptx_emulator"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise EmulationError(f"no folder for the host runtime ({error}); set {_CACHE_VARIABLE}") from None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EmulationError(
            f"{folder} can be written by others, and libraries are loaded from it: set {_CACHE_VARIABLE}"
        )
    return folder


def compiler() -> list[str]:
    """The command of the C compiler: `$CC`, else cc, gcc or clang."""
    wanted = os.environ.get("CC", "").strip()
    command = shlex.split(wanted) if wanted else []
    if command and shutil.which(command[0]):
        return command
    if not command:
        for name in ("cc", "gcc", "clang"):
            if shutil.which(name):
                return [name]
    tried = f"CC={wanted}" if wanted else "cc, gcc and clang"
    raise EmulationError(
        f"no C compiler ({tried}): launch() builds its host runtime with one and links host objects with it. "
        "Install gcc or clang, or set CC; run_ptx() needs none."
    )


def runtime_library() -> Path:
    """Path of the built runtime."""
    command = compiler()
    version = _run([*command, "--version"]).stdout
    digest = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), version.encode(), *map(str.encode, (*command, *_FLAGS))]))
    target = cache_folder() / f"runtime-{digest.hexdigest()[:24]}.so"
    if target.is_file() and target.stat().st_uid == os.getuid():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / "runtime.so"
        done = _run([*command, *_FLAGS, "-o", str(made), str(_SOURCE)])
        if done.returncode:
            raise EmulationError(f"the host runtime does not compile:\n{done.stderr.strip()}")
        made.replace(target)  # atomic: two builders write the same bytes
    return target


def link_object(raw: bytes, folder: Path) -> Path:
    """A shared library of the host object `raw`, in `folder`. Its undefined symbols are the runtime's, found at load."""
    source, made = folder / "host.o", folder / "host.so"
    source.write_bytes(raw)
    done = _run([*compiler(), "-shared", "-o", str(made), str(source)])
    if done.returncode:
        raise EmulationError(f"the host object does not link:\n{done.stderr.strip()}")
    return made


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmulationError(f"the C compiler {command[0]} does not run: {error}") from None
