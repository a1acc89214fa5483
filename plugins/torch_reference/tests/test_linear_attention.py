"""gdn and kda against the textbook recurrence, one head and one token at a time, in numpy fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import oracle, rand, run, single

import cudnn_core
from cudnn_core import Dim, ExecutionError

D = torch.float64
ATTRS = {
    "scale": None, "output_final_state": True, "use_qk_l2norm": False, "checkpoint_every_n_tokens": 0,
    "use_beta_sigmoid": False, "allow_neg_eigval": False, "safe_gate": False, "gate_domain": "log",
    "batch_invariant": False, "overwrite_initial_state": False,
}  # fmt: skip
T, K, V = 9, 4, 3
CU = [0, 4, 4, 9]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def recurrence(op, x, cu, state=None, a_log=None, dt_bias=None, bound=-5.0, **attrs):
    """O [T, HO, V], final [N, HO, V, K] and the states before every n-th token, from the definition."""
    attrs = {**ATTRS, **attrs}
    q, k, v, g, beta = (np.asarray(x[p], dtype=np.float64) for p in ("q", "k", "v", "g", "beta"))
    heads = max(q.shape[1], v.shape[1])
    n = attrs["checkpoint_every_n_tokens"]
    o = np.zeros((q.shape[0], heads, v.shape[2]))
    final = np.zeros((len(cu) - 1, heads, v.shape[2], q.shape[2]))
    rows = []
    for s in range(len(cu) - 1):
        states = np.zeros((heads, q.shape[2], v.shape[2])) if state is None else np.swapaxes(state[s], 1, 2).copy()
        for t in range(cu[s], cu[s + 1]):
            if n and (t - cu[s]) % n == 0:
                rows.append(np.swapaxes(states, 1, 2).copy())
            for h in range(heads):
                qt = q[t, h * q.shape[1] // heads]
                kt = k[t, h * k.shape[1] // heads]
                vt = v[t, h * v.shape[1] // heads]
                if attrs["use_qk_l2norm"]:
                    qt, kt = (y / math.sqrt(float(y @ y) + 1e-6) for y in (qt, kt))
                gt, bt = g[t, h], beta[t, h]
                if attrs["use_beta_sigmoid"]:
                    bt = sigmoid(bt) * (2 if attrs["allow_neg_eigval"] else 1)
                amp = 1.0 if a_log is None else math.exp(a_log[h])
                gt = gt + (0 if dt_bias is None else dt_bias[h]) if attrs["safe_gate"] else gt
                if attrs["gate_domain"] == "linear":
                    alpha = np.maximum(gt, 1e-10)
                elif attrs["safe_gate"]:
                    alpha = np.exp(-amp * np.log1p(np.exp(gt)) if op == "gdn" else bound * sigmoid(amp * gt))
                else:
                    alpha = np.exp(gt)
                S = states[h] * np.broadcast_to(alpha, (q.shape[2],))[:, None]
                S = S + np.outer(kt, bt * (vt - S.T @ kt))
                states[h] = S
                scale = q.shape[2] ** -0.5 if attrs["scale"] is None else attrs["scale"]
                o[t, h] = scale * (S.T @ qt)
        final[s] = np.swapaxes(states, 1, 2)
    return o, final, rows


def data(op, h=2, hk=None, hv=2, seed=0, total=T, width=K):
    heads = max(h, hv)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((total, heads) if op == "gdn" else (total, heads, width), generator=generator, dtype=D)
    return {
        "q": rand(total, h, width, seed=seed, dtype=D),
        "k": rand(total, hk or h, width, seed=seed + 1, dtype=D) / math.sqrt(width),
        "v": rand(total, hv, V, seed=seed + 2, dtype=D),
        "g": torch.log(0.5 + 0.5 * uniform),
        "beta": torch.rand((total, heads), generator=generator, dtype=D),
    }


def build(op, x, cu=CU, extra=None, rows=None, checkpoints=None, dtype="float64", **attrs):
    attrs = {**ATTRS, **({"gate_lower_bound": None} if op == "kda" else {}), **attrs}
    inputs = {port: (dtype if port in "qkv" else "float64", tuple(value.shape)) for port, value in x.items()}
    if cu is not None:
        inputs["cu_seqlens"] = ("int32", (len(cu),))
    inputs |= extra or {}
    heads = max(x["q"].shape[-2], x["v"].shape[-2])
    sequences = len(cu) - 1 if cu is not None else 1
    total = x["q"].shape[0]
    state = (heads, x["v"].shape[-1], x["q"].shape[-1])
    outputs = {"O": ("float64", (total, heads, x["v"].shape[-1]))}
    if attrs["output_final_state"]:
        outputs["final_state"] = ("float64", (rows or sequences, *state))
    if attrs["checkpoint_every_n_tokens"]:
        outputs["state_checkpoints"] = ("float64", (checkpoints, *state))
    return single(op, inputs, outputs, attrs, "float64")


def cu_tensor(cu=CU):
    return torch.tensor(cu, dtype=torch.int32)


def near(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize(("h", "hk", "hv"), [(2, 2, 2), (1, 1, 3), (4, 4, 2), (4, 2, 2), (2, 4, 4)])
def test_recurrence_with_grouped_heads(op, h, hk, hv):
    x = data(op, h, hk, hv)
    out = run(build(op, x), {**x, "cu_seqlens": cu_tensor()})
    o, final, _ = recurrence(op, x, CU)
    near(out["O"], o)
    near(out["final_state"], final)


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_initial_state_and_an_empty_sequence_that_passes_it_through(op):
    x, state = data(op), rand(3, 2, V, K, seed=9, dtype=D)
    out = run(
        build(op, x, extra={"initial_state": ("float64", (3, 2, V, K))}),
        {**x, "cu_seqlens": cu_tensor(), "initial_state": state},
    )
    o, final, _ = recurrence(op, x, CU, state.numpy())
    near(out["O"], o)
    near(out["final_state"], final)
    assert torch.equal(out["final_state"][1], state[1])


@pytest.mark.parametrize(
    "attrs",
    [
        {"scale": 0.7},
        {"use_qk_l2norm": True},
        {"use_beta_sigmoid": True},
        {"use_beta_sigmoid": True, "allow_neg_eigval": True},
        {"batch_invariant": True},
    ],
)
@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_attributes(op, attrs):
    x = data(op)
    out = run(build(op, x, **attrs), {**x, "cu_seqlens": cu_tensor()})
    near(out["O"], recurrence(op, x, CU, **attrs)[0])


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_linear_gate_domain_has_a_floor(op):
    x = data(op)
    x["g"] = x["g"].exp()
    x["g"][2] = 0.0
    out = run(build(op, x, gate_domain="linear"), {**x, "cu_seqlens": cu_tensor()})
    near(out["O"], recurrence(op, x, CU, gate_domain="linear")[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("amplitude", [True, False])
@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_safe_gates(op, amplitude, bias):
    x, extra, values = data(op), {}, {}
    x["g"] = rand(*x["g"].shape, seed=11, dtype=D) * 3
    if amplitude:
        extra["a_log"], values["a_log"] = ("float64", (2,)), rand(2, seed=12, dtype=D)
    if bias:
        dim = (2,) if op == "gdn" else (2, K)
        extra["dt_bias"], values["dt_bias"] = ("float64", dim), rand(*dim, seed=13, dtype=D)
    bound = {} if op == "gdn" else {"gate_lower_bound": -2.5}
    out = run(build(op, x, extra=extra, safe_gate=True, **bound), {**x, **values, "cu_seqlens": cu_tensor()})
    arrays = {name: value.numpy() for name, value in values.items()}
    near(out["O"], recurrence(op, x, CU, safe_gate=True, bound=-2.5, **arrays)[0])


def test_kda_gate_lower_bound_defaults_to_minus_five():
    x = data("kda")
    x["g"] = rand(*x["g"].shape, seed=11, dtype=D)
    out = run(build("kda", x, safe_gate=True), {**x, "cu_seqlens": cu_tensor()})
    near(out["O"], recurrence("kda", x, CU, safe_gate=True, bound=-5.0)[0])


def test_checkpoints_are_the_states_entering_every_nth_token():
    x, state = data("kda"), rand(3, 2, V, K, seed=9, dtype=D)
    attrs = {"checkpoint_every_n_tokens": 2}
    graph = build("kda", x, extra={"initial_state": ("float64", (3, 2, V, K))}, checkpoints=T // 2 + 3, **attrs)
    out = run(graph, {**x, "cu_seqlens": cu_tensor(), "initial_state": state})["state_checkpoints"]
    rows = recurrence("kda", x, CU, state.numpy(), **attrs)[2]
    assert len(rows) == 5  # ceil(4 / 2) + 0 + ceil(5 / 2)
    near(out[:5], np.stack(rows))
    assert (out[5:] == 0).all()
    assert torch.equal(out[0], state[0])


def test_a_pool_of_states_is_read_and_updated_by_index_and_a_negative_one_starts_from_zero():
    x, pool = data("gdn"), rand(5, 2, V, K, seed=9, dtype=D)
    extra = {"initial_state": ("float64", (5, 2, V, K)), "state_indices": ("int32", (3,))}
    graph = build("gdn", x, extra=extra, rows=5, overwrite_initial_state=True)
    shared = pool.clone()  # final_state is initial_state
    out = run(graph, {**x, "cu_seqlens": cu_tensor(), "initial_state": shared, "final_state": shared,
                      "state_indices": torch.tensor([3, 0, -1], dtype=torch.int32)})  # fmt: skip
    seeds = np.concatenate([pool.numpy()[[3, 0]], np.zeros((1, 2, V, K))])
    o, final, _ = recurrence("gdn", x, CU, seeds)
    near(out["O"], o)
    near(shared[3], final[0])
    for row in (0, 1, 2, 4):
        assert torch.equal(shared[row], pool[row])


def test_without_cu_seqlens_there_is_one_sequence():
    x = data("gdn")
    out = run(build("gdn", x, cu=None), x)
    o, final, _ = recurrence("gdn", x, [0, T])
    near(out["O"], o)
    near(out["final_state"], final)


def test_tokens_of_no_sequence_give_zero():
    x = data("gdn")
    out = run(build("gdn", x, cu=[1, 4, 6]), {**x, "cu_seqlens": cu_tensor([1, 4, 6])})["O"]
    assert (out[0] == 0).all()
    assert (out[6:] == 0).all()


@pytest.mark.parametrize(
    ("given", "counted"),
    [([-2, 4, 3, 12], [0, 4, 4, T]), ([7, 2, 5, 8], [7, 7, 7, 8]), ([0, 99, 3, -1], [0, T, T, T])],
)
def test_a_boundary_counts_as_the_largest_up_to_it_held_to_the_tokens(given, counted):
    x = data("gdn")
    out = run(build("gdn", x, cu=given), {**x, "cu_seqlens": cu_tensor(given)})
    o, final, _ = recurrence("gdn", x, counted)
    near(out["O"], o)
    near(out["final_state"], final)


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_positive_gates_count_as_0(op):
    x = data(op)
    x["g"][2], x["g"][5] = 0.7, torch.inf
    out = run(build(op, x), {**x, "cu_seqlens": cu_tensor()})
    near(out["O"], recurrence(op, {**x, "g": x["g"].clamp(max=0)}, CU)[0])
    x["g"] = (x["g"].clamp(max=1)).exp()
    linear = run(build(op, x, gate_domain="linear"), {**x, "cu_seqlens": cu_tensor()})
    near(linear["O"], out["O"])


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_no_tokens(op):
    x, state = {port: value[:0] for port, value in data(op).items()}, rand(2, 2, V, K, seed=9, dtype=D)
    graph = build(op, x, cu=[0, 0, 0], extra={"initial_state": ("float64", (2, 2, V, K))})
    out = run(graph, {**x, "cu_seqlens": cu_tensor([0, 0, 0]), "initial_state": state})
    assert torch.equal(out["final_state"], state)


def test_results_do_not_depend_on_the_rest_of_the_batch_or_on_later_tokens():
    x = data("kda", total=12)
    packed = run(build("kda", x, cu=[0, 5, 12]), {**x, "cu_seqlens": cu_tensor([0, 5, 12])})["O"]
    alone = {port: value[5:10].contiguous() for port, value in x.items()}
    single_run = run(build("kda", alone, cu=[0, 5]), {**alone, "cu_seqlens": cu_tensor([0, 5])})["O"]
    assert torch.equal(packed[5:10], single_run)


def test_strong_decay_and_identical_keys_stay_finite():
    x = data("kda", total=64)
    x["k"] = torch.ones_like(x["k"]) / 2
    x["beta"] = torch.full_like(x["beta"], 0.999)
    x["g"] = torch.full_like(x["g"], -20.0)
    x["g"][7] = -math.inf
    out = run(build("kda", x, cu=[0, 64]), {**x, "cu_seqlens": cu_tensor([0, 64])})
    assert out["O"].isfinite().all()
    near(out["O"], recurrence("kda", x, [0, 64])[0])


def test_long_memory_in_fp32_follows_fp64():
    total = 2048
    x = data("gdn", total=total)
    x["g"] = torch.full_like(x["g"], -1e-3)
    x["k"] = x["k"] / x["k"].norm(dim=-1, keepdim=True)
    graph = build("gdn", x, cu=[0, total])
    values = {**x, "cu_seqlens": cu_tensor([0, total])}
    wide, narrow = oracle(graph, values)["O"], oracle(graph, values, precision="float32")["O"]
    assert (wide - narrow).square().mean().sqrt() < 1e-5 * wide.square().mean().sqrt()


def test_l2norm_rounds_the_rows_to_the_io_type():
    x = data("gdn")
    cast = {port: value.to(torch.bfloat16) if port in "qkv" else value for port, value in x.items()}
    graph = build("gdn", x, dtype="bfloat16", use_qk_l2norm=True)
    out = run(graph, {**cast, "cu_seqlens": cu_tensor()})["O"]
    rounded = dict(x)
    for port in "qk":
        wide = cast[port].double()
        rounded[port] = (wide * (wide.square().sum(-1, keepdim=True) + 1e-6) ** -0.5).to(torch.bfloat16).double()
    rounded["v"] = cast["v"].double()
    near(out, recurrence("gdn", rounded, CU)[0])


def varying(pooled):
    """The plan of a graph whose numbers of tokens, boundaries, states and slots have a name each."""
    graph = cudnn_core.Graph(io_data_type="float32", compute_data_type="float32", intermediate_data_type="float32")
    tokens, count = Dim("tokens", 1, 99), Dim("count", 1, 9)
    q, k, v = (graph.tensor((tokens, 1, 8), name=name) for name in "qkv")
    g, beta = (graph.tensor((tokens, 1), name=name) for name in ("g", "beta"))
    bounds = graph.tensor((Dim("boundaries", 2, 9),), data_type="int32", name="bounds")
    extra = {"initial_state": graph.tensor((Dim("pool", 1, 9) if pooled else count, 1, 8, 8), name="states")}
    if pooled:
        extra["state_indices"] = graph.tensor((count,), data_type="int32", name="slots")
        extra["overwrite_initial_state"] = True
    made = graph.gdn(q, k, v, g, beta, bounds, output_final_state=True, **extra)
    for tensor, name in zip(made, ("O", "final"), strict=False):
        tensor.set_output(True).set_name(name)
    return graph.plan(device="cpu")


def operands(states, bounds, slots=None):
    x = {name: torch.zeros(12, 1, 8) for name in ("q", "k", "v", "O")}
    x |= {name: torch.zeros(12, 1) for name in ("g", "beta")}
    x |= {"states": torch.ones(states, 1, 8, 8), "final": torch.full((states, 1, 8, 8), 7.0)}
    x["bounds"] = torch.tensor(bounds, dtype=torch.int32)
    return x if slots is None else {**x, "slots": torch.tensor(slots, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("states", "bounds", "slots", "culprit"),
    [
        (2, [0, 4, 8, 12], None, "final"),
        (4, [0, 4, 8, 12], None, "final"),
        (3, [0, 12], None, "final"),
        (5, [0, 4, 12], [3], "slots"),
        (5, [0, 12], [3, 1], "slots"),
    ],
    ids=["more sequences", "fewer sequences", "one sequence", "fewer slots", "more slots"],
)
def test_runtime_sizes_that_disagree_are_refused_by_name_before_anything_is_written(states, bounds, slots, culprit):
    plan, x = varying(pooled=slots is not None), operands(states, bounds, slots)
    with pytest.raises(ExecutionError, match=f"operand {culprit}: wrong shape") as raised:
        plan.execute(x)
    assert raised.value.operand == culprit
    assert (x["final"] == 7).all()


def test_runtime_sizes_that_agree_run():
    for pooled, given in ((False, operands(2, [0, 4, 12])), (True, operands(5, [0, 4, 12], [3, 1]))):
        varying(pooled=pooled).execute(given)
        assert (given["final"] == 1).all()
