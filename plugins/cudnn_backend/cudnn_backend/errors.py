"""cuDNN's errors as one line of text and as declines. Imported by ``select``, ``plan`` and ``api``.

The binding raises ``cudnnGraphNotSupportedError`` where no engine takes a graph, RuntimeError where a call fails and ValueError for
arguments; TypeError or OverflowError for a number that its C++ has no room for. Their texts hold the backend's own messages, one line a check; what ``get_last_error_string`` had is in them by then.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from cudnn_core import BuildError, Decline

__all__ = ["decline", "last", "reason", "remember", "translated"]

NOT_SUPPORTED = "cudnnGraphNotSupportedError"  # its class belongs to a module that is not always loaded
UNSUPPORTED = "x.cudnn_backend.unsupported"
REFUSED = "x.cudnn_backend.refused"

_CHECK = re.compile(r"CUDNN_STATUS_([A-Z_]+); Reason: (.*)")
_CALL = re.compile(r"failed with message: (.*?),? and code: (CUDNN_STATUS_[A-Z_]+)", re.DOTALL)
_GATE = re.compile(r"(?:requires|only available starting) cudnn (?:version |v)?(\d+\.\d+(?:\.\d+)?)", re.IGNORECASE)
_NO_ENGINE = re.compile(r"No valid engine configs for\b")
_PREFIX = re.compile(r"^(?:\[cudnn_frontend\] )?(?:Error|ERROR): ")
# What the backend's status says -> what a decline says.
_CODES = {
    "NOT_SUPPORTED_GRAPH_PATTERN": "op.pattern",
    "NOT_SUPPORTED_SHAPE": "shape.range",
    "NOT_SUPPORTED_LAYOUT": "layout.stride",
    "NOT_SUPPORTED_DATA_TYPE": "dtype.unsupported",
    "NOT_SUPPORTED_ARCH_MISMATCH": "device.sm_variant",
    "NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING": "dep.driver",
}

_last = ""


def last() -> str:
    """The text of the last error of the backend; "" if there was none."""
    return _last


def remember(text: str) -> None:
    global _last
    _last = text


def reason(error: BaseException) -> str:
    """cuDNN's own words in one line: of the many checks that an engine list fails, the first that says what is the matter."""
    return _read(error)[1]


def decline(error: BaseException) -> Decline:
    """The error as a reason. Its code follows from the backend's status; ``actual`` is ``reason``."""
    code, text = _read(error)
    gate = _GATE.search(text)
    if gate is not None:
        return Decline("dep.too_old", "libcudnn", f">={gate[1]}", text)
    return Decline(code, "graph", actual=text)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Errors of the binding become BuildErrors with a decline; those of anybody else stay what they are."""
    try:
        yield
    except Exception as error:
        if not of_binding(error):
            raise
        found = decline(error)
        remember(str(error))
        raise BuildError(str(found.actual), decline=found) from error


def of_binding(error: BaseException) -> bool:
    """Whether the binding raises such errors for what the backend refuses."""
    if type(error).__name__ == NOT_SUPPORTED or type(error) in (RuntimeError, ValueError, OverflowError):
        return True
    return type(error) is TypeError and "incompatible function arguments" in str(
        error
    )  # a number that C++ has no room for


def _read(error: BaseException) -> tuple[str, str]:
    """(decline code, one line)"""
    text = _PREFIX.sub("", str(error).strip())
    checks: list[tuple[str, str]] = _CHECK.findall(text)
    telling = [check for check in checks if check[0] != "NOT_SUPPORTED"] or checks
    if telling:
        status, why = telling[0]
        return _CODES.get(status, UNSUPPORTED), f"CUDNN_STATUS_{status}: {_line(why)}"
    call = _CALL.search(text)
    if call is not None:
        code = _CODES.get(call[2].removeprefix("CUDNN_STATUS_"), UNSUPPORTED if "NOT_SUPPORTED" in call[2] else REFUSED)
        message = _line(call[1])
        return code, f"{call[2]}: {message}" if message else call[2]
    if _NO_ENGINE.search(text):
        return UNSUPPORTED, "cuDNN has no engine for the graph"
    code = UNSUPPORTED if type(error).__name__ == NOT_SUPPORTED else REFUSED
    return code, _line(text) or type(error).__name__


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
