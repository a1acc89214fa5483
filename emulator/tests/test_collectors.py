"""Operands that tcgen05.mma keeps, and tensor memory of sm_107: hand-written kernels against numpy."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._layout import InstructionDescriptor, encode_instruction

T = runpy.run_path(str(Path(__file__).with_name("_tensor_core.py")))
run, descriptor, kinds, launch = T["run"], T["descriptor"], T["S"]["kinds"], T["S"]["launch"]
M, N, K = 128, 32, 16  # operands: A, another A, B, another B
OFFSETS = {"a": 0, "other a": M * 32, "b": 2 * M * 32, "other b": 2 * M * 32 + N * 32}


def operands():
    rng = np.random.default_rng(3)
    return {name: rng.integers(-4, 5, (N if "b" in name else M, K)).astype(np.float16) for name in OFFSETS}


def product(*steps, m=M, target="sm_107a"):
    """(tensor memory, findings by kind) of MMAs, each ``(words, a, b)``, into 32 columns each."""
    held = operands()
    image = np.concatenate([x.reshape(len(x) // 8, 8, 2, 8).transpose(0, 2, 1, 3).reshape(-1) for x in held.values()])
    idesc = encode_instruction(InstructionDescriptor("f16", m, N, K, "f16", "f16", "f32"))
    text = ""
    for i, (words, a, b) in enumerate(steps):
        of_a, of_b = (descriptor(OFFSETS[name], 128, 256, arch=target) for name in (a, b))
        text += f"""mov.b64 %rd20, {of_a}; mov.b64 %rd21, {of_b}; mov.b32 %r30, {idesc}; mov.pred %p6, 0; add.u32 %r31, %r21, {N * i};
 tcgen05.mma.cta_group::1.kind::f16{words} [%r31], %rd20, %rd21, %r30, %p6;"""
    out, report = run(text, image, np.zeros((128, N * len(steps)), np.uint32), target=target)
    return out.view(np.float32), [finding.message for finding in report.findings]


def kept(a="", b=""):
    return (f".collector::a::{a}" if a else "") + (f".collector::b::{b}" if b else "")


FINE = {
    "A of two products": ((kept("fill"), "a", "b"), (kept("lastuse"), "a", "other b")),
    "B of three blocks": ((kept("", "fill"), "a", "b"), (kept("", "use"), "other a", "b"), (kept("", "lastuse"), "a", "b")),
    "both by turns": (
        (kept("discard", "fill"), "a", "b"), (kept("fill", "lastuse"), "other a", "b"), (kept("lastuse", "fill"), "other a", "other b"),
        (kept("discard", "lastuse"), "a", "other b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", FINE.values(), ids=FINE)
def test_operands_that_are_kept_are_multiplied(steps):
    out, findings = product(*steps)
    assert not findings
    held = operands()
    for i, (_, a, b) in enumerate(steps):
        expected = held[a].astype(np.float32) @ held[b].astype(np.float32).T
        np.testing.assert_array_equal(out[:, N * i : N * i + N], expected)


WRONG = {
    "nothing was kept": ((kept("", "use"), "a", "b"),),
    "it was given up": ((kept("fill"), "a", "b"), (kept("lastuse"), "a", "b"), (kept("use"), "a", "b")),
    "another B": ((kept("", "fill"), "a", "b"), (kept("", "lastuse"), "other a", "other b")),
    "another A": ((kept("fill"), "a", "b"), (kept("lastuse"), "other a", "b")),
    "an instruction between that keeps nothing": ((kept("fill"), "a", "b"), ("", "other a", "b"), (kept("use"), "a", "b")),
}  # fmt: skip


@pytest.mark.parametrize("steps", WRONG.values(), ids=WRONG)
def test_an_operand_that_the_collector_does_not_hold_is_found(steps):
    (finding,) = product(*steps)[1]
    assert "of which the collector holds" in finding


@pytest.mark.parametrize(
    ("changes", "finding"), [({"target": "sm_100a"}, "B is not kept on sm_100a"), ({"m": 64}, "128 rows")]
)
def test_b_is_kept_by_one_architecture_and_one_shape(changes, finding):
    steps = (kept("", "fill"), "a", "b"), (kept("", "lastuse"), "a", "b")
    found = product(*steps, **changes)[1]
    assert any(finding in message for message in found)
    assert not product(*steps)[1]


def test_an_a_that_moves_is_not_kept():
    idesc = encode_instruction(InstructionDescriptor("f16", M, N, K, "f16", "f16", "f32"))
    b = operands()["b"].reshape(N // 8, 8, 2, 8).transpose(0, 2, 1, 3)
    for word, wrong in (("fill", True), ("discard", False)):
        text = f"""add.u32 %r31, %r21, {N}; mov.b64 %rd21, {descriptor(0, 128, 256)}; mov.b32 %r30, {idesc}; mov.pred %p6, 0;
 tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::{word} [%r21], [%r31], %rd21, %r30, %p6;"""
        assert bool(run(text, b, np.zeros((128, 64), np.uint32))[1].findings) == wrong


def allocation(words, columns, freed=None, touched=0, target="sm_107a"):
    """Kinds of findings of one warp that allocates, writes a column, and frees."""
    freed = words if freed is None else freed
    body = f"""mov.b32 %r2, smem; tcgen05.alloc{words}.cta_group::1.sync.aligned.shared::cta.b32 [%r2], {columns}; ld.shared.b32 %r3, [%r2];
 add.u32 %r4, %r3, {touched}; mov.b32 %r5, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {{%r5}}; tcgen05.wait::st.sync.aligned;
 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; tcgen05.dealloc{freed}.cta_group::1.sync.aligned.b32 %r3, {columns};"""
    return kinds(launch(body, target=target, shared=64))


def test_one_exclusive_allocation_has_every_column():
    assert not allocation(".exclusive", 576, touched=575)
    assert not allocation(".exclusive", 512, touched=511)
    assert allocation(".exclusive", 576, touched=576) == {"out_of_bounds"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"words": "", "columns": 576}, {"words": ".exclusive", "columns": 544}, {"words": ".exclusive", "columns": 64, "target": "sm_100a"},
        {"words": ".exclusive", "columns": 576, "freed": ""}, {"words": "", "columns": 64, "freed": ".exclusive"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_exclusive_allocations_are_found(wrong):
    assert "tensor_memory" in allocation(**wrong)


def test_nothing_is_allocated_beside_an_exclusive_allocation():
    body = """mov.b32 %r2, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
 tcgen05.alloc.exclusive.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 576;"""
    assert "deadlock" in kinds(launch(body, target="sm_107a", shared=64))
