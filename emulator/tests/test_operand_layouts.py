"""Operands that a tensor copy wrote, read through descriptors that fit and that do not."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._layout import (
    InstructionDescriptor,
    MatrixDescriptor,
    TensorMap,
    encode_instruction,
    encode_tcgen05,
    encode_tensor_map,
    encode_wgmma,
)

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds, wait = S["launch"], S["kinds"], S["wait"]
aligned = runpy.run_path(str(Path(__file__).with_name("test_tma.py")))["aligned"]
MODES = ["128B", "64B", "32B"]

# thread 0 loads 64 rows of A and 8 or 16 of B, each a swizzle row wide, to smem + {a} and + {b}; then `multiply`
BODY = """
 ld.param.u64 %rd3, [d]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r2], 1;
 mbarrier.init.shared.b64 [%r2+8], 1; fence.mbarrier_init.release.cluster; mov.b32 %r3, 0; mov.b64 %rd4, amap; cvta.param.u64 %rd4, %rd4; mov.b64 %rd5, bmap;
 cvta.param.u64 %rd5, %rd5; mbarrier.arrive.expect_tx.shared.b64 %rd6, [%r2], {size};
 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2+{a}], [%rd4, {{%r3, %r3}}], [%r2];
 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2+{b}], [%rd5, {{%r3, %r3}}], [%r2];
READY: bar.sync 0; {wait}
 bfe.u32 %r10, %r2, 4, 14; add.u32 %r11, %r10, {b} / 16; add.u32 %r10, %r10, {a} / 16; cvt.u64.u32 %rd7, %r10; or.b64 %rd7, %rd7, {high_a}; cvt.u64.u32 %rd8, %r11;
 or.b64 %rd8, %rd8, {high_b};
 {multiply}
"""
PARAMS = ".param .align 64 .b8 amap[128], .param .align 64 .b8 bmap[128], .param .u64 d"
WGMMA = """mov.pred %p3, 0; wgmma.fence.sync.aligned;
 wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd7, %rd8, %p3, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;
 wgmma.wait_group.sync.aligned 0; mul.wide.u32 %rd9, %r1, 16; add.s64 %rd3, %rd3, %rd9; st.global.v4.f32 [%rd3], {%f1, %f2, %f3, %f4};"""
TCGEN05 = """shr.u32 %r20, %r1, 5; setp.ne.u32 %p4, %r20, 0; @%p4 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], 32;
ALLOCATED: bar.sync 0; ld.shared.b32 %r21, [%r2+16]; @%p1 bra ISSUED; mov.pred %p3, 0; tcgen05.mma.cta_group::1.kind::f16 [%r21], %rd7, %rd8, IDESC, %p3;
 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+8];
ISSUED: WAIT bar.sync 0; @%p4 ret; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r21, 32;"""


def multiply(unit, mode, a=None, read=None, base=0, inside=0):
    """(A, B, D of wgmma, report): the copies write with `mode` at multiples of 128, the descriptors say `read` and `base`."""
    width, rows = int(mode[:-1]) // 2, 8 if unit == "wgmma" else 16
    rng = np.random.default_rng(1)
    left, right = (aligned((n, width), np.float16, rng.integers(-3, 4, (n, width))) for n in (64, rows))
    maps = [encode_tensor_map(TensorMap(m.__array_interface__["data"][0], "f16", m.shape[::-1], m.strides[:1], m.shape[::-1], (1, 1), swizzle=mode))
            for m in (left, right)]  # fmt: skip
    a = 1024 if a is None else a
    b, read = a + 64 * 2 * width, read or mode
    form = MatrixDescriptor(0, 16, 8 * 2 * width, read, base)
    encode = encode_wgmma if unit == "wgmma" else encode_tcgen05
    idesc = encode_instruction(InstructionDescriptor("f16", 64, 16, 16, "f16", "f16", "f32"))
    text = WGMMA if unit == "wgmma" else TCGEN05.replace("IDESC", str(idesc)).replace("WAIT", wait("%r2+8", 0, "D"))
    high = encode(form) + inside // 16
    body = BODY.format(
        size=left.nbytes + right.nbytes, a=a, b=b, wait=wait("%r2", 0, "W"), high_a=high, high_b=high, multiply=text
    )
    body = body.replace(f"{b} / 16", str(b // 16)).replace(f"{a} / 16", str(a // 16))
    d = np.zeros((128, 4), np.float32)
    report = launch(body, [*maps, d], PARAMS, block=128, shared=b + right.nbytes + 1024, buffers=[left, right],
                    target="sm_90a" if unit == "wgmma" else "sm_100a")  # fmt: skip
    return left, right, d, report


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("a", [1024, 1152, 1536, 1920])
def test_a_copy_swizzles_by_absolute_address_wherever_it_starts(mode, a):
    left, right, d, report = multiply("wgmma", mode, a)
    assert not report.findings
    rows = np.arange(128)[:, None] // 32 * 16 + np.arange(128)[:, None] % 32 // 4 + 8 * (np.arange(4) // 2)
    columns = np.arange(128)[:, None] % 4 * 2 + np.arange(4) % 2
    expected = (left[:, :16].astype(np.float32) @ right[:, :16].astype(np.float32).T)[rows, columns]
    np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("unit", ["wgmma", "tcgen05"])
@pytest.mark.parametrize("mode", MODES)
def test_a_descriptor_that_fits_its_copy_is_clean(unit, mode):
    assert not kinds(multiply(unit, mode)[3])


@pytest.mark.parametrize("unit", ["wgmma", "tcgen05"])
@pytest.mark.parametrize(("mode", "read"), [("128B", "64B"), ("64B", "128B"), ("32B", "none"), ("128B", "32B")])
def test_another_swizzle_than_the_copys_is_found(unit, mode, read):
    findings = multiply(unit, mode, read=read)[3].findings
    assert {f.kind for f in findings} - {"uninitialised"} == {"descriptor"}  # the wrong pattern may reach further
    assert any(f"swizzle {read}, but the tensor copy" in f.message for f in findings)


@pytest.mark.parametrize("unit", ["wgmma", "tcgen05"])
def test_a_base_offset_on_what_a_copy_wrote_is_found(unit):
    findings = multiply(unit, "128B", base=3)[3].findings
    assert {f.kind for f in findings} == {"descriptor"}
    assert "base offset 3" in findings[0].message
    assert not kinds(multiply(unit, "128B", inside=32)[3])  # the next K step, inside the pattern
