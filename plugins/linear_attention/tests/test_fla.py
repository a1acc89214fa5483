"""flash-linear-attention's functions against the recurrence, with its layouts and its gates written out."""

from __future__ import annotations

import inspect
from collections import OrderedDict

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import linear_attention as la  # noqa: E402
from la_cases import recurrence  # noqa: E402
from la_cases.properties import inputs  # noqa: E402
from la_cases.running import error  # noqa: E402
from linear_attention import fla  # noqa: E402

GDN = (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule)
KDA = (fla.chunk_kda, fla.fused_recurrent_kda)
OP = {**dict.fromkeys(GDN, "gdn"), **dict.fromkeys(KDA, "kda")}
EVERY = pytest.mark.parametrize("function", [*GDN, *KDA], ids=lambda function: function.__name__)
KDAS = pytest.mark.parametrize("function", KDA, ids=lambda function: function.__name__)
GDNS = pytest.mark.parametrize("function", GDN, ids=lambda function: function.__name__)
HV, SIZE = 4, 64


def batch(function, sequences=2, length=7, seed=0):
    """Inputs [B, T, ..]."""
    x = inputs(OP[function], sequences * length, "cpu", seed)
    return {port: value.unflatten(0, (sequences, length)) for port, value in x.items()}


def want(function, x, cu_seqlens=None, state=None, **options):
    """O [B, T, HV, V] and states [N, HV, V, K] of the recurrence; ``state`` is [N, HV, V, K]."""
    sequences, length = x["q"].shape[:2]
    bounds = [n * length for n in range(sequences + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    arrays = {port: value.flatten(0, 1).double().numpy() for port, value in x.items()}
    arrays |= {} if state is None else {"initial_state": state.double().numpy()}
    found = recurrence.prefill(OP[function], {**arrays, "cu_seqlens": np.array(bounds)}, **options)
    return found["O"].reshape(sequences, length, *found["O"].shape[1:]), found["final_state"]


@EVERY
@pytest.mark.parametrize("length", [1, 8, 9])
def test_a_batch_of_equal_lengths(function, length):
    x = batch(function, length=length)
    o, final = function(**x)
    assert final is None
    assert (o.shape, o.dtype) == ((2, length, HV, SIZE), torch.bfloat16)
    assert error(o, want(function, x)[0]) <= 5e-3


@EVERY
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("length", [3, 11])
def test_states_are_k_by_v_unless_v_comes_first(function, v_first, length):
    x = batch(function, length=length)
    state = torch.randn(2, HV, SIZE, SIZE, generator=torch.Generator().manual_seed(3)) / 4
    given = state if v_first else state.transpose(-1, -2).contiguous()
    o, final = function(**x, initial_state=given, output_final_state=True, state_v_first=v_first)
    wanted = want(function, x, state=state)
    assert error(o, wanted[0]) <= 5e-3
    assert error(final if v_first else final.transpose(-1, -2), wanted[1]) <= 5e-3
    assert final.dtype == torch.float32
    old = function(**x, initial_state=given, output_final_state=True, transpose_state_layout=v_first)[1]
    assert torch.equal(old, final)


@EVERY
def test_a_16_bit_initial_state_gives_a_float32_final_state(function):
    x = batch(function)
    state = torch.ones(2, HV, SIZE, SIZE, dtype=torch.bfloat16)
    final = function(**x, initial_state=state, output_final_state=True)[1]
    assert final.dtype == torch.float32
    assert torch.equal(final, function(**x, initial_state=state.float(), output_final_state=True)[1])


@EVERY
@pytest.mark.parametrize("tokens", [8, 14])
def test_packed_sequences(function, tokens):
    x = batch(function, sequences=1, length=tokens)
    bounds = torch.tensor([0, 3, 3, 4, tokens])
    o, final = function(**x, cu_seqlens=bounds, output_final_state=True, state_v_first=True)
    wanted = want(function, x, bounds)
    assert error(o, wanted[0]) <= 5e-3
    assert error(final, wanted[1]) <= 5e-3


@EVERY
def test_options(function):
    x = batch(function)
    x["q"], x["k"] = 3 * x["q"], 2 * x["k"]
    x["beta"] = x["beta"] * 4 - 2
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "scale": 0.3,
    }
    named = {name.removesuffix("_in_kernel"): value for name, value in options.items()}
    assert error(function(**x, **options)[0], want(function, x, **named)[0]) <= 5e-3


@EVERY
def test_a_16_bit_beta_of_another_type_is_widened(function):
    x = batch(function)
    x["beta"] = x["beta"].half()
    assert error(function(**x)[0], want(function, x)[0]) <= 5e-3


@GDNS
@pytest.mark.parametrize("bias", [False, True])
def test_gate_in_kernel_of_gdn(function, bias):
    x = batch(function)
    x["g"] = torch.randn(x["g"].shape, generator=torch.Generator().manual_seed(1))
    a_log, dt_bias = torch.randn(HV) / 2, torch.randn(HV) if bias else None
    o = function(**x, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias)[0]
    softplus = torch.nn.functional.softplus(x["g"].double() + (0 if dt_bias is None else dt_bias))
    assert error(o, want(function, {**x, "g": -a_log.double().exp() * softplus})[0]) <= 5e-3


@KDAS
@pytest.mark.parametrize("bound", [None, -4.0])
def test_gate_in_kernel_of_kda(function, bound):
    x = batch(function)
    x["g"] = torch.randn(x["g"].shape, generator=torch.Generator().manual_seed(1))
    a_log, dt_bias = torch.randn(HV) / 2, torch.randn(HV * SIZE)
    options = {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias, "lower_bound": bound}
    o = function(**x, **options)[0]
    amplitude, logits = a_log.double().exp()[:, None], x["g"].double() + dt_bias.reshape(HV, SIZE)
    gates = (
        -amplitude * torch.nn.functional.softplus(logits) if bound is None else bound * (amplitude * logits).sigmoid()
    )
    assert error(o, want(function, {**x, "g": gates})[0]) <= 5e-3


@KDAS
def test_bounded_gate_needs_no_amplitude(function):
    x = batch(function)
    x["g"] = torch.randn(x["g"].shape, generator=torch.Generator().manual_seed(1))
    o = function(**x, use_gate_in_kernel=True, lower_bound=-5.0)[0]
    assert error(o, want(function, {**x, "g": -5 * x["g"].double().sigmoid()})[0]) <= 5e-3
    with pytest.raises(la.InputError, match="A_log"):
        function(**x, use_gate_in_kernel=True)


def test_safe_gate_of_chunk_kda_needs_its_bound_and_without_gate_in_kernel_has_no_effect():
    x = batch(fla.chunk_kda)
    with pytest.raises(la.InputError, match="lower_bound"):
        fla.chunk_kda(**x, use_gate_in_kernel=True, safe_gate=True, A_log=torch.zeros(HV))
    assert torch.equal(fla.chunk_kda(**x, safe_gate=True, lower_bound=-5.0)[0], fla.chunk_kda(**x)[0])


def test_fused_recurrent_rule_with_channel_gates_and_without_gates():
    function, x = fla.fused_recurrent_gated_delta_rule, batch(fla.chunk_kda)
    gk = x.pop("g")
    assert error(function(**x, gk=gk)[0], want(fla.chunk_kda, {**x, "g": gk})[0]) <= 5e-3
    g = batch(fla.chunk_gated_delta_rule)["g"]
    both = want(fla.chunk_kda, {**x, "g": gk + g.unsqueeze(-1)})[0]
    assert error(function(**x, g=g, gk=gk)[0], both) <= 5e-3
    del x["beta"]
    plain = {**x, "g": torch.zeros_like(g), "beta": torch.ones_like(g)}
    assert error(function(**x)[0], want(fla.chunk_gated_delta_rule, plain)[0]) <= 5e-3
    with pytest.raises(la.InputError, match="logits"):
        function(**x, gk=gk, use_gate_in_kernel=True, A_log=torch.zeros(HV))


@EVERY
def test_short_calls_are_decode_steps(function, monkeypatch):
    called = []
    for name in ("_GDN", "_KDA"):
        prefill, decode = getattr(fla, name)

        def recorded(*args, _decode=decode, **kwargs):
            called.append(args[0].shape[0])
            return _decode(*args, **kwargs)

        monkeypatch.setattr(fla, name, (prefill, recorded))
    function(**batch(function, length=8))
    function(**batch(function, length=9))
    assert called == ([16] if function.__name__.startswith("fused") else [])


@EVERY
def test_a_layer_calls_with_flas_names(function):
    """The parameters and their order, so that positional calls mean the same."""
    fla_names = {
        "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context kwargs",
        "fused_recurrent_gated_delta_rule": "q k v g gk gv beta scale initial_state output_final_state "
        "use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first "
        "cu_seqlens kwargs",
        "chunk_kda": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states "
        "state_v_first cu_seqlens cu_seqlens_cpu cp_context kwargs",
        "fused_recurrent_kda": "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens kwargs",
    }  # fmt: skip
    assert list(inspect.signature(function).parameters) == fla_names[function.__name__].split()


@EVERY
def test_what_is_refused(function):
    x = batch(function)
    with pytest.raises(TypeError, match="head_first"):
        function(**x, head_first=True)
    with pytest.raises(la.InputError, match="batch of 1"):
        function(**x, cu_seqlens=torch.tensor([0, 7, 14]))
    with pytest.raises(la.InputError, match="v: is of"):
        function(**{**x, "v": x["v"][:1]})
    with pytest.raises(la.InputError, match="transpose_state_layout"):
        function(**x, state_v_first=True, transpose_state_layout=True)
    with pytest.raises(la.InputError, match="initial_state"):
        function(**x, initial_state=torch.zeros(3, HV, SIZE, SIZE))
    with pytest.raises(la.GradientError):
        function(**{**x, "q": x["q"].clone().requires_grad_()})
    for name, value in (("cp_context", object()), ("gv", x["v"]), ("return_intermediate_states", True)):
        if name in inspect.signature(function).parameters:
            with pytest.raises(la.InputError, match="not supported"):
                function(**x, **{name: value})


@EVERY
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("initial_state", torch.tensor(0.0), "has 0 dimensions, needs 4"),
        ("initial_state", torch.zeros(1, HV, SIZE), "has 3 dimensions, needs 4"),
        ("initial_state", torch.zeros(1, HV, SIZE, SIZE, dtype=torch.int32), "has type int32"),
        ("initial_state", torch.zeros(1, HV, SIZE, SIZE, dtype=torch.complex64), "has type complex64"),
        ("cu_seqlens", torch.tensor(7), "has 0 dimensions, needs 1"),
        ("beta", torch.ones(1, 7, HV, dtype=torch.int32), "has type int32"),
    ],
)
def test_tensors_of_another_kind_are_named(function, name, value, text):
    with pytest.raises(la.InputError, match=rf"^{name}: {text}"):
        function(**{**batch(function, sequences=1), name: value})


@KDAS
@pytest.mark.parametrize("elements", [3, SIZE])
def test_a_bias_that_is_not_of_all_channels_is_named(function, elements):
    options = {"use_gate_in_kernel": True, "lower_bound": -5.0, "dt_bias": torch.zeros(elements)}
    with pytest.raises(la.InputError, match=rf"^dt_bias: has {elements} elements, needs {HV} x {SIZE}"):
        function(**batch(function), **options)


@KDAS
@pytest.mark.parametrize(
    ("port", "change"),
    [
        ("g", lambda x: {"g": x["g"][:, :, :1]}),
        ("g", lambda x: {"g": x["g"][..., :1]}),
        ("g", lambda x: {"g": x["g"].int()}),
        ("a_log", lambda x: {"A_log": torch.zeros(HV, dtype=torch.int64)}),
        ("dt_bias", lambda x: {"dt_bias": torch.zeros(HV * SIZE, dtype=torch.int32)}),
    ],
)
def test_softplus_logits_of_another_kind_are_named(function, port, change):
    x = batch(function)
    options = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV * SIZE)}
    function(**x, **options)
    with pytest.raises(la.InputError, match=rf"^{port}: has"):
        function(**{**x, **options, **change(x)})


# --- boundaries that are kept
@pytest.fixture
def kept(monkeypatch):
    """No boundaries yet."""
    monkeypatch.setattr(fla, "_boundaries", OrderedDict())
    return fla._boundaries


@EVERY
@pytest.mark.parametrize("real_first", [False, True])
def test_a_fake_mode_and_real_calls_do_not_share_boundaries(function, real_first, kept):
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = batch(function, length=9)
    wanted = function(**x)[0] if real_first else None
    mode = FakeTensorMode()
    with mode:
        fake = function(**{port: mode.from_tensor(value) for port, value in x.items()})[0]
    assert (fake.shape, fake.dtype) == ((2, 9, HV, SIZE), torch.bfloat16)
    found = function(**x)[0]
    assert wanted is None or torch.equal(found, wanted)
    assert error(found, want(function, x)[0]) <= 5e-3
    assert [type(value) for value in kept.values()] == [torch.Tensor]


@EVERY
def test_a_traced_program_gives_what_a_call_gives(function, kept):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = batch(function, length=9)
    program = make_fx(lambda x: function(**x)[0], tracing_mode="fake")(x)
    assert not kept
    assert torch.equal(program(x), function(**x)[0])
    again = make_fx(lambda x: function(**x)[0], tracing_mode="fake")(x)
    assert torch.equal(again(x), function(**x)[0])


@EVERY
def test_boundaries_are_kept_for_parameters_and_not_of_a_transform(function, kept):
    x = batch(function, length=9)
    torch.func.functionalize(lambda beta: function(**{**x, "beta": beta})[0])(x["beta"])
    assert not kept
    with torch.no_grad():
        function(**{**x, "q": torch.nn.Parameter(x["q"])})
    assert len(kept) == 1


G, GK = torch.zeros(2, 7, HV), torch.zeros(2, 7, HV, SIZE)


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("gk", {"gk": GK[:, :5], "g": G}),
        ("gk", {"gk": GK[:, :5], "g": None}),
        ("gk", {"gk": GK[..., :1], "g": G}),
        ("gk", {"gk": G, "g": G}),
        ("gk", {"gk": GK.int(), "g": G}),
        ("g", {"gk": GK, "g": G[:, :5]}),
        ("g", {"gk": GK, "g": G[:1]}),
        ("g", {"gk": GK, "g": G[..., :1]}),
        ("g", {"gk": GK, "g": GK}),
        ("g", {"gk": GK, "g": G.int()}),
        ("g", {"gk": GK, "g": G.to("meta")}),
    ],
)
def test_channel_gates_and_those_beside_them_are_named(name, gates):
    function = fla.fused_recurrent_gated_delta_rule
    with pytest.raises(la.InputError, match=rf"^{name}: (is|has)") as caught:
        function(**{**batch(function), **gates})
    assert caught.value.argument == name


@GDNS
def test_gate_in_kernel_needs_its_amplitude(function):
    with pytest.raises(la.InputError, match="A_log"):
        function(**batch(function), use_gate_in_kernel=True)


def test_arguments_without_effect_are_accepted():
    x = batch(fla.chunk_kda)
    options = {"chunk_size": 32, "disable_recompute": True, "cu_seqlens_cpu": torch.tensor([0, 7, 14])}
    assert torch.equal(fla.chunk_kda(**x, **options)[0], fla.chunk_kda(**x)[0])


@EVERY
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_tensors_that_are_missing_are_named(function, name):
    x = batch(function)
    if function is fla.fused_recurrent_gated_delta_rule and name in ("g", "beta"):
        assert function(**{**x, name: None})[0].isfinite().all()
        return
    with pytest.raises(la.InputError, match=rf"^{name}: is missing"):
        function(**{**x, name: None})


@EVERY
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "cu_seqlens", "initial_state"])
def test_arguments_that_are_no_tensors_are_named(function, name):
    with pytest.raises(la.InputError, match=rf"^{name}: has type list, needs a tensor"):
        function(**{**batch(function, sequences=1), name: [0, 7]})


@pytest.mark.parametrize(
    ("function", "name", "options"),
    [
        (fla.fused_recurrent_gated_delta_rule, "gk", {}),
        (fla.chunk_kda, "dt_bias", {"use_gate_in_kernel": True, "lower_bound": -5.0}),
        (fla.fused_recurrent_kda, "dt_bias", {"use_gate_in_kernel": True, "lower_bound": -5.0}),
    ],
)
def test_gate_arguments_that_are_no_tensors_are_named(function, name, options):
    with pytest.raises(la.InputError, match=rf"^{name}: has type list, needs a tensor"):
        function(**batch(function), **{name: [0.0]}, **options)


@EVERY
@pytest.mark.parametrize("name", ["q", "v"])
def test_packed_tensors_are_refused(function, name):
    x = batch(function)
    with pytest.raises(la.InputError, match=rf"^{name}: has 3 dimensions, needs 4"):
        function(**{**x, name: x[name][0]})
