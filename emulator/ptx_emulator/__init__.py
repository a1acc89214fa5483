"""Executes PTX on a CPU and reports what a GPU run can hide: see `launch`, `run_ptx`, `Report` and `KINDS`."""

from __future__ import annotations

from ._arguments import Descriptor
from ._findings import KINDS, EmulationError, Finding, FindingError, Limits, Report, UnsupportedError
from ._grid import run_ptx
from ._launch import Launch, launch, record

__all__ = [
    "KINDS",
    "Descriptor",
    "EmulationError",
    "Finding",
    "FindingError",
    "Launch",
    "Limits",
    "Report",
    "UnsupportedError",
    "launch",
    "record",
    "run_ptx",
]

__version__ = "0.1.0"
