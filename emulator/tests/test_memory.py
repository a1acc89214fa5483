import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import EmulationError, FindingError, run_ptx

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds = S["launch"], S["kinds"]
POINTERS = ".param .u64 a, .param .u64 b"
LOAD = """
 ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
 add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
"""


def test_shared_memory_transpose():
    a, b = np.arange(1024, dtype=np.uint32).reshape(32, 32), np.zeros((32, 32), np.uint32)
    body = """
 ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.b32 %r3, smem;
 mad.lo.u32 %r4, %r2, 32, %r1; mul.wide.u32 %rd3, %r4, 4; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
 mad.lo.u32 %r5, %r2, 33, %r1; shl.b32 %r5, %r5, 2; add.u32 %r5, %r5, %r3; ld.global.b32 %r6, [%rd1]; st.shared.b32 [%r5], %r6;
 bar.sync 0;
 mad.lo.u32 %r7, %r1, 33, %r2; shl.b32 %r7, %r7, 2; add.u32 %r7, %r7, %r3; ld.shared.b32 %r8, [%r7]; st.global.b32 [%rd2], %r8;
"""
    report = launch(body, [a, b], POINTERS, block=(32, 32), shared=33 * 32 * 4)
    assert (b == a.T).all()
    assert not report.findings
    racy = body.replace(" bar.sync 0;\n", "")
    assert "race" in kinds(launch(racy, [a, b], POINTERS, block=(32, 32), shared=33 * 32 * 4))


@pytest.mark.parametrize(("kind", "expected"), [("s8", -3), ("u8", 253), ("s16", -3), ("u16", 65533)])
def test_narrow_loads_extend_by_their_sign(kind, expected):
    a, b = np.full(64, -3, np.int16 if kind.endswith("16") else np.int8), np.zeros(32, np.int32)
    width = a.itemsize
    launch(f"{LOAD} mul.wide.u32 %rd6, %r1, {width}; add.s64 %rd6, %rd1, %rd6; ld.global.{kind} %r5, [%rd6]; st.global.b32 [%rd5], %r5;",
           [a, b], POINTERS)  # fmt: skip
    assert b.tolist() == [expected] * 32


def test_vector_loads_and_stores():
    a, b = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    launch(LOAD + """ mul.wide.u32 %rd6, %r1, 16; add.s64 %rd4, %rd1, %rd6; add.s64 %rd5, %rd2, %rd6;
 ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4]; st.global.v4.b32 [%rd5], {%r5, %r4, %r3, %r2};""", [a, b], POINTERS)  # fmt: skip
    assert (b.reshape(32, 4) == a.reshape(32, 4)[:, ::-1]).all()


def test_generic_addresses_reach_shared_memory():
    a, b = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    report = launch(LOAD + """ ld.global.b32 %r2, [%rd4]; mov.b64 %rd7, smem; cvta.shared.u64 %rd8, %rd7; add.s64 %rd8, %rd8, %rd3;
 st.b32 [%rd8], %r2; ld.b32 %r3, [%rd8]; st.b32 [%rd5], %r3;""", [a, b], POINTERS, shared=128)  # fmt: skip
    assert (a == b).all()
    assert not report.findings


def test_atomics_add_every_lane():
    a, b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    launch(LOAD + " atom.global.add.u32 %r2, [%rd1], 2; st.global.b32 [%rd5], %r2; red.global.max.u32 [%rd1+4], %r1;", [a, b], POINTERS,
           block=32, grid=1)  # fmt: skip
    assert a[:2].tolist() == [64, 31]
    assert b.tolist() == list(range(0, 64, 2))


def test_ldmatrix_inverts_stmatrix():
    a, b = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    report = launch(LOAD + """ ld.global.b32 %r2, [%rd4]; mov.b32 %r3, smem; and.b32 %r4, %r1, 7; mad.lo.u32 %r3, %r4, 16, %r3;
 stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r3], {%r2}; bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r3];
 st.global.b32 [%rd5], %r5;""", [a, b], POINTERS, shared=128)  # fmt: skip
    assert (b.view(np.uint16).reshape(8, 8) == a.view(np.uint16).reshape(8, 8).T).all()
    assert not report.findings


def test_reading_shared_memory_that_nothing_wrote_is_found():
    body = "mov.b32 %r1, smem; {} ld.shared.b32 %r2, [%r1];"
    assert kinds(launch(body.format(""), shared=64)) == {"uninitialised"}
    assert not kinds(launch(body.format("st.shared.b32 [%r1], 1;"), shared=64))


def test_reading_an_output_before_it_is_written_is_found():
    a, b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = LOAD + " ld.global.b32 %r2, [%rd5]; st.global.b32 [%rd5], %r2;"
    assert kinds(launch(body, [a, b], POINTERS, outputs=[b])) == {"uninitialised"}
    assert not kinds(launch(body, [a, b], POINTERS))


@pytest.mark.parametrize(
    "access", ["ld.global.b32 %r2, [%rd4+4];", "st.global.b32 [%rd4+4], 1;", "ld.global.b32 %r2, [%rd4+-4];"]
)
def test_global_accesses_outside_their_tensor_are_found(access):
    base = np.zeros(96, np.uint32)
    a, b = base[32:64], np.zeros(32, np.uint32)
    assert kinds(launch(LOAD + access, [a, b], POINTERS)) == {"out_of_bounds"}


def test_shared_accesses_outside_the_window_are_found():
    assert kinds(launch("mov.b32 %r1, smem; st.shared.b32 [%r1+64], 1;", shared=64)) == {"out_of_bounds"}


def test_a_misaligned_access_is_found():
    a, b = np.zeros(64, np.uint32), np.zeros(32, np.uint32)
    assert kinds(launch(LOAD + "ld.global.b32 %r2, [%rd4+2];", [a, b], POINTERS)) == {"misaligned"}
    assert kinds(launch("mov.b32 %r1, smem; st.shared.v2.b32 [%r1+4], {0, 0};", shared=64)) == {"misaligned"}


def test_two_ctas_that_write_one_word_race():
    a, b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    assert kinds(launch(LOAD + "st.global.b32 [%rd5], %r1;", [a, b], POINTERS, grid=2)) == {"race"}
    assert not kinds(launch(LOAD + "red.global.add.u32 [%rd5], %r1;", [a, b], POINTERS, grid=2))


def test_warps_that_store_the_same_value_race_only_in_a_strict_run():
    body = "ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 5; and.b32 %r1, %r1, {}; st.global.v2.b32 [%rd1], {{7, %r1}};"
    for mask, strict, expected in ((0, False, set()), (0, True, {"race"}), (1, False, {"race"})):
        out = np.zeros(2, np.uint32)
        report = launch(body.format(mask), [out], ".param .u64 a", block=64, strict=strict)
        assert kinds(report) == expected
        assert out[0] == 7


def test_a_write_after_an_unordered_read_races():
    body = """
 mov.u32 %r1, %tid.x; mov.b32 %r3, smem; setp.lt.u32 %p1, %r1, 32; @%p1 st.shared.b32 [%r3], 7; bar.sync 0;
 @%p1 bra A; st.shared.b32 [%r3], 8; bra END;
A: ld.shared.b32 %r2, [%r3];
END:
"""
    assert kinds(launch(body, block=64, shared=64)) == {"race"}


def test_release_and_acquire_order_a_message():
    a, b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = (
        LOAD
        + """
 setp.ge.u32 %p1, %r1, 32; @%p1 bra READ;
 st.global.b32 [%rd2], 42; setp.eq.u32 %p2, %r1, 0; @%p2 st.release.gpu.global.b32 [%rd1], 1; bra END;
READ: ld.{}.global.b32 %r2, [%rd1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra READ; ld.global.b32 %r3, [%rd2]; st.global.b32 [%rd2+4], %r3;
END:
"""
    )
    for seed in range(4):
        assert not kinds(launch(body.format("acquire.gpu"), [a * 0, b], POINTERS, block=64, seed=seed))
        assert b[1] == 42
    racy = body.replace("st.release.gpu.global", "st.global").format("acquire.gpu")
    assert "race" in kinds(launch(racy, [a * 0, b], POINTERS, block=64))


def test_raise_stops_at_the_first_finding():
    with pytest.raises(FindingError, match="uninitialised"):
        launch("mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1];", shared=64, check="raise")


@pytest.mark.parametrize(("options", "message"), [
    ({"block": 2048}, "threads"), ({"shared": 300000}, "shared memory"), ({"grid": 3, "cluster": 2}, "multiple of the cluster"),
    ({"grid": 32, "cluster": 32}, "cluster of 32"), ({"grid": (1, 70000, 1), "limits": {"grid_yz": 65535}}, "beyond the device"),
])  # fmt: skip
def test_launches_beyond_the_device_are_found(options, message):
    if "grid" in options and options["grid"] != 3 and options["grid"] != 32:
        options = {"grid": (1, 3, 1), "limits": {"grid_yz": 2}}
    report = launch("", **options)
    assert kinds(report) == {"limits"}
    assert message in report.findings[0].message


def test_block_must_match_reqntid():
    text = S["source"]("").replace("k()\n{", "k()\n.reqntid 64, 1, 1\n{")
    report = S["run_ptx"](text, "k", 1, 32)
    assert kinds(report) == {"limits"}


@pytest.mark.parametrize("width", [4, 16])
def test_cp_async_ignores_its_source_where_the_predicate_says(width):
    values, out = np.arange(1, 33 * 4, dtype=np.uint32)[: 32 * width // 4], np.full(32 * width // 4, 7, np.uint32)
    way = "cg" if width == 16 else "ca"
    body = f"""ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mul.lo.u32 %r3, %r1, {width};
 cvt.u64.u32 %rd3, %r3; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3; add.u32 %r2, %r2, %r3; and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 1;
 cp.async.{way}.shared.global [%r2], [%rd1], {width}, %p1; cp.async.commit_group; cp.async.wait_group 0;"""
    for i in range(0, width, 4):
        body += f" ld.shared.b32 %r5, [%r2+{i}]; st.global.b32 [%rd2+{i}], %r5;"
    report = launch(body, [values, out], ".param .u64 in, .param .u64 out", shared=512, target="sm_90a")
    assert not report.findings
    rows = out.reshape(32, -1)
    assert (rows[::2] == values.reshape(32, -1)[::2]).all()
    assert not rows[1::2].any()


WIDE = """ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mul.lo.u32 %r3, %r1, 16; cvt.u64.u32 %rd3, %r3;
 add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3; add.u32 %r2, %r2, %r3; and.b32 %r4, %r1, 3; setp.ne.u32 %p1, %r4, 0;"""


def words(rows):
    return np.random.default_rng(6).integers(0, 1 << 63, (rows, 2)).astype(np.uint64)


@pytest.mark.parametrize("order", ["", ".relaxed.gpu"])
def test_sixteen_bytes_are_loaded_and_stored(order):
    a, b = words(32), np.zeros((32, 2), np.uint64)
    shared = "" if order else "st.shared.b128 [%r2], %q0; ld.shared.b128 %q0, [%r2];"
    body = WIDE + f"@%p1 ld{order}.global.b128 %q0, [%rd4]; {shared} @%p1 st{order}.global.b128 [%rd5], %q0;"
    report = launch(body, [a, b], POINTERS, shared=512, target="sm_90a")
    assert not report.findings
    assert (b == np.where(np.arange(32)[:, None] % 4 != 0, a, 0)).all()
    odd = launch(WIDE + "ld.global.b128 %q0, [%rd4+8];", [a, b], POINTERS, shared=512, target="sm_90a")
    assert "misaligned" in kinds(odd)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_sixteen_bytes_are_exchanged_and_compared(space):
    a, b, out = words(32), words(32)[::-1].copy(), np.zeros((32, 2), np.uint64)
    b[::2] = a[::2]  # the comparison succeeds in even lanes
    before = b.copy()
    where = "%rd5" if space == "global" else "%r2"
    setup = "" if space == "global" else "ld.global.b128 %q1, [%rd5]; st.shared.b128 [%r2], %q1;"
    back = "" if space == "global" else "ld.shared.b128 %q1, [%r2]; st.global.b128 [%rd5], %q1;"
    body = (
        WIDE
        + f"""ld.param.u64 %rd6, [out]; add.s64 %rd6, %rd6, %rd3; ld.global.b128 %q0, [%rd4]; {setup} mov.b64 %rd7, 5; mov.b128 %q1, {{%rd7, %rd7}};
 atom.{space}.cas.b128 %q0, [{where}], %q0, %q1; st.global.b128 [%rd6], %q0; @!%p1 atom.{space}.exch.b128 %q0, [{where}], %q0; {back}"""
    )
    report = launch(body, [a, b, out], POINTERS + ", .param .u64 out", shared=512, target="sm_90a")
    assert not report.findings
    assert (out == before).all()  # what was there
    swapped = np.where(np.arange(32)[:, None] % 2 == 0, 5, before)
    assert (b == np.where(np.arange(32)[:, None] % 4 == 0, before, swapped)).all()


def test_lanes_of_one_instruction_reach_local_and_global_memory():
    a, b = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    body = (
        LOAD
        + """.local .align 4 .b8 stack[8]; mov.u64 %rd6, stack; cvta.local.u64 %rd6, %rd6; ld.global.b32 %r2, [%rd4]; add.u32 %r3, %r2, 100;
 st.local.b32 [stack], %r3; and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 1; selp.b64 %rd7, %rd6, %rd4, %p1; ld.b32 %r5, [%rd7];
 add.s64 %rd6, %rd6, 4; selp.b64 %rd7, %rd6, %rd5, %p1; st.b32 [%rd7], %r5; @%p1 ld.local.b32 %r6, [stack+4]; @%p1 st.global.b32 [%rd5], %r6;"""
    )
    report = launch(body, [a, b], POINTERS, target="sm_90a")
    assert not report.findings
    assert (b == np.where(a % 2 == 1, a + 100, a)).all()


def test_a_bulk_store_clears_shared_memory():
    out = np.full((32, 4), 9, np.uint32)
    body = """ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mul.lo.u32 %r3, %r1, 16; add.u32 %r4, %r2, %r3; mov.b32 %r5, 7;
 st.shared.v4.b32 [%r4], {%r5, %r5, %r5, %r5}; bar.warp.sync -1; setp.ne.u32 %p1, %r1, 0; mov.b64 %rd3, SIZE; @!%p1 st.bulk.weak.shared::cta [%r2+8], %rd3, 0;
 bar.sync 0; ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r4]; cvt.u64.u32 %rd2, %r3; add.s64 %rd1, %rd1, %rd2; st.global.v4.b32 [%rd1], {%r6, %r7, %r8, %r9};"""
    report = launch(body.replace("SIZE", "296"), [out], ".param .u64 out", shared=512)
    assert not report.findings
    flat = out.ravel()
    assert (flat == np.where((np.arange(128) >= 2) & (np.arange(128) < 76), 0, 7)).all()
    assert "misaligned" in kinds(launch(body.replace("SIZE", "300"), [out], ".param .u64 out", shared=512))
    assert "out_of_bounds" in kinds(launch(body.replace("SIZE", "4096"), [out], ".param .u64 out", shared=512))


@pytest.mark.parametrize(
    ("operation", "dtype"), [("add.u32", np.uint32), ("min.s32", np.int32), ("xor.b32", np.uint32), ("inc.u32", np.uint32), ("add.u64", np.uint64)]
)  # fmt: skip
def test_an_asynchronous_reduction_completes_bytes_at_the_other_cta(operation, dtype):
    """Every lane of CTA 1 reduces its value into CTA 0's word i % 4; CTA 0 waits for the bytes of all."""
    width, name = np.dtype(dtype).itemsize, operation.split(".")[0]
    values, out = np.random.default_rng(3).integers(1, 99, 32).astype(dtype), np.zeros(4, dtype)
    bits = f"b{8 * width}"
    value = "%r5" if width == 4 else "%rd6"
    body = f"""ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mov.u32 %r9, %cluster_ctarank; setp.ne.u32 %p1, %r1, 0;
 mov.b64 %rd6, 50; mov.b32 %r5, 50; and.b32 %r4, %r1, 3; mad.lo.u32 %r3, %r4, {width}, %r2; setp.ge.u32 %p2, %r1, 4; @!%p2 st.shared.{bits} [%r3+64], {value};
 setp.ne.u32 %p3, %r9, 0; or.pred %p4, %p1, %p3; @%p4 bra READY; mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r2], {32 * width};
READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @!%p3 bra RECEIVE;
 mul.wide.u32 %rd3, %r1, {width}; add.s64 %rd1, %rd1, %rd3; ld.global.{bits} {value}, [%rd1]; mov.b32 %r10, 0; mapa.shared::cluster.u32 %r11, %r2, %r10;
 mapa.shared::cluster.u32 %r12, %r3, %r10; red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation} [%r12+64], {value}, [%r11]; bra DONE;
RECEIVE: {S["wait"]("%r2", 0, "W")} @%p2 bra DONE; mul.wide.u32 %rd3, %r1, {width}; add.s64 %rd2, %rd2, %rd3; ld.shared.{bits} {value}, [%r3+64]; st.global.{bits} [%rd2], {value};
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    report = launch(body, [values, out], POINTERS, grid=2, cluster=2, shared=256, target="sm_90a")
    assert not report.findings
    for word in range(4):
        result = 50
        for v in values[word::4].tolist():
            result = {
                "add": result + v,
                "min": min(result, v),
                "xor": result ^ v,
                "inc": 0 if result >= v else result + 1,
            }[name]
        assert out[word] == result


def test_a_launch_beyond_the_device_is_not_executed():
    """Nor is its grid written down: 2^31 CTAs would not fit."""
    x = np.zeros(32, np.float32)
    text = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry one(.param .u64 x)
{
    .reg .b64 %rd<2>; .reg .f32 %f<2>;
    ld.param.u64 %rd1, [x];
    mov.f32 %f1, 0f3F800000;
    st.global.f32 [%rd1], %f1;
    ret;
}
"""
    for options in ({"grid": 2**31, "block": 32}, {"grid": 1, "block": (1, 1, 65)}):
        report = run_ptx(text, "one", args=[x], **options)
        assert [finding.kind for finding in report.findings] == ["limits"]
        assert not x.any()
        assert "instructions" not in report.counts


def test_what_a_kernel_writes_to_a_read_only_array_would_be_lost():
    x = np.zeros(32, np.float32)
    x.flags.writeable = False
    text = ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry none(.param .u64 x)\n{ ret; }\n"
    with pytest.raises(EmulationError, match="parameter x: a read-only array"):
        run_ptx(text, "none", 1, 32, args=[x])
