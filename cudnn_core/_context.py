"""Which device: the one place where a plan's device is decided.

Order: ``device=`` (then the frontend's ``device_property``, ``sm_version``) > the handle's device > the ``build_device``
scope > the current CUDA device > the CPU; ``sm_count`` refines whichever it is. Imported by the graph and the planner;
plugins read ``build_target``.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

from ._device import DeviceInfo, as_device, current_device, device_info
from ._device_json import field_int
from ._errors import ConfigError
from ._handle import Handle, require_handle
from ._presets import REPRESENTATIVE

__all__ = ["build_device", "build_target", "create_device_properties", "resolve_device"]

_scope: ContextVar[DeviceInfo | None] = ContextVar("cudnn_core.build_device", default=None)


class build_device:
    """``with build_device(info_or_ordinal):`` build for that device, whatever device is current.

    A ContextVar scope: it holds for this thread or task alone, and nests. None is no override: an outer scope stays.
    """

    __slots__ = ("_device", "_tokens")

    def __init__(self, device: Any) -> None:
        self._device = None if device is None else as_device(device)
        self._tokens: list[Token[DeviceInfo | None]] = []

    def __enter__(self) -> DeviceInfo | None:
        if self._device is not None:
            self._tokens.append(_scope.set(self._device))
        return _scope.get()

    def __exit__(self, *exc: object) -> None:
        if self._device is not None:
            _scope.reset(self._tokens.pop())


def build_target() -> DeviceInfo:
    """The device to build for: the innermost ``build_device`` scope, else the current CUDA device, else the CPU."""
    return _scope.get() or current_device()


def resolve_device(
    device: Any = None,
    handle: Handle | None = None,
    device_property: Any = None,
    sm_version: int | None = None,
    sm_count: int | None = None,
) -> DeviceInfo:
    """The device that a graph is planned for. Asks the driver only if nothing before it in the order decides.

    A bare ``sm_version`` means the handle's or the current device if it has that version, else the preset that stands for
    it. Raises ConfigError if ``sm_version`` contradicts ``device`` or ``device_property``, or no preset has it.
    """
    if handle is not None:
        handle = require_handle(handle)
    version = (
        None if sm_version is None else field_int({"sm_version": sm_version}, "sm_version", 10, where="sm_version")
    )
    if device is not None or device_property is not None:
        found = as_device(device) if device is not None else _described(device_property)
        if version is not None and found.sm_version != version:
            raise ConfigError(f"sm_version={version} contradicts {found!r}", key="sm_version")
    else:
        found = handle.device if handle is not None else build_target()
        if version is not None and found.sm_version != version:
            found = _representative(version)
    return found if sm_count is None else found.with_sm_count(sm_count)


def create_device_properties(arg: int | str, /) -> DeviceInfo:
    """The frontend's: of a live ordinal, or from the JSON that ``serialize()`` (or ``to_json``) gave."""
    return DeviceInfo.from_json(arg) if isinstance(arg, (str, bytes)) else device_info(arg)


# --------------------------------------------------------------------------------------------------------------------


def _described(value: Any) -> DeviceInfo:
    """A DeviceInfo, its JSON, or the frontend's own device_properties object."""
    if not isinstance(value, DeviceInfo) and hasattr(value, "serialize"):
        raw = value.serialize()
        return DeviceInfo.from_json(bytes(raw) if isinstance(raw, (list, tuple, bytearray)) else raw)
    return as_device(value)


def _representative(version: int) -> DeviceInfo:
    name = REPRESENTATIVE.get((version // 10, version % 10))
    if name is None:
        known = ", ".join(str(10 * major + minor) for major, minor in REPRESENTATIVE)
        raise ConfigError(f"sm_version={version}: no preset has it (there are {known}); pass device=", key="sm_version")
    return DeviceInfo.preset(name)
