"""The exceptions of the front doors. Imports the core alone.

A rule of an op row that is broken is the core's GraphError, an operand of another size than its peers its ExecutionError;
these are for what a graph does not see.
"""

from __future__ import annotations

from cudnn_core import CudnnCoreError

__all__ = ["GradientError", "InputError"]


class InputError(CudnnCoreError, ValueError):
    """An argument is wrong; ``argument`` is its name."""

    def __init__(self, message: str, *, argument: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class GradientError(CudnnCoreError, NotImplementedError):
    """A gradient was asked for: the backward ops don't exist yet."""
