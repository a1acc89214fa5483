"""Tuning records: what ``cudnn-core bench`` measured, and when it may be believed.

One file per (graph key, device, environment), written whole or not at all; every sample is kept. A record says which engine
is best only if every engine that competes today was sampled with the distributions that are installed today, so installing
another engine, or upgrading one or what it requires, invalidates it until it is measured too. Truncated, tampered
and foreign files are misses, and the log says why. Written by the benchmark, read by the planner.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ._canonical import (
    COUNT,
    LIST,
    NOT_NEGATIVE,
    OBJECT,
    POSITIVE,
    STR,
    TEXT,
    Field,
    FormatError,
    digest,
    dumps,
    loads,
    plain,
    take,
)
from ._engine import PlanConfig
from ._errors import CudnnCoreError
from ._store import DoubtfulError, UnusableError, cache_root, locked, make_private, read_private, write_atomic

if TYPE_CHECKING:
    from ._device import DeviceInfo

__all__ = ["Sample", "TuningRecord", "device_facts", "load", "path_of", "store"]

_SCHEMA = 1
_LIMIT = 16 << 20
_NO_SIZES: Mapping[str, int] = MappingProxyType({})
_NO_DISTS: Mapping[str, str] = MappingProxyType({})


class Sample(NamedTuple):
    """One engine's measurement.

    engine      "plugin:engine@revision"
    config      the best of the configs that were timed, knobs complete
    us          its median time in microseconds; n the number of timings; spread their relative half-width
    samples_us  the timings
    sizes       the runtime sizes that it was measured at, by name
    dists       the distributions that the engine depends on, and their versions
    """

    engine: str
    config: PlanConfig
    us: float
    n: int
    spread: float
    samples_us: tuple[float, ...] = ()
    sizes: Mapping[str, int] = _NO_SIZES
    dists: Mapping[str, str] = _NO_DISTS


class TuningRecord(NamedTuple):
    """Every sample of one graph on one device in one environment, oldest first."""

    graph_key: str
    device: Mapping[str, Any]
    environment: Mapping[str, str]
    samples: tuple[Sample, ...] = ()

    def best(
        self, engine: str, sizes: Mapping[str, int] = _NO_SIZES, dists: Mapping[str, str] = _NO_DISTS
    ) -> Sample | None:
        """The latest sample of ``engine`` ("plugin:engine@revision") at these runtime sizes, with these distributions."""
        wanted = (engine, dict(sizes), dict(dists))
        found = (
            sample
            for sample in reversed(self.samples)
            if (sample.engine, dict(sample.sizes), dict(sample.dists)) == wanted
        )
        return next(found, None)


def device_facts(device: DeviceInfo) -> dict[str, Any]:
    """What identifies a device in a record: its name (bandwidth and clocks follow it) and its key."""
    return {"name": device.device_name, "key": plain(device.key())}


def path_of(graph_key: str, device: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The record's place below the cache root."""
    if not _KEY.fullmatch(graph_key):
        raise CudnnCoreError(f"{graph_key!r} is not a graph key")
    place = digest({"device": plain(device), "environment": plain(environment)})
    return "tune", f"v{_SCHEMA}", place[:32], f"{graph_key}.json"


def load(
    graph_key: str, device: Mapping[str, Any], environment: Mapping[str, str], *, root: Path | None = None
) -> TuningRecord | None:
    """The record, or None for whatever is not certainly this record. Never creates anything and never raises for a file."""
    root = root or cache_root()
    if root is None:
        return None
    *folders, name = path_of(graph_key, device, environment)
    try:
        if not root.joinpath(*folders, name).exists():
            return None
        return _read(make_private(root, *folders) / name, graph_key, device, environment)
    except FileNotFoundError:
        return None
    except (UnusableError, DoubtfulError, FormatError, OSError) as error:
        _log().warning("tuning record ignored: %s", error)
        return None


def store(record: TuningRecord, *, pinned: bool, filtered: bool, root: Path | None = None) -> str:
    """Add the record's samples to those on disk. Returns "" or the reason why nothing was written.

    ``pinned`` and ``filtered`` say whether the run chose its engine by a pin or left engines out by configuration: such a run
    has not seen the competition.
    """
    reason = _store(record, pinned, filtered, root)
    if reason:
        _log().warning("tuning record not written: %s", reason)
    return reason


def _store(record: TuningRecord, pinned: bool, filtered: bool, root: Path | None) -> str:
    if pinned:
        return "the run was pinned to an engine or to knobs"
    if filtered:
        return "the run left engines out"
    root = root or cache_root()
    if root is None:
        return "there is no cache folder"
    *folders, name = path_of(record.graph_key, record.device, record.environment)
    try:
        _parse(_dump(record), "the new record")  # refuse to write what a reader would refuse
        folder = make_private(root, *folders)
        with locked(folder / ".lock"):
            known: tuple[Sample, ...] = ()
            try:
                known = _read(folder / name, record.graph_key, record.device, record.environment).samples
            except FileNotFoundError:
                pass
            except (DoubtfulError, FormatError) as error:
                _log().warning("tuning record replaced: %s", error)
            fresh = tuple(sample for sample in record.samples if sample not in known)
            write_atomic(folder / name, _dump(record._replace(samples=known + fresh)))
    except (UnusableError, FormatError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    return ""


def _read(path: Path, graph_key: str, device: Mapping[str, Any], environment: Mapping[str, str]) -> TuningRecord:
    record = _parse(read_private(path, _LIMIT), str(path))
    for what, have, want in (
        ("graph", record.graph_key, graph_key),
        ("device", record.device, plain(device)),
        ("environment", record.environment, plain(environment)),
    ):
        if have != want:
            raise FormatError(f"{path}: of another {what}")
    return record


_KEY = re.compile(r"[0-9a-f]{16,128}")
_TIMES = Field("an array of numbers > 0", lambda value: isinstance(value, list) and all(map(POSITIVE.ok, value)))
_STRINGS = Field(
    "an object of strings", lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
)
_SIZES = Field("an object of sizes", lambda value: isinstance(value, dict) and all(map(COUNT.ok, value.values())))
_RECORD = {
    "schema": COUNT,
    "graph_key": TEXT,
    "device": OBJECT,
    "environment": _STRINGS,
    "samples": LIST,
    "digest": TEXT,
}
_SAMPLE = {
    "engine": TEXT,
    "config": OBJECT,
    "us": POSITIVE,
    "n": COUNT,
    "spread": NOT_NEGATIVE,
    "samples_us": _TIMES,
    "sizes": _SIZES,
    "dists": _STRINGS,
}
_CONFIG = {"engine": TEXT, "knobs": OBJECT, "variant": STR}


def _dump(record: TuningRecord) -> bytes:
    body: dict[str, Any] = {
        "schema": _SCHEMA,
        "graph_key": record.graph_key,
        "device": plain(record.device),
        "environment": plain(record.environment),
        "samples": [
            {**sample._asdict(), "config": _config_json(sample.config), "samples_us": list(sample.samples_us),
             "sizes": dict(sample.sizes), "dists": dict(sample.dists)}
            for sample in record.samples
        ],
    }  # fmt: skip
    return dumps({**body, "digest": digest(body)}).encode()


def _parse(data: bytes, where: str) -> TuningRecord:
    try:
        top = take(loads(data, _LIMIT), _RECORD, "record")
        if top["schema"] != _SCHEMA:
            raise FormatError(f"schema {top['schema']}, and this version reads {_SCHEMA}")
        if top.pop("digest") != digest(top):
            raise FormatError("the digest does not match the content")
        samples = tuple(_sample(item, f"samples[{index}]") for index, item in enumerate(top["samples"]))
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    return TuningRecord(top["graph_key"], top["device"], top["environment"], samples)


def _sample(item: object, where: str) -> Sample:
    row = take(item, _SAMPLE, where)
    config = take(row["config"], _CONFIG, f"{where}.config")
    if config["engine"] != row["engine"]:
        raise FormatError(f"{where}: the config is of another engine")
    return Sample(
        **{**row, "config": PlanConfig(**config), "samples_us": tuple(row["samples_us"]), "sizes": row["sizes"]}
    )


def _config_json(config: PlanConfig) -> dict[str, Any]:
    return {"engine": config.engine, "knobs": plain(config.knobs), "variant": config.variant}


def _log() -> logging.Logger:
    return logging.getLogger("cudnn_core")
