"""The decode kernels in the emulator against the recurrence, what is compiled, and plans."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("ptx_emulator")
pytest.importorskip("torch")

import torch
from _decode import check, kernel, launch, lowered, plan_of, run
from la_cases import properties, running
from la_cases.cases import CASES, named
from linear_attention.decode_compile import TARGETS, kernel_name, target_of
from linear_attention.decode_engine import GdnDecode, KdaDecode
from linear_attention.decode_lowering import lower_gdn_decode
from linear_attention.decode_plan import DecodePlan, restored
from linear_attention.decode_problem import DecodeConfig, DecodeProblem, configs, default_config
from linear_attention.graphs import build

import cudnn_core
from cudnn_core import BuildError, DeviceInfo, DriverError, ExecutionError, PlanConfig, VariantPack

SMALL = [case for case in CASES if case.decodes and not case.large]
# One or two for every feature; `make test-all` runs the others.
QUICK = {
    "gdn_decode-plain", "gdn_decode-k-major", "gdn_decode-grouped-queries", "gdn_decode-no-initial-state",
    "gdn_decode-slots-outside", "gdn_decode-speculative-varlen", "gdn_decode-poisoned-padding", "gdn_decode-beta-doubled",
    "kda_decode-fp16", "kda_decode-bf16-state", "kda_decode-grouped-values", "kda_decode-varlen-past-the-limit",
    "kda_decode-slots-skipped", "kda_decode-slots-read-only", "kda_decode-speculative-counts-out-of-range",
    "kda_decode-linear-gate-out-of-range", "kda_decode-padded-strides", "kda_decode-lower-bound", "kda_decode-softplus",
}  # fmt: skip
PLAIN = {"gdn": named("gdn_decode-plain"), "kda": named("kda_decode-plain")}
ENGINES = {"gdn": GdnDecode, "kda": KdaDecode}
both = pytest.mark.parametrize("op", ["gdn", "kda"])


def _level(case):
    return case if case.name in QUICK else pytest.param(case, marks=pytest.mark.L2)


def _quick(target):
    return target if target in ("sm_80", "sm_90a", "sm_100a") else pytest.param(target, marks=pytest.mark.L2)


@pytest.mark.parametrize("case", [_level(case) for case in SMALL], ids=lambda case: case.name)
def test_case(case):
    check(case)


@pytest.mark.L2
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["gdn_decode-speculative", "kda_decode-varlen", "gdn_decode-bf16-state"])
def test_any_schedule(name, seed):
    check(named(name), seed=seed, schedule="random")


@pytest.mark.parametrize(
    "case",
    [
        replace(named("gdn_decode-slots"), name="gdn", options={"use_qk_l2norm": True, "use_beta_sigmoid": True,
                "safe_gate": True, "output_final_state": True, "overwrite_initial_state": True}, a_log=True, bias=True),
        replace(named("kda_decode-8-tokens"), name="kda", lengths=(8, 8)),
        pytest.param(replace(named("kda_decode-speculative"), name="kda-tokens"), marks=pytest.mark.L2),
        pytest.param(replace(named("gdn_decode-k-major"), name="gdn-k-major", size=(128, 64)), marks=pytest.mark.L2),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_float32_operands_show_the_arithmetic(case):
    """Outputs of 16 bits would hide an error of 1e-3."""
    check(replace(case, io=torch.float32, tolerance=2e-6))


def changed(case, **types):
    """The case's inputs with other data types."""
    return {port: value.to(types.get(port, value.dtype)) for port, value in case.tensors().items()}


@both
def test_types_of_parameters(op):
    case = replace(named(f"{op}_decode-all-in-kernel"), name=f"{op}-types", lengths=(1, 1), size=(64, 64))
    narrow = changed(case, g=torch.float16, a_log=torch.bfloat16, dt_bias=torch.bfloat16, beta=torch.bfloat16)
    check(case, narrow)


@pytest.mark.L2
@pytest.mark.parametrize("wide", ["gdn_decode-speculative-varlen", "kda_decode-slots-outside"])
def test_indices_of_64_bits(wide):
    case = named(wide)
    ports = ("state_indices", "num_accepted_tokens", "cu_seqlens")
    check(case, changed(case, **dict.fromkeys(ports, torch.int64)))


@pytest.mark.L2
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["v_major", "k_major"])
def test_narrow_states(dtype, layout):
    check(replace(named("kda_decode-slots"), name=f"{dtype}-{layout}", state=dtype, layout=layout, size=(128, 64)))


def test_lines_of_states_with_gaps():
    case = named("gdn_decode-slots")
    x = case.tensors()
    pool = x["initial_state"]
    apart = torch.full((*pool.shape[:3], pool.shape[3] + 8), torch.nan)[..., : pool.shape[3]]
    x["initial_state"] = apart.copy_(pool)
    assert not lowered(case, x).problem.dense
    check(case, x)


def test_output_of_another_type():
    case = PLAIN["gdn"]
    configuration = running.call(case)[0].configuration
    outputs = (configuration.outputs[0]._replace(dtype="float32"), *configuration.outputs[1:])
    found = build(configuration._replace(outputs=outputs))[0].freeze().facts(lower_gdn_decode)
    config = configs(found.problem)[0]
    plan = DecodePlan(found.problem, found.binding, config, kernel(found.problem, config, "sm_90a"))
    made = running.call(case)[1]
    o = torch.empty(made.outputs["O"].shape)
    launch(plan, {**made.inputs, **made.outputs, "O": o}, set(made.outputs))
    assert running.error(o, running.expected(case)["O"]) < 1e-6


def test_tokens_before_the_first_sequence_and_boundaries_past_the_last_token():
    # With gates and weights from logits, a token that is not there would change the state.
    options = {"tokens_per_sequence": 2, "output_final_state": True, "safe_gate": True, "use_beta_sigmoid": True}
    case = replace(named("kda_decode-varlen"), name="inside", lengths=(2, 1, 1), options=options, bias=True)
    x = case.tensors()
    x["cu_seqlens"] = torch.tensor([1, 3, 3, 99], dtype=torch.int32)  # tokens [1, 3), none, and [3, 4)
    x["initial_state"] = x["initial_state"][:3]
    for port in ("q", "k", "v", "g", "beta"):
        x[port][0] = torch.nan
    want = running.expected(case, x)
    assert not want["O"][0].any()
    found = run(case, tensors=x)
    for port, tensor in found.items():
        assert running.error(tensor, want[port]) <= 5e-3, port


@both
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "bounds"), properties.DECREASING, ids=str)
def test_boundaries_that_decrease(op, index, tokens, bounds):
    """What all CTAs clear belongs to no sequence; tokens of several are written by each, and nothing else is in disorder."""
    x = properties.decode_inputs(op, tokens, bounds, heads=(1, 1))
    x["cu_seqlens"] = torch.tensor(bounds, dtype=index)
    options = {"tokens_per_sequence": properties.MOST, "output_final_state": True}
    case = replace(named(f"{op}_decode-varlen"), lengths=(tokens,), heads=(1, 1, 1), index=index, options=options)
    plan, made = plan_of(case, tensors=x), running.call(case, tensors=x)[1]
    held = {**made.inputs, **made.outputs}
    report = launch(plan, held, set(made.outputs), schedule="random", seed=1, check="report")
    spans = properties._spans(tokens, bounds)
    shared = sum(end - start for start, end in spans) > len({t for span in spans for t in range(*span)})
    assert all(shared and "not ordered after the write" in str(finding) for finding in report.findings), report.findings
    operands = {port: value for port, value in x.items() if port != "cu_seqlens"}
    properties.decoded_alone(op, operands, bounds, made.outputs["O"], made.outputs["final_state"])


@both
@pytest.mark.parametrize("layout", ["v_major", pytest.param("k_major", marks=pytest.mark.L2)])
def test_tiles_give_the_same_bits(op, layout):
    case = replace(
        PLAIN[op], name=f"{op}-tiles-{layout}", lengths=(1, 1), layout=layout, size=(64, 64), heads=(1, 1, 1)
    )
    first, *others = (run(case, config=config) for config in configs(lowered(case).problem)[:2])
    for other in others:
        for port, tensor in first.items():
            assert torch.equal(tensor, other[port]), port


@pytest.mark.L2
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_every_tile_of_128_channels(rows):
    case = replace(named("gdn_decode-all-in-kernel"), lengths=(1,), heads=(1, 1, 1), size=(128, 128))
    check(case, config=DecodeConfig(rows, rows // 8))


# --- what is compiled


@pytest.mark.parametrize("target", [_quick(target) for target in TARGETS.values()])
@pytest.mark.parametrize(
    "name", ["gdn_decode-slots", pytest.param("kda_decode-speculative-varlen", marks=pytest.mark.L2)]
)
def test_code_for_every_architecture(name, target):
    """One source; no local memory; dependent launches where they exist."""
    plan = plan_of(named(name), target)
    ptx = plan.kernel.ptx
    assert re.search(rf"^\s*\.target\s+{target}\s*$", ptx, re.MULTILINE)
    assert not re.search(r"\.local\b", ptx)
    assert ("griddepcontrol.wait" in ptx) == (not target.startswith("sm_8"))
    assert plan.kernel.entry.startswith(kernel_name(plan.problem, plan.config, target))


def test_an_sm80_kernel_runs_too():
    check(named("kda_decode-slots"), target="sm_80")


def test_state_is_read_once_and_written_once():
    case = replace(PLAIN["gdn"], name="traffic", lengths=(1,), heads=(1, 1, 1))
    plan = plan_of(case)
    made = running.call(case)[1]
    report = launch(plan, {**made.inputs, **made.outputs}, set(made.outputs))
    warps, copies = 64 // 16, 64 * 64 * 4 // 512
    assert report.counts["instructions.cp"] == copies + warps * 3  # and the zero, the commit, the wait
    assert report.counts["bytes.st.global"] == 64 * 64 * 4 + 64 * 2  # and O


def test_targets():
    def target(major, minor):
        return target_of(SimpleNamespace(compute_capability=(major, minor)))

    assert [target(*capability) for capability in TARGETS] == list(TARGETS.values())
    assert target(8, 8) == "sm_87"
    assert target(13, 0) is None


def test_default_tile_gives_every_sm_a_block():
    problem = DecodeProblem("gdn", "bfloat16", 16, 16, 32, 128, 128)
    assert default_config(problem, 64, 132) == DecodeConfig(32, 4)
    assert default_config(problem, 1, 132) == DecodeConfig(16, 2)
    assert default_config(replace(problem, heads_v=16), 1, 132) == DecodeConfig(8, 1)
    assert default_config(replace(problem, key=64), 64, 132) == DecodeConfig(32, 2)
    assert [config.rows for config in configs(replace(problem, key=64))] == [16, 32, 64]


# --- plans


def graph_of(case):
    return running.graph_of(case)[0]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with cudnn_core.configure(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


@both
def test_plan_survives_saving(op):
    case = PLAIN[op]
    plan = plan_of(case)
    header, payloads = plan.serialize()
    again = restored(header, payloads, plan.problem, plan.binding, "sm_90a")
    assert (again.config, again.kernel) == (plan.config, plan.kernel)
    found = [running.call(case)[1] for _ in range(2)]
    for one, made in zip((plan, again), found, strict=True):
        launch(one, {**made.inputs, **made.outputs}, set(made.outputs))
    assert torch.equal(found[0].outputs["O"], found[1].outputs["O"])


def test_plan_of_something_else_is_refused():
    plan = plan_of(PLAIN["gdn"])
    header, payloads = plan.serialize()
    for change, said in (
        ({"schema": 9}, "schema"),
        ({"problem": "{}"}, "another problem"),
        ({"config": {"rows": 8}}, "not a plan"),
        ({"config": {"rows": 64, "warps": 4}}, "the plan's kernel is"),
    ):
        with pytest.raises(BuildError, match=said):
            restored({**header, **change}, payloads, plan.problem, plan.binding, "sm_90a")
    with pytest.raises(BuildError, match="architecture"):
        restored(header, payloads, plan.problem, plan.binding, "sm_80")


@both
def test_engine_builds_saves_and_loads(op):
    graph = graph_of(PLAIN[op])
    plan = graph.plan(device=DeviceInfo.preset("H200"))
    assert plan.engine == f"linear_attention:{op}_decode@1"
    frozen, engine = graph.freeze(), ENGINES[op]()
    ctx = SimpleNamespace(device=DeviceInfo.preset("H200"))
    knobs = {"tile_v": 64}
    made = engine.build_plan(frozen, PlanConfig(f"linear_attention:{op}_decode@1", knobs), ctx)
    assert made.config == DecodeConfig(64, 4)
    assert engine.load_plan(*made.serialize(), frozen, ctx).kernel == made.kernel
    with pytest.raises(BuildError, match="tile_v is 8"):
        engine.build_plan(frozen, PlanConfig("x", {"tile_v": 8}), ctx)


def operands_of(plan, case, change):
    made = running.call(case)[1]
    held = {**made.inputs, **made.outputs}
    return launch(plan, {**held, **change(held)}, set(made.outputs))


def test_strides_and_addresses_that_the_kernel_can_not_take():
    plan, case = plan_of(PLAIN["gdn"]), PLAIN["gdn"]

    def odd_tokens(x):
        return {"q": torch.zeros(5, 2 * 64 + 2, dtype=torch.bfloat16)[:, :128].unflatten(1, (2, 64))}

    def gaps(x):
        return {"initial_state": torch.zeros(5, 2, 64, 68)[..., :64]}

    with pytest.raises(ExecutionError, match="operand q: the stride of axis 0"):
        operands_of(plan, case, odd_tokens)
    with pytest.raises(ExecutionError, match="operand initial_state: the stride of axis 2"):
        operands_of(plan, case, gaps)


class Function:
    """In place of a loaded kernel: keeps the blocks that it is called with."""

    def __init__(self, words):
        self.words, self.calls = words, []

    def __call__(self, block, stream):
        if block:
            held = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * self.words).from_address(block)).copy()
            self.calls.append((held, stream))


def operands_at(plan, held, rows=None):
    """The operands of a plan from tensors by port; ``rows`` are sizes of axis 0 that differ, by port."""
    operands = [None] * len(plan.binding.places)
    for port, place in plan.binding.places.items():
        dim = ((rows or {}).get(port, held[port].shape[0]), *held[port].shape[1:])
        operands[place.operand] = cudnn_core.Operand(
            place.operand, port, "", dim, tuple(held[port].stride()), "input", False, 16
        )
    return tuple(operands)


def test_bound_callable_fills_the_words(monkeypatch):
    plan, case = plan_of(named("gdn_decode-slots")), named("gdn_decode-slots")
    function = Function(len(plan._index))
    monkeypatch.setattr(plan, "function", lambda: function)
    made = running.call(case)[1]
    held = {**made.inputs, **made.outputs}
    places, operands = plan.binding.places, operands_at(plan, held)
    run = plan.bind(operands)
    assert not function.calls
    pointers = [256 * (i + 1) for i in range(len(operands))]
    run(pointers, 0, 7)
    ((words, stream),) = function.calls
    assert stream == 7
    found = {word: int(words[at]) for word, at in plan._index.items()}
    assert (found["tokens"], found["sequences"], found["pool"]) == (5, 5, 7)
    assert found["q.token"] == 2 * 64 * 2
    assert found["initial_state.slot"] == 2 * 64 * 64 * 4
    assert all(found[f"{port}.address"] == pointers[place.operand] for port, place in places.items())
    pointers[places["k"].operand] += 2
    with pytest.raises(ExecutionError, match="operand k: the address"):
        run(pointers, 0, 7)


@pytest.mark.parametrize(
    ("case", "changed", "rows", "wanted"),
    [
        ("slots", "state_indices", 4, 5),
        ("slots", "final_state", 6, 7),
        ("varlen", "cu_seqlens", 9, 8),
        ("plain", "final_state", 4, 5),
        ("speculative", "num_accepted_tokens", 6, 5),
        ("8-tokens", "q", 25, 24),
    ],
)
def test_rows_that_differ_are_refused_by_name(case, changed, rows, wanted, monkeypatch):
    """A state or a slot that is not there would be read outside of its tensor."""
    plan, found = plan_of(named(f"gdn_decode-{case}")), running.call(named(f"gdn_decode-{case}"))[1]
    held = {**found.inputs, **found.outputs}
    operands = operands_at(plan, held, {changed: rows})
    name = "initial_state" if changed == "cu_seqlens" else changed
    message = f"operand {name}: the size of axis 0 is .*{'' if changed == 'cu_seqlens' else rows}, and the kernel needs {wanted}"
    with pytest.raises(ExecutionError, match=message):
        plan.bind(operands)


def test_sizes_beyond_a_launch_are_refused_by_name():
    case = named("gdn_decode-slots")
    plan, made = plan_of(case), running.call(case)[1]
    held, many = {**made.inputs, **made.outputs}, 2**31
    for rows, said in (
        (dict.fromkeys(("initial_state", "final_state"), many), "operand initial_state: the size of axis 0 is"),
        (dict.fromkeys(("q", "state_indices"), many), "operand q: the size of axis 0 is"),
        (dict.fromkeys(("q", "state_indices"), many // 4), f"operand q: {many // 4} sequences need .* CTAs"),
    ):
        with pytest.raises(ExecutionError, match=said):
            plan.bind(operands_at(plan, held, rows))


def test_a_machine_without_a_device_is_a_typed_error(monkeypatch):
    def fail(words, stream):
        raise RuntimeError("Got Cuda Runtime Error: cudaErrorInsufficientDriver")

    case = named("gdn_decode-slots")
    plan, made = plan_of(case), running.call(case)[1]
    monkeypatch.setattr(plan, "function", lambda: fail)
    with pytest.raises(DriverError, match=r"GPU code can't be loaded: .*cudaErrorInsufficientDriver"):
        plan.bind(operands_at(plan, {**made.inputs, **made.outputs}))


def test_no_sequence_is_nothing_to_run_and_no_grid_for_an_executor():
    plan = plan_of(PLAIN["gdn"])
    made = running.call(PLAIN["gdn"])[1]
    operands = operands_at(plan, {**made.inputs, **made.outputs}, dict.fromkeys(plan.binding.places, 0))
    plan.bind(operands)([], 0, 0)
    with pytest.raises(ExecutionError, match="operand q: there is no sequence"):
        plan.host_arguments(plan.artifacts[0], VariantPack(operands, (4096,) * len(operands)), 0)
