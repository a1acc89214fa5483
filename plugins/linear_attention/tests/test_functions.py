"""The front doors on the CPU: options, layouts, masks and what they refuse."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import linear_attention as la  # noqa: E402
from la_cases import recurrence  # noqa: E402
from la_cases.cases import CASES  # noqa: E402
from la_cases.properties import DECODE, PREFILL, inputs, part  # noqa: E402
from la_cases.running import error, expected  # noqa: E402
from linear_attention import plans  # noqa: E402
from linear_attention.contents import check_contents  # noqa: E402

import cudnn_core  # noqa: E402
from cudnn_core import ExecutionError, GraphError, NoEngineError  # noqa: E402

BOTH = pytest.mark.parametrize("op", ["gdn", "kda"])
IN_PLACE = {"output_final_state": True, "overwrite_initial_state": True}


def index(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def call(case):
    """The front door of the case's op, with the frontend's names."""
    options = {name + "_in_kernel" if name in ("use_qk_l2norm", "use_beta_sigmoid") else name: value
               for name, value in case.options.items()}  # fmt: skip
    function = (DECODE if case.decodes else PREFILL)[case.op.removesuffix("_decode")]
    x = case.tensors()
    return x, function(**x, **options, state_layout=case.layout, check=False)


CHOSEN = ("plain", "all-in-kernel", "k-major", "slots", "softplus", "lower-bound", "linear-gate", "padded-strides")
CHOSEN += ("speculative", "varlen", "8-tokens", "beta-doubled", "one-sequence", "scale", "slots-k-major-bf16")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name.partition("-")[2] in CHOSEN], ids=lambda case: case.name
)
def test_functions_follow_the_recurrence(case):
    x, (o, final) = call(case)
    want = expected(case)
    assert error(o, want["O"]) <= case.allowed
    if case.slots is not None:
        assert final is x["initial_state"]
    state = final.transpose(-1, -2) if case.layout == "k_major" else final
    assert error(state, want["final_state"]) <= case.allowed


# --- results
@BOTH
def test_final_state_is_empty_unless_asked_for(op):
    o, final = PREFILL[op](**inputs(op, 5, "cpu"))
    assert (o.shape, o.dtype, final.numel()) == ((5, 4, 64), torch.bfloat16, 0)
    final = PREFILL[op](**inputs(op, 5, "cpu"), output_final_state=True)[1]
    assert (final.shape, final.dtype) == ((1, 4, 64, 64), torch.float32)


@BOTH
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_checkpoints(op, dtype):
    x, bounds = inputs(op, 20, "cpu"), index(0, 9, 20)
    found = PREFILL[op](**x, cu_seqlens=bounds, checkpoint_every_n_tokens=4, checkpoint_dtype=dtype)[2]
    assert (found.shape, found.dtype) == ((7, 4, 64, 64), dtype or torch.bfloat16)
    arrays = {port: value.double().numpy() for port, value in x.items()}
    rows = recurrence.prefill(op, {**arrays, "cu_seqlens": bounds.numpy()}, checkpoint_every_n_tokens=4)[
        "state_checkpoints"
    ]
    for have, want in zip(found[1:3], rows[1:3], strict=True):
        assert error(have, want) <= 5e-3
    flipped = PREFILL[op](
        **x, cu_seqlens=bounds, checkpoint_every_n_tokens=4, checkpoint_dtype=dtype, state_layout="k_major"
    )[2]
    assert torch.equal(flipped.transpose(-1, -2), found)


@BOTH
def test_initial_state_is_not_written_unless_said(op):
    x, state = inputs(op, 5, "cpu"), torch.ones(1, 4, 64, 64)
    final = PREFILL[op](**x, initial_state=state, output_final_state=True)[1]
    assert (state == 1).all()
    overwritten = PREFILL[op](**x, initial_state=state, **IN_PLACE)[1]
    assert overwritten is state
    assert torch.equal(state, final)


@BOTH
@pytest.mark.parametrize("sequences", [0, 2])
def test_no_tokens(op, sequences):
    x, state = part(inputs(op, 5, "cpu"), 0, 0), torch.ones(sequences, 4, 64, 64)
    bounds = torch.zeros(sequences + 1, dtype=torch.int32)
    o, final = PREFILL[op](**x, cu_seqlens=bounds, initial_state=state, output_final_state=True)
    assert o.shape == (0, 4, 64)
    assert torch.equal(final, state)
    assert final is not state
    assert not PREFILL[op](**x, cu_seqlens=bounds, output_final_state=True)[1].any()
    o, final = DECODE[op](**x, cu_seqlens=bounds, initial_state=state, output_final_state=True)
    assert torch.equal(final, state)


@BOTH
def test_no_sequences_zero_the_tokens(op):
    assert not PREFILL[op](**inputs(op, 5, "cpu"), cu_seqlens=index(0))[0].any()


@BOTH
@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"k": lambda k: k[:, :, :7]}, "k"),
        ({"v": lambda v: v.int()}, "v"),
        ({"beta": lambda beta: beta[:, :1]}, "beta"),
        ({"gate_domain": "zzz"}, "gate_domain"),
        ({"cu_seqlens": torch.tensor([5, 3, 9], dtype=torch.int32)}, "cu_seqlens"),
        ({"initial_state": torch.zeros(1, 3, 5, 7)}, "initial_state"),
    ],
)
def test_calls_without_tokens_obey_the_rules_too(op, change, culprit):
    x = part(inputs(op, 5, "cpu"), 0, 0)
    x |= {name: to(x[name]) if callable(to) else to for name, to in change.items()}
    with pytest.raises((la.InputError, cudnn_core.GraphError), match=culprit):
        PREFILL[op](**x, output_final_state=True)


@pytest.mark.parametrize(
    ("port", "shape"), [("a_log", (1,)), ("dt_bias", (1, 64)), ("dt_bias", (4, 1)), ("dt_bias", (3, 64))]
)
def test_softplus_gates_spread_no_parameter(port, shape):
    form = {"safe_gate": True, "gate_activation": "softplus"}
    with pytest.raises(la.InputError, match=port):
        la.kimi_delta_attention(**inputs("kda", 5, "cpu"), **form, **{port: torch.ones(shape)})


@pytest.mark.parametrize("parameters", [(), ("a_log",), ("dt_bias",), ("a_log", "dt_bias")])
@pytest.mark.parametrize("shape", [(5, 1, 64), (5, 4, 1), (5, 2, 64), (1, 4, 64)])
@pytest.mark.parametrize("function", [la.kimi_delta_attention, la.kimi_delta_attention_decode])
def test_softplus_gates_are_not_spread(function, shape, parameters):
    given = {"a_log": torch.zeros(4), "dt_bias": torch.zeros(4, 64)}
    form = {"safe_gate": True, "gate_activation": "softplus", **{port: given[port] for port in parameters}}
    x = {**inputs("kda", 5, "cpu"), "g": torch.zeros(shape)}
    for made in (x, part(x, 0, 0)):
        if made is x or shape[1:] != (4, 64):
            with pytest.raises(la.InputError, match=r"^g: has") as caught:
                function(**made, **form)
            assert caught.value.argument == "g"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("port", ["g", "a_log", "dt_bias"])
@pytest.mark.parametrize("function", [la.kimi_delta_attention, la.kimi_delta_attention_decode])
def test_softplus_gates_are_of_floating_types(function, port, dtype):
    x = {**inputs("kda", 5, "cpu"), "a_log": torch.zeros(4), "dt_bias": torch.zeros(4, 64)}
    form = {"safe_gate": True, "gate_activation": "softplus"}
    function(**x, **form)
    with pytest.raises(la.InputError, match=rf"^{port}: has type {str(dtype)[6:]}, needs a floating one"):
        function(**{**x, port: x[port].to(dtype)}, **form)


@BOTH
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, at the first jvp
def test_forward_mode_derivatives_are_refused(op):
    x = inputs(op, 5, "cpu")
    q = x.pop("q")
    with pytest.raises(la.GradientError, match="no derivatives yet"):
        torch.func.jvp(lambda q: PREFILL[op](q, **x)[0], (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(la.GradientError):
        PREFILL[op](torch.autograd.forward_ad.make_dual(q, q), **x)


@BOTH
def test_channels_that_lie_apart_are_copied_and_expanded_gates_too(op):
    x = inputs(op, 6, "cpu")
    want = PREFILL[op](**x)[0]
    apart = {**x, "q": x["q"].transpose(1, 2).contiguous().transpose(1, 2)}
    assert apart["q"].stride(-1) != 1
    assert torch.equal(PREFILL[op](**apart)[0], want)
    x["beta"] = torch.full((6, 1), 0.5).expand(6, 4)
    packed = {**x, "beta": x["beta"].contiguous()}
    assert torch.equal(PREFILL[op](**x)[0], PREFILL[op](**packed)[0])


@BOTH
def test_engines_are_given_no_operand_whose_elements_share_memory(op):
    from la_cases.cases import named
    from la_cases.running import arguments
    from linear_attention.torch_ops import recipe

    x = arguments(named(f"{op}-plain"))
    assert not recipe(op, x).copied
    x["beta"] = x["beta"][:, :1].expand(-1, 2)
    found = recipe(op, x)
    assert found.copied == {"beta"}
    assert {layout.port: layout.stride for layout in found.configuration.inputs}["beta"] == (2, 1)


@BOTH
def test_slices_of_one_projection_are_read_in_place(op):
    x = inputs(op, 6, "cpu", heads=(4, 4))
    wide = torch.cat([x[port] for port in "qkv"], dim=1)
    views = {port: wide[:, 4 * i : 4 * i + 4] for i, port in enumerate("qkv")}
    assert torch.equal(PREFILL[op](**{**x, **views})[0], PREFILL[op](**x)[0])


@BOTH
def test_decode_counts_tokens_by_the_states(op):
    x, state = inputs(op, 6, "cpu"), torch.zeros(2, 4, 64, 64)
    o, _ = DECODE[op](**x, initial_state=state)
    want = PREFILL[op](**x, cu_seqlens=index(0, 3, 6))[0]
    assert error(o, want.double()) <= 5e-3
    told = DECODE[op](**x, tokens_per_sequence=3)[0]
    assert torch.equal(o, told)


def test_kda_softplus_gate_is_not_the_sigmoid_one():
    x = inputs("kda", 8, "cpu")
    x["g"] = torch.randn(8, 4, 64)
    sigmoid = la.kimi_delta_attention(**x, safe_gate=True)[0]
    assert torch.equal(sigmoid, la.kimi_delta_attention(**x, safe_gate=True, gate_activation="sigmoid")[0])
    assert not torch.equal(sigmoid, la.kimi_delta_attention(**x, safe_gate=True, gate_activation="softplus")[0])


# --- plans
@BOTH
def test_a_plan_is_made_once_and_again_where_the_settings_of_the_core_differ(op):
    x = inputs(op, 7, "cpu")
    PREFILL[op](**x)
    before = plans.plan_count()
    PREFILL[op](**inputs(op, 300, "cpu"))
    assert plans.plan_count() == before
    with cudnn_core.configure(engines={"disable": ["torch_reference:*"]}), pytest.raises(NoEngineError):
        PREFILL[op](**x)
    PREFILL[op](**x)


@BOTH
def test_plan_name_admits_engines_by_their_prefix(op):
    x = inputs(op, 7, "cpu")
    want = PREFILL[op](**x)[0]
    assert torch.equal(PREFILL[op](**x, plan_name="eager")[0], want)
    assert torch.equal(PREFILL[op](**x, plan_name="torch_reference:eag")[0], want)
    with pytest.raises(NoEngineError):
        PREFILL[op](**x, plan_name=f"{op}_sm90")


@BOTH
def test_a_plan_name_of_no_engine_is_refused_by_name(op):
    x = inputs(op, 7, "cpu")
    for function in (PREFILL[op], DECODE[op]):
        with pytest.raises(la.InputError, match=r"^plan_name: no engine has a name that begins with 'nope'"):
            function(**x, plan_name="nope")


def test_room_is_a_power_of_two():
    from linear_attention.graphs import room

    assert [room(size, 256) for size in (0, 1, 256, 257, 5000, 2**31)] == [256, 256, 256, 512, 8192, 2**31 - 1]


# --- masks that hold without a check
@BOTH
def test_boundaries_past_the_tokens_and_decreasing_ones_are_masked(op):
    x = inputs(op, 9, "cpu")
    o, final = PREFILL[op](**x, cu_seqlens=index(0, 4, 4, 99), output_final_state=True, check=False)
    want, state = PREFILL[op](**x, cu_seqlens=index(0, 4, 4, 9), output_final_state=True)
    assert torch.equal(o, want)
    assert torch.equal(final, state)
    empty = PREFILL[op](**x, cu_seqlens=index(0, 9, 5), output_final_state=True, check=False)[1]
    assert not empty[1].any()


@BOTH
@pytest.mark.parametrize(
    ("given", "counted"), [((0, 6, 3), (0, 3, 3)), ((5, 0, 3), (5, 5, 5)), ((2, 1, 99, 7), (2, 2, 7, 7))]
)
def test_boundaries_of_a_decode_are_held_to_the_first_and_the_last(op, given, counted):
    x, states = inputs(op, 8, "cpu"), torch.rand(len(given) - 1, 4, 64, 64)
    options = {"initial_state": states, "output_final_state": True, "tokens_per_sequence": 8, "check": False}
    found = DECODE[op](**x, cu_seqlens=index(*given), **options)
    want = DECODE[op](**x, cu_seqlens=index(*counted), **options)
    assert all(torch.equal(have, good) for have, good in zip(found, want, strict=True))
    assert not found[0][: counted[0]].any()
    assert not found[0][counted[-1] :].any()


@BOTH
def test_last_boundary_before_the_end_leaves_padding_of_zeros(op):
    x = inputs(op, 9, "cpu")
    for value in x.values():
        value[6:] = torch.nan
    o = PREFILL[op](**x, cu_seqlens=index(0, 4, 6))[0]
    assert not o[6:].any()
    assert o.isfinite().all()


@BOTH
def test_slots_outside_the_pool_are_masked(op):
    x, pool = inputs(op, 4, "cpu"), torch.ones(2, 4, 64, 64)
    slots = index(0, 2, -1, 2**30)
    o, _ = DECODE[op](**x, initial_state=pool, state_indices=slots, **IN_PLACE, check=False)
    assert o[0].any()
    assert not o[1:].any()
    assert (pool[1] == 1).all()


@BOTH
def test_positive_gates_count_as_0(op):
    x = inputs(op, 9, "cpu")
    x["g"][3] = 2.0
    want = PREFILL[op](**{**x, "g": x["g"].clamp(max=0)})[0]
    assert torch.equal(PREFILL[op](**x, check=False)[0], want)


# --- what is refused
def _tokens(op, **changes):
    return {**inputs(op, 6, "cpu"), **changes}


STATE = torch.zeros(2, 4, 64, 64)
CONTENTS = {
    "decreasing": ({"cu_seqlens": index(0, 5, 3, 6)}, "cu_seqlens", "decreases from 5 to 3"),
    "not from 0": ({"cu_seqlens": index(1, 6)}, "cu_seqlens", "must start at 0"),
    "past the end": ({"cu_seqlens": index(0, 7)}, "cu_seqlens", "past the 6 tokens"),
    "slot outside": (
        {"cu_seqlens": index(0, 3, 6), "initial_state": STATE, "state_indices": index(0, 2)}, "state_indices", "row 2"),
    "shared slot": (
        {"cu_seqlens": index(0, 3, 6), "initial_state": STATE, "state_indices": index(1, 1)}, "state_indices", "share"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("case", CONTENTS)
def test_values_of_indices(op, case):
    changes, argument, text = CONTENTS[case]
    for check in (None, True):
        with pytest.raises(la.InputError, match=text) as caught:
            PREFILL[op](**_tokens(op, **changes), check=check)
        assert caught.value.argument == argument
    PREFILL[op](**_tokens(op, **changes), check=False)


@BOTH
@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ((0, 1, 0, 3, 4, 5), "sequence 0 names twice row 0"),
        ((0, 1, 2, 3, 1, 5), "sequences 0 and 1 share row 1"),
        ((0, 1, 8, 3, 4, 5), "sequence 0 names row 8 of a pool of 8"),
    ],
)
def test_values_of_slots_for_each_token(op, slots, text):
    x, pool = inputs(op, 6, "cpu"), torch.zeros(8, 4, 64, 64)
    call = {**x, "initial_state": pool, "num_accepted_tokens": index(1, 1), **IN_PLACE}
    with pytest.raises(la.InputError, match=text) as caught:
        DECODE[op](**call, state_indices=index(*slots).reshape(2, 3))
    assert caught.value.argument == "state_indices"
    DECODE[op](**call, state_indices=index(0, -1, -1, 3, -1, 5).reshape(2, 3))


@pytest.mark.parametrize(("bounds", "most", "sequence", "count"), [((0, 9, 10), 8, 0, 9), ((0, 1, 4), 2, 1, 3)])
def test_values_of_boundaries_of_a_decode(bounds, most, sequence, count):
    tensors = {"q": torch.zeros(10, 1, 64), "cu_seqlens": index(*bounds)}
    with pytest.raises(la.InputError, match=f"sequence {sequence} has {count} tokens, of at most {most}") as caught:
        check_contents(tensors, "", None, most)
    assert caught.value.argument == "cu_seqlens"
    for check, allowed in ((None, count), (None, None), (False, most)):
        check_contents(tensors, "", check, allowed)


@BOTH
def test_a_sequence_of_a_decode_has_its_most_tokens(op):
    x = inputs(op, 10, "cpu")
    for most, bounds, past in ((0, (0, 9, 10), 8), (2, (0, 1, 4), 3)):
        options = {"tokens_per_sequence": most, "cu_seqlens": index(*bounds)}
        with pytest.raises(la.InputError, match=r"^cu_seqlens: sequence \d has \d tokens, of at most \d"):
            DECODE[op](**x, **options)
        assert not DECODE[op](**x, **options, check=False)[0][past].any()
    PREFILL[op](**x, cu_seqlens=index(0, 9, 10))


@BOTH
def test_values_of_gates(op):
    x = inputs(op, 6, "cpu")
    x["g"][2] = 0.1
    with pytest.raises(la.InputError, match="at most 0"):
        PREFILL[op](**x)
    with pytest.raises(la.InputError, match="from 0 to 1"):
        PREFILL[op](**{**x, "g": x["g"] + 1}, gate_domain="linear")
    PREFILL[op](**x, safe_gate=True)  # logits


@BOTH
@pytest.mark.parametrize("count", [-1, 4])
def test_values_of_accepted_counts(op, count):
    x, pool = inputs(op, 6, "cpu"), torch.zeros(8, 4, 64, 64)
    slots = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    with pytest.raises(la.InputError, match=f"has {count}, of at most 3"):
        DECODE[op](**x, initial_state=pool, state_indices=slots, num_accepted_tokens=index(1, count), **IN_PLACE)


STRUCTURE = {
    "boundaries of floats": ({"cu_seqlens": torch.tensor([0.0, 6.0])}, GraphError, "cu_seqlens"),
    "boundaries of two axes": ({"cu_seqlens": index(0, 6)[None]}, la.InputError, "cu_seqlens"),
    "no boundary": ({"cu_seqlens": index()}, la.InputError, "cu_seqlens"),
    "four axes": ({"q": torch.zeros(1, 6, 2, 64)}, la.InputError, "q"),
    "tokens": ({"v": torch.zeros(5, 4, 64).bfloat16()}, la.InputError, "v"),
    "heads": ({"q": torch.zeros(6, 3, 64).bfloat16(), "k": torch.zeros(6, 3, 64).bfloat16()}, GraphError, "v"),
    "type of k": ({"k": torch.zeros(6, 2, 64)}, GraphError, "k"),
    "type of beta": ({"beta": torch.zeros(6, 4).half()}, GraphError, "beta"),
    "type of state": ({"initial_state": torch.zeros(1, 4, 64, 64, dtype=torch.int32)}, GraphError, "initial_state"),
    "states of other sequences": ({"initial_state": STATE}, la.InputError, "initial_state"),
    "state heads": ({"initial_state": torch.zeros(1, 2, 64, 64)}, GraphError, "initial_state"),
    "slots without a pool": ({"state_indices": index(0)}, la.InputError, "state_indices"),
    "slots of other sequences": ({"initial_state": STATE, "state_indices": index(0, 1)}, la.InputError, "state_indices"),
    "pool not in place": (
        {"initial_state": STATE, "state_indices": index(0), "output_final_state": True}, GraphError, "state_indices"),
    "overwriting nothing": (IN_PLACE, la.InputError, "overwrite_initial_state"),
    "overwriting without output": (
        {"initial_state": STATE[:1], "overwrite_initial_state": True}, la.InputError, "overwrite_initial_state"),
    "a_log without safe_gate": ({"a_log": torch.zeros(4)}, GraphError, "a_log"),
    "linear logits": ({"safe_gate": True, "gate_domain": "linear"}, GraphError, "gate_domain"),
    "gate domain": ({"gate_domain": "exp"}, GraphError, "gate_domain"),
    "doubled beta": ({"allow_neg_eigval": True}, GraphError, "allow_neg_eigval"),
    "state layout": ({"state_layout": "columns"}, la.InputError, "state_layout"),
    "cadence": ({"checkpoint_every_n_tokens": -1}, GraphError, "checkpoint_every_n_tokens"),
    "on another device": ({"beta": torch.zeros(6, 4, device="meta")}, la.InputError, "beta"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("case", STRUCTURE)
def test_structure(op, case):
    changes, kind, culprit = STRUCTURE[case]
    with pytest.raises(kind) as caught:
        PREFILL[op](**_tokens(op, **changes))
    named = caught.value.port if kind is GraphError else caught.value.argument
    assert named == culprit, caught.value


GATES = {
    "form": ({"safe_gate": True, "gate_activation": "tanh"}, "gate_activation"),
    "softplus without safe_gate": ({"gate_activation": "softplus"}, "gate_activation"),
    "softplus with a bound": (
        {"safe_gate": True, "gate_activation": "softplus", "gate_lower_bound": -5.0}, "gate_lower_bound"),
    "linear softplus": ({"safe_gate": True, "gate_activation": "softplus", "gate_domain": "linear"}, "gate_domain"),
}  # fmt: skip


@pytest.mark.parametrize("function", [la.kimi_delta_attention, la.kimi_delta_attention_decode])
@pytest.mark.parametrize("case", GATES)
def test_gate_forms_of_kda(function, case):
    changes, culprit = GATES[case]
    with pytest.raises(la.InputError) as caught:
        function(**_tokens("kda"), **changes)
    assert caught.value.argument == culprit
    with pytest.raises(GraphError, match="gate_lower_bound"):
        function(**_tokens("kda"), gate_lower_bound=-5.0)


@BOTH
def test_a_decode_of_more_than_8_tokens_is_refused(op):
    x = inputs(op, 18, "cpu")
    with pytest.raises(GraphError, match="1 to 8"):
        DECODE[op](**x, initial_state=STATE)
    with pytest.raises(la.InputError, match="have others"):
        DECODE[op](**part(x, 0, 5), initial_state=STATE)


@BOTH
@pytest.mark.parametrize("told", [{}, {"cu_seqlens": index(0, 2, 6)}, {"initial_state": STATE}])
def test_a_negative_number_of_tokens_per_sequence_is_refused_by_name(op, told):
    for x in (inputs(op, 6, "cpu"), {port: value.to("meta") for port, value in inputs(op, 6, "cpu").items()}):
        options = {port: value.to(x["q"].device) for port, value in told.items()}
        with pytest.raises(la.InputError, match=r"^tokens_per_sequence: is -1, needs 1 to 8, or 0"):
            DECODE[op](**x, **options, tokens_per_sequence=-1)


OTHER_TYPES = {"cu_seqlens": [0, 6], "q": [1.0], "state_indices": (0,), "check": "yes", "scale": "1", "plan_name": 3}


@BOTH
@pytest.mark.parametrize("argument", OTHER_TYPES)
@pytest.mark.parametrize("options", [{}, {"initial_state": STATE[:1], **IN_PLACE}])
def test_arguments_of_another_type_are_named(op, argument, options):
    value = OTHER_TYPES[argument]
    for function in (PREFILL[op], DECODE[op]):
        with pytest.raises(la.InputError, match=rf"^{argument}: has type {type(value).__name__}, needs ") as caught:
            function(**_tokens(op, **options, **{argument: value}))
        assert caught.value.argument == argument


@BOTH
def test_a_pool_that_overlaps_itself_is_not_copied_but_refused(op):
    pool = torch.zeros(1, 4, 64, 64).expand(2, 4, 64, 64)
    with pytest.raises((ExecutionError, GraphError)):
        DECODE[op](**part(inputs(op, 2, "cpu"), 0), initial_state=pool, state_indices=index(0, 1), **IN_PLACE)


# --- gradients
@BOTH
def test_a_gradient_is_a_clear_error_until_there_is_one(op):
    x = inputs(op, 4, "cpu")
    x["v"].requires_grad_()
    with pytest.raises(la.GradientError, match=r"torch\.no_grad"):
        PREFILL[op](**x)
    with pytest.raises(la.GradientError, match="decode has no derivatives yet"):
        DECODE[op](**x, initial_state=torch.zeros(4, 4, 64, 64), **IN_PLACE)
    with torch.no_grad():
        assert not PREFILL[op](**x)[0].requires_grad
    with torch.inference_mode():
        DECODE[op](**x, initial_state=torch.zeros(4, 4, 64, 64), **IN_PLACE)


@pytest.mark.parametrize("kind", [la.GradientError, la.InputError])
def test_errors_are_the_core_s_and_a_builtin_kind(kind):
    assert issubclass(kind, cudnn_core.CudnnCoreError)
    assert issubclass(kind, NotImplementedError if kind is la.GradientError else ValueError)


@pytest.mark.parametrize("port", ["q", "k", "v"])
def test_heads_and_channels_of_size_0_are_refused_by_name(port):
    x = {"q": torch.zeros(4, 2, 8), "k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 2, 8)}
    x |= {"g": torch.zeros(4, 2), "beta": torch.zeros(4, 2), port: torch.zeros(4, 2, 0)}
    with pytest.raises(la.InputError, match=rf"^{port}: has heads or channels of size 0"):
        la.gated_delta_net(**x)


@pytest.mark.parametrize(("port", "dtype"), [("cu_seqlens", torch.int16), ("g", torch.bool), ("q", torch.complex64)])
def test_types_that_no_op_takes_are_refused_by_name(port, dtype):
    x = {name: torch.zeros(4, 2, 8) for name in "qkv"} | {name: torch.zeros(4, 2) for name in ("g", "beta")}
    x["cu_seqlens"] = torch.tensor([0, 4], dtype=torch.int32)
    x[port] = x[port].to(dtype)
    with pytest.raises(la.InputError, match=rf"^{port}: has type"):
        la.gated_delta_net(**x)


@BOTH
@pytest.mark.parametrize("port", ["q", "k", "v", "g", "beta"])
def test_tensors_that_are_missing_are_named(op, port):
    """torch's schemas let None pass for a tensor."""
    for function in (PREFILL[op], DECODE[op]):
        with pytest.raises(la.InputError, match=rf"^{port}: is missing"):
            function(**_tokens(op, **{port: None}))
