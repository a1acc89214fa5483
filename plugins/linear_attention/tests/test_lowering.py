"""From graphs to problems, and what has no kernel: every reason at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from la_cases.cases import CASES, named
from la_cases.running import graph_of
from linear_attention.limits import GRID_LIMIT, MOST_TOKENS, STRIDE_LIMIT
from linear_attention.lowering import lower_gdn, lower_kda
from linear_attention.problem import Problem

import cudnn_core
from cudnn_core import Dim

LOWER = {"gdn": lower_gdn, "kda": lower_kda}
BOTH = pytest.mark.parametrize("op", ["gdn", "kda"])
PREFILLS = [case for case in CASES if not case.decodes]
H, HK, HV, K, V, T, N, P = 2, 2, 4, 64, 128, 100, 3, 7


class Build:
    """A graph of one node, of which single things can be different."""

    def __init__(self, op, **attrs):
        self.op, self.attrs = op, attrs
        gates = (T, HV) if op == "gdn" else (T, HV, K)
        self.tensors = {
            "q": [(T, H, K), "bfloat16", None], "k": [(T, HK, K), "bfloat16", None], "v": [(T, HV, V), "bfloat16", None],
            "g": [gates, "float32", None], "beta": [(T, HV), "float32", None],
        }  # fmt: skip
        self.outputs = {"O": "bfloat16"}
        self.strides = {}
        self.compute = "float32"
        self.hidden = ()

    def having(self, **tensors):
        for port, (dim, dtype, stride) in tensors.items():
            self.tensors[port] = [dim, dtype, stride]
        return self

    def typed(self, dtype, *ports):
        for port in ports:
            self.tensors[port][1] = dtype
        return self

    def strided(self, **strides):
        for port, stride in strides.items():
            self.tensors[port][2] = stride
        return self

    def long(self, tokens):
        for port in ("q", "k", "v", "g", "beta"):
            self.tensors[port][0] = (tokens, *self.tensors[port][0][1:])
        return self

    def states(self, **options):
        self.attrs |= {"output_final_state": True, **options}
        return self.having(initial_state=((N, HV, V, K), "float32", None), cu_seqlens=((N + 1,), "int32", None))

    def pooled(self):
        self.states(overwrite_initial_state=True)
        return self.having(initial_state=((P, HV, V, K), "float32", None), state_indices=((N,), "int32", None))

    def graph(self):
        g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type=self.compute)
        made = {}
        for port, (dim, dtype, stride) in self.tensors.items():
            made[port] = g.tensor(dim=dim, stride=stride, data_type=dtype, name=port)
        outputs = dict(
            zip(("O", "final_state", "state_checkpoints"), getattr(g, self.op)(**made, **self.attrs), strict=False)
        )
        for port, tensor in outputs.items():
            if tensor is None or port in self.hidden:
                continue
            tensor.set_output(True).set_name(port)
            if port in self.outputs:
                tensor.set_data_type(self.outputs[port])
            if port in self.strides:
                tensor.set_stride(self.strides[port])
        return g.freeze()

    def lowered(self):
        return LOWER[self.op](self.graph())

    def problem(self):
        lowered = self.lowered()
        assert lowered.problem is not None, lowered.declines
        return lowered.problem

    def declines(self):
        lowered = self.lowered()
        assert lowered.problem is None
        return {(decline.code, decline.subject) for decline in lowered.declines}


PLAIN = {
    "io": "bfloat16", "heads_q": H, "heads_k": HK, "heads_v": HV, "key": K, "value": V, "gate_dtype": "float32",
    "beta_dtype": "float32", "scale": K**-0.5,
}  # fmt: skip


@BOTH
def test_plain(op):
    assert Build(op).problem() == Problem(op, **PLAIN)


@BOTH
def test_everything_that_is_not_a_size_is_in_the_problem(op):
    channels = (K,) if op == "kda" else ()
    build = Build(
        op,
        scale=0.5,
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        allow_neg_eigval=True,
        safe_gate=True,
        batch_invariant=True,
    ).pooled()
    build.having(a_log=((HV,), "float32", None), dt_bias=((HV, *channels), "bfloat16", None))
    build.typed("int64", "cu_seqlens", "state_indices").typed("bfloat16", "initial_state", "g", "beta")
    assert build.problem() == Problem(
        op, **PLAIN | {"gate_dtype": "bfloat16", "beta_dtype": "bfloat16", "scale": 0.5}, index_dtype="int64", initial=True,
        final=True, state_dtype="bfloat16", slot_dtype="int64", overwrite=True, l2norm=True, beta_sigmoid=True,
        neg_eigval=True, safe="softplus" if op == "gdn" else "sigmoid", lower_bound=0.0 if op == "gdn" else -5.0,
        a_log_dtype="float32", bias_dtype="bfloat16", batch_invariant=True,
    )  # fmt: skip


@BOTH
def test_gates_as_decays(op):
    assert Build(op, gate_domain="linear").problem().domain == "linear"


def test_lower_bound():
    assert Build("kda", safe_gate=True, gate_lower_bound=-1.5).problem().lower_bound == -1.5


@BOTH
def test_final_state_alone_has_its_own_type(op):
    build = Build(op, output_final_state=True)
    assert build.problem() == Problem(op, **PLAIN, final=True, state_dtype="float32")
    build.outputs["final_state"] = "float16"
    assert build.problem().state_dtype == "float16"


@BOTH
def test_k_major_states(op):
    k_major = (HV * K * V, K * V, 1, V)
    build = Build(op).states().strided(initial_state=k_major)
    build.strides["final_state"] = k_major
    assert build.problem().state_layout == "k_major"


@BOTH
def test_sizes_are_not_in_the_problem(op):
    tokens, rows = Dim("tokens", 1, 999), Dim("rows", 1, 99)
    build = Build(op).states()
    sizes = Build(op).states()
    for port in ("q", "k", "v", "g", "beta"):
        sizes.tensors[port][0] = (tokens, *sizes.tensors[port][0][1:])
    sizes.tensors["initial_state"][0] = (rows, HV, V, K)
    sizes.tensors["cu_seqlens"][0] = (Dim("boundaries", 2, 100),)
    assert sizes.problem() == build.problem()


@BOTH
def test_canonical_text_tells_problems_apart(op):
    problem = Build(op).problem()
    assert problem.canonical() == Problem(op, **PLAIN).canonical()
    changes = {
        "heads_q": 4, "value": 64, "io": "float16", "initial": True, "domain": "linear", "safe": "softplus", "scale": 0.25,
        "l2norm": True, "lower_bound": -1.0, "batch_invariant": True, "state_layout": "k_major", "overwrite": True,
    }  # fmt: skip
    texts = {replace(problem, **{name: value}).canonical() for name, value in changes.items()}
    assert len(texts | {problem.canonical()}) == len(changes) + 1


@pytest.mark.parametrize("case", [case for case in PREFILLS if case.io.itemsize == 2], ids=str)
def test_every_case_of_16_bits_has_a_problem(case):
    graph, _ = graph_of(case)
    lowered = LOWER[case.op](graph.freeze())
    assert lowered.declines == ()
    assert lowered.problem.variant == case.op
    assert (lowered.problem.state_layout == "k_major") == (case.layout == "k_major")


# --- the softplus form
def softplus(**fields):
    return replace(named("kda-softplus"), **fields)


@pytest.mark.parametrize(("a_log", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_softplus_form_of_kda_is_found_before_the_node(a_log, bias):
    case = softplus(a_log=a_log, bias=bias)
    frozen = graph_of(case)[0].freeze()
    lowered = lower_kda(frozen)
    problem = lowered.problem
    assert problem is not None, lowered.declines
    assert (problem.safe, problem.a_log_dtype, problem.bias_dtype) == (
        "softplus", "float32" if a_log else "", "float32" if bias else "",
    )  # fmt: skip
    names = {port: frozen.operands[place.operand].name for port, place in lowered.binding.places.items()}
    assert names == {port: port for port in names}
    assert len(names) == len(frozen.operands)


def gate_graph(change=""):
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    tokens = Dim("tokens", 1, 999)
    q, k, v = (g.tensor(dim=(tokens, HV, K), data_type="bfloat16", name=name) for name in "qkv")
    raw = g.tensor(dim=(tokens, HV, K), data_type="float32", name="g")
    beta = g.tensor(dim=(tokens, HV), data_type="float32", name="beta")
    a_log = g.tensor(dim=(1, HV, K if change == "channel a_log" else 1), data_type="float32", name="a_log")
    bias = g.tensor(dim=(1, HV, 1 if change == "head bias" else K), data_type="float32", name="dt_bias")
    logits = g.add(bias, raw) if change == "swapped" else g.add(raw, bias)
    activated = (g.relu if change == "relu" else g.softplus)(logits)
    if change == "16 bits between":
        activated.set_data_type("bfloat16")
    amplitude = a_log if change == "amplitude" else g.exp(a_log)
    scaled = g.mul(amplitude, activated) if change == "swapped" else g.mul(activated, amplitude)
    gate = scaled if change == "sign" else g.neg(scaled)
    if change == "output":
        gate.set_output(True).set_name("gate")
    if change == "read twice":
        g.relu(activated).set_output(True).set_name("other")
    if change == "twice":
        gate = g.neg(g.neg(gate))
    attrs = {"gate_domain": "linear"} if change == "domain" else {"safe_gate": True} if change == "safe" else {}
    g.kda(q=q, k=k, v=v, g=gate, beta=beta, **attrs)[0].set_output(True).set_name("O")
    return g.freeze()


@pytest.mark.parametrize("change", ["", "swapped"])
def test_operands_of_the_form_stand_in_either_order(change):
    frozen = gate_graph(change)
    lowered = lower_kda(frozen)
    assert lowered.problem is not None, lowered.declines
    places = lowered.binding.places
    assert {port: frozen.operands[places[port].operand].name for port in ("g", "a_log", "dt_bias")} == {
        "g": "g", "a_log": "a_log", "dt_bias": "dt_bias",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    ["16 bits between", "amplitude", "sign", "output", "twice", "domain", "safe", "channel a_log", "head bias"],
)
def test_other_pointwise_nodes_are_declined(change):
    declines = lower_kda(gate_graph(change)).declines
    assert [(decline.code, decline.subject) for decline in declines] == [("op.pattern", "kda.g")]
    assert declines[0].actual


@pytest.mark.parametrize("change", ["relu", "read twice"])
def test_other_ops_are_named(change):
    assert {(d.code, d.subject) for d in lower_kda(gate_graph(change)).declines} == {("op.unsupported", "relu")}


# --- declines
FAR = STRIDE_LIMIT // 2  # elements of 2 bytes
CROWD = 2**29 + 1  # sequences of 4 heads and 2 slabs
K_STRIDED = (2 * HV * V * K, 2 * V * K, 2 * K, 2)
DECLINES = {
    "float32": (lambda b: b.typed("float32", "q", "k", "v"), {("dtype.unsupported", "q")}),
    "another type of O": (lambda b: b.outputs.update(O="float32"), {("dtype.mixed", "O")}),
    "float64 gates": (lambda b: b.typed("float64", "g"), {("dtype.unsupported", "g")}),
    "float64 states": (lambda b: b.states().typed("float64", "initial_state"), {
        ("dtype.unsupported", "initial_state"), ("dtype.unsupported", "final_state")}),
    "head size": (lambda b: b.having(v=((T, HV, 96), "bfloat16", None)), {("shape.range", "v.dim[-1]")}),
    "checkpoints": (lambda b: b.attrs.update(checkpoint_every_n_tokens=64), {
        ("op.attribute", "{op}.checkpoint_every_n_tokens")}),
    "channels apart": (lambda b: b.strided(q=(2 * H * K, 2 * K, 2)), {("layout.stride", "q.stride[2]")}),
    "rows of odd bytes": (lambda b: b.strided(k=(HK * K + 4, K, 1)), {("layout.alignment", "k.stride[0]")}),
    "heads of odd bytes": (lambda b: b.strided(v=(HV * (V + 2), V + 2, 1)), {("layout.alignment", "v.stride[1]")}),
    "neither layout of states": (lambda b: b.states().strided(initial_state=K_STRIDED), {("layout.order", "initial_state")}),
    "two layouts of states": (lambda b: b.states().strided(initial_state=(HV * V * K, V * K, 1, V)), {
        ("layout.order", "final_state")}),
    "states of odd bytes": (lambda b: b.states().strided(initial_state=(HV * V * (K + 2), V * (K + 2), K + 2, 1)), {
        ("layout.alignment", "initial_state.stride[2]")}),
    "no sequence": (lambda b: b.having(cu_seqlens=((1,), "int32", None)), {("shape.range", "cu_seqlens.dim[0]")}),
    "too many tokens": (lambda b: b.long(MOST_TOKENS + 1), {("shape.range", "q.dim[0]")}),
    "too many tokens in every run": (lambda b: b.long(Dim("tokens", 2 * MOST_TOKENS, 4 * MOST_TOKENS)), {
        ("shape.range", "q.dim[0]")}),
    "a grid too large": (lambda b: b.having(cu_seqlens=((CROWD,), "int32", None)), {("shape.range", "grid")}),
    "rows too far apart": (lambda b: b.strided(q=(FAR, K, 1)), {("layout.stride", "q.stride[0]")}),
    "states too far apart": (lambda b: b.states().strided(initial_state=(FAR // 2, V * K, K, 1)), {
        ("layout.stride", "initial_state.stride[0]")}),
    "boundaries apart": (lambda b: b.states().strided(cu_seqlens=(2,)), {("layout.stride", "cu_seqlens.stride[0]")}),
    "slots apart": (lambda b: b.pooled().strided(state_indices=(2,)), {("layout.stride", "state_indices.stride[0]")}),
    "compute type": (lambda b: setattr(b, "compute", "bfloat16"), {("dtype.compute", "{op}")}),
    "state kept inside": (lambda b: setattr(b.states(), "hidden", ("final_state",)), {("op.pattern", "final_state")}),
    "several": (lambda b: b.typed("float32", "q", "k", "v").having(beta=((T, HV), "float32", None)).attrs.update(
        checkpoint_every_n_tokens=64), {("dtype.unsupported", "q"), ("op.attribute", "{op}.checkpoint_every_n_tokens")}),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", DECLINES)
def test_declines(op, name):
    change, expected = DECLINES[name]
    build = Build(op)
    change(build)
    if build.tensors["q"][1] == "float32":
        build.outputs["O"] = "float32"
    assert build.declines() == {(code, subject.format(op=op)) for code, subject in expected}


@BOTH
def test_what_just_fits_a_launch_is_taken(op):
    """Runtime sizes count with their smallest value: what they are is for the launch to see."""
    assert Build(op).long(MOST_TOKENS).problem()
    assert Build(op).long(Dim("tokens", 1, 2 * MOST_TOKENS)).problem()
    assert Build(op).having(cu_seqlens=((GRID_LIMIT // 8,), "int32", None)).problem()
    assert Build(op).strided(q=(FAR - 8, K, 1)).problem()


def test_channels_of_kda_gates_are_adjacent():
    build = Build("kda").strided(g=(2 * HV * K, 2 * K, 2))
    assert build.declines() == {("layout.stride", "g.stride[2]")}
    build = Build("kda").strided(g=(HV * K + 2, K, 1))
    assert build.declines() == {("layout.alignment", "g.stride[0]")}


def test_strides_of_gdn_gates_and_of_single_rows_are_free():
    assert Build("gdn").strided(g=(1, T), beta=(2 * HV + 1, 2)).problem()


def test_head_sizes_that_a_run_tells_are_declined():
    width = Dim("width", 64, 128)
    build = Build("gdn").having(q=((T, H, width), "bfloat16", None), k=((T, HK, width), "bfloat16", None))
    assert {("shape.dynamic", "q.dim[2]"), ("shape.dynamic", "k.dim[2]")} <= build.declines()


def test_other_graphs_are_declined():
    g = cudnn_core.Graph(io_data_type="float32")
    g.relu(g.tensor((4, 8))).set_output(True)
    frozen = g.freeze()
    assert [d.code for d in lower_gdn(frozen).declines] == ["op.anchor"]
    assert [d.code for d in lower_gdn(gate_graph()).declines] == ["op.anchor"]
