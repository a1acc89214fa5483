"""K = 96 of sm_103: block-scaled fp4 tcgen05.mma in hand-written kernels against numpy.

The rules are those of CUTLASS' sm_103 kernel and of PTX ISA 9.7.16.3.1.2 and 9.7.16.10.7: rows of 48 bytes that leave a
128-byte swizzle row go on at an absolute address; scale factors run on into the next group of columns.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._layout import InstructionDescriptor, encode_instruction

T = runpy.run_path(str(Path(__file__).with_name("_tensor_core.py")))
run, descriptor, E2M1, kinds = T["run"], T["descriptor"], T["E2M1"], T["S"]["kinds"]
M, N, SCALES = 128, 64, 64  # columns: the accumulator, then the scales of A and of B
IDESC = InstructionDescriptor("mxf4nvf4", M, N, 96, "e2m1", "e2m1", "f32", scale_format="ue4m3")


def swizzled(rows):
    """[rows, 128] bytes in the 128-byte swizzle: piece c of row r at c xor r % 8."""
    out = np.zeros_like(rows)
    for row in range(len(rows)):
        for piece in range(8):
            at = 16 * (piece ^ row % 8)
            out[row, at : at + 16] = rows[row, 16 * piece : 16 * piece + 16]
    return out


def slabs(codes):
    """Rows of K-major fp4 in slabs of 128 bytes along K, each swizzled."""
    raw = T["packed"](codes)
    return np.concatenate([swizzled(raw[:, i : i + 128]).reshape(-1) for i in range(0, raw.shape[1], 128)])


def factors(codes, kind):
    return np.exp2(codes.astype(int) - 127.0) if kind == "ue8m0" else np.exp2((codes.astype(int) >> 3) - 7.0)


def scale_codes(rng, rows, count, kind):
    return rng.integers(126, 129, (rows, count)) if kind == "ue8m0" else rng.integers(6, 9, (rows, count)) << 3


def multiply(vector, kind, steps=8, **change):
    """Eight K = 96 steps over K = 768, as the sm_103 kernels cut it: three 128-byte slabs, scale ids of each step."""
    rng = np.random.default_rng(vector)
    k = 96 * steps
    a, b = rng.integers(0, 16, (M, k)).astype(np.uint8), rng.integers(0, 16, (N, k)).astype(np.uint8)
    sa, sb = scale_codes(rng, M, k // vector, kind), scale_codes(rng, N, k // vector, kind)
    image = np.concatenate((slabs(a), slabs(b)))
    slab_a, slab_b = M * 128, N * 128
    start_b = slab_a * (k // 256)
    tensor = np.zeros((128, 256), np.uint32)
    scales_a, scales_b = T["scale_image"](sa), T["scale_image"](sb)
    at_b = SCALES + scales_a.shape[1]
    tensor[:, SCALES:at_b], tensor[:, at_b : at_b + scales_b.shape[1]] = scales_a, scales_b
    lines = []
    for step in range(steps):
        slab, column = divmod(48 * step, 128)
        operands = []
        for start, size in ((0, slab_a), (start_b, slab_b)):
            following = T["BASE"] + start + size * (slab + 1) if column > 80 else 16
            operands.append(
                descriptor(
                    start + size * slab + column, following, 1024, "128B", "sm_103a", leading_absolute=column > 80
                )
            )
        first = step * (96 // vector)
        word, byte = divmod(first, 4)
        fields = {"scale_format": kind, "a_scale_id": byte, "b_scale_id": byte, **change}
        code = encode_instruction(IDESC._replace(**fields), "sm_103a")
        lines.append(
            f"mov.b64 %rd20, {operands[0]}; mov.b64 %rd21, {operands[1]}; mov.b32 %r30, {code}; add.u32 %r31, %r21, {SCALES + 4 * word};"
            f" add.u32 %r32, %r21, {at_b + 4 * word}; mov.pred %p6, {int(step > 0)};"
            f" tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block{vector} [%r21], %rd20, %rd21, %r30, [%r31], [%r32], %p6;"
        )
    out, report = run("\n".join(lines), image, tensor, "sm_103a")
    left = E2M1[a] * np.repeat(factors(sa, kind), vector, 1)
    right = E2M1[b] * np.repeat(factors(sb, kind), vector, 1)
    return out, left @ right.T, report, tensor


@pytest.mark.parametrize(("vector", "kind"), [(16, "ue4m3"), (16, "ue8m0"), (32, "ue8m0")])
def test_96_wide_steps_cross_swizzle_rows_and_scale_columns(vector, kind):
    out, expected, report, tensor = multiply(vector, kind)
    assert not report.findings
    np.testing.assert_array_equal(out[:, :N].view(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(out[:, N:], tensor[:, N:])


def core_matrices(codes):
    """No swizzle: 8 rows by 16 bytes contiguous, then along K, then along the rows."""
    raw = T["packed"](codes)
    return raw.reshape(len(raw) // 8, 8, -1, 16).transpose(0, 2, 1, 3).reshape(-1)


def test_96_without_swizzle_reads_three_core_matrices():
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 16, (M, 96)).astype(np.uint8), rng.integers(0, 16, (N, 96)).astype(np.uint8)
    tensor = np.zeros((128, 128), np.uint32)
    tensor[:, SCALES:] = 0x7F7F7F7F
    image = np.concatenate((core_matrices(a), core_matrices(b)))
    code = encode_instruction(IDESC._replace(kind="mxf4", scale_format="ue8m0"), "sm_103a")
    text = f"""mov.b64 %rd20, {descriptor(0, 128, 384)}; mov.b64 %rd21, {descriptor(M * 48, 128, 384)}; mov.pred %p6, 0; add.u32 %r31, %r21, {SCALES};
 mov.b32 %r30, {code}; tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%r21], %rd20, %rd21, %r30, [%r31], [%r31], %p6;"""
    out, report = run(text, image, tensor, "sm_103a")
    assert not report.findings
    np.testing.assert_array_equal(out[:, :N].view(np.float32), E2M1[a] @ E2M1[b].T)
    found = run(text, image, tensor, "sm_100a")[1].findings  # K = 96 came with sm_103
    assert {f.kind for f in found} == {"descriptor"}


@pytest.mark.parametrize("change", [{"a_scale_id": 1}, {"b_scale_id": 3}])
def test_scale_ids_that_the_isa_does_not_define_are_found(change):
    assert "descriptor" in kinds(multiply(16, "ue4m3", steps=8, **change)[2])
