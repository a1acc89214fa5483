"""What only cuDNN knows, for the core: ``[provides] backend`` in the manifest. Importing it loads nothing."""

from __future__ import annotations

from typing import Any

from cudnn_core import BuildError, HandleError

from . import errors, library

__all__ = [
    "backend_version",
    "backend_version_string",
    "create_kernel_cache",
    "get_last_error_string",
    "get_stream",
    "set_stream",
]


def backend_version() -> int:
    """cuDNN's version, like 91900; 0 if it can't be loaded here."""
    try:
        return library.load().version
    except BuildError:
        return 0


def backend_version_string() -> str:
    """cuDNN's version, like "9.19.0". Raises HandleError with the reason if there is none."""
    return library.version_text(_loaded("backend_version_string").version)


def get_last_error_string() -> str:
    """cuDNN's text of the last error, "" if there was none."""
    return errors.last()


def get_stream(raw: int) -> int:
    """The stream of a raw handle. Raises HandleError with cuDNN's text."""
    return int(_called("get_stream", raw))


def set_stream(raw: int, stream: int) -> None:
    """Move a raw handle to a stream. Raises HandleError with cuDNN's text."""
    _called("_raw_set_stream", raw, stream)


def create_kernel_cache() -> Any:
    """The binding's cache of compiled kernels."""
    return _loaded("create_kernel_cache").module.create_kernel_cache()


def _called(name: str, raw: int, *arguments: int) -> Any:
    if not raw:
        raise HandleError("0 is no raw cuDNN handle")
    call = getattr(_loaded(name).module, name)
    try:
        return call(raw, *arguments)
    except (RuntimeError, TypeError, OverflowError) as error:
        errors.remember(str(error))
        raise HandleError(f"{name}: {errors.reason(error)}") from error


def _loaded(what: str) -> library.Library:
    try:
        return library.load()
    except BuildError as error:
        raise HandleError(f"{what}: {error}") from error
