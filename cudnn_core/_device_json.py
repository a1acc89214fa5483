"""Reading a device description: our own schema and cuDNN's DeviceProperties.

Pure functions from JSON to the fields of a DeviceInfo; no driver, no defaults taken from this machine. Imported by
``_device`` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._dtypes import STORAGE_DTYPES
from ._errors import ConfigError, nearest
from ._presets import SHARED_MEMORY_OPTIN

__all__ = ["field_int", "fields_from_json"]

_WHERE = "device JSON"
_OPTIONAL: dict[str, Any] = {
    "schema": 1,
    "shared_memory_per_block_optin": None,
    "oversized_shared_memory_per_block": 0,
    "l2_cache_bytes": None,
    "device_name": "",
    "memory_bytes": None,
    "memory_bandwidth": None,
    "peak_flops": {},
}
_REQUIRED = ("type", "compute_capability", "sm_count")


def fields_from_json(text: str | bytes | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a described device, all but ``ordinal`` and ``synthetic``. Raises ConfigError naming the field."""
    data: Any = text
    if isinstance(text, (str, bytes)):
        import json

        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", origin=_WHERE) from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"an object is expected, got {type(data).__name__}", origin=_WHERE)
    return _from_cudnn(data) if "deviceVer" in data else _from_ours(data)


def _from_cudnn(data: Mapping[str, Any]) -> dict[str, Any]:
    version = field_int(data, "deviceVer", least=100)
    if version % 10:
        raise _bad("deviceVer", "100 * major + 10 * minor", version)
    capability = (version // 100, version % 100 // 10)
    return _from_ours(
        {
            "type": "cuda",
            "compute_capability": list(capability),
            "sm_count": field_int(data, "multiProcessorCount", least=1),
            "device_name": f"sm_{10 * capability[0] + capability[1]}",
        }
    )


def _from_ours(data: Mapping[str, Any]) -> dict[str, Any]:
    known = (*_REQUIRED, *_OPTIONAL)
    for name in data:
        if name not in known:
            raise ConfigError(f"unknown field {name!r}{nearest(str(name), known)}", origin=_WHERE, key=str(name))
    for name in _REQUIRED:
        if name not in data:
            raise ConfigError(f"field {name!r} is missing", origin=_WHERE, key=name)
    full = {**_OPTIONAL, **data}
    if full["schema"] != 1 or isinstance(full["schema"], bool):
        raise _bad("schema", 1, full["schema"])
    kind = full["type"]
    if kind not in ("cuda", "cpu"):
        raise _bad("type", '"cuda" or "cpu"', kind)
    capability = _capability(full["compute_capability"], kind)
    shared = full["shared_memory_per_block_optin"]
    if shared is None:
        shared = 0 if kind == "cpu" else SHARED_MEMORY_OPTIN.get(capability)
        if shared is None:
            raise _bad("shared_memory_per_block_optin", f"a number for capability {capability}, not on record", None)
        full["shared_memory_per_block_optin"] = shared
    if not isinstance(full["device_name"], str):
        raise _bad("device_name", "a string", full["device_name"])
    return {
        "type": kind,
        "compute_capability": capability,
        "sm_count": field_int(full, "sm_count", least=1),
        "shared_memory_per_block_optin": field_int(full, "shared_memory_per_block_optin"),
        "oversized_shared_memory_per_block": field_int(full, "oversized_shared_memory_per_block"),
        "l2_cache_bytes": None if full["l2_cache_bytes"] is None else field_int(full, "l2_cache_bytes"),
        "device_name": full["device_name"],
        "memory_bytes": None if full["memory_bytes"] is None else field_int(full, "memory_bytes"),
        "memory_bandwidth": _rate("memory_bandwidth", full["memory_bandwidth"]),
        "peak_flops": _peaks(full["peak_flops"]),
    }


def _capability(value: Any, kind: str) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(type(part) is int for part in value):
        raise _bad("compute_capability", "[major, minor]", value)
    major, minor = value
    if (major, minor) != (0, 0) if kind == "cpu" else not (major >= 1 and 0 <= minor <= 9):
        raise _bad("compute_capability", "[0, 0] for the CPU, [major >= 1, minor 0..9] for a GPU", value)
    return (major, minor)


def _peaks(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise _bad("peak_flops", "an object of data type -> operations a second", value)
    peaks = {}
    for dtype, rate in value.items():
        if dtype not in STORAGE_DTYPES:
            raise ConfigError(
                f"field 'peak_flops': unknown data type {dtype!r}{nearest(str(dtype), STORAGE_DTYPES)}",
                origin=_WHERE,
                key="peak_flops",
            )
        number = _rate(f"peak_flops.{dtype}", rate)
        if number is not None:
            peaks[dtype] = number
    return peaks


def _rate(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise _bad(name, "a positive number or null", value)
    return float(value)


def field_int(data: Mapping[str, Any], name: str, least: int = 0, where: str = _WHERE) -> int:
    if name not in data:
        raise ConfigError(f"field {name!r} is missing", origin=where, key=name)
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(name, f"an integer >= {least}", value, where)
    return value


def _bad(name: str, expected: object, actual: object, where: str = _WHERE) -> ConfigError:
    return ConfigError(f"field {name!r}: expected {expected}, got {actual!r}", origin=where, key=name)
