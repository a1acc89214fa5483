"""Which engine of the backend a plan is of, and what a no of cuDNN's becomes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cudnn_core

ENGINE = "cudnn_backend:graph@1"
START = "from programs import *\n"


def test_members_are_variants_of_one_engine():
    entry = next(entry for entry in cudnn_core.registry().engines if entry.id == ENGINE)
    assert entry.spec.has_variant("eng7")
    assert entry.spec.has_variant("eng0")
    assert not any(map(entry.spec.has_variant, ("engine7", "eng07", "eng" + "9" * 23)))  # one name each


def test_import_is_light():
    program = (
        "import sys, cudnn_backend.engines, cudnn_backend.api;"
        "print([m for m in ('torch', 'numpy', 'cudnn', 'cudnn._compiled_module') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_check_support_loads_nothing_and_asks_nobody(fake):
    fake.run(
        START
        + """
import sys
from pathlib import Path
from cudnn_backend.engines import BackendGraph
verdict = BackendGraph().check_support(matmul().freeze("cuda"), CTX)
assert isinstance(verdict, cudnn_core.Support), verdict
assert [tuple(config.knobs) for config in verdict.configs] == [()]
assert "cudnn._compiled_module" not in sys.modules
assert "libcudnn.so.9" not in open("/proc/self/maps").read()
"""
    )


@pytest.mark.parametrize(("sizes", "us"), [((64, 32, 16), 6.0), ((8192, 8192, 8192), 1852.2)])
def test_the_prior_is_the_roofline_but_no_less_than_a_launch(fake, sizes, us):
    fake.run(
        START
        + f"""
row = next(row for row in matmul(*{sizes}).explain(device=DEVICE).engines if row.id == "cudnn_backend:graph@1")
assert row.basis == "prior" and abs(row.us / {us} - 1) < 0.01, row
"""
    )


@pytest.mark.parametrize(
    ("device", "dtype", "short"),
    [
        ("H200", "fp8_e4m3", True),
        ("H200", "fp8_e5m2", True),
        ("H200", "bfloat16", False),
        ("B200", "fp8_e4m3", False),
    ],
)
def test_fp8_products_on_hopper_have_the_note_of_their_sums(fake, device, dtype, short):
    """And a graph that deselects it is not served by cuDNN there."""
    fake.run(
        START
        + f"""
from cudnn_backend.engines import BackendGraph
device = cudnn_core.DeviceInfo.preset({device!r})
def product():
    graph = cudnn_core.Graph(io_data_type={dtype!r}, intermediate_data_type="float32", compute_data_type="float32")
    c = graph.matmul(A=graph.tensor(dim=(1, 64, 32)), B=graph.tensor(dim=(1, 32, 16), stride=(512, 1, 32)))
    c.set_output(True).set_data_type("bfloat16")
    return graph
graph = product()
verdict = BackendGraph().check_support(graph.freeze("cuda"), ExecutionContext(None, device))
assert verdict.notes == {{"cuda_graph", "declines_at_build"}} | ({{"reduced_precision_reduction"}} if {short} else set())
graph = product().deselect_numeric_notes([cudnn_core.numerical_note.REDUCED_PRECISION_REDUCTION])
row = next(row for row in graph.explain(device=device).engines if row.id == "cudnn_backend:graph@1")
assert ("policy.note_barred" in [reason.code for reason in row.reasons]) == {short}, row
"""
    )


def test_the_prior_of_several_products_is_what_their_engines_are_known_for(fake):
    """One twentieth of the peak. cuDNN 9.19 takes 17.5 ms for this graph on an H200."""
    fake.run(
        START
        + """
def prior(products):
    graph = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    x = graph.tensor(dim=(1, 8192, 4096))
    made = [graph.matmul(x, graph.tensor(dim=(1, 4096, 14336 // products))) for _ in range(products)]
    y = graph.swish(made[0])
    graph.mul(y, made[-1]).set_output(True).set_data_type("bfloat16")
    row = next(row for row in graph.explain(device=DEVICE).engines if row.id == "cudnn_backend:graph@1")
    assert row.basis == "prior", row
    return row.us

peak = DEVICE.peak("bfloat16")
flops = 2 * 8192 * 4096 * 14336
assert abs(prior(2) / (1e6 * flops / (0.05 * peak)) - 1) < 0.01, prior(2)
assert prior(1) < prior(2) / 5  # the same work
"""
    )


def test_a_runtime_size_that_may_be_0_is_declined(fake):
    fake.run(
        START
        + """
from cudnn_backend.engines import BackendGraph
verdicts = [BackendGraph().check_support(matmul(cudnn_core.Dim("m", min=least)).freeze("cuda"), CTX) for least in (0, 1)]
assert {r.code for r in verdicts[0].reasons} == {"shape.range"}  # every size of the range must run
assert verdicts[1]
"""
    )


def test_without_a_variant_the_first_engine_that_builds_is_taken(fake):
    fake.run(
        START
        + """
count = Fake()
plan = build(matmul())
assert (plan.choice, plan.variant) == (("eng0", "KERNEL_CFG=20"), "eng0")
count.set("failing_engines", 0b11)
assert build(matmul(128)).choice == ("eng2", "KERNEL_CFG=22")
count.set("failing_engines", 0b111)
for _ in range(2):
    try:
        build(matmul(256))
    except cudnn_core.BuildError as error:
        assert "the fake's engine does not build" in str(error), error
        assert error.decline.code == "x.cudnn_backend.unsupported", error.decline
    else:
        raise AssertionError
"""
    )


def test_a_variant_is_honoured_exactly(fake):
    fake.run(
        START
        + """
count = Fake()
assert build(matmul(), config("eng2")).choice == ("eng2", "KERNEL_CFG=22")
plan = build(matmul(), config("eng1", engine_knobs="KERNEL_CFG=23"))
assert plan.choice == ("eng1", "KERNEL_CFG=23")
plan.bind(layout(matmul()))((256, 512, 768), 4096, 0)
assert count.last()["engine"] == 1
count.set("failing_engines", 0b10)
for chosen, text in (
    (config("eng1"), "does not build"),
    (config("eng7"), "Invalid engine id"),
    (config("eng1", engine_knobs="KERNEL_CFG"), "knob.domain"),
    (config("eng1", engine_knobs="NO_SUCH_KNOB=1"), "knob.domain"),
    (config("", engine_knobs="KERNEL_CFG=21"), "knob.domain"),
):
    try:
        build(matmul(128), chosen)
    except cudnn_core.BuildError as error:
        assert text in str(error) or text == error.decline.code, error
        assert error.decline is not None
    else:
        raise AssertionError(chosen)
"""
    )


def test_members_are_the_engines_that_heuristics_propose(fake):
    fake.run(
        START
        + """
from cudnn_backend.engines import BackendGraph
engine, frozen = BackendGraph(), matmul().freeze("cuda")
found = engine.members(frozen, CTX)
assert [(c.variant, c.knobs) for c in found] == [(f"eng{i}", {"engine_knobs": f"KERNEL_CFG={20 + i}"}) for i in range(3)]
assert len(engine.members(frozen, CTX, limit=2)) == 2
for member in found:
    assert build(matmul(), config(member.variant, **member.knobs)).choice == (member.variant, member.knobs["engine_knobs"])
"""
    )


def test_the_core_pins_an_engine_of_the_backend_with_its_knobs(fake):
    fake.run(
        START
        + """
def planned(graph, **settings):
    with cudnn_core.configure(**{"plugins": {"allow": ["cudnn_backend"]}, **settings}):
        return graph.plan(device=DEVICE)

rule = {"use": "cudnn_backend:graph/eng7", "knobs": {"engine_knobs": "KERNEL_CFG=21"}}
count = Fake()
count.set("engine_count", 8)
plan = planned(matmul(), rule=[rule], strict=True)
assert (plan.variant, plan.config.variant) == ("eng7", "eng7"), plan
assert plan.config.knobs["engine_knobs"] == "KERNEL_CFG=21"
assert plan._compiled.choice == ("eng7", "KERNEL_CFG=21")
own = planned(matmul(128))
assert (own.variant, own.config.variant) == ("eng0", "")  # known afterwards; what was asked for stays
count.set("failing_engines", 1 << 7)
try:
    planned(matmul(256), rule=[{**rule, "strict": True}])
except cudnn_core.NoEngineError as error:
    row = next(row for row in error.decision.engines if row.id.startswith("cudnn_backend:graph@1"))
    assert row.state == "build_failed" and "does not build" in str(row.reasons[0]), row
else:
    raise AssertionError
"""
    )


def test_the_core_asks_for_members_and_each_of_them_can_be_pinned(fake):
    fake.run(
        START
        + """
from cudnn_core._members import ask
from cudnn_core._planner import survey

with cudnn_core.configure(plugins={"allow": ["cudnn_backend"]}):
    found = survey(matmul().freeze("cuda"), DEVICE)
    (candidate,) = [item.candidate for item in found.ranked if item.id == "cudnn_backend:graph@1"]
    members = ask(found.request, candidate)
assert [(c.variant, c.knobs["engine_knobs"]) for c in members.configs] == [(f"eng{i}", f"KERNEL_CFG={20 + i}") for i in range(3)]
assert not members.reasons
for config in members.configs:
    rule = {"use": f"cudnn_backend:graph/{config.variant}", "knobs": dict(config.knobs)}
    with cudnn_core.configure(rule=[rule], strict=True):
        plan = matmul().plan(device=DEVICE)
    assert (plan.config, plan.variant) == (config, config.variant), plan
    assert plan._compiled.choice == (config.variant, config.knobs["engine_knobs"])
"""
    )


def test_a_no_of_cudnn_is_asked_for_once_and_told_with_its_reason(fake):
    fake.run(
        START
        + """
count = Fake()
count.set("heuristics_fail", 1)
seen = []
for _ in range(3):
    try:
        build(matmul())
    except cudnn_core.BuildError as error:
        seen.append((str(error), error.decline, count.get("heuristics_asked")))
assert len(seen) == 3 and len({asked for *_, asked in seen}) == 1 and len({text for text, *_ in seen}) == 1, seen
assert seen[0][1].code.startswith("x.cudnn_backend."), seen
count.set("heuristics_fail", 0)
build(matmul(128))  # another graph
"""
    )


def test_plan_falls_through_to_the_next_engine_with_the_reason_in_the_decision(fake):
    fake.run(
        START
        + """
Fake().set("heuristics_fail", 1)
graph = matmul()
with cudnn_core.configure(plugins={"allow": ["cudnn_backend"]}):
    try:
        graph.plan(device=DEVICE)
    except cudnn_core.NoEngineError as error:
        row = next(row for row in error.decision.engines if row.id == "cudnn_backend:graph@1")
        assert row.state == "build_failed" and row.reasons, row
    else:
        raise AssertionError
"""
    )


@pytest.mark.parametrize("device", ["A100", "H200", "B200", "R200"])
def test_plans_are_built_for_devices_that_are_not_here(fake, device):
    fake.run(
        START
        + f"""
import json
device = cudnn_core.DeviceInfo.preset({device!r})
with cudnn_core.configure(plugins={{"allow": ["cudnn_backend"]}}):
    plan = matmul().plan(device=device)
assert plan.engine == "cudnn_backend:graph@1"
facts = json.loads(Fake().device_json())
assert (facts["deviceVer"], facts["multiProcessorCount"]) == (10 * device.sm_version, device.sm_count), facts
"""
    )


def test_cpu_is_not_its_device():
    graph = cudnn_core.Graph(io_data_type="float16", compute_data_type="float32")
    graph.relu(input=graph.tensor(dim=(1, 4, 4))).set_output(True)
    row = next(row for row in graph.explain(device="cpu").engines if row.id == ENGINE)
    assert (row.state, row.reasons[0].code) == ("filtered", "device.type")


@pytest.mark.L2
def test_the_conformance_kit_passes_as_far_as_it_goes_without_a_gpu(fake, tmp_path):
    said = fake.run(
        f"""
import os, pytest
os.chdir({str(tmp_path)!r})
raise SystemExit(pytest.main(["-q", "-p", "cudnn_core.testing", "--cudnn-plugin", "cudnn_backend"]))
"""
    )
    assert "check_support accepts 0" not in said


def test_the_readme_has_every_op_and_what_the_core_lacks():
    from cudnn_backend import lower

    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    served, _, missing = text.partition("## Which libcudnn")[0].partition("The binding has these operations too")
    assert set(re.findall(r"`([a-z]\w+)`", served.partition("| family | ops |")[2])) == set(lower.OPS)
    assert set(re.findall(r"`([a-z]\w+)`", missing)) == set(lower.MISSING)
