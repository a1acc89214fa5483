"""What a device is: ``DeviceInfo``, one immutable record for a live GPU, a described one and the CPU.

All facts are read when the record is made, each once, so a record never touches the driver afterwards; one made from
JSON or a preset never does at all. Importing this module loads no CUDA binding. Imported by the handle, the context, the
manifest filter, the ranking, and by plugins as ``cudnn_core.DeviceInfo``.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from . import _driver
from ._device_json import field_int, fields_from_json
from ._errors import ConfigError, DriverError, nearest
from ._presets import PRESETS, SHARED_MEMORY_OPTIN, Preset

__all__ = ["DeviceInfo", "as_device", "current_device", "device_info"]

_OVERSIZED_SINCE = 13040  # driver version of CUDA 13.4, the first that knows the attribute (ordinal 150)
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED: the part lacks what the attribute describes


class DeviceInfo:
    """Facts of one device; immutable, hashable, compared by value. ``DeviceInfo(n)`` is ``device_info(n)``.

    type      "cuda" | "cpu"
    ordinal   the CUDA ordinal, 0 for the CPU, None for a device that is only described
    compute_capability  (major, minor); (0, 0) for the CPU
    sm_count  multiprocessors; for the CPU the cores that this process may use
    shared_memory_per_block_optin     bytes that one block can opt in to; 0 for the CPU
    oversized_shared_memory_per_block bytes beyond that limit's mode; 0 where driver, binding or part lack it
    l2_cache_bytes, memory_bytes      bytes, or None if unknown
    device_name  as the driver reports it
    memory_bandwidth  published bytes a second, or None
    peak_flops  published dense operations a second by data type; ``peak(dtype)`` is None for the others
    synthetic   described (JSON, preset), not read from a device of this machine
    """

    __slots__ = (
        "compute_capability",
        "device_name",
        "l2_cache_bytes",
        "memory_bandwidth",
        "memory_bytes",
        "ordinal",
        "oversized_shared_memory_per_block",
        "peak_flops",
        "shared_memory_per_block_optin",
        "sm_count",
        "synthetic",
        "type",
    )

    type: str
    ordinal: int | None
    compute_capability: tuple[int, int]
    sm_count: int
    shared_memory_per_block_optin: int
    oversized_shared_memory_per_block: int
    l2_cache_bytes: int | None
    device_name: str
    memory_bytes: int | None
    memory_bandwidth: float | None
    peak_flops: Mapping[str, float]
    synthetic: bool

    def __new__(cls, ordinal: int) -> DeviceInfo:  # noqa: PYI034  # one instance per ordinal, not one per call
        return device_info(ordinal)

    @property
    def sm_version(self) -> int:
        """``10 * major + minor``: 90, 103, 0 for the CPU."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def arch(self) -> str:
        """The compile target: "80", "90a", "103a" (architecture-specific from 9.0 on); "" for the CPU."""
        if self.type != "cuda":
            return ""
        return f"{self.sm_version}a" if self.sm_version >= 90 else str(self.sm_version)

    def peak(self, dtype: str) -> float | None:
        """Published dense operations a second for ``dtype``, or None."""
        return self.peak_flops.get(str(dtype))

    def key(self) -> tuple[str, tuple[int, int], int, int, int]:
        """What a plan depends on: (type, capability, SM count, opt-in and oversized shared memory)."""
        return (
            self.type,
            self.compute_capability,
            self.sm_count,
            self.shared_memory_per_block_optin,
            self.oversized_shared_memory_per_block,
        )

    def with_sm_count(self, sm_count: int) -> DeviceInfo:
        """The same device with another SM count; this record, and the cached one, stay as they are."""
        count = field_int({"sm_count": sm_count}, "sm_count", least=1, where="sm_count")
        if count == self.sm_count:
            return self
        return _make(**{name: getattr(self, name) for name in DeviceInfo.__slots__} | {"sm_count": count})

    def to_dict(self) -> dict[str, Any]:
        """The JSON form. It describes the part: neither the ordinal nor ``synthetic`` are in it."""
        return {
            "schema": 1,
            "type": self.type,
            "compute_capability": list(self.compute_capability),
            "sm_count": self.sm_count,
            "shared_memory_per_block_optin": self.shared_memory_per_block_optin,
            "oversized_shared_memory_per_block": self.oversized_shared_memory_per_block,
            "l2_cache_bytes": self.l2_cache_bytes,
            "device_name": self.device_name,
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth": self.memory_bandwidth,
            "peak_flops": dict(self.peak_flops),
        }

    def to_json(self) -> str:
        import json

        return json.dumps(self.to_dict())

    def serialize(self) -> str:
        """cuDNN's DeviceProperties form, as the frontend's ``create_device_properties(...).serialize()``."""
        import json

        major, minor = self.compute_capability
        return json.dumps({"deviceVer": 100 * major + 10 * minor, "multiProcessorCount": self.sm_count})

    @staticmethod
    def from_json(text: str | bytes | Mapping[str, Any]) -> DeviceInfo:
        """A described device, from ``to_json``'s form or cuDNN's DeviceProperties (recognised by ``deviceVer``).

        In our form ``type``, ``compute_capability`` and ``sm_count`` are required, and for a GPU of a capability that the
        programming guide does not list, ``shared_memory_per_block_optin``. In cuDNN's, ``deviceVer`` (100 * major + 10 *
        minor) and ``multiProcessorCount`` are required and read; its other fields are unpublished and ignored, and the
        shared memory follows from the capability. Raises ConfigError naming the field.
        """
        return _described(fields_from_json(text))

    @staticmethod
    def preset(name: str) -> DeviceInfo:
        """A GPU by its product name: "H200", "B200", "B300", "R200", ...; ConfigError lists the near ones."""
        return _from_preset(name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"DeviceInfo is immutable (tried to set {name!r})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"DeviceInfo is immutable (tried to delete {name!r})")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceInfo):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in DeviceInfo.__slots__)

    def __hash__(self) -> int:
        return hash((self.key(), self.ordinal))

    def __copy__(self) -> DeviceInfo:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceInfo:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remake, tuple(_plain(getattr(self, name)) for name in DeviceInfo.__slots__))

    def __repr__(self) -> str:
        where = "synthetic" if self.synthetic else self.type if self.type == "cpu" else f"cuda:{self.ordinal}"
        arch = f" sm_{self.arch}" if self.arch else ""
        units = "SMs" if self.type == "cuda" else "cores"
        return f"<DeviceInfo {where} {self.device_name!r}{arch} {self.sm_count} {units}>"


def device_info(device: int | str) -> DeviceInfo:
    """The device of a CUDA ordinal, or of ``"cpu"``; always the same instance.

    Raises DriverError if there is no such device or the driver refuses a query, and asks no driver for ``"cpu"``.
    """
    if isinstance(device, str):
        if device != "cpu":
            raise ConfigError(f'device_info takes an ordinal or "cpu", got {device!r}')
        return _cpu()
    ordinal = _ordinal(device)
    driver = _driver.driver()
    if driver is None:
        raise DriverError(f"there is no CUDA device {ordinal}: {_driver.why_absent()}")
    facts = _driver.cache()
    found = facts.get(("device", ordinal))
    if found is None:
        with _driver.lock:  # one instance per ordinal, also when two threads ask at once
            found = facts.get(("device", ordinal)) or facts.setdefault(("device", ordinal), _query(driver, ordinal))
    return found  # type: ignore[no-any-return]


def current_device() -> DeviceInfo:
    """The live current CUDA device of this thread (ordinal 0 if it has no context yet), or the CPU without a GPU."""
    driver = _driver.driver()
    if driver is None:
        return _cpu()
    return device_info(driver.current_device() or 0)


def as_device(value: Any) -> DeviceInfo:
    """``value`` as a DeviceInfo: one already, an ordinal, "cpu", "cuda", "cuda:1", a preset's name, JSON text, or a
    framework's device object (``type`` and ``index``). Raises ConfigError or DriverError."""
    if isinstance(value, DeviceInfo):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("{"):
            return _described(fields_from_json(text))
        kind, colon, index = text.partition(":")
        if kind in {"cpu", "cuda"} and (not colon or index.isdecimal()):
            return _of_kind(kind, int(index) if colon else None)
        return _from_preset(text)
    if isinstance(value, Mapping):
        return _described(fields_from_json(value))
    named, number = getattr(value, "type", None), getattr(value, "index", None)
    if named in ("cpu", "cuda") and (number is None or isinstance(number, int)):
        return _of_kind(named, number)
    return device_info(value)


# --------------------------------------------------------------------------------------------------------------------


def _make(**fields: Any) -> DeviceInfo:
    info = object.__new__(DeviceInfo)
    fields["peak_flops"] = MappingProxyType(dict(fields["peak_flops"]))
    for name in DeviceInfo.__slots__:
        object.__setattr__(info, name, fields[name])
    return info


def _described(fields: Mapping[str, Any]) -> DeviceInfo:
    return _make(**fields, ordinal=None, synthetic=True)


def _remake(*values: Any) -> DeviceInfo:
    return _make(**dict(zip(DeviceInfo.__slots__, values, strict=True)))


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, MappingProxyType) else value


def _ordinal(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        ordinal = operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{value!r} is not a device: pass a DeviceInfo, an ordinal, a preset's name or 'cpu'"
        ) from None
    if ordinal < 0:
        raise DriverError(f"there is no CUDA device {ordinal}", code=101)
    return ordinal


def _of_kind(kind: str, index: int | None) -> DeviceInfo:
    if kind == "cpu":
        return _cpu()
    if index is not None:
        return device_info(index)
    found = current_device()
    return found if found.type == "cuda" else device_info(0)  # the latter raises, with the reason


def _query(driver: _driver.Driver, ordinal: int) -> DeviceInfo:
    count = driver.device_count()
    if ordinal >= count:
        raise DriverError(f"there is no CUDA device {ordinal}: {count} visible", code=101)
    name = driver.name(ordinal)
    capability = (
        driver.attribute("COMPUTE_CAPABILITY_MAJOR", ordinal),
        driver.attribute("COMPUTE_CAPABILITY_MINOR", ordinal),
    )
    sm_count = driver.attribute("MULTIPROCESSOR_COUNT", ordinal)
    published = _published(name, capability, sm_count)
    return _make(
        type="cuda",
        ordinal=ordinal,
        compute_capability=capability,
        sm_count=sm_count,
        shared_memory_per_block_optin=driver.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", ordinal),
        oversized_shared_memory_per_block=_oversized(driver, ordinal),
        l2_cache_bytes=driver.attribute("L2_CACHE_SIZE", ordinal),
        device_name=name,
        memory_bytes=driver.total_memory(ordinal),
        memory_bandwidth=published.memory_bandwidth if published else None,
        peak_flops=published.peak_flops if published else {},
        synthetic=False,
    )


def _oversized(driver: _driver.Driver, ordinal: int) -> int:
    """0 in three cases: a driver before 13.4, a binding without the attribute, a part without the mode."""
    if driver.driver_version() < _OVERSIZED_SINCE:
        return 0
    try:
        return driver.attribute("MAX_OVERSIZED_SHARED_MEMORY_PER_BLOCK", ordinal)
    except _driver.AttributeMissing:
        return 0
    except DriverError as error:
        if error.code == _NOT_SUPPORTED:
            return 0
        raise


def _published(name: str, capability: tuple[int, int], sm_count: int) -> Preset | None:
    """The preset of exactly this part: a MIG slice or a cut-down part has other rates."""
    for preset in PRESETS.values():
        if (preset.device_name, preset.compute_capability, preset.sm_count) == (name, capability, sm_count):
            return preset
    return None


_CPU: list[DeviceInfo] = []


def _cpu() -> DeviceInfo:
    if not _CPU:
        with _driver.lock:
            if not _CPU:
                _CPU.append(_read_cpu())
    return _CPU[0]


def _read_cpu() -> DeviceInfo:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this platform
        memory = 0
    return _make(
        type="cpu",
        ordinal=0,
        compute_capability=(0, 0),
        sm_count=usable or 1,
        shared_memory_per_block_optin=0,
        oversized_shared_memory_per_block=0,
        l2_cache_bytes=None,
        device_name="CPU",
        memory_bytes=memory if memory > 0 else None,
        memory_bandwidth=None,
        peak_flops={},
        synthetic=False,
    )


def _from_preset(name: str) -> DeviceInfo:
    wanted = _squash(name)
    for key, preset in PRESETS.items():
        if wanted in (_squash(key), _squash(preset.device_name)):
            shared = SHARED_MEMORY_OPTIN[preset.compute_capability]
            return _described({**preset._asdict(), "type": "cuda", "shared_memory_per_block_optin": shared})
    hint = nearest(name.upper(), PRESETS) or f"; there are: {', '.join(PRESETS)}"
    raise ConfigError(f"unknown device {name!r}{hint}", key="device")


def _squash(name: str) -> str:
    return "".join(char for char in str(name).lower().removeprefix("nvidia ") if char.isalnum())
