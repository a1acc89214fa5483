"""A progress line on a terminal's standard error, for runs that take longer than a second.

Contract: `Progress(stream)` writes nothing unless the stream is a terminal (or `always`), and leaves no line behind.
Imported by `_launch`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

__all__ = ["Progress"]

_PATIENCE = 1.0
_WIDTH = 20


class Progress:
    def __init__(self, stream: TextIO, *, show: bool | None = None) -> None:
        self._stream = stream
        self._show = bool(getattr(stream, "isatty", lambda: False)()) if show is None else show
        self._start = time.monotonic()
        self._kernels: Sequence[str] = ()
        self._length = 0

    def launches(self, kernels: Sequence[str]) -> None:
        self._kernels = kernels

    def update(self, launch: int, done: int, total: int, instructions: int) -> None:
        elapsed = time.monotonic() - self._start
        if not self._show or elapsed < _PATIENCE:
            return
        filled = _WIDTH * done // max(total, 1)
        name = self._kernels[launch] if launch < len(self._kernels) else ""
        several = f" {launch + 1}/{len(self._kernels)}" if len(self._kernels) > 1 else ""
        line = (f"{name[:32]}{several} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total} clusters, "
                f"{instructions:,} warp instructions, {elapsed:.0f} s")  # fmt: skip
        self._write(line)

    def close(self) -> None:
        if self._length:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()

    def _write(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()
        self._length = len(line)
