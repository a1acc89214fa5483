"""Version conditions: ``requires`` of a manifest and ``versions`` of a configuration rule.

Everything is decided from metadata; nothing is imported but ``packaging``, and that only if a condition has a version
(17 ms, measured). Imported by the manifest, the registry and the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ._declines import Decline
from ._errors import CudnnCoreError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = ["Requirement", "check_specifier", "normalise", "requirement_decline", "satisfies"]

_SEPARATORS = re.compile(r"[-_.]+")


class Requirement(NamedTuple):
    """A distribution that must be installed.

    version  a specifier like ">=4.7,<5", or "" for any
    accept   patterns (``*`` and ``?``) of versions that are good enough whatever ``version`` says: "0.*" for
             development builds that count from zero
    """

    dist: str
    version: str = ""
    accept: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.dist} {self.version}".rstrip()


def normalise(dist: str) -> str:
    """A distribution's name as indexes compare it: lower case, runs of ``-_.`` are one ``-``."""
    return _SEPARATORS.sub("-", dist).lower()


def check_specifier(text: str) -> None:
    """Raises CudnnCoreError unless ``text`` is a version specifier."""
    _specifiers(text)


def satisfies(version: str, specifier: str) -> bool:
    """Whether ``version`` meets ``specifier``, as PEP 440 says; an unparsable version never does.

    A pre-release is looked at like any other version: "4.8rc1" meets ">=4.7". But ``<V`` and ``>V`` leave out what belongs
    to V itself: "0.4.2.dev1" does not meet "<0.4.2" (but "<=0.4.2,!=0.4.2"), nor does "4.7.post1" meet ">4.7".
    """
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return _specifiers(specifier).contains(parsed, prereleases=True)


def requirement_decline(requirement: Requirement, dists: Mapping[str, str]) -> Decline | None:
    """None if ``requirement`` is met by ``dists`` (normalised name -> version); else ``dep.missing`` or ``dep.too_old``."""
    name = normalise(requirement.dist)
    if name not in dists:
        return Decline(
            "dep.missing",
            subject=requirement.dist,
            expected=requirement.version or "installed",
            actual="not installed",
            hint=f"pip install '{requirement.dist}{requirement.version}'",
        )
    version = dists[name]
    if not requirement.version or satisfies(version, requirement.version):
        return None
    from fnmatch import fnmatchcase

    if any(fnmatchcase(version, pattern) for pattern in requirement.accept):
        return None
    return Decline(
        "dep.too_old",
        subject=requirement.dist,
        expected=[requirement.version, *requirement.accept],
        actual=version or "unknown",
        hint=f"pip install '{requirement.dist}{requirement.version}'",
    )


def _specifiers(text: str) -> SpecifierSet:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise CudnnCoreError(f"{text!r} is not a version condition like '>=4.7,<5'") from None
