"""The rows gdn_decode and kda_decode: what a graph of them says, infers, refuses and costs. Without torch."""

from __future__ import annotations

import pytest

import cudnn_core
from cudnn_core import Dim, GraphError

H, HV, K, V = 2, 4, 64, 128
N, P = 5, 9


class Step:
    """A decode graph in the making: tensors by port, changed by keyword; ``options`` are attributes."""

    def __init__(self, op="gdn_decode", sequences=N, each=1, **options):
        self.op, self.options = op, {"tokens_per_sequence": each, **options}
        tokens = each * sequences
        gates = (tokens, HV, K) if op == "kda_decode" else (tokens, HV)
        self.ports = {
            "q": ((tokens, H, K), "bfloat16"), "k": ((tokens, H, K), "bfloat16"), "v": ((tokens, HV, V), "bfloat16"),
            "g": (gates, "float32"), "beta": ((tokens, HV), "float32"), "initial_state": ((sequences, HV, V, K), "float32"),
        }  # fmt: skip

    def having(self, **ports):
        """Ports as (dim, type), or a dim of the type before; None: without."""
        for port, given in ports.items():
            if given is None:
                del self.ports[port]
            else:
                typed = len(given) == 2 and isinstance(given[1], str)
                self.ports[port] = given if typed else (given, self.ports[port][1])
        return self

    def pooled(self, slots=(N,), **options):
        self.options |= {"output_final_state": True, "overwrite_initial_state": True, **options}
        return self.having(initial_state=(P, HV, V, K), state_indices=(slots, "int32"))

    def graph(self):
        g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
        tensors = {port: g.tensor(dim=dim, data_type=dtype, name=port) for port, (dim, dtype) in self.ports.items()}
        made = getattr(g, self.op)(**tensors, **self.options)
        for tensor in made:
            if tensor is not None:
                tensor.set_output(True)
        return g

    def outputs(self):
        return {tensor.name.rpartition("::")[2]: tensor for tensor in self.graph().get_outputs()}


@pytest.mark.parametrize("op", ["gdn_decode", "kda_decode"])
def test_outputs_follow_from_the_inputs(op):
    found = Step(op, output_final_state=True).outputs()
    assert found["O"].dim == (N, HV, V)
    assert found["final_state"].dim == (N, HV, V, K)
    assert Step(op).outputs().keys() == {"O"}


def test_final_state_of_a_pool_is_the_pool():
    found = Step().pooled().outputs()["final_state"]
    assert (found.dim, found.dtype) == ((P, HV, V, K), "float32")


def test_state_type_is_the_initial_state_s():
    step = Step(output_final_state=True).having(initial_state=((N, HV, V, K), "bfloat16"))
    assert step.outputs()["final_state"].dtype == "bfloat16"
    assert Step(output_final_state=True).having(initial_state=None).outputs()["final_state"].dtype == "float32"


@pytest.mark.parametrize("each", [1, 3, 8])
def test_number_of_sequences_is_a_runtime_size(each):
    sequences, slots = Dim("sequences", min=1, max=64), Dim("slots", min=1, max=64)
    step = Step("kda_decode", sequences=sequences, each=each).pooled((sequences, each))
    g = step.having(initial_state=(slots, HV, V, K), num_accepted_tokens=((sequences,), "int32")).graph()
    assert g.get_outputs()[0].dim == (each * sequences, HV, V)
    assert set(g.freeze().dims) == {"sequences", "slots"}


@pytest.mark.parametrize("each", [1, 4])
def test_without_a_state_the_tokens_tell_the_sequences(each):
    found = Step(each=each, output_final_state=True).having(initial_state=None).outputs()
    assert found["final_state"].dim == (N, HV, V, K)
    sequences = Dim("sequences", min=1, max=64)
    found = Step(sequences=sequences, each=each, output_final_state=True).having(initial_state=None).outputs()
    assert found["final_state"].dim == (sequences, HV, V, K)


def _accepted(**ports):
    return Step(each=3).pooled((N, 3)).having(**ports)


REFUSED = {
    "rank of q": (lambda: Step().having(q=(N, H * K)), "q", "wrong rank"),
    "tokens of v": (lambda: Step().having(v=(N + 1, HV, V)), "v", "number of tokens"),
    "head dimension of k": (lambda: Step().having(k=(N, H, 32)), "k", "head dimension"),
    "heads of k": (lambda: Step().having(k=(N, 3, K)), "k", "neither"),
    "heads in groups": (lambda: Step().having(q=(N, 3, K), k=(N, 3, K)), "v", "groups"),
    "shape of g": (lambda: Step("kda_decode").having(g=(N, HV)), "g", "wrong shape"),
    "shape of beta": (lambda: Step().having(beta=(N, H)), "beta", "wrong shape"),
    "type of k": (lambda: Step().having(k=((N, H, K), "float16")), "k", "data type differs"),
    "type of beta": (lambda: Step().having(beta=((N, HV), "float16")), "beta", "wrong data type"),
    "type of slots": (lambda: Step().pooled().having(state_indices=((N,), "float32")), "state_indices", "wrong data type"),
    "state heads": (lambda: Step().having(initial_state=(N, H, V, K)), "initial_state", "wrong shape"),
    "state layout": (lambda: Step().having(initial_state=(N, HV, K, V)), "initial_state", "wrong shape"),
    "state rows": (lambda: Step().having(cu_seqlens=((N + 2,), "int32")), "initial_state", "wrong shape"),
    "boundaries": (
        lambda: Step().pooled().having(cu_seqlens=((N + 2,), "int32")), "cu_seqlens", "number of boundaries"),
    "nine tokens": (lambda: Step(each=9), "tokens_per_sequence", "out of range"),
    "no token": (lambda: Step(tokens_per_sequence=0), "tokens_per_sequence", "out of range"),
    "tokens that do not divide": (lambda: Step(tokens_per_sequence=2).having(initial_state=None), "q", "without cu_seqlens"),
    "tokens of other sequences": (lambda: Step(tokens_per_sequence=2), "q", "without cu_seqlens"),
    "slots without a pool": (lambda: Step().pooled().having(initial_state=None), "state_indices", "needs initial_state"),
    "pool not in place": (
        lambda: Step().pooled(overwrite_initial_state=False), "state_indices", "needs overwrite_initial_state"),
    "overwriting nothing": (
        lambda: Step(output_final_state=True, overwrite_initial_state=True).having(initial_state=None),
        "initial_state", "overwrite_initial_state needs it"),
    "overwriting without output": (
        lambda: Step(overwrite_initial_state=True), "overwrite_initial_state", "needs output_final_state"),
    "slots of other tokens": (lambda: Step(each=3).pooled((N, 2)), "state_indices", "wrong shape"),
    "slots of other sequences": (lambda: Step().pooled((N + 1,)), "q", "without cu_seqlens"),
    "counts without slots": (
        lambda: Step().having(num_accepted_tokens=((N,), "int32")), "num_accepted_tokens", "a slot for every token"),
    "counts with one slot": (
        lambda: Step().pooled().having(num_accepted_tokens=((N,), "int32")), "num_accepted_tokens", "a slot for every"),
    "counts of other sequences": (
        lambda: _accepted(num_accepted_tokens=((N + 1,), "int32")), "num_accepted_tokens", "wrong shape"),
    "counts of floats": (
        lambda: _accepted(num_accepted_tokens=((N,), "float32")), "num_accepted_tokens", "wrong data type"),
    "scale": (lambda: Step(scale=float("nan")), "scale", "not finite"),
    "a_log without safe_gate": (lambda: Step().having(a_log=((HV,), "float32")), "a_log", "needs safe_gate"),
    "dt_bias without safe_gate": (lambda: Step().having(dt_bias=((HV,), "float32")), "dt_bias", "needs safe_gate"),
    "shape of a_log": (lambda: Step(safe_gate=True).having(a_log=((H,), "float32")), "a_log", "wrong shape"),
    "channels of dt_bias": (
        lambda: Step("kda_decode", safe_gate=True).having(dt_bias=((HV,), "float32")), "dt_bias", "wrong shape"),
    "linear logits": (lambda: Step(safe_gate=True, gate_domain="linear"), "gate_domain", "logits"),
    "doubled beta without sigmoid": (lambda: Step(allow_neg_eigval=True), "allow_neg_eigval", "needs use_beta_sigmoid"),
    "bound without safe_gate": (lambda: Step("kda_decode", gate_lower_bound=-5.0), "gate_lower_bound", "needs safe_gate"),
    "positive bound": (
        lambda: Step("kda_decode", safe_gate=True, gate_lower_bound=1.0), "gate_lower_bound", "not negative"),
    "bound of softplus": (
        lambda: Step("kda_decode", safe_gate=True, gate_activation="softplus", gate_lower_bound=-5.0),
        "gate_lower_bound", "sigmoid form"),
    "softplus without safe_gate": (
        lambda: Step("kda_decode", gate_activation="softplus"), "gate_activation", "needs safe_gate"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rule(case):
    make, port, text = REFUSED[case]
    with pytest.raises(GraphError, match=text) as caught:
        make().graph().validate()
    assert caught.value.port == port, caught.value


def test_a_gdn_decode_has_no_bound():
    with pytest.raises(GraphError, match="gate_lower_bound"):
        Step(gate_lower_bound=-5.0).graph()


def test_valid_steps():
    for step in (
        Step("kda_decode", safe_gate=True).having(a_log=((HV,), "float32"), dt_bias=((HV, K), "float32")),
        Step("kda_decode", safe_gate=True, gate_activation="softplus"),
        Step(each=8).having(cu_seqlens=((N + 1,), "int64"), q=(17, H, K), k=(17, HV, K), v=(17, HV, V), g=(17, HV),
                            beta=((17, HV), "bfloat16")),
        _accepted(num_accepted_tokens=((N,), "int64")),
        Step().pooled((N,), output_final_state=False, overwrite_initial_state=False),
    ):  # fmt: skip
        step.graph().validate()


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_parameters_are_those_of_the_core_s_ops_in_their_order(op):
    def names(row):
        return [param.name for param in row.builders[row.name][0]]

    gone = {"checkpoint_every_n_tokens", "batch_invariant", "name", "compute_data_type", "out_dims"}
    shared = [name for name in names(cudnn_core.lookup_op(op)) if name not in gone]
    ours = names(cudnn_core.lookup_op(f"{op}_decode"))
    assert [name for name in ours if name in shared] == shared
    assert set(ours) - set(shared) <= {"num_accepted_tokens", "tokens_per_sequence", "gate_activation"}


def test_graph_json_round_trip_keeps_the_key():
    g = _accepted(num_accepted_tokens=((N,), "int32")).graph()
    assert cudnn_core.Graph.from_json(g.to_json()).key() == g.key()


def cost(step):
    (node,) = step.graph().freeze().nodes
    return cudnn_core.lookup_op(step.op).cost(node)


def test_cost_counts_the_rows_of_the_pool_that_are_touched():
    row = HV * V * K * 4
    tokens = 2 * N * (2 * H * K + 2 * HV * V) + 4 * N * (HV + HV)
    found = cost(Step().pooled())
    assert found.flops == 7 * N * HV * K * V
    assert found.bytes == tokens + N * 4 + 2 * N * row
    assert cost(Step(each=3).pooled((N, 3))).bytes - 3 * tokens == N * 3 * 4 + 4 * N * row
    assert cost(Step()).bytes == tokens + N * row
    assert cost(Step().having(initial_state=None)).bytes == tokens


def test_names_for_configuration_rules():
    (node,) = Step(each=3).pooled((N, 3)).graph().freeze().nodes
    names = cudnn_core.lookup_op("gdn_decode").dims(node)
    assert names == {
        "total_tokens": 3 * N, "tokens_per_sequence": 3, "heads_q": H, "heads_k": H, "heads_v": HV, "head_dim_k": K,
        "head_dim_v": V, "sequences": N,
    }  # fmt: skip


@pytest.mark.parametrize("op", ["gdn_decode", "kda_decode"])
def test_engine_of_the_op_is_found_on_every_generation_since_ampere(op):
    for device in ("A100", "H200", "B200"):
        decision = Step(op).graph().explain(device=cudnn_core.DeviceInfo.preset(device))
        engine = next(engine for engine in decision.engines if engine.id.startswith(f"linear_attention:{op}"))
        assert engine.state == "selected", engine.reasons
