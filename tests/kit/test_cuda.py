"""The kit's CUDA checks, on one sound engine and on one for each thing that they must find."""

from __future__ import annotations

import json
import re

import pytest

from tests.zoo._animals import metadata_of
from tests.zoo._make import manifest, write_plugin
from tests.zoo.test_kit import run_kit

pytestmark = pytest.mark.gpu

ENGINE = """
from cudnn_core import Estimate, PlanConfig, Support, checks


class Memory:
    def __init__(self, operand, address):
        self.__cuda_array_interface__ = {
            "shape": tuple(operand.dim), "strides": tuple(4 * s for s in operand.stride), "typestr": "<f4",
            "data": (address, False), "version": 3,
        }


class Plan:
    workspace_size = 0

    def __init__(self, graph):
        slots = [tensor.index for tensor in graph.operand_tensors()]
        self.x, self.y = (slots.index(t.index) for t in (graph.nodes[0].inputs["in0"], graph.nodes[0].outputs["out"]))

    def execute(self, pack, ctx):
        self.bind(pack.operands)(pack.pointers, ctx.workspace, ctx.stream)

    def bind(self, layout):
        import torch

        def run(pointers, workspace, stream):
            x, y = (torch.as_tensor(Memory(layout[i], pointers[i]), device="cuda") for i in (self.x, self.y))
            current = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
            with torch.cuda.stream(current):
                self.run(torch, x, y)

        return run

    def run(self, torch, x, y):
        torch.abs(x, out=y)


class Engine:
    def check_support(self, graph, ctx):
        c = checks(graph, ctx)
        c.device("cuda")
        c.ops("abs")
        c.no_dynamic()
        if c.require(len(graph.nodes) == 1, "op.count", "graph", 1, len(graph.nodes)):
            for tensor in graph.tensors:
                c.dtype(tensor.name, tensor, "float32")
                c.require(not tensor.by_value and tensor.ragged_offset is None, "op.pattern", tensor.name)
        return c.result(Support((PlanConfig("", {}),), workspace=0))

    def estimate(self, graph, config, ctx):
        return Estimate(20.0, "model", "calibration.json")

    def build_plan(self, graph, config, ctx):
        return Plan(graph)
"""
OVER = """

SoundPlan = Plan


class Plan(SoundPlan):
"""
BROKEN = {  # the body of Plan, the check that fails, what it says
    "ignores_stream": (
        (
            "    def run(self, torch, x, y):\n        with torch.cuda.stream(torch.cuda.default_stream()):\n"
            "            torch.abs(x, out=y)\n"
        ),
        "stream",
        "is the stream honoured",
    ),
    "allocates": (
        "    def run(self, torch, x, y):\n        y.copy_(x.abs())\n",
        "allocation",
        "a run allocates device memory",
    ),
    "synchronises": (
        "    def run(self, torch, x, y):\n        torch.abs(x, out=y)\n        torch.cuda.synchronize()\n",
        "capture",
        "can't be captured",
    ),
    "bakes_data": (
        (
            "    def run(self, torch, x, y):\n        self.x0 = getattr(self, 'x0', None)\n"
            "        self.x0 = x.clone() if self.x0 is None or self.x0.shape != x.shape else self.x0\n"
            "        torch.abs(self.x0, out=y)\n"
        ),
        "capture|contract",
        "other data",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    site = folder / "site-packages"
    site.mkdir()
    fields = {"devices": ["cuda"], "ops": ["abs"], "dtypes": ["float32"], "notes": ["cuda_graph"]}
    arguments = []
    for name, code in [("sound", ENGINE), *((name, ENGINE + OVER + row[0]) for name, row in BROKEN.items())]:
        write_plugin(site, name, manifest(name, engine=fields), code, metadata=metadata_of(f"acme-{name}"))
        arguments += ["--cudnn-plugin", name]
    calibration = folder / "calibration.json"
    arguments += ["--cudnn-device", "cuda:0", "--cudnn-calibration", str(calibration), "-rs"]
    found, _, output = run_kit(site, *arguments, folder=folder)
    return found, output, calibration


def test_a_sound_engine_passes_every_cuda_check(results):
    found, output, _ = results
    mine = {name: text for name, text in found.items() if name.startswith("sound")}
    assert not any(mine.values()), "\n".join(mine.values())
    checks = {re.split(r"::|\[", name)[1] for name in mine}
    assert checks >= {"stream", "capture", "allocation", "calibration", "numerics", "contract", "threads"}
    assert "SKIPPED" not in output


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_cuda_contract_is_named(results, name):
    _, check, says = BROKEN[name]
    failures = [
        text for test, text in results[0].items() if text and re.match(rf"{name}:main::({check})\[cuda:0", test)
    ]
    assert any(says in text for text in failures), (
        failures,
        [t for t in results[0].items() if t[0].startswith(name) and t[1]],
    )


def test_the_calibration_file_is_one_that_the_ranking_reads(results):
    from cudnn_core import device_info
    from cudnn_core._ranking import calibration_error

    path = results[2]
    assert json.loads(path.read_text())["schema"] == 1
    error = calibration_error(str(path.parent), path.name, device_info(0))
    assert error is not None
    assert error >= 0
