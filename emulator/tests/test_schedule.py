import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import EmulationError

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds = S["launch"], S["kinds"]

# every warp appends its number to a list: the order of the warps is visible in the result
ORDER = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; setp.ne.u32 %p1, %r2, 0; @%p1 ret;
 atom.global.add.u32 %r3, [%rd1], 1; shr.u32 %r4, %r1, 5; mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3+4], %r4;
"""


def order(seed):
    out = np.zeros(9, np.uint32)
    report = launch(ORDER, [out], ".param .u64 out", block=256, seed=seed)
    assert not report.findings
    return out[1:].tolist()


def test_seed_zero_runs_the_warps_in_order():
    assert order(0) == list(range(8))


def test_a_seed_shuffles_and_replays():
    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(5)}) > 2


def test_an_unknown_schedule_is_refused():
    with pytest.raises(EmulationError, match="late, eager, random"):
        launch("", schedule="fair")


def test_warps_that_wait_for_different_barriers_deadlock_with_the_names_of_both():
    body = (
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 2, 64; bra END;\nA: bar.sync 1, 64;\nEND:"
    )
    report = launch(body, block=64)
    assert kinds(report) == {"deadlock"}
    message = report.findings[0].message
    assert "barrier 1 (32 of 64" in message
    assert "barrier 2 (32 of 64" in message


def test_a_spin_on_memory_that_nobody_writes_is_a_deadlock():
    flag = np.zeros(1, np.uint32)
    body = "ld.param.u64 %rd1, [out];\nL: ld.acquire.gpu.global.b32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;"
    assert kinds(launch(body, [flag], ".param .u64 out")) == {"deadlock"}


def test_named_barriers_order_producers_and_consumers():
    out = np.zeros(32, np.uint32)
    body = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; mov.b32 %r3, smem; mad.lo.u32 %r4, %r2, 4, %r3;
 setp.ge.u32 %p1, %r1, 32; @%p1 bra CONSUME;
 st.shared.b32 [%r4], %r2; bar.arrive 3, 64; bra END;
CONSUME: {} ld.shared.b32 %r5, [%r4]; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd1, %rd1, %rd2; st.global.b32 [%rd1], %r5;
END:
"""
    for seed in range(4):
        report = launch(body.format("bar.sync 3, 64;"), [out], ".param .u64 out", block=64, shared=128, seed=seed)
        assert out.tolist() == list(range(32))
        assert not report.findings
    assert "race" in kinds(launch(body.format(""), [out], ".param .u64 out", block=64, shared=128, seed=0))


def test_different_thread_counts_at_one_barrier_are_found():
    body = (
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; bra END;\nA: bar.sync 1, 96;\nEND:"
    )
    assert "divergence" in kinds(launch(body, block=64))


def test_lanes_of_a_warp_meet_again_before_an_aligned_instruction():
    out = np.zeros(1, np.uint32)
    body = f"""
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
 mbarrier.init.shared.b64 [%r2], 1;
READY: bar.sync 0; setp.eq.u32 %p2, %r1, 32; @%p2 bra ARRIVE; @%p1 bra JOIN;
 {S["wait"]("%r2", 0, "W")} bra JOIN;
ARRIVE: mbarrier.arrive.shared.b64 %rd2, [%r2];
JOIN: bar.sync 0; st.global.b32 [%rd1], 1;
"""
    report = launch(body, [out], ".param .u64 out", block=64, shared=64)
    assert kinds(report) <= {"race"}  # both warps write the same word; what matters: no divergence, no deadlock
    assert out[0] == 1


def test_instruction_counts_are_reported():
    counts = launch("mov.u32 %r1, %tid.x; bar.sync 0;", block=64).counts
    assert counts["instructions.mov"] == 2
    assert counts["instructions.bar"] == 2


def test_a_cta_that_waits_for_a_later_one_lets_it_run():
    out = np.zeros(4, np.uint32)
    body = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 ret; setp.eq.u32 %p2, %r2, 2; @%p2 bra LAST;
L: ld.acquire.gpu.global.b32 %r3, [%rd1]; setp.eq.u32 %p3, %r3, 0; @%p3 bra L;
 ld.global.b32 %r4, [%rd1+4]; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd1, %rd1, %rd2; st.global.b32 [%rd1+8], %r4; ret;
LAST: st.global.b32 [%rd1+4], 9; st.release.gpu.global.b32 [%rd1], 1;
"""
    report = launch(body, [out], ".param .u64 out", grid=3)
    assert out.tolist() == [1, 9, 9, 9]
    assert not report.findings
