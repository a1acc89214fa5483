"""The exceptions as values: they come back from pickling as they went, which process pools and test runners rely on."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil

import pytest

import cudnn_core
from cudnn_core import Decline

DECLINE = Decline("dep.missing", "x", expected=">=1", actual="none", hint="pip install x")
EXAMPLES = [
    cudnn_core.CudnnCoreError("text", 5),
    cudnn_core.ConfigError("text", origin="file:3", key="a.b"),
    cudnn_core.ManifestError("text", subject="engine[0].ops"),
    cudnn_core.GraphError("text", node="n", port="A", expected=8, actual=7),
    cudnn_core.GraphTypeError("text", node="n"),
    cudnn_core.NoEngineError("text"),
    cudnn_core.BuildError("text"),
    cudnn_core.ExecutionError("text", operand="x"),
    cudnn_core.DriverError("text", code=719),
    cudnn_core.HandleError("text"),
    cudnn_core.HandleTypeError("text"),
    cudnn_core.DecisionError("text"),
    cudnn_core.KnobError("a:b@1", [DECLINE, DECLINE]),
    cudnn_core.EngineLookupError("text", "unavailable", [DECLINE]),
    cudnn_core.EngineBroken("a:b@1", DECLINE, "Traceback ..."),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_survives_pickling_and_copying(error, again):
    error.note = "set by a caller"
    found = again(error)
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def test_every_error_has_an_example():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    for module in pkgutil.walk_packages(cudnn_core.__path__, "cudnn_core."):
        # _cute_host is a kernel's host function: it can't be imported without the CuTe DSL, and has no errors.
        if not module.name.endswith(("__main__", "._cute_host")) and ".testing" not in module.name:
            importlib.import_module(module.name)
    kinds = {kind for kind in below(cudnn_core.CudnnCoreError) if kind.__module__.startswith("cudnn_core.")}
    assert {kind for kind in kinds if kind.__init__ is not kind.__base__.__init__} <= {type(e) for e in EXAMPLES}


def test_an_error_of_a_plugin_survives_too():
    assert pickle.loads(pickle.dumps(PluginError(1, why="x"))).why == "x"


class PluginError(cudnn_core.BuildError):
    def __init__(self, number: int, *, why: str) -> None:
        super().__init__(f"{number}: {why}")
        self.why = why
