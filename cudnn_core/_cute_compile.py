"""What talks to the CuTe DSL: compiles a kernel class for a target, loads an object. Imported by ``cute_dsl``, which says more.

The DSL is imported by the functions that need it, and one thread at a time is in it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ._errors import BuildError, DriverError

__all__ = ["Compilation", "Function", "compile_class", "cubin_sm", "load_code", "load_function"]

# A compiled host function: (address of the argument words, stream). Address 0 loads the GPU code and launches nothing.
Function = Callable[[int, int], object]

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


class Compilation(NamedTuple):
    """What the DSL makes: the main kernel's symbol, and what it is the symbol in."""

    entry: str
    cubin: bytes
    ptx: str
    object: bytes


def compile_class(make: Callable[[], Any], name: str, target: str) -> Compilation:
    """Compile ``host`` of what ``make()`` returns. Raises BuildError."""
    with _dsl_lock:
        with _imports(name):
            cutlass: Any = importlib.import_module("cutlass")
            cute: Any = importlib.import_module("cutlass.cute")
            runtime: Any = importlib.import_module("cutlass.cute.runtime")
            host = importlib.import_module("cudnn_core._cute_host").Host(make())
        with _named(host.kernel, name), _folder() as folder, warnings.catch_warnings():
            options = f"--gpu-arch {target} --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {shlex.quote(folder)}"
            # What the DSL deprecates is the plugin's business, not that of a caller who turns warnings into errors.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                function = cute.compile(host.host, cutlass.Int64(0), runtime.make_fake_stream(), options=options)
                path = Path(folder, "kernel.o")
                function.export_to_c(str(path), function_name=name)
                cubin, ptx, code = function.__cubin__, function.__ptx__, path.read_bytes()
            except Exception as error:  # the DSL's errors have no common base; a refused option is a plain ValueError
                raise BuildError(f"{name} does not compile for {target}: {_said(error)}") from error
    # A failed ptxas can leave the dump's path in place of the bytes.
    if not isinstance(cubin, bytes) or not isinstance(ptx, str) or code[:4] != _ELF:
        raise BuildError(f"{name} does not compile for {target}: ptxas made no cubin")
    _check_target(name, cubin, ptx, target)
    return Compilation(_main_entry(name, ptx), cubin, ptx, code)


def load_function(code: bytes, name: str) -> Function:
    """The function ``name`` of an object. Raises BuildError."""
    with _dsl_lock:
        return _load(code, name)


def load_code(function: Function) -> Function:
    """``function``, with its GPU code on the current device. Launches nothing; not for use inside a stream capture.

    Raises DriverError where it can't be loaded, and says what is missing if there is no driver or no device.
    """
    try:
        function(0, 0)
    except Exception as error:  # the runtime raises a plain RuntimeError with what CUDA said
        from ._driver import why_absent

        absent = why_absent()
        cause = _said(error) if absent is None else f"{absent}; {_said(error)}"
        raise DriverError(f"the kernel's GPU code can't be loaded: {cause}") from error
    return function


def cubin_sm(cubin: bytes) -> int:
    """The SM version that a cubin's ELF header states, such as 103; BuildError for what is no cubin."""
    if cubin[:4] != _ELF or len(cubin) < 52:
        raise BuildError("the compiler returned no cubin: ptxas failed")
    flags = int.from_bytes(cubin[48:52], "little")
    return flags >> 8 & 0xFF if cubin[8] >= _CUBIN_ABI_8 else flags & 0xFF


@contextlib.contextmanager
def _named(kernel: Any, name: str) -> Iterator[None]:
    """Name the kernels of an object and of its parts. A name belongs to the class: left there, it would show in the next
    object that uses the class."""
    found = {}
    for label, part in {name: kernel, **{f"{name}_{key}": part for key, part in _parts(kernel).items()}}.items():
        for method in dir(type(part)):
            rename = getattr(getattr(type(part), method, None), "set_name_prefix", None)
            if rename is not None and method != "host":
                found[label if method == "kernel" else f"{label}_{method}"] = rename
    try:
        for symbol, rename in found.items():
            rename(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        yield
    finally:
        for rename in found.values():
            rename("")


def _parts(kernel: Any) -> Mapping[str, Any]:
    parts: Mapping[str, Any] = getattr(kernel, "kernel_parts", {})
    return parts


def _main_entry(name: str, ptx: str) -> str:
    """The kernel's symbol in the PTX: of those with its name, ``kernel`` before other methods, then by the launch's number."""
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    ours = [match for entry in entries if (match := re.fullmatch(rf"{name}(_\w+)?_(\d+)", entry))]
    if not ours:
        raise BuildError(f"{name} has no kernel of that name, only {', '.join(entries) or 'none'}")
    return min(ours, key=lambda match: (match[1] is not None, int(match[2])))[0]


def _check_target(name: str, cubin: bytes, ptx: str, target: str) -> None:
    """A compiler that follows the GPU at hand and not its option must not serve another architecture's plan."""
    stated = re.search(r"^\s*\.target\s+(\w+)", ptx, re.MULTILINE)
    found, sm = stated[1] if stated else "no target", f"sm_{cubin_sm(cubin)}"
    if found != target or sm != target.rstrip("af"):
        raise BuildError(
            f"{name}: the DSL compiled for {found} (cubin: {sm}) and not for {target}: it can't pin its target"
        )


@lru_cache(maxsize=256)
def _load(code: bytes, name: str) -> Function:
    with _imports(name):
        runtime: Any = importlib.import_module("cutlass.cute.runtime")
    with _folder() as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(code)
        try:
            function: Function = runtime.load_module(str(path), enable_tvm_ffi=True)[name]
        except Exception as error:
            raise BuildError(f"the object of {name} can't be loaded: {_said(error)}") from error
    return function


@contextlib.contextmanager
def _imports(name: str) -> Iterator[None]:
    """What a missing module means for the kernel."""
    try:
        yield
    except ImportError as error:
        raise BuildError(
            f"{name} needs {error.name or 'a module'}, which can't be imported: {error} (pip install 'nvidia-cutlass-dsl>=4.7')"
        ) from error


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cudnn-core-cute-dsl-")


def _said(error: BaseException) -> str:
    """What an error of the DSL says, on one line: without colours, without advice on its own debugging options."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("suggestion:")[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:_SAID]}".rstrip(": ")
