"""Ranking: which of the engines that can run a graph is used. Evidence decides, not a number that a plugin writes.

Candidates have passed every hard filter. They are sorted by ``(order rule, tier, time bucket of 5 %, -efficiency, maturity,
id)``; the time comes, in this order of trust, from

measured  a tuning record that covers every candidate's engine@revision, with the distributions installed now
model     an engine's estimate whose calibration file, shipped in the plugin's package, covers the device's architecture
prior     the roofline divided by the manifest's efficiency

The order is total and a function of the input set alone. Imported by the planner.
"""

from __future__ import annotations

import logging
import math
import stat
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ._canonical import COUNT, NOT_NEGATIVE, OBJECT, FormatError, dumps, loads, plain, take
from ._engine import Estimate, PlanConfig, Support

if TYPE_CHECKING:
    from ._device import DeviceInfo
    from ._tuning import Sample, TuningRecord

__all__ = ["Candidate", "Ranked", "calibration_error", "member_id", "offered", "rank", "time_bucket"]

# Times within this fraction of each other tie, and the rest of the key decides.
BUCKET = 0.05
# No kernel is believed to be nearer to the roofline than this without a calibration file.
UNCALIBRATED_EFFICIENCY = 0.8

_NO_ORDER = 1 << 30  # after every order rule
_NO_TIME = 1 << 30  # after every known time; where no rate of the device is known, all priors share it
_TIERS = {"normal": 0, "reference": 1}
_MATURITIES = {"stable": 0, "preview": 1, "experimental": 2}


class Candidate(NamedTuple):
    """An engine that can run the graph.

    entry     the registry's EngineEntry: ``id``, ``spec``, ``environment()`` and, for calibration files, ``package_dir`` are
              read
    support   what check_support answered
    config    the config that competes, knobs complete
    estimate  what the engine's ``estimate`` answered for it
    configs   every config that may run under the configuration, knobs complete; a measured one replaces ``config``.
              Empty: ``config`` alone
    """

    entry: Any
    support: Support
    config: PlanConfig
    estimate: Estimate | None = None
    configs: tuple[PlanConfig, ...] = ()


class Ranked(NamedTuple):
    """A candidate in its place. ``us`` is None where no rate of the device is known; ``order_index`` if no rule names it."""

    candidate: Candidate
    us: float | None
    basis: str
    bucket: int
    order_index: int | None
    efficiency: float

    @property
    def id(self) -> str:
        """``plugin:engine@revision[/variant]``."""
        return member_id(self.candidate.config)


def rank(
    candidates: Iterable[Candidate],
    config: Any,
    device: DeviceInfo,
    *,
    roofline: float | None = None,
    record: TuningRecord | None = None,
    sizes: dict[str, int] | None = None,
    usable: Callable[[Candidate, PlanConfig], PlanConfig | None] | None = None,
) -> list[Ranked]:
    """The candidates, best first.

    ``config`` answers ``order_index(short engine id)``; ``roofline`` is in microseconds; ``record`` counts only if it covers
    every candidate at these runtime ``sizes``. ``usable`` gives the config that a measured one stands for now, or None; by
    default those that the candidates offer are (``offered``).
    """
    pool = list(candidates)
    measured = _measured(pool, record, sizes or {}, usable or offered)
    ranked = []
    for index, candidate in enumerate(pool):
        trusted = _calibrated(candidate, device)
        efficiency = _efficiency(candidate, trusted)
        if measured is not None:
            sample, used = measured[index]
            candidate = candidate._replace(config=used)  # noqa: PLW2901
            us: float | None = sample.us
            basis = "measured"
        elif trusted and candidate.estimate is not None and candidate.estimate.basis == "model":
            us, basis = candidate.estimate.us, "model"
        else:
            us, basis = _prior(candidate.estimate, roofline, efficiency), "prior"
        place = config.order_index(candidate.entry.spec.short_id)
        ranked.append(Ranked(candidate, us, basis, time_bucket(us), place, efficiency))
    return sorted(ranked, key=_key)


def time_bucket(us: float | None) -> int:
    """The number of a time's 5 % bucket. Buckets, unlike "within 5 % of each other", make an order that is transitive."""
    return _NO_TIME if us is None else round(math.log(us) / math.log1p(BUCKET))


def member_id(config: PlanConfig) -> str:
    """``plugin:engine@revision[/variant]``, what a decision speaks of."""
    return f"{config.engine}/{config.variant}" if config.variant else config.engine


def calibration_error(package_dir: Path | str | None, name: str, device: DeviceInfo) -> float | None:
    """The 90th percentile of an engine's relative estimation error on the device's architecture, or None: not calibrated.

    The file lies in the plugin's package and reads ``{"schema": 1, "sm": {"90a": {"p90_error": 0.12}}}``; a CPU's key is
    "cpu". The conformance kit writes it. A file that can't be read or believed calibrates nothing, and the log says so.
    """
    if not package_dir or not name:
        return None
    path = Path(package_dir, name)
    try:
        if not path.resolve(strict=True).is_relative_to(Path(package_dir).resolve(strict=True)):
            raise FormatError("lies outside the plugin's package")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("is not a regular file")
        table = _read_calibration(path, status.st_mtime_ns, status.st_size)
    except (OSError, FormatError) as error:
        logging.getLogger("cudnn_core").warning("calibration file %s ignored: %s", path, error)
        return None
    return table.get(device.arch or device.type)


@lru_cache(maxsize=256)
def _read_calibration(path: Path, mtime: int, size: int) -> dict[str, float]:
    """Cached by modification time and size too, so that a plugin's upgrade is seen."""
    with path.open("rb") as file:
        top = take(loads(file.read(1 << 20)), {"schema": COUNT, "sm": OBJECT}, path.name)
    if top["schema"] != 1:
        raise FormatError(f"schema {top['schema']}, and this version reads 1")
    return {arch: take(row, {"p90_error": NOT_NEGATIVE}, f"sm.{arch}")["p90_error"] for arch, row in top["sm"].items()}


def _calibrated(candidate: Candidate, device: DeviceInfo) -> bool:
    """Whether the engine's estimate is a time, and its calibration file covers the device."""
    estimate = candidate.estimate
    if estimate is None or not _is_time(estimate.us):
        return False
    package = getattr(candidate.entry, "package_dir", None)
    return calibration_error(package, estimate.calibration, device) is not None


def _efficiency(candidate: Candidate, trusted: bool) -> float:
    claimed = candidate.entry.spec.efficiency
    return float(min(claimed, 1.0 if trusted else UNCALIBRATED_EFFICIENCY))


def _prior(estimate: Estimate | None, roofline: float | None, efficiency: float) -> float | None:
    """roofline / efficiency. An estimate that is not trusted may admit to be slower than that; it can't claim to be faster."""
    if not roofline or not efficiency > 0:
        return None
    us = roofline / efficiency
    return max(us, estimate.us) if estimate is not None and _is_time(estimate.us) else us


def _is_time(us: object) -> bool:
    return isinstance(us, (int, float)) and not isinstance(us, bool) and math.isfinite(us) and us > 0


def _measured(
    pool: list[Candidate],
    record: TuningRecord | None,
    sizes: dict[str, int],
    usable: Callable[[Candidate, PlanConfig], PlanConfig | None],
) -> list[tuple[Sample, PlanConfig]] | None:
    """The latest sample and its config for each candidate; None unless every candidate has one that may still run.

    A sample whose best config may no longer run (other knobs are pinned, another plugin version) measured something
    else, so it counts as never taken.
    """
    if record is None:
        return None
    found = []
    for candidate in pool:
        sample = record.best(candidate.config.engine, sizes, candidate.entry.environment())
        if sample is None:
            return None
        used = usable(candidate, sample.config)
        if used is None:
            return None
        found.append((sample, used))
    return found


def offered(candidate: Candidate, config: PlanConfig) -> PlanConfig | None:
    """The config that the candidate offers and that is ``config``, or None."""
    return next((item for item in candidate.configs or (candidate.config,) if _same(item, config)), None)


def _same(a: PlanConfig, b: PlanConfig) -> bool:
    return a.engine == b.engine and a.variant == b.variant and plain(a.knobs) == plain(b.knobs)


def _key(ranked: Ranked) -> tuple[Any, ...]:
    spec = ranked.candidate.entry.spec
    return (
        _NO_ORDER if ranked.order_index is None else ranked.order_index,
        _TIERS.get(spec.tier, 0),
        ranked.bucket,
        -ranked.efficiency,
        _MATURITIES.get(spec.maturity, len(_MATURITIES)),
        ranked.id,
        dumps(plain(ranked.candidate.config.knobs)),
        ranked.us or 0.0,
    )
