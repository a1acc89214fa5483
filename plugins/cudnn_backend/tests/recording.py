"""What the lowering asks of the binding: a proxy around ``backend_graph`` that passes every call on and writes it down.

Runs in a child process with a fake libcudnn (attention asks for its version). ``python recording.py MODULE`` prints, for each
(name, graph) of ``MODULE.recorded_graphs()``, the calls, the declines, or what the binding refused while it was asked.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from cudnn_core import DeviceInfo

DEVICE = DeviceInfo.preset("H200")
VERSION = 91900


class Recorder:
    """``calls``: one line an operation, with the setters of its results behind."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.calls: list[str] = []
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = method(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
            shown = [text(arg) for arg in args] + [f"{key}={text(value)}" for key, value in kwargs.items()]
            results = (
                [None if item is None else self._wrap(item) for item in found]
                if isinstance(found, list)
                else self._wrap(found)
            )
            self.calls.append(f"{text(results)} = {name}({', '.join(shown)})")
            return results

        return call

    def _wrap(self, real: Any) -> Tensor:
        self.count += 1
        return Tensor(self, real, f"%{self.count}")


class Tensor:
    def __init__(self, owner: Recorder, real: Any, label: str) -> None:
        self._owner, self._real, self._label = owner, real, label

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*args: Any) -> Tensor:
            method(*map(plain, args))
            line = f"{name.removeprefix('_').removeprefix('set_')}={', '.join(map(text, args))}"
            calls = self._owner.calls
            if calls and calls[-1].startswith(f"    {self._label}: "):
                calls[-1] += f" {line}"
            else:
                calls.append(f"    {self._label}: {line}")
            return self

        return call


def plain(value: Any) -> Any:
    """The binding's own objects."""
    if isinstance(value, Tensor):
        return value._real
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


def text(value: Any) -> str:
    if isinstance(value, Tensor):
        return value._label
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(text, value)) + "]"
    return getattr(value, "name", None) or repr(value)


def record(graph: Any, module: Any) -> dict[str, Any]:
    from cudnn_backend import lower

    frozen = graph.freeze("cuda")
    declines = frozen.facts(lower.analyse).declines  # a vetoed graph can be declared all the same
    if declines:
        return {"declines": [str(decline) for decline in declines]}
    types = {name: getattr(module.data_type, member) for name, member in lower.GRAPH_TYPES.items()}
    # The handle is never used: nothing is built.
    recorder = Recorder(module.backend_graph(name="g", handle=1, sm_version=90, **types))
    try:
        lower.lower(frozen, module, recorder)
    except RuntimeError as error:  # the binding's own answer
        return {"refused": str(error), "calls": recorder.calls}
    return {"calls": recorder.calls, "operands": len(frozen.operands)}


def main(source: str) -> None:
    from cudnn_backend import library

    module = library.load().module
    graphs = importlib.import_module(source).recorded_graphs()
    methods = [name for name in dir(module.backend_graph) if not name.startswith("_")]
    print(json.dumps({"graphs": {name: record(graph, module) for name, graph in graphs}, "methods": methods}))


if __name__ == "__main__":
    main(sys.argv[1])
