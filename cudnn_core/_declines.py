"""Decline codes: the closed catalogue of reasons why an engine does not run a graph.

A decline is data, never an exception. Core codes are listed in ``CATALOGUE`` (``docs/decline-codes.md`` is generated
from it); a plugin adds its own as ``x.<plugin>.<slug>``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ._errors import CudnnCoreError, nearest

__all__ = ["CATALOGUE", "Decline", "check_code"]

# code -> what it means, for the docs and for `explain`.
CATALOGUE: dict[str, str] = {
    "op.unsupported": "An operation of the graph is not one that the engine implements.",
    "op.anchor": "The graph has none of the operations that the engine is built around.",
    "op.pattern": "The operations are supported one by one, but not connected in this way.",
    "op.attribute": "An operation has an attribute value that the engine does not implement.",
    "op.count": "The graph has more operations than the engine can fuse.",
    "dtype.unsupported": "A tensor has a data type that the engine does not implement.",
    "dtype.mixed": "The data types of several tensors can't be combined.",
    "dtype.compute": "The compute data type is not available.",
    "shape.rank": "A tensor has too few or too many dimensions.",
    "shape.range": "A size lies outside the range that the engine supports.",
    "shape.multiple_of": "A size is not a multiple of what the engine needs.",
    "shape.dynamic": "A runtime size (Dim) stands where the engine needs a fixed one.",
    "layout.stride": "A tensor's strides are not supported.",
    "layout.order": "A tensor's dimension order (major-ness) is not supported.",
    "layout.alignment": "A pointer or stride alignment is too small.",
    "layout.ragged": "A ragged tensor stands where the engine needs a dense one.",
    "device.type": "The engine runs on another device type.",
    "device.sm_too_low": "The device's compute capability is below the engine's range.",
    "device.sm_too_high": "The device's compute capability is above the engine's range.",
    "device.sm_variant": "The engine is built for another architecture or family.",
    "device.smem": "The device has too little shared memory per block.",
    "device.memory": "The device has too little memory.",
    "device.absent": "No device of the kind is present and the engine can't build for an absent one.",
    "dep.missing": "A distribution that the engine needs is not installed.",
    "dep.too_old": "A distribution that the engine needs is installed in an unsuitable version.",
    "dep.import_failed": "An import that the engine needs failed.",
    "dep.driver": "The CUDA driver is missing or too old.",
    "resource.workspace": "The engine needs more workspace than the configuration allows.",
    "policy.determinism": "The engine can't give the determinism that the graph asks for.",
    "policy.precision": "The engine can't give the precision that the graph asks for.",
    "policy.note_missing": "The engine lacks a behaviour note that the configuration or the graph requires.",
    "policy.note_barred": "The engine has a behaviour note that the graph excludes.",
    "config.disabled": "The configuration disables the engine.",
    "config.not_allowed": "The configuration's allow-list leaves the plugin out, or its deny-list names it.",
    "config.avoided": "A configuration rule that matches the graph avoids the engine.",
    "config.pinned_elsewhere": "A rule or a call pins the graph to another engine.",
    "config.maturity": "The engine is experimental and not enabled.",
    "api.too_new": "The plugin was written for a newer engine API.",
    "api.too_old": "The plugin was written for an older, incompatible engine API.",
    "plugin.conflict": "Two distributions claim the same plugin id.",
    "plugin.bad_manifest": "The manifest can't be read or is invalid.",
    "plugin.broken": "The plugin's code raised or returned something that the protocol forbids.",
    "plugin.unknown_hook": "A hook module implements a hook that does not exist.",
    "knob.unknown": "The engine has no knob of that name.",
    "knob.type": "A knob's value has the wrong type.",
    "knob.domain": "A knob's value lies outside its domain.",
    "build.failed": "build_plan failed.",
    "rank.slower": "Another engine is ranked before it.",
    "not_implemented": "The engine is declared, and its kernels are not written yet.",
}

_PLUGIN_CODE = re.compile(r"x\.[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*\Z")


class Decline(NamedTuple):
    """One reason. Every field is JSON-able.

    code      from CATALOGUE, or ``x.<plugin>.<slug>``
    subject   what is declined: ``"A"``, ``"C.stride[1]"``, ``"knob:split_k"``, ``"device"``
    expected  what the engine needs: ``["bfloat16"]``, ``{"multiple_of": 8}``
    actual    what the graph or the machine has
    hint      what the user can change
    origin    ``file:line`` of the configuration, or where the plugin said it
    """

    code: str
    subject: str = ""
    expected: object = None
    actual: object = None
    hint: str = ""
    origin: str = ""

    def __str__(self) -> str:
        text = f"{self.code} {self.subject}".rstrip()
        if self.expected is not None:
            text += f": needs {_plain(self.expected)}"
            if self.actual is not None:
                text += f", got {_plain(self.actual)}"
        elif self.actual is not None:
            text += f": {_plain(self.actual)}"
        if self.hint:
            text += f" ({self.hint})"
        if self.origin:
            text += f" [{self.origin}]"
        return text

    def to_dict(self) -> dict[str, object]:
        return dict(self._asdict())


def check_code(code: str) -> None:
    """Raises CudnnCoreError if ``code`` is neither in the catalogue nor a plugin's own."""
    if code not in CATALOGUE and not _PLUGIN_CODE.match(code):
        raise CudnnCoreError(f"unknown decline code {code!r}{nearest(code, CATALOGUE)}")


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " | ".join(str(item) for item in value) if value else "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
