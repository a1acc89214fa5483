"""The whole way without a GPU: a graph in JSON, ``cudnn-core run --executor emulator``, the numbers checked against the reference.

Every run fails on a finding of the emulator too: a race, an access out of bounds, a barrier that nobody completes.
"""

from __future__ import annotations

import json
import math

import pytest
from graphs import bias_relu, dequantised, matmul, plain

import cudnn_core
from cudnn_core._cli import main

pytest.importorskip("cutlass")
pytest.importorskip("ptx_emulator")

ENGINES = {"H200": "frost_gemm:sm90_wgmma", "B200": "frost_gemm:sm100_tcgen05"}
DEVICES = {"H200": "H200", "B200": "B200", "B300": "B200", "R200": "B200"}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Not the user's. The variable alone is not seen once the configuration has been read."""
    folder = str(tmp_path_factory.getbasetemp() / "frost cache")
    with pytest.MonkeyPatch.context() as patch, cudnn_core.configure(cache_dir=folder):
        patch.setenv("CUDNN_CORE_CACHE_DIR", folder)  # of child processes
        yield


@pytest.fixture
def emulated(tmp_path, capsys):
    """Runs a graph on the emulator; the report of ``cudnn-core run --json``."""

    def run(graph, device, knobs=None, sizes=()):
        path = tmp_path / "graph.json"
        path.write_text(graph.to_json())
        engine = ENGINES[DEVICES[device]]
        arguments = ["run", str(path), "--executor", "emulator", "--device", device, "--json"]
        for size in sizes:
            arguments += ["--size", size]
        with cudnn_core.configure(engine={engine: {"knobs": knobs or {}}}):
            status = main(arguments)
        shown = capsys.readouterr()
        report = json.loads(shown.out)
        assert status == 0, report["error"]["message"] if "error" in report else report["outputs"]
        assert report["engine"] == f"{engine}@1"
        assert report["ok"]
        assert {name: report["knobs"][name] for name in knobs or {}} == (knobs or {})
        return report

    return run


@pytest.mark.parametrize("device", ["H200", "B200"])
def test_bias_and_relu_of_a_ragged_product(emulated, device):
    report = emulated(bias_relu(m=24, n=40, k=72), device)
    (output,) = report["outputs"]
    assert output["shape"] == [1, 24, 40]


@pytest.mark.parametrize("device", ["H200", "B200"])
def test_sums_of_int32_are_modulo_two_to_the_32(emulated, device):
    """The elements are near a limit: every sum leaves int32, and saturated partial sums would depend on their order."""
    g, c = matmul("int8", m=20, n=24, k=32, out="int32")
    for mode, limit in (("ADD", 2**31 - 2**18), ("NORM1", -(2**31) + 2**18)):
        y = g.reduction(g.add(c, limit).set_data_type("int32"), mode=mode, out_dims=(1, 20, 1))
        y.set_output(True).set_name(mode).set_data_type("int32")
    report = emulated(g, device, {"tile_m": 64, "tile_n": 32} if device == "H200" else {"tile_m": 128, "tile_n": 64})
    assert {output["name"] for output in report["outputs"]} == {"ADD", "NORM1"}


SMALL = {"H200": {"tile_m": 64, "tile_n": 32}, "B200": {"tile_m": 128, "tile_n": 64}}


@pytest.mark.parametrize("device", ["H200", "B200"])
@pytest.mark.parametrize("compute", ["int32", "float32"])
def test_results_of_integers_that_become_floats_do_not_saturate(emulated, device, compute):
    g, c = matmul("int8", m=20, n=24, k=32, out="int32")
    near = g.add(c, 2**31 - 2**18).set_data_type("int32")
    for op in ("add", "mul", "add_square"):
        y = getattr(g, op)(near, c if op == "add" else near, compute_data_type=compute)
        y.set_output(True).set_name(op).set_data_type("float32")
    y = g.mul(c, c, compute_data_type=compute)
    y.set_output(True).set_name("exact").set_data_type("int32")
    report = emulated(g, device, SMALL[device])
    assert all(output["max_rel"] < 2**-23 for output in report["outputs"])


def _masked():
    """A causal mask of -inf, other numbers that JSON lacks, and zeros of both signs."""
    g, c = matmul(m=24, n=40, k=40, out="float32")
    row, col = (g.gen_index(c, axis=axis).set_data_type("int32") for axis in (1, 2))
    seen = g.cmp_ge(row, col, compute_data_type="int32").set_data_type("boolean")
    values = {
        "masked": g.binary_select(c, -math.inf, seen),
        "nan": g.binary_select(c, math.nan, seen),
        "clipped": g.relu(c, upper_clip=math.inf),
        "signs": g.reciprocal(g.add(g.mul(c, 0.0), -0.0)),
    }
    for name, value in values.items():
        value.set_output(True).set_name(name).set_data_type("float32")
    return g


def _infinite_weights():
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    a, b = g.tensor(dim=(1, 24, 48), name="A"), g.tensor(dim=(1, 48, 48), name="B", data_type="fp8_e4m3")
    a = g.identity(g.max(a, -math.inf)).set_data_type("bfloat16")
    b = g.identity(g.mul(g.min(b, math.inf), math.inf)).set_data_type("bfloat16")
    g.matmul(A=a, B=b).set_output(True).set_data_type("float32")
    return g


@pytest.mark.parametrize("device", ["H200", "B200"])
@pytest.mark.parametrize("graph", [_masked, _infinite_weights])
def test_numbers_that_are_not_finite(emulated, graph, device):
    emulated(graph(), device, SMALL[device])


WIDE = {"tile_m": 128, "tile_n": 64}
SETTINGS = {
    "H200 pingpong": ("H200", {"tile_m": 64, "tile_n": 32, "schedule": "pingpong"}),
    "H200 swapped": ("H200", {"tile_m": 64, "tile_n": 32, "swap_ab": True}),
    "H200 split": ("H200", {"tile_m": 64, "tile_n": 32, "split_k": 2}),
    "H200 cluster": ("H200", {"tile_m": 64, "tile_n": 32, "cluster_m": 2, "cluster_n": 2}),
    "H200 two warpgroups": ("H200", WIDE),
    "H200 two on an SM": ("H200", {"tile_m": 64, "tile_n": 32, "stages": 4}),
    "B200 one CTA": ("B200", WIDE),
    "B200 pair": ("B200", {"tile_m": 256, "tile_n": 64, "cta_group": 2, "cluster_m": 2}),
    "B200 swapped": ("B200", {**WIDE, "swap_ab": True}),
    "B200 split": ("B200", {**WIDE, "split_k": 2}),
    "B200 cluster": ("B200", {**WIDE, "cluster_m": 2, "cluster_n": 2}),
    "B300": ("B300", WIDE),
    "R200": ("R200", WIDE),
}


@pytest.mark.L2
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_the_kernel_and_not_the_numbers(emulated, name):
    device, knobs = SETTINGS[name]
    emulated(bias_relu(m=136, n=72, k=200), device, knobs)


def _taps():
    g, c = matmul(m=40, n=48, k=64, out="float32")
    c.set_output(True).set_name("C")
    gate = g.swish(c, swish_beta=1.5)
    y = g.mul(gate, g.tensor(dim=(1, 40, 48), name="residual", data_type="bfloat16"))
    y.set_output(True).set_name("Y").set_data_type("bfloat16")
    g.reduction(y, mode="AMAX", out_dims=(1, 1, 1)).set_output(True).set_data_type("float32")
    return g


def _scaled():
    g, c = matmul("fp8_e4m3", m=33, n=48, k=128, out="float32")
    scale = g.tensor(dim=(1, 1, 1), name="alpha", data_type="float32", is_pass_by_value=True)
    rows = g.tensor(dim=(1, 33, 1), name="row scale", data_type="float32")
    y = g.mul(g.mul(c, scale), rows)
    y.set_output(True).set_data_type("bfloat16")
    return g


def _gate_and_up():
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    x = g.tensor(dim=(1, 24, 64), name="x")
    gate, up = (g.matmul(x, g.tensor(dim=(1, 64, 40), stride=(64 * 40, 1, 64), name=name)) for name in ("Wg", "Wu"))
    y = g.mul(g.swish(gate), up)
    y.set_output(True).set_data_type("bfloat16")
    return g


def _computed(op, both):
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    a, b = g.tensor(dim=(1, 24, 72), name="A"), g.tensor(dim=(1, 72, 40), name="B")
    a, b = (getattr(g, op)(x).set_data_type("bfloat16") if made else x for x, made in ((a, True), (b, both)))
    g.matmul(A=a, B=b).set_output(True).set_data_type("float32")
    return g


GRAPHS = {
    "taps and amax": _taps,
    "fp8 with scales": _scaled,
    "gate and up": _gate_and_up,
    "int8": lambda: plain("int8", m=20, n=32, k=96, out="int32"),
    "float16 row-major B": lambda: plain("float16", m=24, n=40, k=72, b_k_major=False),
    "column-major A and C": lambda: plain(m=24, n=40, k=72, a_stride=(24 * 72, 1, 24), c_stride=(24 * 40, 1, 24)),
    "batch of three": lambda: bias_relu(m=24, n=40, k=72, batch=3),
    "int8 weights with a scale": dequantised,
    "fp8 weights by columns, relu of A": lambda: dequantised("fp8_e4m3", n=48, a_op="relu", b_k_major=False),
    "exponentials past the end of K": lambda: _computed("exp", both=True),
    "reciprocals of zeros past the end of K": lambda: _computed("reciprocal", both=False),
    "padded output": lambda: plain(m=24, n=40, k=72, c_stride=(24 * 41, 41, 1)),
}


@pytest.mark.L2
@pytest.mark.parametrize("device", ["H200", "B200"])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_every_class(emulated, name, device):
    emulated(GRAPHS[name](), device)


@pytest.mark.L2
@pytest.mark.parametrize("device", ["H200", "B200", "R200"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_setting_that_is_offered_builds(name, device):
    """Frost invariant 18: what the probe offers the build accepts."""
    info = cudnn_core.DeviceInfo.preset(device)
    ctx = cudnn_core.ExecutionContext(None, info)
    graph = GRAPHS[name]().freeze("cuda")
    engine = cudnn_core.registry().get(ENGINES[DEVICES[device]]).instance()
    found = engine.check_support(graph, ctx)
    if (name, device) == ("int8", "R200"):  # which has no MMA of int8
        assert [decline.code for decline in found.reasons] == ["dtype.unsupported"]
        return
    for config in found.configs:
        named = cudnn_core.PlanConfig(f"{ENGINES[DEVICES[device]]}@1", config.knobs)
        assert engine.build_plan(graph, named, ctx).artifacts


@pytest.mark.L2
@pytest.mark.parametrize("device", ["H200", "B200"])
def test_one_kernel_serves_every_size(emulated, device):
    m = cudnn_core.Dim("m", min=1, max=256)
    for rows in (1, 65):
        emulated(bias_relu(m=m, n=40, k=72), device, sizes=[f"m={rows}"])


@pytest.mark.L2
@pytest.mark.parametrize("device", DEVICES)
def test_random_graphs_agree_with_the_reference(emulated, device):
    """Graphs of ``test_reference``: any major, prologues, types, batches, taps and reductions. What is declined is left out."""
    hypothesis = pytest.importorskip("hypothesis")
    from test_reference import SETTINGS as QUIET
    from test_reference import Draw

    run = 0

    @hypothesis.settings(max_examples=20, phases=[hypothesis.Phase.generate], **QUIET)
    @hypothesis.given(hypothesis.strategies.data())
    def check(data):
        nonlocal run
        graph = Draw(data).build()
        decision = graph.explain(device=cudnn_core.DeviceInfo.preset(device))
        if decision.selected == f"{ENGINES[DEVICES[device]]}@1":
            emulated(graph, device)
            run += 1

    check()
    assert run >= 3
