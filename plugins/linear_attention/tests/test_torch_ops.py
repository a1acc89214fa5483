"""The custom ops as torch sees them: schemas, fake kernels, compilers."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import linear_attention as la  # noqa: E402
from la_cases.properties import DECODE, PREFILL, inputs  # noqa: E402

BOTH = pytest.mark.parametrize("op", ["gdn", "kda"])
NAMES = {"gdn": "gated_delta_net", "kda": "kimi_delta_attention"}
FLAGS = {
    "scale": None, "use_qk_l2norm": True, "use_beta_sigmoid": False, "allow_neg_eigval": False, "safe_gate": False,
    "gate_domain": "log", "state_layout": "k_major", "plan_name": None, "check": None,
}  # fmt: skip


def sample(op, decode, overwrite):
    x = inputs(op, 4, "cpu")
    state = torch.zeros(2, 4, 64, 64)
    tensors = [
        *x.values(),
        torch.tensor([0, 1, 4], dtype=torch.int32),
        state,
        None,
        None,
        None,
        *([None] if decode else []),
    ]
    options = {**FLAGS, **({"gate_lower_bound": None, "gate_activation": "sigmoid"} if op == "kda" else {})}
    options |= {} if overwrite else {"output_final_state": True}
    if decode:
        options |= {"tokens_per_sequence": 3}
    else:
        options |= {"checkpoint_every_n_tokens": 2, "checkpoint_dtype": None, "batch_invariant": False}
    name = NAMES[op] + ("_decode" if decode else "") + ("_overwrite_state" if overwrite else "")
    return getattr(torch.ops.linear_attention, name).default, tuple(tensors), options


@BOTH
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_schema_says_what_is_written(op, decode, overwrite):
    torch_op, tensors, options = sample(op, decode, overwrite)
    la.gated_delta_net  # noqa: B018  registers the ops
    written = [argument.name for argument in torch_op._schema.arguments if argument.alias_info is not None]
    assert written == (["initial_state"] if overwrite else [])
    before = [None if tensor is None else tensor.clone() for tensor in tensors]
    torch_op(*tensors, **options)
    for argument, old, new in zip(torch_op._schema.arguments, before, tensors, strict=False):
        assert old is None or torch.equal(old, new) == (argument.name not in written), argument.name


def on_meta(tensors):
    return [None if tensor is None else tensor.to("meta") for tensor in tensors]


def faked(tensors):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return [None if tensor is None else mode.from_tensor(tensor) for tensor in tensors]


@BOTH
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("made", [on_meta, pytest.param(faked, marks=pytest.mark.L2)])
def test_fake_kernel_gives_the_shapes_types_and_strides_of_the_real_one(op, decode, overwrite, made):
    torch_op, tensors, options = sample(op, decode, overwrite)
    real, fake = torch_op(*tensors, **options), torch_op(*made(tensors), **options)
    real, fake = (found if isinstance(found, (list, tuple)) else (found,) for found in (real, fake))
    assert len(real) == len(fake) == (1 if decode and overwrite else 2 if decode or overwrite else 3)
    for have, want in zip(fake, real, strict=True):
        assert (have.shape, have.dtype, have.stride()) == (want.shape, want.dtype, want.stride())


def test_fake_kernel_checks_the_structure():
    x = {port: value.to("meta") for port, value in inputs("gdn", 4, "cpu").items()}
    assert la.gated_delta_net(**x)[0].device.type == "meta"
    with pytest.raises(la.InputError, match="initial_state"):
        la.gated_delta_net(**x, initial_state=torch.zeros(2, 4, 64, 64, device="meta"))


@BOTH
@pytest.mark.L2
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_opcheck(op, decode, overwrite):
    torch_op, tensors, options = sample(op, decode, overwrite)
    torch.library.opcheck(torch_op, tensors, options, test_utils=("test_schema", "test_faketensor"))


@BOTH
@pytest.mark.L2
@pytest.mark.filterwarnings("ignore")
def test_compiled_programs_run_without_a_break_and_for_any_number_of_tokens(op):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(x, pool, slots):
        o, _ = PREFILL[op](**x)
        step = {port: value[: slots.shape[0]] for port, value in x.items()}
        d, _ = DECODE[op](
            **step, initial_state=pool, state_indices=slots, output_final_state=True, overwrite_initial_state=True
        )
        return o * 2, d

    with torch.no_grad():
        for tokens in (9, 30):
            x, slots = inputs(op, tokens, "cpu"), torch.tensor([2, 0], dtype=torch.int32)
            pool, plain = torch.zeros(3, 4, 64, 64), torch.zeros(3, 4, 64, 64)
            o, d = layer(x, pool, slots)
            step = {port: value[:2] for port, value in x.items()}
            options = {"state_indices": slots, "output_final_state": True, "overwrite_initial_state": True}
            assert torch.equal(o, PREFILL[op](**x)[0] * 2)
            assert torch.equal(d, DECODE[op](**step, initial_state=plain, **options)[0])
            assert torch.equal(pool, plain)


@pytest.mark.L2
def test_a_first_call_does_not_import_the_compiler():
    program = """if True:
        import sys, torch, linear_attention as la
        z = torch.zeros
        la.gated_delta_net(z(2, 1, 64), z(2, 1, 64), z(2, 1, 64), z(2, 1), z(2, 1))
        print("torch._dynamo" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
