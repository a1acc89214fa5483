"""A file of results that several runs fill: rows of the cases that ran replace those that are there, the others stay.

Written anew after each case, so that a run that its time limit ends keeps what it measured. Runs are of one machine, of the same sources
and of the same versions of what they share (a peer may be missing in one), or the file is refused. Used by linear_attention.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["OtherRunError", "ResultFile"]


class OtherRunError(Exception):
    """The file has results that can't stand beside this run's; the message says what differs."""


class ResultFile:
    """JSON lines at ``path``, in the order of the cases' ``names``.

    append    keep the rows that are there. ``identity``: the keys whose values all rows must share
    """

    def __init__(self, path: Path, names: Sequence[str], identity: Mapping[str, Any], *, append: bool) -> None:
        self._path, self._names = path, list(names)
        self._kept: list[dict[str, Any]] = []
        if append and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self._kept = [json.loads(line) for line in lines]
        for record in self._kept:
            for key, ours in identity.items():
                theirs = record.get(key)
                if not _agree(theirs, ours):
                    raise OtherRunError(f"{path} has results with {key} {theirs!r}, this run has {ours!r}")

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """``records`` of this run, all of them so far, and what was kept."""
        ran = {self._case(record) for record in records}
        kept = [record for record in self._kept if self._case(record) not in ran]
        ordered = sorted([*kept, *records], key=self._case)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(self._path.name + ".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in ordered), encoding="utf-8")
        part.replace(self._path)

    def _case(self, record: Mapping[str, Any]) -> int:
        """The number of the case whose name begins the row's title; rows of no case are last."""
        title = record["case"].strip()
        return next(
            (
                number
                for number, name in enumerate(self._names)
                if title == name or title.startswith((f"{name},", f"{name}:"))
            ),
            len(self._names),
        )


def _agree(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(theirs[name] == ours[name] for name in theirs.keys() & ours.keys())
    return bool(theirs == ours)
