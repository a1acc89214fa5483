"""Validation rules of sdpa, gdn and kda: one node for each, whose finding names the port."""

import math

import pytest

from ._fakes import call, index, ports_with_problems, problems, scalar, tensor

B, H, SQ, SKV, D = 2, 8, 128, 256, 64


def sdpa(
    q=(B, H, SQ, D), k=(B, 4, SKV, D), v=(B, 4, SKV, D), dtype="float16", k_dtype="float16", q_fields=None, **kwargs
):
    return call(
        "sdpa",
        tensor(*q, dtype=dtype, **(q_fields or {})),
        tensor(*k, dtype=k_dtype),
        tensor(*v, dtype=dtype),
        **kwargs,
    )


LENGTHS = {"use_padding_mask": True, "seq_len_q": index(B, 1, 1, 1), "seq_len_kv": index(B, 1, 1, 1)}
PAGED = {
    **LENGTHS,
    "k": (40, 4, 16, D),
    "v": (40, 4, 16, D),
    "paged_attention_k_table": index(B, 1, 16, 1),
    "paged_attention_v_table": index(B, 1, 16, 1),
}
RANDOM = (0.1, scalar("int64"), scalar("int64"))


def ragged(**fields):
    return {"ragged_offset": index(B + 1, 1, 1, 1), **fields}


SDPA = {
    "rank of q": (lambda: sdpa(q=(B, H, SQ)), "q", "wrong rank"),
    "rank of v": (lambda: sdpa(v=(B, 4, SKV)), "v", "wrong rank"),
    "type of q": (lambda: sdpa(dtype="int8", k_dtype="int8"), "q", "data type"),
    "type of k": (lambda: sdpa(k_dtype="bfloat16"), "k", "data type differs"),
    "heads of k": (lambda: sdpa(k=(B, 3, SKV, D)), "k", "does not divide"),
    "heads of v": (lambda: sdpa(v=(B, 5, SKV, D)), "v", "does not divide"),
    "batch of k": (lambda: sdpa(k=(1, 4, SKV, D)), "k", "batch differs"),
    "head dim of k": (lambda: sdpa(k=(B, 4, SKV, 32)), "k", "head dimension differs"),
    "keys of v": (lambda: sdpa(v=(B, 4, 255, D)), "v", "sequence length differs"),
    "scale twice": (
        None,
        "attn_scale",
        "both as a tensor and as a number",
    ),
    "infinite scale": (lambda: sdpa(attn_scale=math.inf), "scale", "not finite"),
    "shape of attn_scale": (lambda: sdpa(attn_scale=tensor(2)), "attn_scale", "one element"),
    "type of attn_scale": (lambda: sdpa(attn_scale=scalar("int32")), "attn_scale", "data type"),
    "negative right bound": (lambda: sdpa(diagonal_band_right_bound=-1), "right_bound", "negative"),
    "empty window": (lambda: sdpa(sliding_window_length=0), "left_bound", "not positive"),
    "window with more queries than keys": (
        lambda: sdpa(q=(B, H, 512, D), sliding_window_length=8),
        "left_bound",
        "as many keys as queries",
    ),
    "bottom right with more queries than keys": (
        lambda: sdpa(q=(B, H, 512, D), use_causal_mask_bottom_right=True),
        "diagonal_alignment",
        "as many keys as queries",
    ),
    "alibi without a causal mask": (lambda: sdpa(use_alibi_mask=True), "use_alibi_mask", "needs a causal mask"),
    "shape of bias": (lambda: sdpa(bias=tensor(1, 1, SQ, 1000)), "bias", "does not broadcast"),
    "rank of bias": (lambda: sdpa(bias=tensor(SQ, SKV)), "bias", "wrong rank"),
    "type of bias": (lambda: sdpa(bias=tensor(1, 1, SQ, SKV, dtype="boolean")), "bias", "data type"),
    "shape of block_mask": (lambda: sdpa(block_mask=tensor(B, H, 1, 2, dtype="uint8")), "block_mask", "wrong shape"),
    "type of block_mask": (lambda: sdpa(block_mask=tensor(B, H, 1, 1, dtype="int32")), "block_mask", "data type"),
    "shape of sink": (lambda: sdpa(sink_token=tensor(1, 4, 1, 1)), "sink_token", "wrong shape"),
    "type of sink": (lambda: sdpa(sink_token=tensor(1, H, 1, 1, dtype="float16")), "sink_token", "data type"),
    "padding without lengths of q": (lambda: sdpa(**{**LENGTHS, "seq_len_q": None}), "seq_len_q", "needs it"),
    "padding without lengths of kv": (lambda: sdpa(**{**LENGTHS, "seq_len_kv": None}), "seq_len_kv", "needs it"),
    "lengths without padding": (
        lambda: sdpa(seq_len_q=index(B, 1, 1, 1)),
        "seq_len_q",
        "needs use_padding_mask",
    ),
    "shape of lengths": (lambda: sdpa(**{**LENGTHS, "seq_len_q": index(3, 1, 1, 1)}), "seq_len_q", "wrong shape"),
    "type of lengths": (lambda: sdpa(**{**LENGTHS, "seq_len_kv": tensor(B, 1, 1, 1)}), "seq_len_kv", "data type"),
    "two forms of lengths": (lambda: sdpa(**LENGTHS, cu_seq_len_q=index(B + 1)), "cu_seq_len_q", "excludes"),
    "shape of running lengths": (
        lambda: sdpa(**{**LENGTHS, "seq_len_q": None}, cu_seq_len_q=index(B)),
        "cu_seq_len_q",
        "wrong shape",
    ),
    "ragged without padding": (lambda: sdpa(q_fields=ragged()), "q", "needs use_padding_mask"),
    "size of ragged offsets": (
        lambda: sdpa(q_fields=ragged(ragged_offset=index(B, 1, 1, 1)), **LENGTHS),
        "q",
        "wrong size of ragged_offset",
    ),
    "type of ragged offsets": (
        lambda: sdpa(q_fields=ragged(ragged_offset=tensor(B + 1, 1, 1, 1)), **LENGTHS),
        "q",
        "wrong data type of ragged_offset",
    ),
    "page limit without pages": (
        lambda: sdpa(paged_attention_max_seq_len_kv=256),
        "paged_attention_max_seq_len_kv",
        "only for paged caches",
    ),
    "pages without lengths": (
        lambda: sdpa(**{**PAGED, "use_padding_mask": False, "seq_len_q": None, "seq_len_kv": None}),
        "use_padding_mask",
        "paged caches need sequence lengths",
    ),
    "page limit of zero": (
        lambda: sdpa(**PAGED, paged_attention_max_seq_len_kv=0),
        "paged_attention_max_seq_len_kv",
        "not positive",
    ),
    "too few pages": (
        lambda: sdpa(**{**PAGED, "paged_attention_v_table": index(B, 1, 15, 1)}, paged_attention_max_seq_len_kv=256),
        "paged_attention_v_table",
        "too few pages",
    ),
    "shape of page table": (
        lambda: sdpa(**{**PAGED, "paged_attention_k_table": index(B, 16)}, paged_attention_max_seq_len_kv=256),
        "paged_attention_k_table",
        "wrong shape",
    ),
    "type of page table": (
        lambda: sdpa(**{**PAGED, "paged_attention_k_table": tensor(B, 1, 16, 1)}),
        "paged_attention_k_table",
        "data type",
    ),
    "dropout of everything": (
        lambda: sdpa(dropout=(1.0, *RANDOM[1:])),
        "dropout_probability",
        "not a probability",
    ),
    "dropout without a seed": (lambda: sdpa(dropout=(0.1, None, scalar("int64"))), "seed", "dropout_probability"),
    "type of seed": (lambda: sdpa(dropout=(0.1, scalar(), scalar("int64"))), "seed", "data type"),
    "shape of offset": (lambda: sdpa(dropout=(0.1, scalar("int64"), index(2))), "offset", "one element"),
    "dropout mask without a scale": (lambda: sdpa(dropout=(tensor(1, 1, SQ, SKV), None)), "dropout_mask", "needs"),
    "dropout scale without a mask": (lambda: sdpa(dropout=(None, scalar())), "dropout_scale", "needs"),
    "shape of dropout mask": (
        lambda: sdpa(dropout=(tensor(3, 1, SQ, SKV), scalar())),
        "dropout_mask",
        "does not broadcast",
    ),
    "rank of dropout mask": (lambda: sdpa(dropout=(tensor(SQ, SKV), scalar())), "dropout_mask", "wrong rank"),
    "type of dropout mask": (
        lambda: sdpa(dropout=(tensor(1, 1, SQ, SKV, dtype="fp8_e8m0"), scalar())),
        "dropout_mask",
        "data type",
    ),
    "shape of dropout scale": (
        lambda: sdpa(dropout=(tensor(1, 1, SQ, SKV), tensor(2))),
        "dropout_scale",
        "one element",
    ),
    "random numbers without dropout": (
        lambda: sdpa(rng_dump=tensor(B, H, SQ, SKV)),
        "rng_dump",
        "needs dropout_probability",
    ),
    "shape of random numbers": (
        lambda: sdpa(rng_dump=tensor(B, H, SQ, 1), dropout=RANDOM),
        "rng_dump",
        "wrong shape",
    ),
    "largest total length": (lambda: sdpa(max_total_seq_len_q=0), "max_total_seq_len_q", "not positive"),
    "shape of O": (lambda: sdpa(_out={"O": {"dim": (B, H, SQ, 32)}}), "O", "wrong shape"),
    "shape of Stats": (
        lambda: sdpa(generate_stats=True, _out={"Stats": {"dim": (B, H, SQ)}}),
        "Stats",
        "wrong shape",
    ),
    "type of Stats": (
        lambda: sdpa(generate_stats=True, _out={"Stats": {"dtype": "float16"}}),
        "Stats",
        "data type",
    ),
    "shape of the row maxima": (lambda: sdpa(score_max=tensor(B, H, SQ, 2)), "score_max", "wrong shape"),
}


@pytest.mark.parametrize("case", SDPA)
def test_sdpa_rule(case):
    make, port, text = SDPA[case]
    if case == "scale twice":
        node = sdpa(attn_scale=scalar())
        node.attrs["scale"] = 2.0
    else:
        node = make()
    found = problems(node)
    assert [(item.port, text in item.message) for item in found] == [(port, True)], found


def test_a_dropout_mask_excludes_a_probability():
    node = sdpa(dropout=RANDOM)
    node.inputs.update(dropout_mask=tensor(1, 1, SQ, SKV), dropout_scale=scalar())
    assert ports_with_problems(node) == ["dropout_mask"]


def test_valid_attention():
    for node in (
        sdpa(),
        sdpa(v=(B, 2, SKV, 128)),
        sdpa(**LENGTHS),
        sdpa(use_padding_mask=True, cu_seq_len_q=index(B + 1), seq_len_kv=index(B, dtype="int64")),
        sdpa(**PAGED),
        sdpa(**PAGED, paged_attention_max_seq_len_kv=250),
        sdpa(q_fields=ragged(), **LENGTHS),
        sdpa(q=(B, H, 512, D), use_causal_mask_bottom_right=True, sliding_window_length=4, **LENGTHS),
        sdpa(q=(B, H, 512, D), use_causal_mask=True),
        sdpa(use_alibi_mask=True, use_causal_mask=True, attn_scale=0.125),
        sdpa(bias=tensor(1, H, SQ, SKV), sink_token=tensor(1, H, 1, 1), block_mask=tensor(B, H, 1, 1, dtype="uint8")),
        sdpa(dropout=RANDOM, rng_dump=tensor(B, H, SQ, SKV)),
        sdpa(dropout=(tensor(B, H, SQ, SKV, dtype="boolean"), scalar())),
        sdpa(generate_stats=True, score_max=tensor(B, H, SQ, 1), score_sum_exp=tensor(B, H, SQ, 1)),
    ):
        assert problems(node) == []


T, HQ, HV, K, V, N = 40, 2, 4, 16, 32, 3


def la(op="gdn", q=(T, HQ, K), k=(T, HQ, K), v=(T, HV, V), g=None, beta=(T, HV), cu=None, dtype="bfloat16", **kwargs):
    types = {name: kwargs.pop(name, default) for name, default in (("k_dtype", dtype), ("g_dtype", "float32"))}
    gate = g or ((T, HV, K) if op == "kda" else (T, HV))
    beta_dtype = kwargs.pop("beta_dtype", "float32")
    return call(
        op,
        tensor(*q, dtype=dtype),
        tensor(*k, dtype=types["k_dtype"]),
        tensor(*v, dtype=dtype),
        tensor(*gate, dtype=types["g_dtype"]),
        tensor(*beta, dtype=beta_dtype),
        index(N + 1) if cu is None else cu,
        **kwargs,
    )


def state(rows=N, dtype="float32"):
    return tensor(rows, HV, V, K, dtype=dtype)


POOL = {"initial_state": state(9), "state_indices": index(N)}
SAFE = {"safe_gate": True, "a_log": tensor(HV)}

LINEAR = {
    "rank of q": (lambda: la(q=(1, T, HQ, K)), "q", "wrong rank"),
    "tokens of k": (lambda: la(k=(T + 1, HQ, K)), "k", "number of tokens"),
    "tokens of v": (lambda: la(v=(T - 1, HV, V)), "v", "number of tokens"),
    "head dim of k": (lambda: la(k=(T, HQ, 8)), "k", "head dimension differs"),
    "heads of k": (lambda: la(k=(T, 1, K)), "k", "neither q's nor v's"),
    "heads of v": (lambda: la(q=(T, 3, K), k=(T, 3, K)), "v", "not in groups"),
    "shape of g": (lambda: la(g=(T, HQ)), "g", "wrong shape"),
    "channels of g": (lambda: la("kda", g=(T, HV)), "g", "wrong shape"),
    "shape of beta": (lambda: la(beta=(T, HQ)), "beta", "wrong shape"),
    "shape of a_log": (lambda: la(safe_gate=True, a_log=tensor(HQ)), "a_log", "wrong shape"),
    "shape of dt_bias": (lambda: la(safe_gate=True, dt_bias=tensor(HV, K)), "dt_bias", "wrong shape"),
    "channels of dt_bias": (lambda: la("kda", safe_gate=True, dt_bias=tensor(HV)), "dt_bias", "wrong shape"),
    "shape of initial_state": (lambda: la(initial_state=tensor(N, HV, K, V)), "initial_state", "wrong shape"),
    "rows of initial_state": (lambda: la(initial_state=state(N + 1)), "initial_state", "wrong shape"),
    "shape of final_state": (
        lambda: la(output_final_state=True, _out={"final_state": {"dim": (N, HV, K, V)}}),
        "final_state",
        "wrong shape",
    ),
    "shape of checkpoints": (
        lambda: la(checkpoint_every_n_tokens=16, _out={"state_checkpoints": {"dim": (2, HV, V, K)}}),
        "state_checkpoints",
        "wrong shape",
    ),
    "shape of O": (lambda: la(_out={"O": {"dim": (T, HQ, V)}}), "O", "wrong shape"),
    "type of q": (lambda: la(dtype="int8", beta_dtype="float32"), "q", "data type"),
    "type of k": (lambda: la(k_dtype="float16"), "k", "data type differs"),
    "type of g": (lambda: la(g_dtype="int32"), "g", "data type"),
    "type of beta": (lambda: la(beta_dtype="float16"), "beta", "data type"),
    "type of cu_seqlens": (lambda: la(cu=tensor(N + 1)), "cu_seqlens", "data type"),
    "rank of cu_seqlens": (lambda: la(cu=index(N + 1, 1)), "cu_seqlens", "wrong rank"),
    "empty cu_seqlens": (lambda: la(cu=index(0)), "cu_seqlens", "no first boundary"),
    "type of state_indices": (
        lambda: la(initial_state=state(9), state_indices=tensor(N)),
        "state_indices",
        "data type",
    ),
    "rows of state_indices": (
        lambda: la(initial_state=state(9), state_indices=index(N + 1)),
        "state_indices",
        "wrong shape",
    ),
    "state_indices without a pool": (lambda: la(state_indices=index(N)), "state_indices", "needs initial_state"),
    "type of initial_state": (lambda: la(initial_state=state(dtype="int32")), "initial_state", "data type"),
    "type of final_state": (
        lambda: la(initial_state=state(), output_final_state=True, _out={"final_state": {"dtype": "bfloat16"}}),
        "final_state",
        "data type differs",
    ),
    "infinite scale": (lambda: la(scale=math.inf), "scale", "not finite"),
    "negative cadence": (lambda: la(checkpoint_every_n_tokens=-1), "checkpoint_every_n_tokens", "negative"),
    "a_log without safe_gate": (lambda: la(a_log=tensor(HV)), "a_log", "needs safe_gate"),
    "dt_bias without safe_gate": (lambda: la(dt_bias=tensor(HV)), "dt_bias", "needs safe_gate"),
    "linear gate with safe_gate": (lambda: la(**SAFE, gate_domain="linear"), "gate_domain", "logits"),
    "neg eigval without sigmoid": (lambda: la(allow_neg_eigval=True), "allow_neg_eigval", "use_beta_sigmoid"),
    "bound without safe_gate": (lambda: la("kda", gate_lower_bound=-5.0), "gate_lower_bound", "needs safe_gate"),
    "positive bound": (lambda: la("kda", **SAFE, gate_lower_bound=0.5), "gate_lower_bound", "not negative"),
    "overwrite without a final state": (
        lambda: la(initial_state=state(), overwrite_initial_state=True),
        "overwrite_initial_state",
        "needs output_final_state",
    ),
    "overwrite without an initial state": (
        lambda: la(output_final_state=True, overwrite_initial_state=True),
        "initial_state",
        "overwrite_initial_state needs it",
    ),
    "a pool's final state elsewhere": (
        lambda: la(**POOL, output_final_state=True),
        "state_indices",
        "needs overwrite_initial_state",
    ),
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear_attention_rule(case):
    make, port, text = LINEAR[case]
    found = problems(make())
    assert [(item.port, text in item.message) for item in found] == [(port, True)], found


def test_valid_linear_attention():
    for node in (
        la(),
        la("kda"),
        la(k=(T, HV, K)),
        la(q=(T, 8, K), k=(T, 8, K), g=(T, 8), beta=(T, 8)),
        la(beta_dtype="bfloat16", g_dtype="bfloat16"),
        la(cu=index(N + 1, dtype="int64"), initial_state=state(dtype="bfloat16"), output_final_state=True),
        la(**SAFE, dt_bias=tensor(HV), use_beta_sigmoid=True, allow_neg_eigval=True, use_qk_l2norm=True),
        la("kda", **SAFE, dt_bias=tensor(HV, K), gate_lower_bound=-3.0),
        la(**POOL),
        la(**POOL, output_final_state=True, overwrite_initial_state=True),
        la(gate_domain="linear", checkpoint_every_n_tokens=16),
    ):
        assert problems(node) == []


def test_without_boundaries_the_tokens_are_one_sequence():
    q, gate = tensor(T, 1, 8), tensor(T, 1)
    node = call("gdn", q, q, q, gate, gate, initial_state=tensor(1, 1, 8, 8), output_final_state=True)
    assert problems(node) == []
    assert node.outputs["final_state"].dim == (1, 1, 8, 8)
