"""Saved plans: a JSON header and hashed payloads. Damage, tampering and foreign files are BuildErrors; no code is loaded."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest

import cudnn_core
from cudnn_core import BuildError, Dim, Graph, GraphError, Plan, PlanConfig, Support
from cudnn_core.testing import temporary_plugin

torch = pytest.importorskip("torch")
F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}
START = 16 + 8 + 32


class Compiled:
    workspace_size = 0

    def __init__(self, code=b"built"):
        self.code = code

    def execute(self, pack, ctx):
        pass

    def serialize(self):
        return {"entry": "kernel"}, {"cubin": self.code, "empty": b""}


class Engine:
    loads: list = []

    def check_support(self, graph, ctx):
        return Support((PlanConfig("", {}),))

    def build_plan(self, graph, config, ctx):
        return Compiled()

    def load_plan(self, header, payloads, graph, ctx):
        self.loads.append((header, payloads))
        return Compiled(payloads["cubin"])


MANIFEST = {"plugin": "saver", "engine": [{"name": "e", "ops": ["*"], "anchors": ["*"], "devices": ["cpu", "cuda"],
            "knobs": {"tile": {"type": "int", "choices": [1, 2]}}, "aot": True}]}  # fmt: skip


def graph():
    g = Graph(**F32)
    x = g.tensor(dim=(1, Dim("m", max=16), 8), name="x", uid=11)
    w = g.tensor(dim=(1, 8, 4), name="w")
    g.gelu(g.matmul(x, w)).set_output(True).set_name("y")
    return g


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "reference.plan"
    graph().plan(device="cpu").save(path)
    return path


@pytest.fixture
def saver(tmp_path):
    Engine.loads = []
    with temporary_plugin(MANIFEST, {"e": Engine}, isolated=True):
        path = tmp_path / "saver.plan"
        graph().plan(device="cpu").save(path)
        yield path


def test_a_loaded_plan_runs_and_knows_its_decision(saved):
    plan = Plan.load(saved)
    x, w, y = torch.randn(1, 5, 8), torch.randn(1, 8, 4), torch.empty(1, 5, 4)
    plan.execute({11: x, "w": w, "y": y})
    torch.testing.assert_close(y, torch.nn.functional.gelu(x @ w))
    assert plan.decision.selected == plan.engine == "torch_reference:eager@1"
    assert plan.graph.key == graph().key()


def test_saving_is_deterministic_and_round_trips(saved, tmp_path):
    again = tmp_path / "again.plan"
    Plan.load(saved).save(again)
    assert again.read_bytes() == saved.read_bytes()


def test_saving_replaces_whole_files(saved):
    saved.write_bytes(b"old")
    graph().plan(device="cpu").save(saved)
    Plan.load(saved)
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_an_unwritable_place_is_a_build_error(tmp_path):
    with pytest.raises(BuildError, match="can't be written"):
        graph().plan(device="cpu").save(tmp_path / "no" / "such" / "dir.plan")


def test_a_missing_file_is_a_build_error(tmp_path):
    with pytest.raises(BuildError, match=r"none\.plan can't be read"):
        Plan.load(tmp_path / "none.plan")


def test_every_flipped_byte_is_found(saver):
    data = saver.read_bytes()
    for offset in [*range(START), *range(START, len(data), 7), len(data) - 1]:
        damaged = bytearray(data)
        damaged[offset] ^= 0x40
        saver.write_bytes(bytes(damaged))
        with pytest.raises(BuildError):
            Plan.load(saver, trust=True)
    assert Engine.loads == []


@pytest.mark.parametrize("keep", [0, 5, 16, 40, START, START + 10, -1])
def test_every_truncation_is_found(saver, keep):
    data = saver.read_bytes()
    saver.write_bytes(data[:keep])
    with pytest.raises(BuildError):
        Plan.load(saver)
    saver.write_bytes(data + b"x")
    with pytest.raises(BuildError, match="after its last payload"):
        Plan.load(saver)


def rewrite(path, change):
    """A file whose header was changed and correctly re-hashed: what someone who knows the format can write."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data, 16)
    header = json.loads(data[START : START + length])
    change(header)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(
        b"".join((data[:16], struct.pack("<Q", len(text)), hashlib.sha256(text).digest(), text, data[START + length :]))
    )


def put(**fields):
    return lambda header: header.update(fields)


def decided(**fields):
    """A signed decision with other content."""
    made = graph().explain(device="cpu")
    parts = {"graph_key": made.graph_key, "device": made.device, "engines": made.engines, **fields}
    other = cudnn_core.Decision(**parts)
    return {**other.to_dict(), "digest": other.digest}


def decide(header, **fields):
    header["decision"] = decided(**fields)


FORGED = {
    "schema": (put(schema=2), "unknown schema"),
    "unknown field": (put(code="import os"), "unknown field 'code'"),
    "missing field": (lambda h: h.pop("knobs"), "'knobs' is missing"),
    "wrong type": (put(graph=[]), r"header\.graph: expected an object"),
    "graph key": (put(graph_key="0" * 64), "does not have the key"),
    "graph": (lambda h: h["graph"]["nodes"][0].update(op="gelo"), "gelo"),
    "engine": (put(engine="saver:f@1"), "saver:f"),
    "plugin": (put(engine="elsewhere:e@1", dist="elsewhere-engines"), "pip install elsewhere-engines"),
    "revision": (put(engine="saver:e@2"), "revision 1"),
    "knob": (put(knobs={"tile": 7}), r"knob\.domain"),
    "knob name": (put(knobs={"tiel": 1}), r"knob\.unknown"),
    "fewer knobs": (put(knobs={}), "other knobs"),
    "variant": (put(variant="v1"), "variant"),
    "decision": (lambda h: h["decision"].update(selected="saver:x@1"), "decision"),
    "payload table": (lambda h: h["payloads"][0].update(mode="x"), "unknown field 'mode'"),
    "payload size": (lambda h: h["payloads"][0].update(size=-3), r"payloads\[0\]\.size"),
    "payload size type": (lambda h: h["payloads"][0].update(size=True), r"payloads\[0\]\.size"),
    "payload name": (lambda h: h["payloads"][0].update(name=[]), r"payloads\[0\]\.name"),
    "payload row": (lambda h: h["payloads"].append(5), r"payloads\[2\]"),
    "one payload twice": (lambda h: h["payloads"].append(h["payloads"][0]), "two payloads 'cubin'"),
    "decision of another graph": (lambda h: decide(h, graph_key="0" * 64), "of another graph"),
    "decision of another engine": (lambda h: h.update(decision=decided(engines=[])), "of another engine"),
    "decision with other knobs": (put(knobs={"tile": 2}), "of another config"),
    "device": (lambda h: h["device"].update(type="tpu"), "tpu"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_header_is_a_build_error_that_names_the_field(saver, name):
    change, match = FORGED[name]
    rewrite(saver, change)
    with pytest.raises(BuildError, match=match):
        Plan.load(saver, trust=True)
    assert Engine.loads == []


def test_a_plan_that_needs_more_workspace_than_its_file_states_is_refused(tmp_path):
    class Greedy(Engine):
        size = 1000

        def build_plan(self, graph, config, ctx):
            return type("P", (Compiled,), {"workspace_size": Greedy.size})()

    with temporary_plugin(MANIFEST, {"e": Greedy}, isolated=True):
        path = tmp_path / "greedy.plan"
        plan = graph().plan(device="cpu")
        plan.save(path)
        assert Plan.load(path).workspace_size == plan.workspace_size
    Greedy.size = 2000
    with temporary_plugin(MANIFEST, {"e": Greedy}, isolated=True):
        with pytest.raises(BuildError, match="workspace"):
            Plan.load(path)


def test_another_plan_can_not_be_added_to_a_loaded_graph():
    g = cudnn_core.pygraph()
    g.deserialize(built().serialize(as_bytes=True))
    with pytest.raises(GraphError, match="loaded with its plan"):
        g.create_execution_plan("torch_reference:eager")


def test_a_handle_that_is_none_is_not_the_files_fault(saved):
    with pytest.raises(cudnn_core.HandleError):
        Plan.load(saved, handle=5)


def test_native_payloads_are_used_only_with_trust(saver):
    plan = Plan.load(saver)
    assert Engine.loads == []
    assert plan._compiled.code == b"built"
    Plan.load(saver, trust=True)
    assert Engine.loads == [({"entry": "kernel"}, {"cubin": b"built", "empty": b""})]


def test_a_load_plan_that_raises_is_a_build_error(saver):
    class Broken(Engine):
        def load_plan(self, header, payloads, graph, ctx):
            raise RuntimeError("old format")

    with temporary_plugin({**MANIFEST, "plugin": "saver"}, {"e": Broken}, isolated=True):
        with pytest.raises(BuildError, match="old format"):
            Plan.load(saver, trust=True)
        assert cudnn_core.registry().find("saver:e").state == "quarantined"


def test_an_engine_that_now_declines_is_a_build_error(saver):
    class Declining(Engine):
        def check_support(self, graph, ctx):
            return cudnn_core.Declined((cudnn_core.Decline("shape.range", "x"),))

    with temporary_plugin(MANIFEST, {"e": Declining}, isolated=True):
        with pytest.raises(BuildError, match=r"shape\.range"):
            Plan.load(saver)


def test_a_disabled_engine_does_not_come_back_by_a_file(saver):
    with cudnn_core.configure(disable=["saver:e"]), pytest.raises(BuildError, match="disabled"):
        Plan.load(saver)


def test_a_plan_for_a_gpu_does_not_load_on_a_cpu(tmp_path):
    with temporary_plugin(MANIFEST, {"e": Engine}, isolated=True):
        path = tmp_path / "b200.plan"
        graph().plan(device="B200").save(path)
        with pytest.raises(BuildError, match="built for"):
            Plan.load(path)


def test_a_file_without_the_engine_names_the_distribution(saver):
    with temporary_plugin({"plugin": "other"}, {}, isolated=True):
        with pytest.raises(BuildError, match="pip install"):
            Plan.load(saver)


@pytest.mark.parametrize("change", ["revision", "knob", "dist"])
def test_a_file_whose_engine_is_here_in_another_form_says_what_is_here(saver, change):
    row = {**MANIFEST["engine"][0]}
    row |= {"revision": {"revision": 2}, "knob": {"knobs": {}}, "dist": {"name": "f"}}[change]
    match = {"revision": "revision 2 is installed", "knob": "tile", "dist": "has no engine 'e'"}[change]
    with temporary_plugin({"plugin": "saver", "engine": [row]}, {row["name"]: Engine}, isolated=True):
        rewrite(saver, put(dist="saver-engines", version="7"))
        with pytest.raises(BuildError, match=match) as caught:
            Plan.load(saver)
    assert "pip install" not in str(caught.value)
    assert "made with saver-engines 7, installed is" in str(caught.value)


def test_a_disabled_engine_is_not_to_be_installed(saver):
    with cudnn_core.configure(disable=["saver:e"]), pytest.raises(BuildError, match=r"config\.disabled") as caught:
        Plan.load(saver)
    assert "pip install" not in str(caught.value)


# --- the frontend's forms
def built():
    g = graph()
    g.build()
    return g


@pytest.mark.parametrize("as_bytes", [True, False])
def test_serialize_and_deserialize_round_trip(as_bytes):
    data = built().serialize(as_bytes=as_bytes)
    assert isinstance(data, bytes if as_bytes else list)
    g = cudnn_core.pygraph()
    g.deserialize(data)
    x, w, y = torch.randn(1, 5, 8), torch.randn(1, 8, 4), torch.empty(1, 5, 4)
    g.execute({11: x, "w": w, g.find_tensor("y"): y})
    torch.testing.assert_close(y, torch.nn.functional.gelu(x @ w))
    assert g.get_workspace_size() == 0


def test_deserialize_accepts_every_argument_form():
    data = built().serialize(as_bytes=True)
    handle = cudnn_core.create_handle(device="cpu")
    for args, kwargs in (
        ((data,), {}),
        ((data, False), {}),
        ((handle, data), {}),
        ((handle, data, False), {}),
        ((), {"handle_": handle, "pyobj": data}),
        ((data,), {"enforce_precompiled": False}),
    ):
        g = cudnn_core.pygraph()
        g.deserialize(*args, **kwargs)
        assert g.is_planned


def test_enforce_precompiled_refuses_to_compile():
    data = built().serialize(as_bytes=True)
    with pytest.raises(BuildError, match="enforce_precompiled"):
        cudnn_core.pygraph().deserialize(data, True)


def test_deserialize_needs_an_empty_graph_and_bytes():
    data = built().serialize(as_bytes=True)
    with pytest.raises(GraphError, match="empty graph"):
        graph().deserialize(data)
    for bad in ("text", [300], [-1], 5):
        with pytest.raises((BuildError, GraphError)):
            cudnn_core.pygraph().deserialize(bad)
    with pytest.raises(GraphError, match="no parameter 'trusted'"):
        cudnn_core.pygraph().deserialize(data, trusted=True)


def test_kernels_can_be_left_out():
    with temporary_plugin(MANIFEST, {"e": Engine}, isolated=True):
        g = built()
        assert len(g.serialize(as_bytes=True, include_kernels=False)) < len(g.serialize(as_bytes=True))


def test_serialize_before_build_is_an_error():
    with pytest.raises(BuildError, match="no plan is built"):
        graph().serialize()
