"""Applies the ``log`` key to the "cudnn_core" logger. Imported only when the key is set."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["apply"]


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the time of the record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def apply(level: str) -> None:
    """Set the logger's level; give it a handler on stderr if the program has configured none."""
    logger = logging.getLogger("cudnn_core")
    if level == "off":
        logger.setLevel(logging.CRITICAL + 1)
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        logger.addHandler(_StderrHandler())
