"""The backend's engine is known, and declines with every reason that is true today."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cudnn_core

ENGINE = "cudnn_backend:graph@1"


def matmul():
    g = cudnn_core.Graph(io_data_type="float16", intermediate_data_type="float32", compute_data_type="float32")
    c = g.matmul(A=g.tensor(dim=(1, 64, 32), name="A"), B=g.tensor(dim=(1, 32, 16), name="B"))
    g.relu(input=c).set_output(True).set_data_type("float16")
    return g


def explained(graph, device):
    decision = graph.explain(device=cudnn_core.DeviceInfo.preset(device) if device != "cpu" else "cpu")
    return next(engine for engine in decision.engines if engine.id == ENGINE)


@pytest.mark.parametrize("device", ["A100", "H200", "B200", "R200"])
def test_engine_says_that_the_lowering_is_not_written(device):
    engine = explained(matmul(), device)
    assert (engine.state, [reason.code for reason in engine.reasons]) == ("declined", ["not_implemented"])
    assert "not written" in engine.reasons[0].hint


def test_cpu_is_not_its_device():
    engine = explained(matmul(), "cpu")
    assert (engine.state, [reason.code for reason in engine.reasons]) == ("filtered", ["device.type"])


def test_members_are_variants_of_one_engine():
    entry = next(entry for entry in cudnn_core.registry().engines if entry.id == ENGINE)
    assert entry.spec.has_variant("eng7")
    assert not entry.spec.has_variant("engine7")


def test_there_is_no_backend_version_without_the_binding():
    assert cudnn_core.backend_version() == 0


def test_building_is_refused():
    import cudnn_backend.engines as engines

    with pytest.raises(cudnn_core.BuildError, match="not written"):
        engines.BackendGraph().build_plan(None, None, None)


def test_import_is_light():
    program = "import sys, cudnn_backend.engines; print([m for m in ('torch', 'numpy', 'cudnn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
