"""wgmma, tcgen05 and mma.sync in small hand-written kernels against numpy."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator._layout import InstructionDescriptor, encode_instruction

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds, wait, core_matrices = S["launch"], S["kinds"], S["wait"], S["core_matrices"]
POINTERS = ".param .u64 a, .param .u64 b, .param .u64 d"
RNG = np.random.default_rng(5)

# every thread copies its share of A to smem + 1024 and of B behind it; `size` bytes in all from a, b laid out by the host
FILL = """
 ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [d]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem;
 mul.lo.u32 %r3, %r1, 16;
FA: setp.ge.u32 %p1, %r3, {abytes}; @%p1 bra FB0; cvt.u64.u32 %rd4, %r3; add.s64 %rd5, %rd1, %rd4; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd5];
 add.u32 %r8, %r2, %r3; st.shared.v4.b32 [%r8+1024], {{%r4, %r5, %r6, %r7}}; add.u32 %r3, %r3, 2048; bra FA;
FB0: mul.lo.u32 %r3, %r1, 16;
FB: setp.ge.u32 %p1, %r3, {bbytes}; @%p1 bra FILLED; cvt.u64.u32 %rd4, %r3; add.s64 %rd5, %rd2, %rd4; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd5];
 add.u32 %r8, %r2, %r3; st.shared.v4.b32 [%r8+{bstart}], {{%r4, %r5, %r6, %r7}}; add.u32 %r3, %r3, 2048; bra FB;
FILLED: {fence} bar.sync 0;
"""


def numbers(rows, columns, dtype=np.float16):
    return RNG.integers(-4, 5, (rows, columns)).astype(dtype)


def wgmma(fence="fence.proxy.async.shared::cta;", waiting="wgmma.wait_group.sync.aligned 0;", commit="wgmma.commit_group.sync.aligned;",
          leading=128, ordered="wgmma.fence.sync.aligned;", touched="", **options):  # fmt: skip
    a, b, d = numbers(64, 16), numbers(8, 16), np.full((64, 8), np.nan, np.float32)
    high = (leading >> 4) << 16 | (256 >> 4) << 32
    body = (
        FILL.format(abytes=2048, bbytes=256, bstart=3072, fence=fence)
        + f"""
 add.u32 %r10, %r2, 1024; bfe.u32 %r10, %r10, 4, 14; cvt.u64.u32 %rd6, %r10; or.b64 %rd6, %rd6, {high};
 add.u32 %r11, %r2, 3072; bfe.u32 %r11, %r11, 4, 14; cvt.u64.u32 %rd7, %r11; or.b64 %rd7, %rd7, {high};
 mov.pred %p3, 0; {ordered} {touched}
 wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f1, %f2, %f3, %f4}}, %rd6, %rd7, %p3, 1, 1, 0, 0;
 {commit} {waiting}
 shr.u32 %r12, %r1, 5; and.b32 %r13, %r1, 31; shr.u32 %r14, %r13, 2; and.b32 %r15, %r13, 3; mad.lo.u32 %r16, %r12, 16, %r14;
 mul.lo.u32 %r16, %r16, 32; mad.lo.u32 %r16, %r15, 8, %r16; cvt.u64.u32 %rd8, %r16; add.s64 %rd8, %rd3, %rd8;
 st.global.v2.f32 [%rd8], {{%f1, %f2}}; st.global.v2.f32 [%rd8+256], {{%f3, %f4}};
"""
    )
    report = launch(
        body,
        [core_matrices(a), core_matrices(b), d],
        POINTERS,
        block=128,
        target="sm_90a",
        shared=4096,
        outputs=[],
        **options,
    )
    return d, a.astype(np.float32) @ b.astype(np.float32).T, report


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_wgmma_multiplies(schedule):
    got, expected, report = wgmma(schedule=schedule, seed=2)
    assert (got == expected).all()
    assert not report.findings


def test_wgmma_without_proxy_fence_is_found():
    assert kinds(wgmma(fence="")[2]) == {"proxy_fence"}


def test_a_wgmma_is_complete_for_its_whole_warpgroup():
    """Its wait orders what the other warps read: thread t writes over row 63 - t / 2 of A."""
    store = " sub.u32 %r30, 127, %r1; shl.b32 %r30, %r30, 4; add.u32 %r30, %r2, %r30; st.shared.b32 [%r30+1024], %r1;"
    wait_group = "wgmma.wait_group.sync.aligned 0;"
    for seed in range(4):
        got, expected, report = wgmma(waiting=wait_group + store, seed=seed)
        assert (got == expected).all()
        assert not report.findings
    assert "race" in kinds(wgmma(waiting=store + wait_group)[2])


def test_accumulators_used_before_the_wait_are_found():
    got, expected, report = wgmma(waiting="")
    assert "uncommitted" in kinds(report)
    assert (got != expected).any()
    assert "uncommitted" in kinds(wgmma(commit="")[2])


def test_a_wgmma_without_its_fence_is_found():
    assert kinds(wgmma(ordered="")[2]) == {"uncommitted"}
    touched = "mov.b32 %f2, 0f00000000;"  # public kernels have such moves
    assert not kinds(wgmma(touched=touched)[2])
    assert kinds(wgmma(touched=touched, strict=True)[2]) == {"uncommitted"}
    assert not kinds(wgmma(strict=True)[2])


def test_a_wgmma_operand_outside_shared_memory_is_found():
    assert kinds(wgmma(leading=8192)[2]) & {"out_of_bounds", "uninitialised", "descriptor"}


IDESC = InstructionDescriptor("f16", 128, 16, 16, "f16", "f16", "f32")
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"


def tcgen05(idesc=IDESC, columns=32, fence="fence.proxy.async.shared::cta;", commit=COMMIT, waiting=None, lane_shift=21, dealloc=True,
            enable=0, init="mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;", early="", a_operand="%rd6", before="",
            **options):  # fmt: skip
    a, b, d = numbers(128, 16), numbers(16, 16), np.full((128, 16), np.nan, np.float32)
    code = encode_instruction(idesc)
    high = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46
    registers = ", ".join(f"%r{i}" for i in range(40, 56))
    stores = " ".join(
        f"st.global.v4.b32 [%rd9+{4 * i}], {{%r{40 + i}, %r{41 + i}, %r{42 + i}, %r{43 + i}}};" for i in range(0, 16, 4)
    )
    body = (
        FILL.format(abytes=4096, bbytes=512, bstart=5120, fence=fence)
        + f"""
 shr.u32 %r20, %r1, 5; setp.ne.u32 %p4, %r20, 0; setp.ne.u32 %p5, %r1, 0; @%p4 bra ALLOCATED;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], {columns};
ALLOCATED: @%p5 bra READY; {init}
READY: bar.sync 0; ld.shared.b32 %r21, [%r2+16]; {before} @%p5 bra WAIT;
 add.u32 %r10, %r2, 1024; bfe.u32 %r10, %r10, 4, 14; cvt.u64.u32 %rd6, %r10; or.b64 %rd6, %rd6, {high};
 add.u32 %r11, %r2, 5120; bfe.u32 %r11, %r11, 4, 14; cvt.u64.u32 %rd7, %r11; or.b64 %rd7, %rd7, {high};
 setp.ne.u32 %p6, {enable}, 0; tcgen05.mma.cta_group::1.kind::f16 [%r21], {a_operand}, %rd7, {code}, %p6;
 {commit}
WAIT: {wait("%r2", 0, "W") if waiting is None else waiting}
 bar.sync 0; shl.b32 %r22, %r20, {lane_shift}; add.u32 %r22, %r21, %r22;
 tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r22]; tcgen05.wait::ld.sync.aligned;
 mul.wide.u32 %rd8, %r1, 64; add.s64 %rd9, %rd3, %rd8; {stores}
 {early} bar.sync 0; @%p4 ret; {f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r21, {columns};" if dealloc else ""}
"""
    )
    report = launch(body, [core_matrices(a), core_matrices(b), d], POINTERS, block=128, shared=8192, **options)
    return d, a.astype(np.float32) @ b.astype(np.float32).T, report


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_tcgen05_multiplies(schedule):
    got, expected, report = tcgen05(schedule=schedule, seed=1)
    assert (got == expected).all()
    assert not report.findings


def test_tensor_memory_that_is_not_freed_is_found():
    assert kinds(tcgen05(dealloc=False)[2]) == {"tensor_memory"}


def test_an_allocation_of_a_wrong_size_is_found():
    assert "tensor_memory" in kinds(tcgen05(columns=48)[2])


def test_lanes_of_another_warp_are_found():
    assert "tensor_memory" in kinds(tcgen05(lane_shift=20)[2])


def test_a_warp_reaches_its_own_lanes_whatever_the_address_names():
    got, expected, report = tcgen05(lane_shift=40)  # lane 0 for every warp
    assert not report.findings
    assert (got == expected).all()
    assert kinds(tcgen05(lane_shift=40, strict=True)[2]) == {"tensor_memory"}
    got, expected, report = tcgen05(lane_shift=22)  # lanes 0, 64, 128 and 192
    assert kinds(report) == {"tensor_memory"}
    assert (got == expected).all()


def test_reading_before_the_commit_completes_is_found():
    got, expected, report = tcgen05(waiting="")
    assert "race" in kinds(report)
    assert (got != expected).any()


def test_a_missing_commit_deadlocks():
    assert "deadlock" in kinds(tcgen05(commit="")[2])


def test_accumulating_onto_nothing_is_found():
    assert "uninitialised" in kinds(tcgen05(enable=1)[2])


def test_tcgen05_without_proxy_fence_is_found():
    assert "proxy_fence" in kinds(tcgen05(fence="")[2])


@pytest.mark.parametrize("change", [{"n": 264}, {"m": 192}, {"a_format": "bf16", "accumulator": "f16"}])
def test_an_illegal_instruction_descriptor_is_found(change):
    assert "descriptor" in kinds(tcgen05(IDESC._replace(**change))[2])


def test_allocation_after_the_permit_was_given_up_is_found():
    body = """mov.b32 %r2, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; ld.shared.b32 %r3, [%r2];
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; {}"""
    assert not kinds(launch(body.format(""), shared=16))
    again = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; ld.shared.b32 %r3, [%r2]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;"
    assert kinds(launch(body.format(again), shared=16)) == {"tensor_memory"}


def test_a_commit_that_nobody_waits_for_is_found_only_in_a_strict_run():
    init = (
        "mbarrier.init.shared.b64 [%r2], 1; mbarrier.init.shared.b64 [%r2+8], 1; fence.mbarrier_init.release.cluster;"
    )
    release = COMMIT.replace("[%r2]", "[%r2+8]")
    for strict, expected in ((False, set()), (True, {"exit_pending"})):
        got, wanted, report = tcgen05(init=init, commit=COMMIT + release, strict=strict)
        assert (got == wanted).all()
        assert kinds(report) == expected
    again = f"tcgen05.mma.cta_group::1.kind::f16 [%r21], %rd6, %rd7, {encode_instruction(IDESC)}, %p6;"
    assert "exit_pending" in kinds(tcgen05(init=init, commit=COMMIT + again + release)[2])


# every thread stores its row of A to columns 16 to 23 of tensor memory
A_IN_TENSOR_MEMORY = """
 and.b32 %r60, %r1, 7; shl.b32 %r60, %r60, 4; shr.u32 %r61, %r1, 3; shl.b32 %r61, %r61, 8; add.u32 %r60, %r60, %r61;
 cvt.u64.u32 %rd20, %r60; add.s64 %rd20, %rd1, %rd20;
 ld.global.v4.b32 {%r62, %r63, %r64, %r65}, [%rd20]; ld.global.v4.b32 {%r66, %r67, %r68, %r69}, [%rd20+128];
 shl.b32 %r70, %r20, 21; add.u32 %r70, %r21, %r70; add.u32 %r24, %r21, 16;
 tcgen05.st.sync.aligned.32x32b.x8.b32 [%r70+16], {%r62, %r63, %r64, %r65, %r66, %r67, %r68, %r69};
 tcgen05.wait::st.sync.aligned;"""


def test_tensor_memory_needs_no_proxy_fence_but_a_barrier():
    """tcgen05.st is not a generic-proxy write that the matrix engine would see through the async proxy."""
    for strict in (False, True):
        got, expected, report = tcgen05(before=A_IN_TENSOR_MEMORY + "bar.sync 0;", a_operand="[%r24]", strict=strict)
        assert (got == expected).all()
        assert not report.findings
    assert kinds(tcgen05(before=A_IN_TENSOR_MEMORY, a_operand="[%r24]", seed=3)[2]) >= {"race"}


def test_tensor_memory_store_and_load_round_trip():
    out = np.zeros(32, np.uint32)
    body = """ld.param.u64 %rd1, [out]; mov.b32 %r2, smem; mov.u32 %r1, %tid.x;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; ld.shared.b32 %r3, [%r2]; mul.lo.u32 %r4, %r1, 3;
 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r4}; tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];
 tcgen05.wait::ld.sync.aligned; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2; st.global.b32 [%rd1], %r5;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;"""
    report = launch(body, [out], ".param .u64 out", shared=16, strict=True)
    assert out.tolist() == [3 * i for i in range(32)]
    assert not report.findings
    for waiting, kind in (("tcgen05.wait::st", "race"), ("tcgen05.wait::ld", "uncommitted")):
        hasty = body.replace(f"{waiting}.sync.aligned;", "")
        assert not kinds(launch(hasty, [out], ".param .u64 out", shared=16))
        assert kinds(launch(hasty, [out], ".param .u64 out", shared=16, strict=True)) == {kind}
