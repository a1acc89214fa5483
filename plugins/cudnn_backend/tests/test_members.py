"""The backend's engines as further candidates, on request."""

from __future__ import annotations

import pytest

START = "from programs import *\nfrom cudnn_backend import members\nfrom cudnn_backend.engines import BackendGraph\n"
OFFERED = "[(c.variant, c.knobs) for c in BackendGraph().check_support(matmul().freeze('cuda'), CTX).configs]"


@pytest.fixture
def graph_file(tmp_path):
    from programs import matmul

    path = tmp_path / "graph.json"
    path.write_text(matmul().to_json(), encoding="utf-8")
    return path


def test_they_are_offered_from_the_request_on_behind_the_own_choice(fake, graph_file, tmp_path):
    cache = {"CUDNN_CORE_CACHE_DIR": str(tmp_path / "cache")}
    assert fake.run(START + f"print({OFFERED})", **cache).strip() == "[('', {})]"
    said = fake.run(
        START + f"raise SystemExit(members.main([{str(graph_file)!r}, '--device', 'H200']))", **cache
    ).splitlines()
    assert said[:2] == ["eng1[KERNEL_CFG=21] offered", "eng2[KERNEL_CFG=22] offered"]
    assert said[2] == "2 engines beside the backend's own choice on NVIDIA H200"
    expected = [("", {}), ("eng1", {"engine_knobs": "KERNEL_CFG=21"}), ("eng2", {"engine_knobs": "KERNEL_CFG=22"})]
    assert fake.run(START + f"print({OFFERED})", **cache).strip() == str(expected)
    # Another graph, another device, another libcudnn: nobody has asked.
    fake.run(
        START
        + """
count = lambda graph, device: len(BackendGraph().check_support(graph.freeze("cuda"), ExecutionContext(None, device)).configs)
assert count(matmul(), DEVICE) == 3
assert count(matmul(128), DEVICE) == count(matmul(), cudnn_core.DeviceInfo.preset("B200")) == 1
""",
        **cache,
    )
    other = fake.build(tmp_path / "other")
    assert fake.run(START + f"print({OFFERED})", other, **cache).strip() == "[('', {})]"


def test_the_core_plans_the_one_that_a_rule_pins(fake, graph_file, tmp_path):
    """A variant is an entry of the graph's plans as soon as it is offered."""
    fake.run(
        START
        + f"""
assert members.main([{str(graph_file)!r}, "--device", "H200"]) == 0
with cudnn_core.configure(plugins={{"allow": ["cudnn_backend"]}}):
    graph = matmul()
    graph.device_property = DEVICE
    graph.create_execution_plans()
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
assert names[1:] == [f"cudnn_backend:graph@1/eng{{i}}[engine_knobs=KERNEL_CFG=2{{i}}, heuristics=A]" for i in (1, 2)], names
graph.build_plan_at_index(2)
assert graph.selected_plan.variant == "eng2"
""",
        CUDNN_CORE_CACHE_DIR=str(tmp_path / "cache"),
    )


def test_what_does_not_build_is_not_offered(fake, graph_file, tmp_path):
    cache = {"CUDNN_CORE_CACHE_DIR": str(tmp_path / "cache")}
    said = fake.run(
        START + f"Fake().set('failing_engines', 2)\nmembers.main([{str(graph_file)!r}, '--device', 'H200'])", **cache
    ).splitlines()
    assert said[0].startswith("eng1[KERNEL_CFG=21] does not build: ")
    assert "the fake's engine does not build" in said[0]
    assert fake.run(START + f"print(len({OFFERED}))", **cache).strip() == "2"


def test_no_engine_is_a_failure_of_the_command(fake, graph_file, tmp_path):
    fake.run(
        START
        + f"""
import contextlib, io
Fake().set("heuristics_fail", 1)
for graph, text in (({str(graph_file)!r}, "no engine"), ("no such file", "no such file")):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert members.main([graph, "--device", "H200"]) == 1
    assert text in said.getvalue(), said.getvalue()
""",
        CUDNN_CORE_CACHE_DIR=str(tmp_path / "cache"),
    )


def test_who_never_asked_looks_once(fake, tmp_path):
    fake.run(
        START
        + """
looks, read = [], members._read
members._read = lambda key: looks.append(key) or read(key)
for m in (64, 128, 256):
    BackendGraph().check_support(matmul(m).freeze("cuda"), CTX)
assert len(looks) == 1
""",
        CUDNN_CORE_CACHE_DIR=str(tmp_path / "cache"),
    )
