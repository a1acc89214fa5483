"""What the command line names: graph and decision files, devices, runtime sizes. Imported by explain, run and bench.

A file or value that can't be used raises UsageProblem, which names it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .._errors import ConfigError, CudnnCoreError, ExecutionError
from ._output import UsageProblem

if TYPE_CHECKING:
    from .._device import DeviceInfo
    from .._graph._graph import Graph

__all__ = ["device_named", "load_graph", "read_text", "sizes_named", "write_text"]

_LIMIT = 64 << 20


def read_text(name: str, what: str) -> str:
    """The text of the file ``name``, or of standard input for ``-``."""
    try:
        if name == "-":
            return sys.stdin.read(_LIMIT)
        with Path(name).open("rb") as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise UsageProblem(f"{what} {name}: larger than {_LIMIT >> 20} MiB")
        return data.decode("utf-8")
    except OSError as error:
        raise UsageProblem(f"{what} {name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{what} {name}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def write_text(name: str, text: str) -> None:
    """Write a result; OSError is the environment's."""
    Path(name).write_text(text, encoding="utf-8")


def load_graph(name: str) -> Graph:
    """The graph in the JSON file ``name``, valid."""
    from .._graph._graph import Graph

    text = read_text(name, "graph")
    try:
        graph = Graph.from_json(text)
        graph.validate()
    except CudnnCoreError as error:
        raise UsageProblem(f"graph {name}: {error}") from None
    return graph


def device_named(name: str | None) -> DeviceInfo:
    """The device of ``--device``: None is the current one."""
    from .._context import resolve_device

    if name is None:
        return resolve_device()
    text = name.strip()
    if text.isdecimal():
        return resolve_device(int(text))
    path = Path(text)
    if text.endswith(".json") or "/" in text or (not text.startswith("{") and path.is_file()):
        text = read_text(text, "device").strip()
        if not text.startswith("{"):
            raise UsageProblem(f"device {name}: not a JSON object")
    try:
        return resolve_device(text)
    except ConfigError as error:
        raise UsageProblem(f"device {name}: {error}") from None


def sizes_named(graph: Graph, device: DeviceInfo, settings: Iterable[str]) -> dict[str, int]:
    """The runtime sizes of ``--size NAME=N``, checked against the graph's Dims."""
    from .._planner import _sizes

    given: dict[str, int] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not value.isdecimal():
            raise UsageProblem(f"--size {setting}: NAME=N is needed")
        given[key] = int(value)
    try:
        _sizes(graph.freeze(device.type), given)
    except ExecutionError as error:
        raise UsageProblem(f"--size: {str(error).removeprefix('hint: ')}") from None
    return given
