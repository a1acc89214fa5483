"""The engines' verdicts and plans, without a GPU: what is offered, what is declined and why, and what a plan consists of."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from frost_gemm import engines
from graphs import bias_relu, dequantised, matmul, plain

import cudnn_core
from cudnn_core import BuildError, DeviceInfo, Dim, ExecutionContext, Plan, PlanConfig, Support, cute_dsl
from cudnn_core._cli import main

SM90, SM100 = "frost_gemm:sm90_wgmma@1", "frost_gemm:sm100_tcgen05@1"
ENGINES = {"H200": (SM90, engines.Sm90Wgmma), **dict.fromkeys(("B200", "B300", "R200"), (SM100, engines.Sm100Tcgen05))}
ARCHES = {"H200": ("90a", 90), "B200": ("100a", 100), "B300": ("103a", 103), "R200": ("107a", 107)}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """One cache for the module, and not the user's. The variable alone is not seen once the configuration has been read."""
    folder = str(tmp_path_factory.getbasetemp() / "frost cache")
    with pytest.MonkeyPatch.context() as patch, cudnn_core.configure(cache_dir=folder):
        patch.setenv("CUDNN_CORE_CACHE_DIR", folder)  # of child processes
        yield


def explained(graph, device):
    decision = graph.explain(device=DeviceInfo.preset(device))
    return next(row for row in decision.engines if row.id == ENGINES[device][0])


def reasons(graph, device="H200"):
    row = explained(graph, device)
    return {(reason.code, reason.subject) for reason in row.reasons} if row.state in ("declined", "filtered") else set()


def context(device):
    return ExecutionContext(None, DeviceInfo.preset(device))


def verdict(graph, device):
    return ENGINES[device][1]().check_support(graph.freeze("cuda"), context(device))


@pytest.mark.parametrize("device", ENGINES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"])
def test_the_engine_of_the_generation_offers_up_to_eight_settings(device, dtype):
    row = explained(plain(dtype), device)
    assert row.state == "selected"
    found = verdict(plain(dtype), device)
    assert isinstance(found, Support)
    assert 1 < len(found.configs) <= 8
    assert found.workspace == 0
    short = {"reduced_precision_reduction"} if device == "H200" and dtype.startswith("fp8") else set()
    tested = "ran_on_h200" if device == "H200" else "emulated_only"
    assert found.notes == {"deterministic", "cuda_graph", tested} | short


@pytest.mark.parametrize(
    ("graph", "noted"),
    [
        (lambda: plain("fp8_e4m3", b_dtype="fp8_e5m2", compute="fast_float_for_fp8"), True),
        (lambda: dequantised("fp8_e4m3"), False),
        (lambda: plain("int8", out="int32"), False),
    ],
)
def test_sums_of_reduced_precision_are_noted_by_what_the_matrix_unit_multiplies(graph, noted):
    assert ("reduced_precision_reduction" in verdict(graph(), "H200").notes) == noted


def test_a_user_can_do_without_sums_of_reduced_precision():
    def row(device, dtype):
        graph = plain(dtype)
        graph.deselect_numeric_notes([cudnn_core.numerical_note.REDUCED_PRECISION_REDUCTION])
        return explained(graph, device)

    assert {reason.code for reason in row("H200", "fp8_e4m3").reasons} == {"policy.note_barred"}
    assert row("H200", "bfloat16").state == "selected"
    assert row("B200", "fp8_e4m3").state == "selected"
    with cudnn_core.configure(require=["reduced_precision_reduction"]):
        assert {reason.code for reason in explained(plain("fp8_e4m3"), "B200").reasons} == {"policy.note_missing"}
        assert explained(plain("fp8_e4m3"), "H200").state == "selected"


@pytest.mark.parametrize(
    ("device", "state"), [("H200", "selected"), ("B200", "selected"), ("B300", "declined"), ("R200", "declined")]
)
def test_int8_goes_where_the_matrix_unit_multiplies_it(device, state):
    row = explained(plain("int8", out="int32"), device)
    assert row.state == state
    assert state == "selected" or {reason.code for reason in row.reasons} == {"dtype.unsupported"}


@pytest.mark.parametrize(
    ("graph", "device", "expected"),
    [
        (lambda: plain("float32"), "H200", {("dtype.unsupported", "matmul.A"), ("dtype.unsupported", "matmul.B")}),
        (lambda: plain(k=260), "H200", {("layout.alignment", "A.stride"), ("layout.alignment", "B.stride")}),
        (
            lambda: plain("fp8_e4m3", k=248),
            "B200",
            {("layout.alignment", "A.stride"), ("layout.alignment", "B.stride")},
        ),
        (lambda: plain("fp8_e4m3", b_k_major=False), "H200", {("layout.order", "B")}),
        (lambda: plain("int8", out="int32", b_k_major=False), "H200", {("layout.order", "B")}),
        (lambda: plain("fp8_e4m3", b_k_major=False), "B200", set()),
        (lambda: plain("fp8_e4m3", b_dtype="fp8_e5m2"), "H200", set()),
        (lambda: plain("fp8_e5m2", out="fp8_e8m0"), "H200", {("dtype.unsupported", "C")}),
        (lambda: plain(b_dtype="float16"), "H200", {("dtype.mixed", "B")}),
        (lambda: plain(a_stride=(64 * 512, 512, 2)), "H200", {("layout.order", "A")}),
        (lambda: plain(batch=2, a_stride=(4, 256, 1)), "H200", {("layout.alignment", "A.stride")}),
    ],
)
def test_reasons_are_given_by_operand_and_all_at_once(graph, device, expected):
    found = reasons(graph(), device)
    assert expected <= found if expected else found == set()


def test_matmuls_in_a_chain_are_not_one_kernel():
    g, c = matmul()
    d = g.matmul(A=c.set_data_type("bfloat16"), B=g.tensor(dim=(1, 128, 128), name="B2"))
    d.set_output(True).set_data_type("bfloat16")
    assert "op.pattern" in {code for code, _ in reasons(g)}


def _converted(other=None):
    """A matmul whose B is int8 in memory, converted or combined with another tensor on the way."""
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="bfloat16", compute_data_type="float32")
    weight = g.tensor(dim=(1, 256, 128), stride=(256 * 128, 1, 256), data_type="int8", name="W")
    b = g.identity(weight) if other is None else g.mul(weight, g.tensor(dim=other, name="S"))
    c = g.matmul(A=g.tensor(dim=(1, 64, 256), name="A"), B=b)
    c.set_output(True).set_data_type("bfloat16")
    return g


@pytest.mark.parametrize("device", ["H200", "B200"])
def test_two_tensors_before_the_matmul_are_not_one_kernel(device):
    found = verdict(_converted((1, 256, 128)), device)
    assert {(reason.code, reason.subject) for reason in found.reasons} == {("op.pattern", "B")}


@pytest.mark.parametrize("device", ["H200", "B200"])
def test_a_cast_before_the_matmul_builds_where_it_is_offered(device):
    """Asked of the layout, which knows what the kernels load; never a plan that ignores the cast."""
    graph = _converted()
    found = verdict(graph, device)
    if not found:
        assert {(reason.code, reason.subject) for reason in found.reasons} == {("op.pattern", "B")}
        return
    pytest.importorskip("cutlass")
    config = PlanConfig(ENGINES[device][0], found.configs[0].knobs)
    plan = ENGINES[device][1]().build_plan(graph.freeze("cuda"), config, context(device))
    assert "int8tobf16" in plan.kernel.name


def test_sizes_that_a_kernel_cannot_count_are_declined_and_runtime_sizes_wait_for_the_call():
    wide = plain(m=2**31 - 1, n=8, k=8)
    assert ("shape.range", "m") in reasons(wide)
    many = plain(m=65, n=8, k=8, batch=2**27, b_k_major=False)
    assert ("shape.range", "number of blocks of 64 x 8 elements") in reasons(many)
    assert reasons(plain(m=Dim("m"), n=8, k=8)) == set()


def test_an_operand_is_named_as_in_the_graph_where_rows_are_computed_as_columns():
    g = cudnn_core.Graph(io_data_type="fp8_e4m3", intermediate_data_type="float32", compute_data_type="float32")
    a = g.tensor(dim=(1, 8, 256), data_type="fp8_e5m2", name="A")
    b = g.tensor(dim=(1, 256, 4096), stride=(256 * 4096, 1, 256), name="B")
    g.matmul(A=g.identity(a).set_data_type("fp8_e4m3"), B=b).set_output(True).set_data_type("float32")
    assert verdict(plain("fp8_e4m3", m=8, n=4096), "H200").configs[0].knobs["swap_ab"]
    assert reasons(g) == {("op.pattern", "A")}
    graph = g.freeze("cuda")
    for swap in (False, True):
        config = PlanConfig(SM90, _defaults(SM90) | {"swap_ab": swap})
        with pytest.raises(BuildError) as error:
            engines.Sm90Wgmma().build_plan(graph, config, context("H200"))
        assert error.value.decline.subject == "A"


def test_a_program_that_shared_memory_cannot_hold_says_how_much_it_needs():
    g, c = matmul(m=64, n=128, k=64, out="float32")
    for i in range(32):
        bias = g.tensor(dim=(1, 1, 128), name=f"bias{i}", data_type="bfloat16")
        g.add(c, bias).set_output(True).set_data_type("float32")
    (reason,) = verdict(g, "B200").reasons
    assert reason.code == "device.smem"
    assert "232448 bytes" in str(reason)
    assert int(str(reason).split(" got ")[1].split()[0]) > 232448


def test_floats_added_up_by_many_ctas_are_not_deterministic():
    def reduced(mode):
        g, c = matmul(out="float32")
        c.set_output(True)
        g.reduction(c, mode=mode, out_dims=(1, 1, 1)).set_output(True).set_data_type("float32")
        return verdict(g, "H200")

    assert "deterministic" not in reduced("ADD").notes
    assert "deterministic" in reduced("AMAX").notes


@pytest.mark.parametrize(("device", "silicon"), [("H200", "ran_on_h200"), ("B200", "emulated_only")])
def test_what_has_run_on_hardware_is_noted_by_engine_and_graph_and_can_be_required(device, silicon, capsys):
    g, c = matmul(out="float32")
    g.reduction(c, mode="ADD", out_dims=(1, 1, 1)).set_output(True).set_data_type("float32")
    assert silicon in verdict(g, device).notes
    main(["engines"])
    (shown,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(ENGINES[device][0]))
    assert silicon in shown
    with cudnn_core.configure(require=["ran_on_h200"]):
        row = explained(plain(), device)
    assert (row.state == "selected") == (silicon == "ran_on_h200")


def test_runtime_sizes_are_ranked_by_their_hint_and_declared_bounds_count():
    few, many = Dim("m", max=16), Dim("m", min=2048, max=8192, multiple_of=8)
    first = [verdict(plain(m=m, n=8192, k=8192), "H200").configs[0].knobs for m in (few, many)]
    assert [knobs["swap_ab"] for knobs in first] == [True, False]
    assert ("shape.range", "K") in reasons(plain(k=Dim("k", min=0, max=256, multiple_of=8), b_stride=None))


def test_a_second_question_costs_a_look_up():
    graph = bias_relu().freeze("cuda")
    engine, ctx = engines.Sm90Wgmma(), context("H200")
    first = engine.check_support(graph, ctx)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        assert engine.check_support(graph, ctx) is first
        times.append(time.perf_counter() - begin)
    assert sorted(times)[50] < 20e-6


def test_graphs_that_differ_in_sizes_share_what_no_size_is_in_and_nothing_that_can_be_changed():
    engine, ctx = engines.Sm90Wgmma(), context("H200")
    first = engine.check_support(bias_relu().freeze("cuda"), ctx)
    made = engines._rules.cache_info().misses
    expected = dict(first.configs[0].knobs)
    first.configs[0].knobs["tile_m"] = 1
    again = engine.check_support(bias_relu(m=72).freeze("cuda"), ctx)
    assert engines._rules.cache_info().misses == made
    assert expected in [config.knobs for config in again.configs]


def test_verdicts_follow_the_device():
    graph = plain("int8", out="int32").freeze("cuda")
    engine = engines.Sm100Tcgen05()
    assert engine.check_support(graph, context("B200"))
    assert not engine.check_support(graph, context("B300"))
    small = DeviceInfo.preset("B200").with_sm_count(8)
    assert engine.check_support(graph, ExecutionContext(None, small))


def test_deciding_imports_neither_the_dsl_nor_a_framework():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from graphs import bias_relu\n"
        "import cudnn_core\n"
        "d = bias_relu().explain(device=cudnn_core.DeviceInfo.preset('H200'))\n"
        "assert d.selected.startswith('frost_gemm'), d\n"
        "print([m for m in ('torch', 'numpy', 'cutlass', 'tvm_ffi', 'cuda') if m in sys.modules])\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", program, here], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.L2
def test_the_conformance_kit_passes_as_far_as_it_goes_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "cudnn_core.testing", "--cudnn-plugin", "frost_gemm", "-q"]
    done = subprocess.run([*command, "-m", "not gpu"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "9 passed" in done.stdout


# Plans: these compile


@pytest.fixture(scope="module")
def plans(own_cache):
    pytest.importorskip("cutlass")
    return {device: bias_relu().plan(device=DeviceInfo.preset(device)) for device in ENGINES}


def test_plans_for_gpus_that_are_not_here_hold_code_for_exactly_them(plans):
    """Two and more architectures in one process."""
    for device, (arch, sm) in ARCHES.items():
        plan = plans[device]
        assert plan.engine == ENGINES[device][0]
        (artifact,) = plan.artifacts
        assert artifact.arch == arch
        assert cute_dsl.cubin_sm(artifact.cubin) == sm
        assert re.search(rf"^\.target sm_{arch}$", artifact.ptx, re.MULTILINE)
        assert artifact.entry.startswith(f"frost_sm{sm}_bf16_")
        assert artifact.cubin in artifact.object


def test_an_equal_program_of_other_sizes_is_served_by_the_cache(plans, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("compiled again")

    knobs = dict(plans["H200"].knobs)
    monkeypatch.setattr("cutlass.cute.compile", refuse)
    other = bias_relu(m=72, n=256, k=512).freeze("cuda")
    plan = engines.Sm90Wgmma().build_plan(other, PlanConfig(SM90, knobs), context("H200"))
    assert plan.kernel.object == plans["H200"].artifacts[0].object


def test_a_plan_for_a_described_gpu_needs_no_dsl_once_its_kernel_is_cached(plans):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from graphs import bias_relu\n"
        "import cudnn_core\n"
        "cudnn_core.cute_dsl.sources_digest = lambda package: sys.argv[2]\n"
        "plan = bias_relu().plan(device=cudnn_core.DeviceInfo.preset('B200'))\n"
        "print(plan.artifacts[0].name, 'cutlass' in sys.modules)\n"
    )
    arguments = [str(Path(__file__).parent), cute_dsl.sources_digest("frost_gemm")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [plans["B200"].artifacts[0].name, "False"]


def test_a_plan_survives_saving_and_loading(plans, monkeypatch):
    plan = plans["B200"]
    compiled = plan._compiled
    header, payloads = compiled.serialize()
    header = json.loads(json.dumps(header))
    graph, ctx = bias_relu().freeze("cuda"), context("B200")
    monkeypatch.setattr("cutlass.cute.compile", None)
    loaded = engines.Sm100Tcgen05().load_plan(header, payloads, graph, ctx)
    assert loaded.artifacts == compiled.artifacts
    assert loaded.workspace_size == compiled.workspace_size

    load = engines.Sm100Tcgen05().load_plan
    for change, text in (
        ({"schema": 2}, "schema 2"),
        ({"arch": "103a"}, "another architecture"),
        ({"runtime": {"nvidia-cutlass-dsl": "4.7.0"}}, "another runtime"),
        ({"config": {"tile": 1}}, "not a plan of this plugin"),
        ({"config": header["config"] | {"tile_n": 96}}, "another configuration"),
        ({"config": header["config"] | {"tile_k": "128"}}, "another configuration"),
        ({"name": "frost"}, "another configuration"),
        ({"entry": "other"}, "another one's entry"),
    ):
        with pytest.raises(BuildError, match=text):
            load({**header, **change}, payloads, graph, ctx)
    with pytest.raises(BuildError, match="another program"):
        load(header, payloads, plain().freeze("cuda"), ctx)
    with pytest.raises(BuildError, match="does not hold its cubin"):
        load(header, {**payloads, "cubin": b"another"}, graph, ctx)
    with pytest.raises(BuildError, match="not a plan"):
        load(header, {}, graph, ctx)


def test_a_plan_file_is_the_plan(plans, tmp_path):
    plans["H200"].save(tmp_path / "plan")
    assert plans["H200"].artifacts[0].object in (tmp_path / "plan").read_bytes()
    assert Plan is type(plans["H200"])


@pytest.mark.parametrize(
    ("device", "knobs", "code"),
    [
        ("H200", {"tile_m": 256, "tile_n": 256}, "knob.domain"),
        ("H200", {"split_k": 8, "cluster_m": 2}, "knob.domain"),
        ("H200", {"schedule": "pingpong", "split_k": 2}, "knob.domain"),
        ("H200", {"stages": 16, "tile_n": 256}, "device.smem"),
        ("B200", {"tile_m": 512, "cta_group": 1}, "knob.domain"),
        ("B200", {"tile_m": 256, "cta_group": 2, "cluster_m": 1}, "knob.domain"),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_their_reason_and_never_changed(device, knobs, code):
    engine_id, factory = ENGINES[device]
    config = PlanConfig(engine_id, _defaults(engine_id) | knobs)
    with pytest.raises(BuildError) as error:
        factory().build_plan(plain().freeze("cuda"), config, context(device))
    assert error.value.decline.code == code


@pytest.mark.parametrize("knobs", [{"cluster_m": 2}, {"cluster_n": 2}, {"split_k": 2}])
@pytest.mark.parametrize("device", ["H200", "B200"])
def test_a_cluster_that_the_device_has_no_sms_for_is_refused(device, knobs):
    engine_id, factory = ENGINES[device]
    ctx = ExecutionContext(None, DeviceInfo.preset(device).with_sm_count(1))
    config = PlanConfig(engine_id, _defaults(engine_id) | knobs)
    with pytest.raises(BuildError) as error:
        factory().build_plan(plain().freeze("cuda"), config, ctx)
    assert (error.value.decline.code, error.value.decline.expected) == ("knob.domain", {"at most": 1})
    offered = factory().check_support(plain().freeze("cuda"), ctx).configs
    assert {c.knobs["cluster_m"] * c.knobs["cluster_n"] * c.knobs["split_k"] for c in offered} == {1}


def _defaults(engine_id):
    spec = cudnn_core.registry().get(engine_id.partition("@")[0]).spec
    return {name: knob.default for name, knob in spec.knobs.items()}


@pytest.mark.parametrize(
    ("device", "knobs", "shown"),
    [
        (
            "H200",
            {"tile_m": 64, "tile_n": 32, "stages": 3, "schedule": "pingpong"},
            "frost_sm90_bf16_64x32x64_1x1_pingpong_",
        ),
        (
            "H200",
            {"tile_m": 64, "tile_n": 64, "split_k": 2, "swap_ab": True},
            "frost_sm90_bf16_64x64x64_1x1_split2_swap_",
        ),
        ("B200", {"tile_m": 256, "tile_n": 64, "cta_group": 2, "cluster_m": 2}, "frost_sm100_bf16_256x64x64_2x1_2cta_"),
    ],
)
def test_knobs_are_replayed_exactly(device, knobs, shown):
    pytest.importorskip("cutlass")
    engine_id, factory = ENGINES[device]
    config = PlanConfig(engine_id, _defaults(engine_id) | knobs)
    plan = factory().build_plan(plain().freeze("cuda"), config, context(device))
    assert plan.kernel.name.startswith(shown)
    assert plan.config.knobs(tuple(config.knobs)) == config.knobs


def test_the_manifests_defaults_are_a_setting_that_builds():
    pytest.importorskip("cutlass")
    for device in ("H200", "B200"):
        engine_id, factory = ENGINES[device]
        config = PlanConfig(engine_id, _defaults(engine_id))
        assert factory().build_plan(plain().freeze("cuda"), config, context(device)).artifacts


@pytest.mark.parametrize("factory", [engines.Sm90Wgmma, engines.Sm100Tcgen05])
def test_every_knob_of_the_manifest_is_a_field_and_the_other_way_round(factory):
    name = {"wgmma": "frost_gemm:sm90_wgmma", "tcgen05": "frost_gemm:sm100_tcgen05"}[factory.mma]
    spec = cudnn_core.registry().get(name).spec
    assert set(spec.knobs) == set(factory.knobs)
    assert spec.notes == {*factory.notes, "deterministic"}
    assert spec.aot
    assert "not_implemented" not in spec.notes


def test_a_dsl_that_is_too_old_is_known_from_its_metadata(monkeypatch):
    spec = cudnn_core.registry().get("frost_gemm:sm90_wgmma").spec
    needs = {item.dist: item for item in spec.requires}
    dsl = needs["nvidia-cutlass-dsl"]
    from packaging.specifiers import SpecifierSet

    assert "4.6.9" not in SpecifierSet(dsl.version)
    assert "4.7.0" in SpecifierSet(dsl.version)
    assert "0.*" in dsl.accept
    assert "apache-tvm-ffi" in needs


def test_estimates_are_times_of_the_model(plans):
    engine, ctx = engines.Sm90Wgmma(), context("H200")
    graph = plain(m=4096, n=4096, k=4096).freeze("cuda")
    configs = engine.check_support(graph, ctx).configs
    times = [engine.estimate(graph, PlanConfig(SM90, _defaults(SM90) | config.knobs), ctx).us for config in configs]
    assert times == sorted(times)
    assert 100 < times[0] < 400
    assert engine.estimate(plain("float32").freeze("cuda"), PlanConfig(SM90, {}), ctx) is None
