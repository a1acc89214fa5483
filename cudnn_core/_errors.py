"""The exception tree. Imported by every module; imports none of them.

CudnnCoreError
|-- ConfigError        a configuration file, variable or configure() call
|-- DecisionError      a saved decision is malformed, tampered with, or of another graph or device
|-- ManifestError      a plugin's manifest or op row
|-- GraphError         a graph: names the node, the port, what was expected and what was there
|   `-- GraphTypeError a call with the wrong arguments (also a TypeError)
|-- NoEngineError      no engine can run the graph; carries the Decision
|-- BuildError         a plan could not be built, saved or loaded
|-- ExecutionError     an operand, a workspace or a device is wrong; raised before anything is written
|-- DriverError        the CUDA driver refused a query
`-- HandleError        a handle is closed, foreign or of another device
    `-- HandleTypeError  not a Handle at all (also a TypeError)

Raised where they are defined: KnobError (a knob's value), EngineLookupError and EngineBroken (an engine asked for by name).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._decision import Decision
    from ._declines import Decline

__all__ = [
    "BuildError",
    "ConfigError",
    "CudnnCoreError",
    "DriverError",
    "ExecutionError",
    "GraphError",
    "GraphTypeError",
    "HandleError",
    "HandleTypeError",
    "ManifestError",
    "NoEngineError",
    "nearest",
]


class CudnnCoreError(Exception):
    """Root of every error that cudnn-core raises on purpose. All of them survive pickling, whatever their constructors take."""

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.args), self.__dict__


class ConfigError(CudnnCoreError):
    """A configuration source is missing, unreadable, malformed or contradictory.

    ``origin`` is ``file:line``, ``env:NAME`` or ``configure()``; ``key`` is the dotted key, ``text`` the message without both.
    """

    def __init__(self, message: str, *, origin: str = "", key: str = "") -> None:
        super().__init__(f"{origin}: {message}" if origin else message)
        self.text = message.removeprefix(f"{key}: ") if key else message
        self.origin = origin
        self.key = key


class ManifestError(CudnnCoreError):
    """A plugin's manifest or op row is malformed; ``subject`` is the dotted field, ``text`` the message without it."""

    def __init__(self, message: str, *, subject: str = "") -> None:
        super().__init__(f"{subject}: {message}" if subject else message)
        self.text = message
        self.subject = subject


class GraphError(CudnnCoreError):
    """A graph is wrong. ``node`` and ``port`` name the place."""

    def __init__(
        self,
        message: str,
        *,
        node: str = "",
        port: str = "",
        expected: object = None,
        actual: object = None,
    ) -> None:
        place = ".".join(part for part in (node, port) if part)
        text = f"{place}: {message}" if place else message
        if expected is not None:
            text += f" (expected {expected}, got {actual})"
        super().__init__(text)
        self.node = node
        self.port = port
        self.expected = expected
        self.actual = actual


class GraphTypeError(GraphError, TypeError):
    """A builder was called with unknown, missing or ill-typed arguments."""


class NoEngineError(CudnnCoreError):
    """No engine can run the graph on the device. ``decision`` holds every engine's reasons."""

    def __init__(self, message: str, decision: Decision | None = None) -> None:
        super().__init__(message)
        self.decision = decision


class BuildError(CudnnCoreError):
    """A plan could not be built, saved or loaded. ``decline`` is the reason as data, if there is one."""

    def __init__(self, message: str = "", *, decline: Decline | None = None) -> None:
        super().__init__(message)
        self.decline = decline


class ExecutionError(CudnnCoreError):
    """A plan was given operands, a workspace or a device that it can't run with.

    Raised before the engine is called, so no output has been written. ``operand`` names the culprit.
    """

    def __init__(self, message: str, *, operand: str = "") -> None:
        super().__init__(message)
        self.operand = operand


class DriverError(CudnnCoreError):
    """The CUDA driver answered a query with an error. ``code`` is its CUresult."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class HandleError(CudnnCoreError):
    """A handle is closed, belongs to another device, or its backend failed."""


class HandleTypeError(HandleError, TypeError):
    """Something that is not a Handle was passed where one is needed."""


def _restored(kind: type[CudnnCoreError], args: tuple[object, ...]) -> CudnnCoreError:
    """An error of ``kind`` as ``__reduce__`` saw it; its attributes follow. The constructor made ``args`` of other things."""
    error = kind.__new__(kind)
    error.args = args
    return error


def nearest(name: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest of ``choices``, or an empty string."""
    from difflib import get_close_matches

    found = get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""
