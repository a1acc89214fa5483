"""Argument words of a call's operands, what a run may not bring, and plans that are saved. No DSL but where a kernel is compiled."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from la_cases.cases import named
from la_cases.running import call, graph_of
from linear_attention.arguments import ADDRESSES
from linear_attention.compile import kernel_name
from linear_attention.graphs import build
from linear_attention.launch import Launcher
from linear_attention.limits import MOST_TOKENS
from linear_attention.lowering import lower_gdn, lower_kda
from linear_attention.plan import PrefillPlan, restored
from linear_attention.prefill_engine import GdnSm90, KdaSm90

import cudnn_core
from cudnn_core import BuildError, DeviceInfo, DriverError, ExecutionContext, ExecutionError, VariantPack
from cudnn_core.cute_dsl import CompiledKernel

LOWER = {"gdn": lower_gdn, "kda": lower_kda}
ENGINES = {"gdn": GdnSm90, "kda": KdaSm90}
H200 = ExecutionContext(None, DeviceInfo.preset("H200"))
SMS = 132


class Setup:
    """A case's launcher and its operands."""

    def __init__(self, case):
        recipe, made = call(case)
        graph, uids = build(recipe.configuration)
        self.frozen = graph.freeze()
        self.lowered = LOWER[case.op](self.frozen)
        self.tensors = {uids[port]: tensor for port, tensor in {**made.inputs, **made.outputs}.items()}
        self.held = [self.tensors[operand.uid] for operand in self.frozen.operands]
        self.operands = [
            operand._replace(dim=tuple(tensor.shape), stride=tuple(tensor.stride()))
            for operand, tensor in zip(self.frozen.operands, self.held, strict=True)
        ]
        self.launcher = Launcher(self.lowered.problem, self.lowered.binding, SMS)

    def place(self, port):
        return self.lowered.binding.places[port].operand

    def change(self, port, dim=None, stride=None):
        at = self.place(port)
        operand = self.operands[at]
        self.operands[at] = operand._replace(dim=dim or operand.dim, stride=stride or operand.stride)

    def words(self):
        return self.launcher.words(self.operands)

    def pack(self):
        return VariantPack(tuple(self.operands), tuple(tensor.data_ptr() for tensor in self.held))


def test_words_of_a_case():
    setup = Setup(named("kda-slots-k-major-bf16"))
    words = setup.words()
    sizes = {name: words[name] for name in ("tokens", "sequences", "pool", "segments", "sms")}
    assert sizes == {"tokens": 215, "sequences": 3, "pool": 6, "segments": 1, "sms": SMS}
    strides = {name: value for name, value in words.items() if name.startswith(("q.", "g.", "initial_state."))}
    assert strides == {
        "q.address": 0, "q.token": 128, "q.head": 64, "g.address": 0, "g.token": 128, "g.head": 64,
        "initial_state.address": 0, "initial_state.token": 8192, "initial_state.head": 4096, "initial_state.row": 1,
        "initial_state.col": 64,
    }  # fmt: skip


def test_an_axis_of_one_element_has_no_stride():
    setup = Setup(replace(named("gdn-plain"), heads=(1, 1, 1)))
    setup.change("q", stride=(64, 13, 1))
    assert setup.words()["q.head"] == 0


def test_a_long_sequence_of_few_heads_is_cut():
    case = replace(named("gdn-plain"), lengths=(1,), heads=(1, 1, 1))
    setup = Setup(case)
    for port in ("q", "k", "v", "g", "beta", "O"):
        operand = setup.operands[setup.place(port)]
        setup.change(
            port, dim=(64 * 500, *operand.dim[1:]), stride=(64 if len(operand.dim) == 3 else 1, *operand.stride[1:])
        )
    assert setup.words()["segments"] > 2


TOO_MANY = MOST_TOKENS + 1
REFUSED = {
    "rows of states": (lambda s: s.change("initial_state", dim=(2, 2, 64, 64)), "initial_state", "2 states"),
    "rows of final states": (lambda s: s.change("final_state", dim=(4, 2, 64, 64)), "final_state", "4 states"),
    "no sequence": (lambda s: s.change("cu_seqlens", dim=(1,)), "cu_seqlens", "no sequence"),
    "stride of tokens": (lambda s: s.change("v", stride=(132, 64, 1)), "v", "axis 0 is 132"),
    "stride of heads": (lambda s: s.change("k", stride=(128, 68, 1)), "k", "axis 1 is 68"),
    "stride of states": (lambda s: s.change("final_state", stride=(8192, 4096, 66, 1)), "final_state", "axis 2 is 66"),
    "far strides": (lambda s: s.change("q", stride=(2**40, 64, 1)), "q", "below"),
    "negative strides": (lambda s: s.change("g", stride=(-2, 1)), "g", "at least 0"),
    "tokens": (lambda s: s.change("q", dim=(TOO_MANY, 2, 64)), "q", f"{TOO_MANY} tokens"),
    "no token": (lambda s: s.change("q", dim=(0, 2, 64)), "q", "0 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_may_not_bring(name):
    change, operand, text = REFUSED[name]
    setup = Setup(named("gdn-plain"))
    change(setup)
    with pytest.raises(ExecutionError, match=text) as raised:
        setup.words()
    assert raised.value.operand == operand


def test_slots_are_one_for_each_sequence():
    setup = Setup(named("gdn-slots"))
    setup.change("state_indices", dim=(2,))
    with pytest.raises(ExecutionError, match="2 slots") as raised:
        setup.words()
    assert raised.value.operand == "state_indices"


def test_a_grid_has_its_limit():
    setup = Setup(replace(named("kda-plain"), heads=(64, 64, 64)))
    tokens = MOST_TOKENS
    setup.change("q", dim=(tokens, 64, 64))
    setup.change("cu_seqlens", dim=(2**25 + 1,))
    for port in ("initial_state", "final_state"):
        setup.change(port, dim=(2**25, 64, 64, 64))
    with pytest.raises(ExecutionError, match="CTAs"):
        setup.words()


class Fake:
    """A host function that keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, words, stream):
        self.calls.append((None if not words else list((ctypes.c_int64 * self.count).from_address(words)), stream))


def fake_kernel(problem):
    name = kernel_name(problem)
    return CompiledKernel(name, "90a", f"{name}_0", b"cubin", "ptx", b"with cubin inside")


@pytest.fixture
def plan(monkeypatch):
    setup = Setup(named("kda-plain"))
    made = PrefillPlan(setup.lowered.problem, setup.lowered.binding, fake_kernel(setup.lowered.problem), SMS, 10**9)
    made.setup, made.fake = setup, Fake()
    made.fake.count = len(setup.launcher.index)
    monkeypatch.setattr(PrefillPlan, "function", lambda self: self.fake)
    return made


def test_run_puts_addresses_into_the_words(plan):
    setup = plan.setup
    run = plan.bind(tuple(setup.operands))
    assert plan.fake.calls == [(None, 0)]
    pointers = [0x1000 * (i + 1) for i in range(len(setup.operands))]
    run(pointers, 0x70000000, 5)
    words, stream = plan.fake.calls[-1]
    index, want = setup.launcher.index, setup.words()
    assert stream == 5
    for word, at in index.items():
        port, _, kind = word.partition(".")
        if kind == "address":
            assert words[at] == pointers[setup.place(port)]
        elif word in ADDRESSES:
            assert words[at] == 0x70000000 + want[word]
        else:
            assert words[at] == want[word]
    run([pointer + 0x100000 for pointer in pointers], 0, 6)
    assert plan.fake.calls[-1][0][index["q.address"]] == pointers[setup.place("q")] + 0x100000


def test_a_machine_without_a_device_is_a_typed_error(plan, monkeypatch):
    def fail(words, stream):
        raise RuntimeError("Got Cuda Runtime Error: cudaErrorInsufficientDriver")

    monkeypatch.setattr(PrefillPlan, "function", lambda self: fail)
    with pytest.raises(DriverError, match=r"GPU code can't be loaded: .*cudaErrorInsufficientDriver"):
        plan.bind(tuple(plan.setup.operands))


@pytest.mark.parametrize("port", ["q", "k", "v", "g", "O", "initial_state", "final_state"])
def test_misaligned_addresses_are_named(plan, port):
    setup = plan.setup
    run = plan.bind(tuple(setup.operands))
    pointers = [0x1000 * (i + 1) for i in range(len(setup.operands))]
    pointers[setup.place(port)] += 8
    with pytest.raises(ExecutionError, match="multiple of 16") as raised:
        run(pointers, 0, 0)
    assert raised.value.operand == port
    assert len(plan.fake.calls) == 1


def test_other_addresses_need_no_alignment(plan):
    setup = plan.setup
    pointers = [0x1000 * (i + 1) for i in range(len(setup.operands))]
    pointers[setup.place("beta")] += 2
    pointers[setup.place("cu_seqlens")] += 4
    plan.bind(tuple(setup.operands))(pointers, 0, 0)
    assert len(plan.fake.calls) == 2


def test_host_arguments_say_which_words_are_addresses(plan):
    setup = plan.setup
    block, stream = plan.host_arguments(plan.artifacts[0], setup.pack(), 0x1000)
    words = memoryview(block.data).cast("q")
    index = setup.launcher.index
    addresses = {word for word, at in index.items() if 8 * at in block.addresses}
    assert stream is None
    assert addresses == {word for word in index if word.endswith(".address")} | {*ADDRESSES}
    assert words[index["q.address"]] == setup.held[setup.place("q")].data_ptr()
    assert words[index["workspace"]] == 0x1000


def test_a_saved_plan_comes_back(plan):
    header, payloads = plan.serialize()
    assert restored(header, payloads, plan.problem) == plan.kernel
    engine = KdaSm90()
    made = engine.load_plan(header, payloads, plan.setup.frozen, H200)
    assert made.workspace_size == engine.check_support(plan.setup.frozen, H200).workspace


@pytest.mark.parametrize("change", ["schema", "problem", "layout", "arch", "name", "cubin"])
def test_a_plan_of_something_else_is_refused(plan, change):
    header, payloads = plan.serialize()
    if change == "cubin":
        payloads["cubin"] = b"other"
    else:
        header[change] = {"schema": 99, "problem": "{}", "layout": None, "arch": "100a", "name": "other"}[change]
    with pytest.raises(BuildError):
        restored(header, payloads, plan.problem)


# --- engines
@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_support_and_its_workspace(op):
    setup = Setup(named(f"{op}-plain"))
    engine = ENGINES[op]()
    support = engine.check_support(setup.frozen, H200)
    assert support
    assert support.workspace > 0
    assert {"deterministic", "cuda_graph"} <= support.notes
    assert engine.check_support(setup.frozen, H200) is support


@pytest.mark.parametrize("device", ["A100", "B200"])
def test_other_devices_are_declined(device):
    setup = Setup(named("gdn-plain"))
    declined = GdnSm90().check_support(setup.frozen, ExecutionContext(None, DeviceInfo.preset(device)))
    assert [decline.code for decline in declined.reasons] == ["device.sm_variant"]
    with pytest.raises(BuildError, match="no kernels"):
        GdnSm90().build_plan(setup.frozen, None, ExecutionContext(None, DeviceInfo.preset(device)))


def test_a_workspace_that_no_memory_holds_is_declined():
    """The default bound of a runtime size is 2^31 - 1 tokens."""
    g = cudnn_core.Graph(io_data_type="bfloat16", compute_data_type="float32")
    tokens = cudnn_core.Dim("tokens")
    q, k, v = (g.tensor(dim=(tokens, 4, 64), name=name) for name in "qkv")
    gate = g.tensor(dim=(tokens, 4, 64), data_type="float32", name="g")
    beta = g.tensor(dim=(tokens, 4), data_type="float32", name="beta")
    g.kda(q=q, k=k, v=v, g=gate, beta=beta)[0].set_output(True)
    declined = KdaSm90().check_support(g.freeze(), H200)
    assert [(decline.code, decline.subject) for decline in declined.reasons] == [("device.memory", "workspace")]
    assert "Dim" in declined.reasons[0].hint


def test_declines_of_graph_and_device_come_together():
    frozen = graph_of(replace(named("gdn-plain"), io=torch.float32))[0].freeze()
    declined = GdnSm90().check_support(frozen, ExecutionContext(None, DeviceInfo.preset("A100")))
    assert {decline.code for decline in declined.reasons} == {"dtype.unsupported", "device.sm_variant"}
