"""What only ``importlib.metadata`` can tell: distributions in archives and behind foreign finders, and a second opinion.

Apart from ``_discovery`` because its import takes 47 ms. Imported by the discovery, if there is something foreign to read,
and by the doctor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, distributions
from pathlib import Path
from typing import Any

from ._discovery import ENGINES, Discovery
from ._versions import normalise

__all__ = ["differences", "read"]

# Name, version, place, entry_points.txt.
Read = tuple[str, str, str, bytes]


def read(source: Any) -> tuple[list[Read], list[tuple[str, str]]]:
    """The distributions of ``source`` (an archive's path or a finder), and (place, reason) of those that can't be read."""
    found: list[Read] = []
    failures: list[tuple[str, str]] = []
    try:
        dists = list(_all(source))
    except Exception as error:  # a damaged archive or a foreign finder may raise anything
        place = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
        return [], [(f"{place}", f"{type(error).__name__}: {error}")]
    for dist in dists:
        place = str(getattr(dist, "_path", dist))
        try:
            name, version = dist.metadata["Name"], dist.metadata["Version"]
            text = (dist.read_text("entry_points.txt") or "").encode("utf-8", "surrogateescape")
        except Exception as error:  # as above
            failures.append((place, f"{type(error).__name__}: {error}"))
            continue
        if name:
            found.append((str(name), str(version or ""), place, text))
        else:
            failures.append((place, "its METADATA has no Name"))
    return found, failures


def differences(discovery: Discovery) -> list[str]:
    """Plugins that only one of our scan of ``sys.path`` and the standard library finds; what was left out on purpose aside."""
    ours = {(found.plugin, normalise(found.dist)) for found in discovery.plugins}
    left_out = {normalise(item.dist) for item in (*discovery.ignored, *discovery.shadowed)}
    left_out_places = {os.path.realpath(item.path) for item in discovery.broken}
    theirs: set[tuple[str, str]] = set()
    # What the scan found broken is not touched: importlib.metadata would wait for a FIFO, as a path entry or in a dist-info.
    path = [entry for entry in sys.path if Path(entry).is_dir() or Path(entry).is_file()]
    for dist in distributions(path=path):
        try:
            if os.path.realpath(str(getattr(dist, "_path", ""))) in left_out_places:
                continue
            points = [point.name for point in dist.entry_points if point.group == ENGINES]
            theirs.update((name, normalise(dist.metadata["Name"])) for name in points)
        except Exception:  # noqa: S112  broken metadata is reported by the scan
            continue
    return [
        *(f"importlib.metadata does not list {plugin} of {dist}" for plugin, dist in sorted(ours - theirs)),
        *(f"the scan misses {plugin} of {dist}" for plugin, dist in sorted(theirs - ours) if dist not in left_out),
    ]


def _all(source: Any) -> Iterable[Distribution]:
    if isinstance(source, str):
        return distributions(path=[source])
    found: Iterable[Distribution] = source.find_distributions(DistributionFinder.Context())
    return found
