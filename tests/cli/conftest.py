"""Fixtures of the command-line tests: no configuration or cache of this machine, engines in this process, graph files."""

from __future__ import annotations

import ctypes
import json
import os
import time

import pytest

import cudnn_core
from cudnn_core import _config
from cudnn_core._cli import main
from cudnn_core.testing import temporary_plugin


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A home, a cache and a current directory of the test's own."""
    for name in [name for name in os.environ if name.startswith("CUDNN_CORE_")]:
        monkeypatch.delenv(name)
    for name, folder in (("HOME", "home"), ("XDG_CONFIG_HOME", "config"), ("XDG_CACHE_HOME", "cache")):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    _config.reload()
    yield tmp_path
    monkeypatch.undo()
    _config.reload()


@pytest.fixture
def configure(machine):
    """``configure(text)`` writes the user's configuration file."""

    def write(text):
        file = machine / "config" / "cudnn_core" / "config.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text("schema = 1\n" + text)
        _config.reload()
        return file

    return write


@pytest.fixture
def cli(capsys):
    """``cli(*argv)`` -> (exit code, standard output, standard error)."""

    def call(*argv):
        code = main([str(item) for item in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def cli_json(cli):
    """``cli_json(*argv)`` -> (exit code, the one document on standard output)."""

    def call(*argv):
        code, out, _ = cli(*argv, "--json")
        return code, json.loads(out)

    return call


@pytest.fixture
def graph_file(machine):
    """``graph_file()`` is the JSON file of y = a + b; ``build(graph)`` makes another."""

    def write(build=None, dtype="float32", name="graph.json"):
        graph = cudnn_core.Graph(io_data_type=dtype, compute_data_type="float32", intermediate_data_type="float32")
        if build is None:
            a, b = graph.tensor((4, 8), name="a"), graph.tensor((4, 8), name="b")
            graph.add(a, b).set_output(True).set_name("y")
        else:
            build(graph)
        file = machine / "work" / name
        file.write_text(graph.to_json())
        return file

    return write


class AddEngine:
    """y = a + b of contiguous float32 operands in ctypes, after ``delay`` seconds, plus ``error`` on every element."""

    delay = 0.0
    error = 0.0
    configs = ({},)

    def check_support(self, graph, ctx):
        return cudnn_core.Support(tuple(cudnn_core.PlanConfig("", knobs) for knobs in self.configs), workspace=0)

    def build_plan(self, graph, config, ctx):
        return AddPlan(graph, self.delay * config.knobs.get("slow", 1), self.error)


class AddPlan:
    workspace_size = 0

    def __init__(self, graph, delay, error):
        self.delay, self.error = delay, error
        slots = {tensor.index: slot for slot, tensor in enumerate(graph.operand_tensors())}
        node = graph.nodes[0]
        self.slots = [slots[node.inputs[port].index] for port in ("in0", "in1")] + [slots[node.outputs["out"].index]]

    def execute(self, pack, ctx):
        time.sleep(self.delay)
        count = 1
        for size in pack.operands[0].dim:
            count *= size
        a, b, y = ((ctypes.c_float * count).from_address(pack.pointers[slot]) for slot in self.slots)
        for index in range(count):
            y[index] = a[index] + b[index] + self.error


@pytest.fixture
def engines():
    """``with engines(name=fields, ...)``: in-process plugins ``name:add``; fields beside the manifest's set attributes."""
    from contextlib import ExitStack, contextmanager

    @contextmanager
    def install(isolated=True, **plugins):
        with ExitStack() as stack:
            for index, (name, given) in enumerate(plugins.items()):
                fields = dict(given)
                own = {key: fields.pop(key) for key in ("delay", "error", "configs") if key in fields}
                kind = type(name, (fields.pop("base", AddEngine),), own)
                row = {"name": "add", "ops": ["add"], "devices": ["cpu"], **fields}
                stack.enter_context(
                    temporary_plugin({"plugin": name, "engine": [row]}, {"add": kind}, isolated=isolated and index == 0)
                )
            yield

    return install
