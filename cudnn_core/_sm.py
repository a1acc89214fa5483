"""Architecture patterns: how ``sm = ["90a", "100f", "80+"]`` of a manifest meets a compute capability.

    "90a" or "90"  exactly compute capability 9.0: architecture-specific code runs nowhere else
    "100f"         the family: the same major and at least this minor, as NVIDIA defines family-specific targets
                   (compute_100f runs on 10.0, 10.3 and 10.7, compute_103f on 10.3 and 10.7)
    "80+"          8.0 and everything above it

Imported by the manifest (coarse filter) and by ``checks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ._declines import Decline
from ._errors import ManifestError

__all__ = ["SmPattern", "parse_sm", "sm_decline"]

_PATTERN = re.compile(r"([1-9][0-9]?)([0-9])([af+]?)\Z")

# Jetson Thor was 10.1 before CUDA 13 renamed it to 11.0 (PTX ISA 9.0): its number lies in the range of the 10.x family,
# the part does not belong to it.
_OUTSIDE_ITS_FAMILY = frozenset([(10, 1)])


class SmPattern(NamedTuple):
    """One parsed pattern; ``kind`` is "exact", "family" or "range"."""

    text: str
    capability: tuple[int, int]
    kind: str

    def matches(self, capability: tuple[int, int]) -> bool:
        if self.kind == "exact":
            return capability == self.capability
        if self.kind == "range":
            return capability >= self.capability
        if capability == self.capability:
            return True
        return (
            capability[0] == self.capability[0]
            and capability[1] >= self.capability[1]
            and capability not in _OUTSIDE_ITS_FAMILY
            and self.capability not in _OUTSIDE_ITS_FAMILY
        )


@lru_cache(maxsize=256)  # manifests repeat a few
def parse_sm(text: str) -> SmPattern:
    """The pattern that ``text`` stands for; ManifestError for anything else."""
    found = _PATTERN.match(text)
    if found is None:
        raise ManifestError(f'{text!r} is not an architecture: write "90a" (exact), "100f" (family) or "80+" (range)')
    major, minor, suffix = found.groups()
    return SmPattern(text, (int(major), int(minor)), {"f": "family", "+": "range"}.get(suffix, "exact"))


def sm_decline(patterns: Iterable[SmPattern], capability: tuple[int, int], arch: str = "") -> Decline | None:
    """None if one of ``patterns`` (no pattern: any) matches; else why not.

    ``device.sm_too_low`` if a range begins above the device, ``device.sm_variant`` if there are only exact
    architectures and families.
    """
    patterns = tuple(patterns)
    if not patterns or any(pattern.matches(capability) for pattern in patterns):
        return None
    code = "device.sm_too_low" if any(pattern.kind == "range" for pattern in patterns) else "device.sm_variant"
    actual = arch or f"{capability[0]}{capability[1]}"
    return Decline(code, subject="device", expected=[pattern.text for pattern in patterns], actual=actual)
