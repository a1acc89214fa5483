"""The engines are known, take what they have kernels for, and decline the rest with every reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cudnn_core


def attention(op, dtype="bfloat16", width=128):
    g = cudnn_core.Graph(io_data_type=dtype, intermediate_data_type="float32", compute_data_type="float32")
    tokens, heads = 256, 4
    q, k, v = (g.tensor(dim=(tokens, heads, width), name=name) for name in "qkv")
    gates = (tokens, heads) if op == "gdn" else (tokens, heads, width)
    gate = g.tensor(dim=gates, data_type="float32", name="g")
    beta = g.tensor(dim=(tokens, heads), data_type="float32", name="beta")
    cu_seqlens = g.tensor(dim=(3,), data_type="int32", name="cu_seqlens")
    outputs = getattr(g, op)(q=q, k=k, v=v, g=gate, beta=beta, cu_seqlens=cu_seqlens)
    outputs[0].set_output(True)
    return g


def explained(graph, device):
    decision = graph.explain(device=cudnn_core.DeviceInfo.preset(device))
    return {engine.id: engine for engine in decision.engines}


def codes(engine):
    return {reason.code for reason in engine.reasons}


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_hopper_engine_is_the_best(op):
    decision = attention(op).explain(device=cudnn_core.DeviceInfo.preset("H200"))
    (best,) = (engine for engine in decision.engines if engine.id == f"linear_attention:{op}_sm90@1")
    assert (best.state, codes(best)) == ("selected", set())


def test_engines_of_other_ops_and_generations_are_filtered():
    engines = explained(attention("gdn"), "B200")
    assert codes(engines["linear_attention:gdn_sm90@1"]) == {"device.sm_variant"}
    assert {"op.unsupported", "device.sm_variant"} <= codes(engines["linear_attention:kda_sm90@1"])
    assert "op.unsupported" in codes(engines["linear_attention:gdn_decode@1"])


def test_head_size_without_a_kernel_is_named():
    engine = explained(attention("gdn", width=96), "H200")["linear_attention:gdn_sm90@1"]
    assert codes(engine) == {"shape.range"}
    assert {reason.subject for reason in engine.reasons} == {"q.dim[-1]", "v.dim[-1]"}


def test_import_is_light():
    program = (
        "import sys, linear_attention.engines; print([m for m in ('torch', 'numpy', 'cutlass') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
