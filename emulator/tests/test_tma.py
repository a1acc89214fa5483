import runpy
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import EmulationError
from ptx_emulator._layout import TensorMap, encode_tensor_map, swizzle

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
launch, kinds, wait = S["launch"], S["kinds"], S["wait"]
NAMES = {2: "f16", 4: "f32", 8: "f64", 1: "u8"}


def aligned(shape, dtype, fill=None):
    """An array whose base address is a multiple of 128, as TMA needs."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.__array_interface__["data"][0] % 128
    out = raw[start : start + size].view(dtype).reshape(shape)
    if fill is not None:
        out[:] = fill
    return out


def tensor_map(array, box, **fields):
    """Map of a row-major array; box innermost first."""
    return encode_tensor_map(TensorMap(array.__array_interface__["data"][0], fields.pop("name", NAMES[array.itemsize]), array.shape[::-1],
                                       array.strides[-2::-1], box, (1,) * array.ndim, **fields))  # fmt: skip


# thread 0 loads a box to smem + 1024 and, after the wait, all threads copy `size` bytes of it to `out`
LOAD = """
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; add.u32 %r3, %r2, 1024; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
 mbarrier.init.shared.b64 [%r2], 1; {fence}
READY: bar.sync 0; @%p1 bra WAIT;
 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], {expect};
 mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd3, {{{x}, {y}}}], [%r2];
WAIT: {wait}
 mul.lo.u32 %r4, %r1, 4; add.u32 %r3, %r3, %r4; cvt.u64.u32 %rd4, %r4; add.s64 %rd1, %rd1, %rd4;
COPY: ld.shared.b32 %r5, [%r3]; st.global.b32 [%rd1], %r5; add.u32 %r3, %r3, 128; add.s64 %rd1, %rd1, 128; add.u32 %r4, %r4, 128;
 setp.lt.u32 %p2, %r4, {size}; @%p2 bra COPY;
"""
PARAMS = ".param .align 64 .b8 map[128], .param .u64 out"


def load(
    array,
    box,
    x=0,
    y=0,
    expect=None,
    waiting=None,
    fence="fence.mbarrier_init.release.cluster;",
    fields=None,
    body=LOAD,
    **options,
):
    size = int(np.prod(box)) * array.itemsize
    out = np.zeros(size, np.uint8)
    text = body.format(x=x, y=y, size=size, expect=size if expect is None else expect, fence=fence,
                       wait=wait("%r2", 0, "W") if waiting is None else waiting)  # fmt: skip
    report = launch(
        text,
        [tensor_map(array, box, **(fields or {})), out],
        PARAMS,
        shared=1024 + size,
        buffers=[array],
        outputs=[out],
        **options,
    )
    return out, report


@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_a_box_arrives_swizzled(mode, schedule):
    array = aligned((40, 64), np.float16, np.arange(2560).reshape(40, 64))
    inner = {"none": 32, "32B": 16, "64B": 32, "128B": 64}[mode]
    out, report = load(array, (inner, 8), x=0, y=16, fields={"swizzle": mode}, schedule=schedule)
    box = array[16:24, :inner]
    linear = np.arange(out.size)
    expected = np.zeros(out.size, np.uint8)
    expected[swizzle(linear, mode)] = np.ascontiguousarray(box).view(np.uint8).reshape(-1)
    assert (out == expected).all()
    assert not report.findings
    assert report.counts["bytes.tma.load"] == out.size


@pytest.mark.parametrize(("x", "y"), [(-8, -2), (24, 12), (-16, 30), (100, 0)])
def test_elements_outside_the_tensor_are_zero_and_count(x, y):
    array = aligned((20, 32), np.float32, 1 + np.arange(640).reshape(20, 32))
    out, report = load(array, (16, 16), x=x, y=y)
    expected = np.zeros((16, 16), np.float32)
    for i in range(16):
        for j in range(16):
            if 0 <= y + i < 20 and 0 <= x + j < 32:
                expected[i, j] = array[y + i, x + j]
    assert (out.view(np.float32).reshape(16, 16) == expected).all()
    assert not report.findings


# the H200's patterns: 0x7ff7 in every half word
@pytest.mark.parametrize(
    ("dtype", "name"), [("f2", "f16"), ("u2", "bf16"), ("f4", "f32"), ("f4", "tf32"), ("f4", "f32_ftz"), ("f8", "f64")]
)  # fmt: skip
def test_nan_fill(dtype, name):
    array, inside = aligned((8, 32), np.dtype(dtype), 1), 8 if dtype[1] == "2" else 4
    out, report = load(array, (2 * inside, 8), x=32 - inside, fields={"nan_fill": True, "name": name})
    values = out.view(dtype).reshape(8, -1)
    assert not report.findings
    assert (values[:, :inside] == 1).all()
    assert (np.ascontiguousarray(values[:, inside:]).view(np.uint16) == 0x7FF7).all()


def test_a_box_that_starts_between_16_byte_pieces_is_found():
    array = aligned((8, 64), np.float16, 1)
    assert kinds(load(array, (32, 8), x=4)[1]) == {"misaligned"}  # an illegal instruction on an H200
    assert not kinds(load(array, (32, 8), x=-8)[1])


def test_a_missing_wait_is_a_race():
    array = aligned((8, 32), np.float32, 1.0)
    out, report = load(array, (32, 8), waiting="")
    assert "race" in kinds(report)
    assert not out.any()  # late completion: the data is not there
    assert "race" in kinds(load(array, (32, 8), waiting="", schedule="eager")[1])


@pytest.mark.parametrize("late", [False, True])
def test_the_completion_of_a_copy_orders_only_what_its_issuer_did_before(late):
    array, note = aligned((16, 64), np.float16, 1), "st.shared.b32 [%r2+32], 7;"
    body = f"""
 mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; @%p1 bra OTHERS; mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], 512; {"" if late else note}
 mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2+1024], [%rd3, {{%r1, %r1}}], [%r2];
 {note if late else ""} ret;
OTHERS: {wait("%r2", 0, "W")} setp.ne.u32 %p2, %r1, 32; @!%p2 ld.shared.b32 %r5, [%r2+32];
"""
    report = launch(
        body, [tensor_map(array, (32, 8))], ".param .align 64 .b8 map[128]", shared=2048, block=64, buffers=[array]
    )
    assert kinds(report) == ({"race"} if late else set())


def test_too_few_expected_bytes_are_found():
    array = aligned((8, 32), np.float32, 1.0)
    for schedule in ("late", "eager", "random"):
        assert "transaction_bytes" in kinds(load(array, (32, 8), expect=512, schedule=schedule)[1])


def test_too_many_expected_bytes_deadlock_and_are_named():
    found = kinds(load(aligned((8, 32), np.float32, 1.0), (32, 8), expect=2048)[1])
    assert {"deadlock", "transaction_bytes"} <= found


def test_a_barrier_without_init_fence_is_found():
    assert "proxy_fence" in kinds(load(aligned((8, 32), np.float32, 1.0), (32, 8), fence="")[1])
    assert not kinds(load(aligned((8, 32), np.float32, 1.0), (32, 8), fence="fence.proxy.async.shared::cta;")[1])


def test_an_illegal_map_is_found():
    array = aligned((8, 32), np.float32, 1.0)
    report = load(array, (32, 8), fields={"swizzle": "64B"})[1]  # 128 bytes do not fit the 64-byte span
    assert "descriptor" in kinds(report)
    raw = tensor_map(array, (32, 8))
    bad = launch(LOAD.replace(".2d.", ".3d.").format(x=0, y="0, 0", size=1024, expect=1024, fence="", wait=""), [raw, np.zeros(1024, np.uint8)],
                 PARAMS, shared=2048, buffers=[array])  # fmt: skip
    assert "descriptor" in kinds(bad)


def test_a_box_that_is_no_multiple_of_16_bytes_is_found():
    array = aligned((16, 64), np.float16, 1)
    report = load(array, (60, 8), fields={"swizzle": "128B"})[-1]
    assert "descriptor" in kinds(report)
    assert "multiple of 16 bytes" in report.findings[0].message


@pytest.mark.parametrize(
    ("name", "when"), [("__init__", "an instruction of cta 0 warp 0"), ("fetch", "the completion of")]
)
def test_an_exception_of_the_emulator_names_the_instruction(monkeypatch, name, when):
    def fail(*_):
        raise IndexError("too far")

    monkeypatch.setattr(f"ptx_emulator._tma.Box.{name}", fail)
    with pytest.raises(EmulationError, match=rf"{when}.*PTX line \d+ \(cp\.async\.bulk.*IndexError: too far"):
        load(aligned((16, 64), np.float16, 1), (32, 8))


def test_a_map_larger_than_its_tensor_is_out_of_bounds():
    array = aligned((16, 32), np.float32, 1.0)
    raw = tensor_map(array, (32, 8))
    text = LOAD.format(x=0, y=8, size=1024, expect=1024, fence="fence.proxy.async;", wait=wait("%r2", 0, "W"))
    report = launch(text, [raw, np.zeros(1024, np.uint8)], PARAMS, shared=2048, buffers=[array[:8]])
    assert "out_of_bounds" in kinds(report)


def test_a_misaligned_destination_is_found():
    body = LOAD.replace("add.u32 %r3, %r2, 1024", "add.u32 %r3, %r2, 1040")
    array = aligned((8, 32), np.float32, 1.0)
    text = body.format(x=0, y=0, size=512, expect=512, fence="fence.proxy.async;", wait=wait("%r2", 0, "W"))
    report = launch(text, [tensor_map(array, (32, 4)), np.zeros(512, np.uint8)], PARAMS, shared=2048, buffers=[array])
    assert "misaligned" in kinds(report)


STORE = """
 mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mad.lo.u32 %r3, %r1, 4, %r2; cvt.rn.f32.u32 %f1, %r1; st.shared.f32 [%r3], %f1;
 {fence} bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
 mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;
 cp{reduce}.async.bulk.tensor.2d.global.shared::cta{op}.tile.bulk_group [%rd3, {{8, 2}}], [%r2];
 cp.async.bulk.commit_group; {wait}
"""


def store(
    fence="fence.proxy.async.shared::cta;", waiting="cp.async.bulk.wait_group.read 0;", reduce="", op="", **options
):
    array = aligned((8, 32), np.float32, 100.0)
    text = STORE.format(fence=fence, wait=waiting, reduce=reduce, op=op)
    report = launch(
        text, [tensor_map(array, (16, 2))], ".param .align 64 .b8 map[128]", shared=128, buffers=[array], **options
    )
    return array, report


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_a_box_is_stored(schedule):
    array, report = store(schedule=schedule)
    expected = np.full((8, 32), 100.0)
    expected[2:4, 8:24] = np.arange(32).reshape(2, 16)
    assert (array == expected).all()
    assert not report.findings


def test_a_box_is_added():
    array, report = store(reduce=".reduce", op=".add")
    assert (array[2:4, 8:24] == 100 + np.arange(32).reshape(2, 16)).all()
    assert array[0].tolist() == [100] * 32
    assert not report.findings


def test_a_store_without_proxy_fence_is_found():
    assert kinds(store(fence="")[1]) == {"proxy_fence"}


def test_exit_without_waiting_for_a_store_is_found():
    for schedule in ("late", "eager", "random"):
        assert kinds(store(waiting="", schedule=schedule)[1]) == {"exit_pending"}


def test_overwriting_the_source_of_a_store_in_flight_is_a_race():
    assert "race" in kinds(store(waiting="st.shared.f32 [%r2], 0f00000000; cp.async.bulk.wait_group 0;")[1])
    assert not kinds(store(waiting="cp.async.bulk.wait_group.read 0; st.shared.f32 [%r2], 0f00000000;")[1])


def test_exit_before_a_load_arrives_is_found():
    body = LOAD.split("WAIT:", maxsplit=1)[0].format(x=0, y=0, expect=1024, fence="fence.proxy.async;") + "\nWAIT:"
    array = aligned((8, 32), np.float32, 1.0)
    report = launch(body, [tensor_map(array, (32, 8)), np.zeros(4, np.uint8)], PARAMS, shared=2048, buffers=[array])
    assert "exit_pending" in kinds(report)


def test_bulk_copy_there_and_back():
    a, b = aligned(64, np.uint32, np.arange(64)), aligned(64, np.uint32)
    body = f"""
 ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
 mbarrier.init.shared.b64 [%r2], 1; fence.proxy.async.shared::cta; mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r2], 256;
 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2+128], [%rd1], 256, [%r2];
 {wait("%r2", 0, "W")}
 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2+128], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
    report = launch(body, [a, b], ".param .u64 a, .param .u64 b", shared=512)
    assert (a == b).all()
    assert not report.findings


def test_multicast_reaches_every_cta_of_the_mask():
    array, out = aligned((8, 32), np.float32, np.arange(256).reshape(8, 32)), np.zeros((2, 256), np.float32)
    body = f"""
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; mov.u32 %r9, %cluster_ctarank; @%p1 bra READY;
 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%p1 bra WAIT;
 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], 1024; setp.ne.u32 %p3, %r9, 0; @%p3 bra WAIT; mov.b64 %rd3, map; mov.b16 %rs1, 3;
 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r2+1024], [%rd3, {{0, 0}}], [%r2], %rs1;
WAIT: {wait("%r2", 0, "W")}
 mul.wide.u32 %rd4, %r9, 1024; add.s64 %rd1, %rd1, %rd4; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd1, %rd1, %rd4; mad.lo.u32 %r3, %r1, 4, %r2;
 mov.b32 %r4, 0;
COPY: ld.shared.b32 %r5, [%r3+1024]; st.global.b32 [%rd1], %r5; add.u32 %r3, %r3, 128; add.s64 %rd1, %rd1, 128; add.u32 %r4, %r4, 1;
 setp.lt.u32 %p2, %r4, 8; @%p2 bra COPY;
 barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
    for seed in range(3):
        report = launch(
            body, [tensor_map(array, (32, 8)), out], PARAMS, grid=2, cluster=2, shared=2048, buffers=[array], seed=seed
        )
        assert (out == array.reshape(1, -1)).all()
        assert not report.findings


def test_cluster_launch_control_hands_out_every_cta_once():
    out = np.zeros(6, np.uint32)
    body = f"""
 ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 ret; mov.u32 %r3, %ctaid.x; mov.b32 %r4, 0;
 mbarrier.init.shared.b64 [%r2], 1; fence.proxy.async.shared::cta;
L: mul.wide.u32 %rd2, %r3, 4; add.s64 %rd2, %rd1, %rd2; ld.global.b32 %r5, [%rd2]; add.u32 %r5, %r5, 1; st.global.b32 [%rd2], %r5;
 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r2], 16; fence.proxy.async.shared::cta;
 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2+16], [%r2];
 {wait("%r2", "%r4", "W")}
 xor.b32 %r4, %r4, 1; ld.shared.v2.b64 {{%rd5, %rd6}}, [%r2+16]; mov.b128 %q0, {{%rd5, %rd6}};
 clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q0; clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r3, %q0;
 @%p2 bra L;
"""
    report = launch(body, [out], ".param .u64 out", grid=6, shared=64)
    assert out.tolist() == [1] * 6
    assert not report.findings
    unfenced = body.replace("16; fence.proxy.async.shared::cta;", "16;")
    assert "proxy_fence" in kinds(launch(unfenced, [out], ".param .u64 out", grid=6, shared=64))


@pytest.mark.parametrize("held", [64, 128])  # bytes of the map that the kernel copies before it edits them
def test_a_map_edited_on_the_device_is_used(held):
    array = aligned((16, 32), np.float32, np.arange(512).reshape(16, 32))
    workspace = aligned(128, np.uint8)
    address, body = array.__array_interface__["data"][0], LOAD
    edit = f"""
 add.u32 %r20, %r2, 64; ld.param.u64 %rd10, [work];
 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r2+256], {address + 1024};
 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r2+256], 1, 8;
 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r2+256], 0, 128;
 """
    copy = "\n".join(
        f" ld.param.v4.b32 {{{{%r30, %r31, %r32, %r33}}}}, [map+{i}]; st.shared.v4.b32 [%r2+{256 + i}], {{{{%r30, %r31, %r32, %r33}}}};"
        for i in range(0, held, 16)
    )
    publish = "READY: ld.param.u64 %rd10, [work]; bar.sync 0; setp.ge.u32 %p9, %r1, 32;\n tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd10], [%r2+256], 128;\n bar.sync 0;"
    body = body.replace("{fence}", "{fence}" + copy + edit).replace("READY: bar.sync 0;", publish)
    body = body.replace(
        "mov.b64 %rd3, map; cvta.param.u64 %rd3, %rd3;",
        "mov.b64 %rd3, %rd10; fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128;",
    )
    text = body.format(x=0, y=4, size=1024, expect=1024, fence="fence.proxy.async;", wait=wait("%r2", 0, "W"))
    out = np.zeros((8, 32), np.float32)
    report = launch(
        text, [tensor_map(array, (32, 8)), out, workspace], PARAMS + ", .param .u64 work", shared=2048, buffers=[array]
    )
    assert not report.findings
    assert (out[:4] == array[12:]).all()  # base moved by 8 rows, extent cut to 8: rows 4..7 of the new tensor
    assert not out[4:].any()
