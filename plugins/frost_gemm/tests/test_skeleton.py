"""The engines are known, and decline with every reason that is true today."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cudnn_core

SM90, SM100 = "frost_gemm:sm90_wgmma@1", "frost_gemm:sm100_tcgen05@1"


def matmul(dtype="bfloat16", k=256, n=128, b_stride=None, cross=False):
    g = cudnn_core.Graph(io_data_type=dtype, intermediate_data_type="float32", compute_data_type="float32")
    a = g.tensor(dim=(1, 64, k), name="A")
    b = g.tensor(dim=(1, k, n), stride=b_stride or (n * k, 1, k), name="B")
    c = g.matmul(A=a, B=b)
    if cross:
        c = g.matmul(A=c.set_data_type(dtype), B=g.tensor(dim=(1, n, n), name="B2"))
    c.set_output(True).set_data_type("bfloat16")
    return g


def explained(graph, device):
    decision = graph.explain(device=cudnn_core.DeviceInfo.preset(device))
    return {engine.id: engine for engine in decision.engines}


def codes(engine):
    return {reason.code for reason in engine.reasons}


@pytest.mark.parametrize(
    ("device", "engine", "other"), [("H200", SM90, SM100), ("B200", SM100, SM90), ("B300", SM100, SM90)]
)
def test_engine_of_the_generation_says_that_it_is_not_written(device, engine, other):
    engines = explained(matmul(), device)
    assert engines[engine].state == "declined"
    assert codes(engines[engine]) == {"not_implemented"}
    assert "not written" in engines[engine].reasons[0].hint
    assert engines[other].state == "filtered"
    assert "device.sm_variant" in codes(engines[other])


def test_data_type_that_no_tensor_core_path_serves_is_filtered():
    engine = explained(matmul("float32"), "H200")[SM90]
    assert (engine.state, codes(engine)) == ("filtered", {"dtype.unsupported"})


@pytest.mark.parametrize(("k", "aligned"), [(256, True), (264, True), (260, False)])
def test_rows_that_tma_cannot_address_are_named_too(k, aligned):
    engine = explained(matmul(k=k), "H200")[SM90]
    assert codes(engine) == {"not_implemented"} | (set() if aligned else {"layout.alignment"})


def test_fp8_on_hopper_needs_k_major_operands():
    row_major = explained(matmul("fp8_e4m3", b_stride=(256 * 128, 128, 1)), "H200")[SM90]
    assert codes(row_major) == {"not_implemented", "layout.order"}
    assert [reason.subject for reason in row_major.reasons if reason.code == "layout.order"] == ["B"]
    assert codes(explained(matmul("fp8_e4m3"), "H200")[SM90]) == {"not_implemented"}
    assert codes(explained(matmul("fp8_e4m3", b_stride=(256 * 128, 128, 1)), "B200")[SM100]) == {"not_implemented"}


def test_chained_matmuls_are_not_one_kernel():
    assert codes(explained(matmul(cross=True), "H200")[SM90]) == {"not_implemented", "op.pattern"}


def test_building_is_refused():
    import frost_gemm.engines as engines

    with pytest.raises(cudnn_core.BuildError, match="not written"):
        engines.Sm90Wgmma().build_plan(None, None, None)


def test_import_is_light():
    program = "import sys, frost_gemm.engines; print([m for m in ('torch', 'numpy', 'cutlass') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
