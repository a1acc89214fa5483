"""Facts of the process: CUDA versions, the backend's version, and the environment part of tuning keys.

What only a cuDNN backend knows comes from the plugin whose manifest says ``[provides] backend = "module"``. That module
has ``backend_version() -> int``, ``backend_version_string() -> str``, ``get_last_error_string() -> str``,
``get_stream(raw) -> int`` and ``set_stream(raw, stream)``. Imported by the handle, the tuning records and the public table.
"""

from __future__ import annotations

from typing import Any, Protocol

from . import _driver
from ._errors import HandleError

__all__ = [
    "BackendAPI",
    "backend",
    "backend_version",
    "backend_version_string",
    "create_kernel_cache",
    "driver_version",
    "environment_key",
    "get_last_error_string",
    "require_backend",
    "runtime_version",
]


class BackendAPI(Protocol):
    """The module that a plugin provides as ``backend``."""

    def backend_version(self) -> int: ...

    def backend_version_string(self) -> str: ...

    def get_last_error_string(self) -> str: ...

    def get_stream(self, raw: int, /) -> int: ...

    def set_stream(self, raw: int, stream: int, /) -> object: ...


def driver_version() -> int:
    """The CUDA driver's version, like 13040 for 13.4; 0 without a driver. Asked once."""
    return _version("driver_version")


def runtime_version() -> int:
    """The version of the CUDA runtime that cuda-bindings carries, like 13050; 0 without a driver. Asked once."""
    return _version("runtime_version")


def backend_version() -> int:
    """cuDNN's version, like 92700; 0 without a backend plugin."""
    api = backend()
    return 0 if api is None else int(api.backend_version())


def backend_version_string() -> str:
    """cuDNN's version, like "9.27.0". Raises HandleError without a backend plugin."""
    return str(require_backend("backend_version_string").backend_version_string())


def get_last_error_string() -> str:
    """The backend's last error. Raises HandleError without a backend plugin."""
    return str(require_backend("get_last_error_string").get_last_error_string())


def create_kernel_cache() -> Any:
    """The backend's cache of compiled kernels, which graphs of runtime sizes share. Raises HandleError without a backend
    plugin, or with one that has no such cache."""
    create = getattr(require_backend("create_kernel_cache"), "create_kernel_cache", None)
    if create is None:
        raise HandleError("create_kernel_cache: the backend plugin has no kernel cache")
    return create()


def backend() -> BackendAPI | None:
    """The provided backend module; None if no plugin provides one, or the one that does is broken."""
    from . import _registry

    found: Any = _registry.current().provider("backend")
    return found  # type: ignore[no-any-return]


def require_backend(what: str) -> BackendAPI:
    """The provided backend module; HandleError names ``what`` needed it, and the package to install or what broke."""
    api = backend()
    if api is None:
        from . import _registry

        broken = "; ".join(map(str, _registry.current().provider_declines("backend")))
        missing = 'no cuDNN backend plugin is installed: pip install "cudnn-core[backend]"'
        raise HandleError(f"{what}: {broken or missing}")
    return api


def environment_key() -> dict[str, str]:
    """What every measured time depends on besides graph and device. What only some engines depend on, the versions of their
    distributions, is kept with each sample: ``EngineEntry.environment``."""
    import platform

    from . import __version__

    return {
        "python": platform.python_version(),
        "cudnn_core": __version__,
        "driver": str(driver_version()),
        "runtime": str(runtime_version()),
    }


def _version(name: str) -> int:
    driver = _driver.driver()
    if driver is None:
        return 0
    facts = _driver.cache()
    if name not in facts:
        facts[name] = int(getattr(driver, name)())
    return int(facts[name])
