"""What the verbs print: one JSON document, or aligned text; errors and notes on standard error.

``Failure`` and its kinds carry an exit code. Imported by every verb; imports nothing of the core.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "EnvironmentProblem",
    "Failure",
    "Progress",
    "UsageProblem",
    "aligned",
    "documents_only",
    "emit",
    "emit_json",
    "fail",
    "note",
]

_documents: list[str] | None = None  # what `emit` was given inside `documents_only`


class Failure(Exception):  # noqa: N818  the kinds below are named after what is wrong
    """Ends a verb with a message and an exit code; ``details`` go into the JSON document of the error."""

    exit_code = 1

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class UsageProblem(Failure):
    """The arguments, or a file that they name, are wrong."""

    exit_code = 2


class EnvironmentProblem(Failure):
    """Something that the command needs is not there."""

    exit_code = 3


def emit_json(document: Mapping[str, Any]) -> None:
    """The one JSON document of a ``--json`` run."""
    import json

    from .._canonical import plain

    emit(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))


def emit(text: str) -> None:
    """A result, for standard output."""
    if _documents is None:
        print(text)
    else:
        _documents.append(text)


@contextlib.contextmanager
def documents_only() -> Iterator[None]:
    """In the block only ``emit`` reaches standard output, when the block ends; everything else goes to standard error.

    Plugins may print, and so may the libraries and child processes that they use: the file descriptor is redirected too.
    """
    global _documents
    out, before, saved = sys.stdout, _documents, None
    emitted: list[str] = []
    _documents = emitted
    try:
        out.flush()
        descriptor = out.fileno()
        saved = os.dup(descriptor)
        os.dup2(2, descriptor)
    except (OSError, ValueError, AttributeError):  # standard output is no file, or standard error is closed
        descriptor = -1
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _documents = before
        if saved is not None:
            out.flush()
            if descriptor >= 0:
                os.dup2(saved, descriptor)
            os.close(saved)
        for text in emitted:
            print(text)


def note(message: str) -> None:
    """A line for people, on standard error."""
    print(f"cudnn-core: {message}", file=sys.stderr)


def fail(error: Exception, code: int, as_json: bool) -> int:
    """Report an error; returns ``code``."""
    kind: dict[type[Exception], str] = {UsageProblem: "usage", EnvironmentProblem: "environment", Failure: "findings"}
    note(f"error: {error}")
    if as_json:
        facts = {"exit": code, "type": kind.get(type(error), type(error).__name__), "message": str(error)}
        decision = getattr(error, "decision", None)
        if decision is not None:
            facts["decision"] = decision.to_dict()
        emit_json({"schema": 1, "error": {**facts, **getattr(error, "details", {})}})
    return code


def aligned(rows: Iterable[Sequence[object]], header: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """``rows`` in columns, the last one unpadded; ``right`` are the columns that are flushed right."""
    from .._decision_text import escape

    table = [[escape(cell) for cell in row] for row in ([header] if header else [])]
    table += [[escape(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))] if table else []
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Progress:
    """A progress bar on standard error if that is a terminal, else nothing."""

    def __init__(self, total: int, label: str = "") -> None:
        self._total = max(total, 1)
        self._label = label
        self._live = sys.stderr.isatty()
        self._width = 0

    def step(self, done: int, what: str = "") -> None:
        """Show that ``done`` of the total are finished and ``what`` comes next."""
        if not self._live:
            return
        filled = 24 * min(done, self._total) // self._total
        text = f"{self._label} [{'#' * filled}{'.' * (24 - filled)}] {done}/{self._total} {what}"[:100]
        print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def close(self) -> None:
        """Wipe the bar."""
        if self._live and self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
            self._width = 0
