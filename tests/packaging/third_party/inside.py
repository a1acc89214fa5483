"""What holds where the wheel is installed. Run by test_installed.py with the throw-away environment's interpreter, which names
the environment's site-packages in ACME_SITE. Not collected by itself: its name is no test module's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import cudnn_core

FUSED, NORM = "acme_cpu:fused_matmul@1", "acme_cpu:row_norm@1"
REFERENCE = "torch_reference:eager@1"


def new_graph(**types):
    return cudnn_core.Graph(
        **{"io_data_type": "float32", "compute_data_type": "float32", "intermediate_data_type": "float32", **types}
    )


def linear(**types):
    """x [2, 24, 16] @ w + b, gelu."""
    graph = new_graph(**types)
    x, w, b = (
        graph.tensor((2, 24, 16), name="x"),
        graph.tensor((1, 16, 32), name="w"),
        graph.tensor((1, 1, 32), name="b"),
    )
    graph.gelu(graph.bias(graph.matmul(x, w), b)).set_output(True).set_name("y")
    return graph


def gated(rows=24):
    graph = new_graph()
    x, gate, scale = (graph.tensor(d, name=n) for d, n in (((rows, 64), "x"), ((rows, 64), "gate"), ((1, 64), "scale")))
    graph.acme_rmsnorm_gated(x, gate, scale, epsilon=1e-4)[0].set_output(True).set_name("y")
    return graph


def execute(plan, operands):
    buffer = torch.empty(plan.workspace_size + 256, dtype=torch.uint8)
    start = -buffer.data_ptr() % 256
    plan.execute(operands, buffer[start:])


def rows(decision):
    return {row.id: row for row in decision.engines}


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """Writes a configuration that CUDNN_CORE_CONFIG names, and has it read."""

    def write(text):
        path = tmp_path / "deployment.toml"
        path.write_text(f"schema = 1\n{text}", encoding="utf-8")
        monkeypatch.setenv("CUDNN_CORE_CONFIG", str(path))
        cudnn_core.configure()
        return path

    yield write
    monkeypatch.undo()
    cudnn_core.configure()


def test_found_by_its_entry_point():
    (plugin,) = [item for item in cudnn_core.registry().plugins if item.plugin == "acme_cpu"]
    assert (plugin.dist, plugin.version, plugin.state) == ("acme-cpu-engines", "0.1.0", "eligible")
    assert Path(plugin.origin).parent == Path(os.environ["ACME_SITE"])
    engines = {str(entry): entry.state for entry in cudnn_core.registry().engines if entry.plugin == "acme_cpu"}
    assert engines == {FUSED: "eligible", NORM: "eligible"}


def test_code_comes_from_the_wheel():
    import acme_cpu.engines

    assert Path(acme_cpu.engines.__file__).is_relative_to(os.environ["ACME_SITE"])
    assert Path(acme_cpu.__file__).with_name("py.typed").exists()


def test_ranks_before_the_reference():
    decision = linear().explain(device="cpu")
    assert decision.selected == FUSED
    found = rows(decision)
    assert (found[FUSED].rank, found[FUSED].basis) == (1, "model")
    assert found[FUSED].us > 0
    assert (found[REFERENCE].state, found[REFERENCE].rank) == ("outranked", 2)
    assert [reason.code for reason in found[REFERENCE].reasons] == ["rank.slower"]


def test_explains_what_it_declines():
    graph = new_graph()
    x = graph.tensor((8, 8))
    graph.matmul(graph.matmul(x, x), x).set_output(True)
    found = rows(graph.explain(device="cpu"))
    assert found[FUSED].state == "declined"
    assert [(r.code, r.subject, r.expected, r.actual) for r in found[FUSED].reasons] == [("op.count", "matmul", 1, 2)]

    found = rows(linear(io_data_type="bfloat16").explain(device="cpu"))
    assert found[FUSED].state == "filtered"
    assert {r.code for r in found[FUSED].reasons} == {"dtype.unsupported"}

    found = rows(linear().explain(device="B200"))
    assert [r.code for r in found[FUSED].reasons] == ["device.type"]


def test_disabled_by_a_file(config_file):
    path = config_file('[engines]\ndisable = ["acme_cpu:*"]\n')
    decision = linear().explain(device="cpu")
    row = rows(decision)[FUSED]
    assert decision.selected == REFERENCE
    assert row.state == "disabled"
    assert [(r.code, r.origin) for r in row.reasons] == [("config.disabled", f"{path}:3")]


def test_denied_by_a_file(config_file):
    config_file('[plugins]\ndeny = ["acme_*"]\n')
    assert rows(linear().explain(device="cpu"))[FUSED].state == "disabled"
    with pytest.raises(AttributeError, match=r"plugin acme_cpu is disabled: config\.not_allowed.*cudnn_core|config"):
        new_graph().acme_rmsnorm_gated  # noqa: B018  a denied plugin's op is gone too


def test_knobs_from_a_file_reach_the_plan(config_file):
    config_file('[engine."acme_cpu:fused_matmul".knobs]\nblock_rows = 16\n')
    assert linear().plan(device="cpu").knobs["block_rows"] == 16
    config_file('[engine."acme_cpu:fused_matmul".knobs]\nblock_rows = 17\n')
    with pytest.warns(cudnn_core.ConfigWarning, match=r"deployment\.toml:3.*knob\.domain"):
        row = rows(linear().explain(device="cpu"))[FUSED]
    assert (row.state, [r.code for r in row.reasons]) == ("declined", ["knob.domain"])


def test_a_rule_pins_it_by_its_ops_dims(config_file):
    config_file('[[rule]]\nmatch = { op = "acme_rmsnorm_gated", cols = "..64" }\nuse = "torch_reference:eager"\n')
    assert gated().explain(device="cpu").selected == REFERENCE


def test_linear_matches_torch():
    torch.manual_seed(0)
    x, w, b, y = torch.randn(2, 24, 16), torch.randn(1, 16, 32), torch.randn(1, 1, 32), torch.empty(2, 24, 32)
    plan = linear().plan(device="cpu")
    assert plan.engine == FUSED
    execute(plan, {"x": x, "w": w, "b": b, "y": y})
    torch.testing.assert_close(y, functional.gelu(x @ w + b), rtol=1e-5, atol=1e-5)


def test_layernorm_matches_torch():
    torch.manual_seed(0)
    x, scale, bias, y = torch.randn(5, 7, 48), torch.randn(1, 1, 48), torch.randn(1, 1, 48), torch.empty(5, 7, 48)
    graph = new_graph()
    tensors = [graph.tensor_like(t) for t in (x, scale, bias)]
    out, _, _ = graph.layernorm(*tensors, epsilon=1e-5, norm_forward_phase="INFERENCE")
    out.set_output(True)
    plan = graph.plan(device="cpu")
    assert plan.engine == NORM
    execute(plan, {**dict(zip(tensors, (x, scale, bias), strict=True)), out: y})
    torch.testing.assert_close(y, functional.layer_norm(x, (48,), scale[0, 0], bias[0, 0], 1e-5), rtol=1e-5, atol=1e-5)


def test_own_op_from_builder_json_and_reference():
    torch.manual_seed(0)
    x, gate, scale = torch.randn(24, 64), torch.randn(24, 64), torch.randn(1, 64)
    wanted = functional.rms_norm(x, (64,), scale[0], 1e-4) * functional.silu(gate)
    built = gated()
    for graph in (built, cudnn_core.Graph.from_json(built.to_json())):
        assert graph.key() == built.key()
        for engine, disable in ((NORM, []), (REFERENCE, ["acme_cpu:*"])):
            with cudnn_core.configure(disable=disable):
                plan = graph.plan(device="cpu")
            assert plan.engine == engine
            y = torch.empty(24, 64)
            execute(plan, {"x": x, "gate": gate, "scale": scale, "y": y})
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_own_op_is_checked_like_a_built_in_one():
    graph = new_graph()
    with pytest.raises(cudnn_core.GraphTypeError, match=r"epsilom.*epsilon"):
        graph.acme_rmsnorm_gated(graph.tensor((2, 8)), graph.tensor((2, 8)), graph.tensor((1, 8)), epsilom=1.0)
    y, _ = graph.acme_rmsnorm_gated(graph.tensor((2, 8)), graph.tensor((2, 4)), graph.tensor((1, 8)), name="norm")
    y.set_output(True)
    with pytest.raises(cudnn_core.GraphError, match=r"norm\.gate") as caught:
        graph.validate()
    assert caught.value.port == "gate"


def test_a_bad_workspace_is_refused_before_anything_is_written():
    plan = linear().plan(device="cpu")
    assert plan.workspace_size > 0
    y = torch.full((2, 24, 32), 7.0)
    operands = {"x": torch.zeros(2, 24, 16), "w": torch.zeros(1, 16, 32), "b": torch.zeros(1, 1, 32), "y": y}
    small = torch.empty(plan.workspace_size - 256, dtype=torch.uint8)  # 255 of the bytes are room for alignment
    for workspace in (None, small):
        with pytest.raises(cudnn_core.ExecutionError, match="workspace"):
            plan.execute(operands, workspace)
    assert (y == 7.0).all()


def test_hooks_see_the_selection():
    from acme_cpu import telemetry

    before = telemetry.counts().get(FUSED, 0)
    linear().plan(device="cpu")
    assert telemetry.counts()[FUSED] == before + 1


def test_saved_plan_loads_with_and_without_trust(tmp_path):
    plan = linear().plan(device="cpu")
    plan.save(tmp_path / "linear.plan")
    for trust in (False, True):
        loaded = cudnn_core.Plan.load(tmp_path / "linear.plan", trust=trust)
        assert (loaded.engine, loaded.workspace_size) == (plan.engine, plan.workspace_size)
