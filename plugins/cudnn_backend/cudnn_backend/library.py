"""libcudnn and its binding: found, checked and loaded, when a plan is first built. Imported by ``engines``, ``plan`` and ``api``.

The binding is the compiled module of nvidia-cudnn-frontend, loaded under its own name without the ``cudnn`` package: a later
``import cudnn`` of the user's gets the same module (another name would abort the process), and one that came before is used as
it is. Its C symbols are resolved in one libcudnn, once: here is the only place that says in which.

``problem()`` opens no libcudnn that the process does not have yet, unless the system's loader alone knows where one is;
``load()`` does. Both answer from memory afterwards.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from cudnn_core import BuildError, Decline

__all__ = ["FLOOR", "Library", "load", "problem", "version", "version_text"]

FLOOR = 91300  # device descriptions without a GPU, unified sdpa; older ones have planner bugs that we do not know
MODULE = "cudnn._compiled_module"
BINDING = "nvidia-cudnn-frontend"
WHEELS = {"nvidia-cudnn-cu13": 13, "nvidia-cudnn-cu12": 12}  # both install the same files
SONAME = "libcudnn.so.9"
GRAPH = "libcudnn_graph.so.9"
TWO_COPIES = "x.cudnn_backend.two_copies"

_INSTALL = "pip install nvidia-cudnn-cu13, for CUDA 12 nvidia-cudnn-cu12"
_MAPPED = re.compile(r"\s(/\S.*/(libcudnn(?:_graph)?\.so\.9)[.\d]*)$", re.MULTILINE)
_VERSIONED = re.compile(r"libcudnn\.so\.(\d+)\.(\d+)\.(\d+)$")


class Library(NamedTuple):
    """A loaded libcudnn behind the binding.

    module   the binding's extension module
    version  like 91900
    path     the file, "" if it is not known
    """

    module: Any
    version: int
    path: str


class Found(NamedTuple):
    """A libcudnn that may be loaded. ``version`` and ``cuda`` (the major version that it is built for) are 0 if unknown."""

    path: str
    version: int = 0
    cuda: int = 0


class _State:
    """What this process knows by now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.library: Library | None = None
        self.examined = False
        self.found: Found | None = None
        self.problem: Decline | None = None


_state = _State()


if hasattr(os, "register_at_fork"):  # another thread of the parent may hold it
    os.register_at_fork(after_in_child=lambda: setattr(_state, "lock", threading.RLock()))


def problem() -> Decline | None:
    """Why there is no usable libcudnn here, or None. Found out once."""
    state = _state
    if not state.examined:
        with state.lock:
            if not state.examined:
                state.found, state.problem = _examine()
                state.examined = True
    return state.problem


def version() -> int:
    """The version that is or would be loaded, like 91900; 0 if there is none, or if it can't be told without loading it."""
    state = _state
    if state.library is not None:
        return state.library.version
    return 0 if problem() is not None or state.found is None else state.found.version


def load() -> Library:
    """The library, loaded by the first call. Raises BuildError, whose decline is ``problem()`` from then on."""
    state = _state
    if state.library is None:
        with state.lock:
            if state.library is None:
                reason = problem()
                if reason is None:
                    assert state.found is not None
                    try:
                        state.library = _load(state.found)
                    except _Unusable as error:
                        reason = state.problem = error.decline
                if reason is not None:
                    raise BuildError(str(reason), decline=reason)
    assert state.library is not None
    return state.library


def version_text(number: int) -> str:
    """91900 -> "9.19.0"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# --- looking, without loading


class _Unusable(Exception):  # noqa: N818  # a decline on its way out of this module
    def __init__(self, decline: Decline) -> None:
        super().__init__(str(decline))
        self.decline = decline


def _examine() -> tuple[Found | None, Decline | None]:
    try:
        if MODULE not in sys.modules and _binding_file() is None:
            hint = 'pip install "cudnn-core[backend]"'
            raise _Unusable(Decline("dep.missing", BINDING, hint=hint))
        found = _find()
        if found.version:
            _require_floor(found.version)
        _graph_library(found)
        _cublas_lt(found)
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            hint = "install the NVIDIA driver"
            raise _Unusable(Decline("dep.driver", "libcuda", actual=str(error), hint=hint)) from None
    except _Unusable as error:
        return None, error.decline
    return found, None


def _find() -> Found:
    """The copy to use: one that the process has already, then where the binding's own package would look, then beside torch."""
    wheels = _wheels()
    if len(wheels) > 1:
        hint = "uninstall both, then install one"
        raise _Unusable(Decline(TWO_COPIES, "libcudnn", "one wheel", list(wheels), hint))
    mapped = _mapped()
    _require_one(mapped)
    places = [
        *mapped.get(SONAME, ()),
        *(f"{folder}/{SONAME}" for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder),
        *(found.path for found in wheels.values()),
        *(f"{folder}/lib/{SONAME}" for folder in _package_folders("torch")),
    ]
    path = next((place for place in places if Path(place).is_file()), None)
    if path is None:
        try:
            ctypes.CDLL(SONAME)  # no other way to ask the loader
        except OSError:
            raise _Unusable(Decline("dep.missing", "libcudnn", f"{SONAME}, 9.13 or later", hint=_INSTALL)) from None
        path = next(iter(_mapped().get(SONAME, ())), SONAME)
    for found in wheels.values():
        if _same(found.path, path):
            return found
    name = _VERSIONED.search(os.path.realpath(path))
    return Found(path, int(name[1]) * 10000 + int(name[2]) * 100 + int(name[3]) if name else 0)


def _wheels() -> dict[str, Found]:
    """The installed cuDNN wheels by distribution name."""
    found = {}
    for name, cuda in WHEELS.items():
        dist = _distribution(name)
        if dist is None:
            continue
        path = Path(str(dist.locate_file(f"nvidia/cudnn/lib/{SONAME}")))
        parts = [int(part) for part in dist.version.split(".") if part.isdecimal()]
        number = parts[0] * 10000 + parts[1] * 100 + parts[2] if len(parts) > 2 else 0
        if path.is_file():
            found[name] = Found(str(path), number, cuda)
    return found


def _distribution(name: str) -> Any:
    from importlib import metadata

    try:
        return metadata.distribution(name)
    except Exception:  # not installed, or broken metadata, which `cudnn-core doctor` reports
        return None


def _binding_file() -> str | None:
    dist = _distribution(BINDING)
    if dist is None:
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(str(dist.locate_file(f"cudnn/_compiled_module{suffix}")))
        if path.is_file():
            return str(path)
    return None


def _package_folders(name: str) -> list[str]:
    """Where a package is, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _mapped() -> dict[str, list[str]]:
    """The files of libcudnn and of its graph library that the process has, each once, by the name that programs ask for."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return {}
    found: dict[str, list[str]] = {}
    for path, name in _MAPPED.findall(text):
        known = found.setdefault(name, [])
        if not any(_same(other, path) for other in known):
            known.append(path)
    return found


def _same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _require_one(mapped: dict[str, list[str]]) -> None:
    """The parts of one copy lie in one folder: the loader takes a part by its name alone, from whichever copy came first."""
    folders = {str(Path(os.path.realpath(path)).parent) for paths in mapped.values() for path in paths}
    if len(folders) > 1:
        hint = "load one copy only: leave the other out of LD_LIBRARY_PATH, or uninstall it"
        raise _Unusable(Decline(TWO_COPIES, "libcudnn", "one copy in the process", sorted(folders), hint))


def _require_floor(number: int) -> None:
    if number < FLOOR:
        expected = f">={version_text(FLOOR)}"
        raise _Unusable(
            Decline("dep.too_old", "libcudnn", expected, version_text(number), "pip install -U nvidia-cudnn-cu13")
        )


def _graph_library(found: Found) -> None:
    """The part that the first call needs. libcudnn aborts the process where it finds none; of the other parts it says so.

    The loader looks beside the path that it was given: not where a link points.
    """
    if (Path(found.path).parent / GRAPH).is_file():
        return
    try:
        ctypes.CDLL(GRAPH)
    except OSError:
        raise _Unusable(Decline("dep.missing", "libcudnn", f"{GRAPH} beside {SONAME}", found.path, _INSTALL)) from None


def _cublas_lt(found: Found) -> str:
    """What to load libcublasLt as. cuDNN aborts the process where it finds none."""
    majors = (found.cuda,) if found.cuda else (13, 12)
    names = [f"libcublasLt.so.{major}" for major in majors]
    for name in names:
        for folder in _toolkit_folders(found.path):
            if (folder / name).is_file():
                return str(folder / name)
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    hint = f"pip install {'nvidia-cublas' if 13 in majors else 'nvidia-cublas-cu12'}"
    raise _Unusable(Decline("dep.missing", "libcublasLt", " or ".join(names), hint=hint))


def _toolkit_folders(path: str) -> list[Path]:
    """Where a libcudnn at ``path`` looks for the CUDA libraries of wheels, and its own folder."""
    own = Path(os.path.realpath(path)).parent
    root = own.parent.parent
    return [own, *(root / part / "lib" for part in ("cu13", "cublas", "cuda_runtime", "cuda_nvrtc"))]


# --- loading


def _load(found: Found) -> Library:
    used_before = "cudnn" in sys.modules and MODULE in sys.modules
    module = _module()
    if not used_before:
        mapped = _mapped()
        _require_one(mapped)
        found = next(
            (Found(path) for path in mapped.get(SONAME, ()) if not _same(path, found.path)), found
        )  # came since
        ctypes.CDLL(_cublas_lt(found))
        _cudart(found)
        try:
            library = ctypes.CDLL(found.path)
            library.cudnnGetVersion.restype = ctypes.c_size_t
            number = int(library.cudnnGetVersion())
        except (OSError, AttributeError) as error:
            raise _Unusable(Decline("dep.import_failed", "libcudnn", actual=str(error))) from error
        _require_floor(number)
        _require_one(_mapped())
        module._set_dlhandle_cudnn(library._handle)
    try:
        number = int(module.backend_version())
    except Exception as error:
        raise _Unusable(Decline("dep.import_failed", "libcudnn", actual=str(error))) from error
    _require_floor(number)
    _require_one(_mapped())
    return Library(module, number, next(iter(_mapped().get(SONAME, ())), found.path))


def _module() -> Any:
    """The binding's extension, under the one name that it may have in a process."""
    known = sys.modules.get(MODULE)
    if known is not None:
        return known
    path = _binding_file()
    spec = importlib.util.spec_from_file_location(MODULE, path) if path is not None else None
    if spec is None or spec.loader is None:
        raise _Unusable(Decline("dep.missing", BINDING, hint='pip install "cudnn-core[backend]"'))
    try:
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = module
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(MODULE, None)
        raise _Unusable(Decline("dep.import_failed", BINDING, actual=f"{type(error).__name__}: {error}")) from error
    return module


def _cudart(found: Found) -> None:
    """The binding asks the loader for libcudart by name when it first runs a plan: see to it that there is one."""
    if os.environ.get("CUDNN_FRONTEND_CUDART_LIB_NAME"):
        return
    names = ("libcudart.so.12", "libcudart.so.13")  # in the binding's order
    beside = [
        str(folder / name) for folder in _toolkit_folders(found.path) for name in names if (folder / name).is_file()
    ]
    for name in (*names, *beside):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return
    hint = f"pip install {'nvidia-cuda-runtime-cu12' if found.cuda == 12 else 'nvidia-cuda-runtime'}"
    raise _Unusable(Decline("dep.missing", "libcudart", " or ".join(names), hint=hint))
