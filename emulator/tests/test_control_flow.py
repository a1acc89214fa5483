import runpy
from pathlib import Path

import numpy as np
import pytest

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds = S["launch"], S["kinds"]

OUT = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
"""


def lanes(body, block=32, **options):
    out = np.zeros(block, np.uint32)
    report = launch(OUT + body + " st.global.b32 [%rd3], %r2;", [out], ".param .u64 out", block=block, **options)
    assert not report.findings
    return out


def test_divergent_branches_reconverge():
    got = lanes("""
 setp.lt.u32 %p1, %r1, 10; mov.b32 %r2, 0;
 @%p1 bra SMALL;
 add.u32 %r2, %r2, 100; bra JOIN;
SMALL: add.u32 %r2, %r2, 7;
JOIN: activemask.b32 %r3; add.u32 %r2, %r2, 1; setp.ne.b32 %p2, %r3, -1; @%p2 mov.b32 %r2, 0;
""")
    assert got.tolist() == [8] * 10 + [101] * 22


def test_every_lane_takes_its_own_trip_count():
    got = lanes(
        "mov.b32 %r2, 0; mov.b32 %r4, 0;\nL: add.u32 %r2, %r2, 3; add.u32 %r4, %r4, 1; setp.le.u32 %p1, %r4, %r1; @%p1 bra L;"
    )
    assert got.tolist() == [3 * (i + 1) for i in range(32)]


def test_a_guarded_exit_ends_only_its_lanes():
    got = lanes("mov.b32 %r2, 5; setp.ge.u32 %p1, %r1, 20; @%p1 ret;")
    assert got.tolist() == [5] * 20 + [0] * 12


def test_a_guard_keeps_the_other_lanes():
    got = lanes(
        "mov.b32 %r2, 1; and.b32 %r3, %r1, 1; setp.eq.b32 %p1, %r3, 0; @%p1 mov.b32 %r2, 9; @!%p1 add.u32 %r2, %r2, 1;"
    )
    assert got.tolist() == [9, 2] * 16


def test_a_partial_last_warp_runs_its_threads_only():
    assert lanes("mov.b32 %r2, 3;", block=40).tolist() == [3] * 40


def test_shuffles_and_votes():
    got = lanes("""
 shfl.sync.bfly.b32 %r4|%p1, %r1, 1, 31, -1; shfl.sync.down.b32 %r5|%p2, %r1, 4, 0x181f, -1;
 setp.gt.u32 %p3, %r1, 29; vote.sync.ballot.b32 %r6, %p3, -1; add.u32 %r2, %r4, %r5; add.u32 %r2, %r2, %r6;
""")
    expected = [(i ^ 1) + (i + 4 if i % 8 + 4 < 8 else i) + 0xC0000000 for i in range(32)]
    assert got.tolist() == [e % 2**32 for e in expected]


def test_elect_picks_the_lowest_lane():
    got = lanes(
        "mov.b32 %r2, 0; setp.lt.u32 %p1, %r1, 5; @%p1 bra END; elect.sync %r2|%p2, 0xffffffe0; @%p2 mov.b32 %r2, 77;\nEND:"
    )
    assert got.tolist() == [0] * 5 + [77] + [5] * 26


def test_extended_precision_addition():
    got = lanes("mov.b32 %r4, -1; add.cc.u32 %r5, %r4, %r1; addc.u32 %r2, 10, 0;")
    assert got.tolist() == [10] + [11] * 31


@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_thread_and_block_indices(axis):
    out = np.zeros(2 * 3 * 2 * 64, np.uint32)
    body = f"""
 ld.param.u64 %rd1, [out];
 mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mad.lo.u32 %r2, %r3, 3, %r2; mad.lo.u32 %r1, %r2, 2, %r1;
 mov.u32 %r4, %tid.x; mov.u32 %r5, %tid.y; mov.u32 %r6, %tid.z; mad.lo.u32 %r5, %r6, 4, %r5; mad.lo.u32 %r4, %r5, 8, %r4;
 mad.lo.u32 %r1, %r1, 64, %r4; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
 mov.u32 %r7, %tid.{axis}; mov.u32 %r8, %ctaid.{axis}; mad.lo.u32 %r7, %r8, 1000, %r7; st.global.u32 [%rd1], %r7;
"""
    report = launch(body, [out], ".param .u64 out", grid=(2, 3, 2), block=(8, 4, 2))
    cz, cy, cx, tz, ty, tx = np.indices((2, 3, 2, 2, 4, 8))
    pick = {"x": cx * 1000 + tx, "y": cy * 1000 + ty, "z": cz * 1000 + tz}[axis]
    assert out.tolist() == pick.reshape(-1).tolist()
    assert not report.findings


def test_an_aligned_instruction_in_a_diverged_warp_is_found():
    broken = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.sync 0; bra END;\nA: bar.sync 0;\nEND:"
    assert "divergence" in kinds(launch(broken))
    assert not kinds(launch("bar.sync 0;", block=64))


@pytest.mark.parametrize("kind", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_cvt_pack_saturates_and_packs(kind):
    rng = np.random.default_rng(1)
    bits = int(kind[1:])
    near = 1 << bits
    a, b = (
        np.concatenate((rng.integers(-2 * near, 2 * near, 24), rng.integers(-(1 << 31), 1 << 31, 8))).astype(np.int32)
        for _ in range(2)
    )
    c, out = rng.integers(0, 1 << 32, 32, dtype=np.uint32), np.zeros(32, np.uint32)
    wide = kind in ("u16", "s16")
    body = (
        " ".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(4)) + " mov.u32 %r1, %tid.x; mul.wide.u32 %rd9, %r1, 4;"
    )
    body += " ".join(f"add.s64 %rd{i}, %rd{i}, %rd9;" for i in range(4)) + " ".join(
        f"ld.global.b32 %r{2 + i}, [%rd{i}];" for i in range(3)
    )
    body += f"cvt.pack.sat.{kind}.s32{'' if wide else '.b32'} %r6, %r2, %r3{'' if wide else ', %r4'}; st.global.b32 [%rd3], %r6;"
    report = launch(body, [a, b, c, out], ", ".join(f".param .u64 p{i}" for i in range(4)), target="sm_90a")
    assert not report.findings
    low, high = (-(near // 2), near // 2 - 1) if kind[0] == "s" else (0, near - 1)
    for lane in range(32):
        expected = 0 if wide else int(c[lane])
        for value in (int(a[lane]), int(b[lane])):  # b ends up lowest
            expected = expected << bits | min(max(value, low), high) & near - 1
        assert out[lane] == expected & 0xFFFFFFFF


@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_an_indexed_branch_goes_where_its_table_says(guard):
    index, out = np.arange(32, dtype=np.uint32) % 3, np.zeros(32, np.uint32)
    body = f"""ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
 ld.global.b32 %r2, [%rd1]; setp.lt.u32 %p1, %r1, 16; mov.b32 %r3, 0;
TABLE: .branchtargets ONE, TWO, THREE;
 {guard}brx.idx %r2, TABLE; bra DONE;
THREE: add.u32 %r3, %r3, 30; bra DONE;
ONE: add.u32 %r3, %r3, 10;
TWO: add.u32 %r3, %r3, 20;
DONE: st.global.b32 [%rd2], %r3;"""
    report = launch(body, [index, out], ".param .u64 a, .param .u64 b", target="sm_90a")
    assert not report.findings
    expected = np.array([30, 20, 30])[index]  # entry 0 runs on into entry 1
    assert (out == np.where((np.arange(32) < 16) | (guard == ""), expected, 0)).all()
    index[5] = 7
    findings = launch(body, [index, out], ".param .u64 a, .param .u64 b", target="sm_90a").findings
    assert [f.kind for f in findings] == ["assertion"]
