"""On a GPU: every data type, epilogue class, layout and setting against fp64, and what a launch promises.

Operands are small integers, so that sums are exact in any order and results must be equal to the last bit, wherever the epilogue is
exact too. The conformance kit (``cudnn-core plugin test frost_gemm``) adds random data, NaN, canaries, streams and serialization.
"""

from __future__ import annotations

import itertools
import threading

import pytest
from graphs import bias_relu, dequantised, matmul, plain

import cudnn_core
from cudnn_core import DeviceInfo, Dim, ExecutionError, Plan

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TORCH = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8, "int32": torch.int32, "float32": torch.float32,
}  # fmt: skip
MULTIPLE = {"bfloat16": 8, "float16": 8, "fp8_e4m3": 16, "fp8_e5m2": 16, "int8": 16}  # elements of 16 bytes


@pytest.fixture(scope="module", autouse=True)
def supported():
    major = torch.cuda.get_device_capability()[0]
    if major not in (9, 10):
        pytest.skip(f"no kernels for compute capability {major}.x")


def wgmma():
    return torch.cuda.get_device_capability()[0] == 9


def engine():
    return "frost_gemm:sm90_wgmma" if wgmma() else "frost_gemm:sm100_tcgen05"


def planned(graph, **knobs):
    rule = {"match": {"op": "matmul"}, "use": engine()}
    with cudnn_core.configure(strict=True, rule=[rule], engine={engine(): {"knobs": knobs}}):
        plan = graph.plan(device=cudnn_core.device_info(0))
    assert plan.engine == f"{engine()}@1", plan.decision
    assert {name: plan.knobs[name] for name in knobs} == knobs
    return plan


def integers(tensor_like, seed=0):
    """Values -2..2 in the shape, strides and type of an operand."""
    dim, stride, dtype = tensor_like
    size = 1 + sum((n - 1) * s for n, s in zip(dim, stride, strict=True)) if 0 not in dim else 0
    make = torch.Generator(device="cuda").manual_seed(seed)
    tensor = torch.zeros(size, dtype=TORCH[dtype], device="cuda").as_strided(dim, stride)
    return tensor.copy_(torch.randint(-2, 3, dim, generator=make, device="cuda"))


def operands(plan, sizes=None, seed=0):
    """name -> tensor for every operand of a plan; outputs hold a value that is never right."""
    graph = plan.graph.at(sizes or {})
    made = {}
    for number, operand in enumerate(graph.operands):
        made[operand.name] = integers((operand.dim, operand.stride, operand.dtype), seed + number)
        if operand.role == "output":
            made[operand.name].fill_(77)
    return made


def product(values):
    return values["A"].double() @ values["B"].double()


def equal(actual, expected):
    torch.testing.assert_close(actual.double(), expected.to(actual.dtype).double(), rtol=0, atol=0)


def check(plan, expected, sizes=None, seed=0):
    values = operands(plan, sizes, seed)
    plan.execute(values)
    for name, want in expected(values).items():
        equal(values[name], want)
    return values


SHAPES = [
    (1, 1, 1),
    (1, 8, 1),
    (17, 40, 3),
    (64, 128, 8),
    (129, 257, 33),
    (300, 520, 65),
    (8, 4096, 64),
    (1024, 1024, 128),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_of_every_type_are_exact(dtype, m, n, k):
    out = "int32" if dtype == "int8" else "float32"
    plan = planned(plain(dtype, m=m, n=n, k=k * MULTIPLE[dtype], out=out))
    check(plan, lambda v: {"C": product(v)})


def test_fp8_types_mix():
    plan = planned(plain("fp8_e4m3", b_dtype="fp8_e5m2", m=72, n=136, k=160, out="bfloat16"))
    check(plan, lambda v: {"C": product(v)})


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_outputs_of_every_type(out):
    plan = planned(plain(m=40, n=96, k=16, out=out))
    values = operands(plan)
    values["A"].zero_()
    values["A"][:, :, 0] = 1  # the product is the first column of B: representable everywhere
    plan.execute(values)
    equal(values["C"], product(values))


M, N, K = 136, 264, 72
LAYOUTS = {
    "B row-major": {"b_k_major": False},
    "A column-major": {"a_stride": (M * K, 1, M)},
    "C column-major": {"c_stride": (M * N, 1, M)},
    "C padded to 16 bytes": {"c_stride": (M * 272, 272, 1)},
    "C of odd rows": {"c_stride": (M * 265, 265, 1)},
    "A padded": {"a_stride": (M * 80, 80, 1)},
    "B padded": {"b_stride": (N * 80, 1, 80)},
    "A padded, C column-major and padded": {"a_stride": (M * 80, 80, 1), "c_stride": (N * 144, 1, 144)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    plan = planned(plain(m=M, n=N, k=K, **LAYOUTS[layout]))
    check(plan, lambda v: {"C": product(v)})


@pytest.mark.parametrize(("a", "b"), [(3, 3), (3, 1), (1, 3)])
def test_batches_and_what_they_share(a, b):
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    c = g.matmul(g.tensor(dim=(a, 40, 64), name="A"), g.tensor(dim=(b, 64, 72), name="B"))
    c.set_output(True).set_name("C").set_data_type("float32")
    check(planned(g), lambda v: {"C": product(v)})


@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize(("a_op", "b_k_major"), [("", True), ("", False), ("relu", True), ("abs", False)])
def test_operands_are_converted_on_their_way(stored, a_op, b_k_major):
    plan = planned(dequantised(stored, m=72, n=144, k=208, a_op=a_op, b_k_major=b_k_major))
    values = operands(plan)
    values["scale"].fill_(0.5)  # exact in bfloat16, as are all products
    plan.execute(values)
    a = {"": lambda x: x, "relu": torch.relu, "abs": torch.abs}[a_op](values["A"].double())
    equal(values["C"], a @ (0.5 * values["B"].double()))


def _epilogue(build, m=72, n=136, k=64, **fields):
    g, c = matmul(m=m, n=n, k=k, out="float32", **fields)
    build(g, c)
    return g


def _named(tensor, name, dtype="bfloat16"):
    tensor.set_output(True).set_name(name).set_data_type(dtype)


def test_bias_along_rows_and_columns_and_a_residual():
    def build(g, c):
        row = g.tensor(dim=(1, 72, 1), name="row", data_type="float32")
        col = g.tensor(dim=(1, 1, 136), name="col")
        full = g.tensor(dim=(1, 72, 136), name="full")
        _named(g.relu(g.sub(g.add(g.add(c, col), row), full)), "Y")

    check(
        planned(_epilogue(build)),
        lambda v: {"Y": (product(v) + v["col"].double() + v["row"].double() - v["full"].double()).relu()},
    )


def test_scalars_by_value_and_on_the_device():
    def build(g, c):
        alpha = g.tensor(dim=(1, 1, 1), name="alpha", data_type="float32", is_pass_by_value=True)
        beta = g.tensor(dim=(1, 1, 1), name="beta", data_type="float32")
        _named(g.add(g.mul(c, alpha), beta), "Y", "float32")

    plan = planned(_epilogue(build))
    values = operands(plan)
    for alpha in (0.5, -3.0):
        values["alpha"] = alpha
        plan.execute(values)
        equal(values["Y"], alpha * product(values) + values["beta"].double())


def test_several_outputs_of_different_types_and_majors():
    def build(g, c):
        _named(c, "C", "float32")
        y = g.relu(c)
        y.set_stride((72 * 136, 1, 72))
        _named(y, "Y", "float16")

    check(planned(_epilogue(build)), lambda v: {"C": product(v), "Y": product(v).relu()})


@pytest.mark.parametrize("m", [8, 200])
def test_gate_and_up(m):
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    x = g.tensor(dim=(1, m, 64), name="x")
    gate, up = (g.matmul(x, g.tensor(dim=(1, 64, 136), stride=(64 * 136, 1, 64), name=name)) for name in ("Wg", "Wu"))
    _named(g.mul(g.swish(gate), up), "Y", "float32")
    plan = planned(g)
    values = operands(plan)
    plan.execute(values)
    gate, up = (values["x"].double() @ values[name].double() for name in ("Wg", "Wu"))
    torch.testing.assert_close(values["Y"].double(), torch.nn.functional.silu(gate) * up, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["gelu", "tanh", "sigmoid", "exp", "softplus", "elu"])
def test_smooth_functions(op):
    def build(g, c):
        scale = g.tensor(dim=(1, 1, 1), name="scale", data_type="float32", is_pass_by_value=True)
        name = {"elu": "elu", "softplus": "softplus"}.get(op, op)
        _named(getattr(g, name)(g.mul(c, scale)), "Y", "float32")

    plan = planned(_epilogue(build))
    values = operands(plan)
    values["scale"] = 0.0625
    plan.execute(values)
    function = {
        "gelu": torch.nn.functional.gelu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp,
        "softplus": torch.nn.functional.softplus, "elu": torch.nn.functional.elu,
    }[op]  # fmt: skip
    torch.testing.assert_close(values["Y"].double(), function(0.0625 * product(values)), rtol=3e-6, atol=3e-7)


REDUCED = {"all": ((1, 1, 1), (0, 1, 2)), "rows": ((1, 1, 136), (0, 1)), "columns": ((1, 72, 1), (0, 2))}


@pytest.mark.parametrize("axes", REDUCED)
@pytest.mark.parametrize("mode", ["ADD", "AMAX", "MAX", "MIN"])
def test_reductions_are_exact_and_start_anew_each_time(axes, mode):
    dim, reduced = REDUCED[axes]

    def build(g, c):
        _named(c, "C", "float32")
        _named(g.reduction(c, mode=mode, out_dims=dim), "R", "float32")

    plan = planned(_epilogue(build))
    function = {
        "ADD": torch.sum,
        "AMAX": lambda x, **kw: x.abs().amax(**kw),
        "MAX": torch.amax,
        "MIN": torch.amin,
    }[mode]
    for seed in (0, 10):
        check(plan, lambda v: {"R": function(product(v), dim=reduced, keepdim=True)}, seed=seed)


def _settings():
    if torch.cuda.is_available() and wgmma():
        sizes = [(64, 16), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (192, 128), (256, 128)]
        for tile_m, tile_n in sizes:
            yield {"tile_m": tile_m, "tile_n": tile_n}
        for tile_m, tile_n in ((64, 64), (64, 192), (128, 128)):
            yield {"tile_m": tile_m, "tile_n": tile_n, "schedule": "pingpong"}
        for cluster_m, cluster_n in ((2, 1), (1, 2), (2, 2), (4, 2)):
            yield {"tile_m": 64, "tile_n": 64, "cluster_m": cluster_m, "cluster_n": cluster_n}
        for split in (2, 4, 8):
            yield {"tile_m": 64, "tile_n": 64, "split_k": split}
        yield {"tile_m": 128, "tile_n": 32, "swap_ab": True}
        yield {"tile_m": 64, "tile_n": 64, "raster": 1}
        yield {"tile_m": 64, "tile_n": 64, "stages": 2}
        return
    for tile_n in (16, 64, 128, 256):
        yield {"tile_m": 128, "tile_n": tile_n}
        yield {"tile_m": 256, "tile_n": tile_n, "cta_group": 2, "cluster_m": 2}
    for split in (2, 4):
        yield {"tile_m": 128, "tile_n": 64, "split_k": split}
    yield {"tile_m": 128, "tile_n": 64, "cluster_m": 2, "cluster_n": 2}
    yield {"tile_m": 128, "tile_n": 32, "swap_ab": True}


BASE = {"cluster_m": 1, "cluster_n": 1, "split_k": 1, "swap_ab": False, "stages": 0, "raster": 0}


@pytest.mark.parametrize("knobs", list(_settings()), ids=lambda knobs: "-".join(f"{k}{v}" for k, v in knobs.items()))
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_every_setting_gives_the_same_numbers(knobs, dtype):
    graph = bias_relu(dtype, m=520, n=392, k=592)
    extra = {"schedule": "cooperative"} if wgmma() else {"cta_group": 1}
    try:
        plan = planned(graph, **{**BASE, **extra, **knobs})
    except cudnn_core.NoEngineError as error:
        if dtype == "fp8_e4m3" and "registers of accumulators" in str(error):
            pytest.skip("the sums of fp8 products need registers of their own: this tile is refused")
        raise
    check(plan, lambda v: {"Y": (product(v) + v["bias"].double()).relu()})


def test_every_offered_setting_builds_and_is_right():
    graph = plain(m=200, n=328, k=1032, out="float32")
    frozen = graph.freeze("cuda")
    from cudnn_core import ExecutionContext

    ctx = ExecutionContext(None, cudnn_core.device_info(0))
    configs = cudnn_core.registry().get(engine()).instance().check_support(frozen, ctx).configs
    assert len(configs) > 2
    for config in configs:
        check(planned(graph, **config.knobs), lambda v: {"C": product(v)})


def test_one_kernel_serves_every_size():
    m = Dim("m", min=1, max=1024)
    plan = planned(bias_relu(m=m, n=136, k=72))
    for rows in (1, 7, 64, 65, 300, 1024):
        check(plan, lambda v: {"Y": (product(v) + v["bias"].double()).relu()}, sizes={"m": rows})


def test_offsets_beyond_32_bits():
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip("needs 12 GiB of device memory")
    rows, stride = 9, 1 << 29  # elements: the last row starts 2^32 elements behind the first
    plan = planned(plain(m=rows, n=64, k=64, out="float32", a_stride=(rows * stride, stride, 1)))
    check(plan, lambda v: {"C": product(v)})


def test_capture_and_replay_with_other_data():
    plan = planned(bias_relu(m=136, n=264, k=72))
    values = operands(plan)
    pack = cudnn_core.pack(plan, values)
    run = plan.bind(pack)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(pack.pointers, 0, stream.cuda_stream)
    for seed in (20, 40):
        fresh = operands(plan, seed=seed)
        for name in ("A", "B", "bias"):
            values[name].copy_(fresh[name])
        values["Y"].fill_(77)
        graph.replay()
        equal(values["Y"], (product(values) + values["bias"].double()).relu())


def test_a_run_allocates_nothing_and_waits_for_nothing():
    plan = planned(bias_relu(m=136, n=264, k=72))
    pack = cudnn_core.pack(plan, operands(plan))
    run = plan.bind(pack)
    stream = torch.cuda.Stream()
    run(pack.pointers, 0, stream.cuda_stream)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    run(pack.pointers, 0, stream.cuda_stream)
    assert not stream.query()
    assert torch.cuda.mem_get_info() == before
    torch.cuda.synchronize()


def test_threads_share_a_plan():
    plan = planned(bias_relu(m=136, n=264, k=72))
    sets = [operands(plan, seed=10 * number) for number in range(8)]
    errors = []

    def work(values):
        try:
            torch.cuda.set_device(0)
            for _ in range(20):
                plan.execute(values)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(values,)) for values in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    for values in sets:
        equal(values["Y"], (product(values) + values["bias"].double()).relu())


def test_misaligned_operands_are_refused_and_nothing_is_written():
    plan = planned(plain(m=16, n=64, k=64))
    values = operands(plan)
    for name in ("A", "B", "C"):
        flat = torch.zeros(values[name].numel() + 8, dtype=values[name].dtype, device="cuda")
        shifted = flat[1 : 1 + values[name].numel()].as_strided(values[name].shape, values[name].stride(), 1)
        with pytest.raises(ExecutionError, match=rf"operand {name}: "):
            plan.execute({**values, name: shifted})
    torch.cuda.synchronize()
    assert (values["C"] == 77).all()


def test_a_plan_for_another_gpu_does_not_run_here(tmp_path):
    other = "B200" if wgmma() else "H200"
    plan = plain(m=16, n=64, k=64).plan(device=DeviceInfo.preset(other))
    with pytest.raises(ExecutionError):
        plan.execute(operands(plan))
    plan.save(tmp_path / "plan")
    with pytest.raises(cudnn_core.BuildError):
        Plan.load(tmp_path / "plan", trust=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_plan_of_one_gpu_is_refused_while_another_is_current():
    plan = planned(plain(m=16, n=64, k=64))
    values = operands(plan)
    with torch.cuda.device(1), pytest.raises(ExecutionError, match="cuda:1 is current"):
        plan.execute(values)


def test_a_saved_plan_runs_without_compiling(tmp_path, monkeypatch):
    plan = planned(bias_relu(m=136, n=264, k=72))
    plan.save(tmp_path / "plan")
    monkeypatch.setattr("cutlass.cute.compile", None)
    loaded = Plan.load(tmp_path / "plan", trust=True)
    check(loaded, lambda v: {"Y": (product(v) + v["bias"].double()).relu()})


def test_sums_of_fp8_products_are_promoted_unless_the_graph_says_fast():
    """K = 8192 positive products: wgmma's own sums keep about 14 bits, so what is added late to a large sum is lost."""

    def error(compute):
        plan = planned(plain("fp8_e4m3", m=128, n=128, k=8192, out="float32", compute=compute))
        make = torch.Generator(device="cuda").manual_seed(0)
        values = operands(plan)
        for name in ("A", "B"):
            values[name].copy_(torch.rand(values[name].shape, generator=make, device="cuda"))
        plan.execute(values)
        return ((values["C"].double() - product(values)).abs() / product(values)).max().item()

    promoted, fast = error("float32"), error("fast_float_for_fp8")
    assert promoted < 2.0**-9
    assert not wgmma() or promoted < fast / 2


def test_random_bf16_sums_are_fp32_sums():
    plan = planned(plain(m=200, n=136, k=4096, out="float32"))
    make = torch.Generator(device="cuda").manual_seed(0)
    values = operands(plan)
    for name in ("A", "B"):
        values[name].copy_(torch.randn(values[name].shape, generator=make, device="cuda"))
    plan.execute(values)
    bound = values["A"].double().abs() @ values["B"].double().abs()
    assert ((values["C"].double() - product(values)).abs() / bound).max() < 2.0**-18


def test_nan_and_infinity_arrive():
    plan = planned(plain(m=40, n=72, k=64, out="float32"))
    values = operands(plan)
    values["A"][0, 3, 5] = float("nan")
    values["B"][0, 7, 11] = float("inf")
    plan.execute(values)
    torch.testing.assert_close(values["C"].double(), product(values), rtol=0, atol=0, equal_nan=True)


def test_rows_beyond_the_edge_are_not_touched():
    """Guard bands around every operand keep their content, whatever part of a tile lies outside."""
    for (m, n), out in itertools.product(((17, 24), (65, 136)), ("bfloat16", "float32")):
        plan = planned(plain(m=m, n=n, k=40, out=out))
        values = operands(plan)
        size = values["C"].numel()
        band = torch.full((size + 512,), 55, dtype=values["C"].dtype, device="cuda")
        values["C"] = band[256 : 256 + size].view(values["C"].shape)
        plan.execute(values)
        equal(values["C"], product(values))
        assert (band[:256] == 55).all()
        assert (band[256 + size :] == 55).all()
