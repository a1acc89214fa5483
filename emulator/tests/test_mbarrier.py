import runpy
from pathlib import Path

import numpy as np
import pytest

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds, wait = S["launch"], S["kinds"], S["wait"]

# warp 0 is the producer of a value in shared memory, warp 1 its consumer
HANDOVER = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; add.u32 %r3, %r2, 16; setp.ne.u32 %p1, %r1, 0;
 @%p1 bra READY; mbarrier.init.shared.b64 [%r2], {count};
READY: bar.sync 0;
 setp.ge.u32 %p2, %r1, 32; @%p2 bra CONSUME;
 st.shared.b32 [%r3], 99; {arrive}
 bra END;
CONSUME: {wait}
 ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd1], %r4;
END:
"""
ARRIVE = "mbarrier.arrive.shared.b64 %rd2, [%r2];"


def handover(count=32, arrive=ARRIVE, waiting=None, **options):
    out = np.zeros(1, np.uint32)
    waiting = wait("%r2", 0, "W") if waiting is None else waiting
    report = launch(
        HANDOVER.format(count=count, arrive=arrive, wait=waiting),
        [out],
        ".param .u64 out",
        block=64,
        shared=64,
        **options,
    )
    return out[0], report


@pytest.mark.parametrize("seed", range(6))
def test_arrive_and_wait_hand_data_over(seed):
    value, report = handover(seed=seed, schedule=("late", "random")[seed % 2])
    assert value == 99
    assert not report.findings


def test_a_missing_wait_is_a_race():
    assert "race" in kinds(handover(waiting="")[1])


def test_a_relaxed_arrive_does_not_order():
    assert "race" in kinds(handover(arrive="mbarrier.arrive.relaxed.cta.shared.b64 %rd2, [%r2];")[1])


def test_a_missing_arrival_deadlocks_and_names_the_waiter():
    report = handover(count=33)[1]
    assert kinds(report) == {"deadlock"}
    assert "cta 0 warp 1" in report.findings[0].message
    assert "1 of 33 arrivals missing" in report.findings[0].message


def test_the_wrong_parity_deadlocks_or_races():
    assert kinds(handover(waiting=wait("%r2", 1, "W"))[1]) & {"race", "deadlock"}


def test_more_arrivals_than_expected_are_found():
    assert "mbarrier" in kinds(handover(count=16)[1])


def test_use_before_init_is_found():
    assert kinds(launch("mov.b32 %r2, smem; mbarrier.arrive.shared.b64 %rd2, [%r2];", shared=64)) == {"mbarrier"}


def test_double_init_is_found_unless_invalidated():
    body = "mov.b32 %r2, smem; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 ret; mbarrier.init.shared.b64 [%r2], 1; {} mbarrier.init.shared.b64 [%r2], 2;"
    assert kinds(launch(body.format(""), shared=64)) == {"mbarrier"}
    assert not kinds(launch(body.format("mbarrier.inval.shared.b64 [%r2];"), shared=64))


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_arrival_counts_have_a_range(count):
    body = f"mov.b32 %r2, smem; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 ret; mbarrier.init.shared.b64 [%r2], {count};"
    assert "mbarrier" in kinds(launch(body, shared=64))


def test_initialisation_must_be_ordered_before_use():
    assert "race" in kinds(launch(HANDOVER.replace("READY: bar.sync 0;", "READY:").format(count=32, arrive=ARRIVE, wait=wait("%r2", 0, "W")),
                                  [np.zeros(1, np.uint32)], ".param .u64 out", block=64, shared=64))  # fmt: skip


def test_phases_alternate():
    out = np.zeros(1, np.uint32)
    body = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
 mbarrier.init.shared.b64 [%r2], 1; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r8, 0;
L: mbarrier.arrive.shared.b64 %rd3, [%r2]; mbarrier.test_wait.parity.shared.b64 %p2, [%r2], %r5; selp.b32 %r7, 1, 0, %p2; add.u32 %r6, %r6, %r7;
 mbarrier.test_wait.shared.b64 %p3, [%r2], %rd3; selp.b32 %r7, 10, 0, %p3; add.u32 %r6, %r6, %r7;
 xor.b32 %r5, %r5, 1; add.u32 %r8, %r8, 1; setp.lt.u32 %p4, %r8, 5; @%p4 bra L;
 st.global.b32 [%rd1], %r6;
"""
    report = launch(body, [out], ".param .u64 out", shared=64)
    assert out[0] == 55
    assert not report.findings


def test_cluster_barrier_and_remote_arrival():
    out = np.zeros(2, np.uint32)
    body = f"""
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.b32 %r3, smem; xor.b32 %r4, %r2, 1;
 setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r3], 1;
READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
 @%p1 bra DONE;
 mapa.shared::cluster.u32 %r5, %r3, %r4; add.u32 %r6, %r2, 70; st.shared::cluster.b32 [%r5+16], %r6;
 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
 {wait("%r3", 0, "W")}
 ld.shared.b32 %r7, [%r3+16]; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd1, %rd1, %rd2; st.global.b32 [%rd1], %r7;
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
    for seed in range(4):
        report = launch(body, [out], ".param .u64 out", grid=2, cluster=2, shared=64, seed=seed)
        assert out.tolist() == [71, 70]
        assert not report.findings
    racy = body.replace(
        "READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "READY:"
    )
    assert kinds(launch(racy, [out], ".param .u64 out", grid=2, cluster=2, shared=64)) & {"race", "mbarrier"}


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_lanes_of_a_warp_wait_for_barriers_of_their_own(schedule):
    """Lane i of warp 0 waits for barrier i % 4, which warp i % 4 + 1 completes."""
    out = np.zeros(32, np.uint32)
    body = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; shr.u32 %r3, %r1, 5; and.b32 %r4, %r1, 31; setp.ge.u32 %p1, %r1, 4; @%p1 bra READY;
 mad.lo.u32 %r5, %r1, 8, %r2; mbarrier.init.shared.b64 [%r5], 1;
READY: bar.sync 0; setp.eq.u32 %p2, %r3, 0; @%p2 bra WAITER; setp.ne.u32 %p3, %r4, 0; @%p3 ret;
 sub.u32 %r6, %r3, 1; mad.lo.u32 %r5, %r6, 8, %r2; add.u32 %r7, %r6, 10; mad.lo.u32 %r8, %r6, 4, %r2; st.shared.b32 [%r8+64], %r7;
 setp.ge.u32 %p5, %r6, ARRIVING; @%p5 ret; mbarrier.arrive.shared.b64 %rd2, [%r5]; ret;
WAITER: and.b32 %r6, %r1, 3; mad.lo.u32 %r5, %r6, 8, %r2;
W: mbarrier.try_wait.parity.shared.b64 %p4, [%r5], 0; @!%p4 bra W;
 mad.lo.u32 %r8, %r6, 4, %r2; ld.shared.b32 %r7, [%r8+64]; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3; st.global.b32 [%rd1], %r7;
"""
    for seed in range(2):
        out[:] = 0
        report = launch(
            body.replace("ARRIVING", "4"),
            [out],
            ".param .u64 out",
            block=160,
            shared=128,
            schedule=schedule,
            seed=seed,
            target="sm_90a",
        )
        assert not report.findings
        assert out.tolist() == [10 + i % 4 for i in range(32)]
    report = launch(body.replace("ARRIVING", "2"), [out], ".param .u64 out", block=160, shared=128, schedule=schedule)
    assert kinds(report) == {"deadlock"}
    assert report.findings[0].message.count("mbarrier cta 0 shared") == 2


def test_the_state_of_an_arrival_tells_what_was_pending_before_it():
    out = np.zeros(4, np.uint32)
    body = """ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 ret; mbarrier.init.shared.b64 [%r2], 4;
 mbarrier.arrive.shared.b64 %rd2, [%r2]; mbarrier.arrive.noComplete.shared.b64 %rd3, [%r2], 2; mbarrier.arrive.shared.b64 %rd4, [%r2];
 mbarrier.pending_count.b64 %r3, %rd2; mbarrier.pending_count.b64 %r4, %rd3; mbarrier.pending_count.b64 %r5, %rd4;
 mbarrier.test_wait.shared.b64 %p2, [%r2], %rd2; selp.b32 %r6, 1, 0, %p2; st.global.v4.b32 [%rd1], {%r3, %r4, %r5, %r6};"""
    report = launch(body, [out], ".param .u64 out", shared=64, target="sm_90a")
    assert not report.findings
    assert out.tolist() == [4, 3, 1, 1]
