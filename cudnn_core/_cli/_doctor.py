"""``cudnn-core doctor``: guarded, offline probes of the installation. Exit 1 if one of them finds a problem.

A probe yields ``Line``s of level "ok", "info" (worth knowing, nothing to repair) or "problem"; one that raises is a problem
itself and stops no other. Plugin code runs in child processes only (``_child``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ._output import aligned, emit_json, note

__all__ = ["Line", "doctor"]


class Line(NamedTuple):
    """One result: ``level`` is "ok", "info" or "problem"."""

    probe: str
    level: str
    subject: str
    detail: str = ""


def doctor(options: Any) -> int:
    from . import _probes

    lines: list[Line] = []
    for probe in _probes.PROBES:
        lines += _guarded(probe, options)
    problems = sum(line.level == "problem" for line in lines)
    if options.json:
        emit_json({"schema": 1, "problems": problems, "lines": [line._asdict() for line in lines]})
    else:
        shown = [line for line in lines if options.verbose or line.level != "ok" or line.probe == "versions"]
        fine = len(lines) - len(shown)
        print(aligned([(line.level, line.probe, line.subject, line.detail) for line in shown]))
        print(f"\n{problems} problems; {fine} more checks are fine" if fine else f"\n{problems} problems")
    return 1 if problems else 0


def _guarded(probe: Callable[[Any], Iterable[Line]], options: Any) -> list[Line]:
    name = probe.__name__
    lines: list[Line] = []
    try:
        lines.extend(probe(options))
    except Exception as error:
        lines.append(Line(name, "problem", "the probe itself failed", f"{type(error).__name__}: {error}"))
        if options.verbose:
            import traceback

            note(traceback.format_exc())
    return lines
