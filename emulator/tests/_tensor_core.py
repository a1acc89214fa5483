"""tcgen05 in one hand-written kernel: images of shared and of tensor memory go in, the tensor memory comes out.

`run(statements, shared, tensor)` copies `shared` (bytes) to shared memory at `BASE` and `tensor` ([128, columns]
uint32) to the columns of an allocation, executes `statements` in one thread, commits, waits, and returns the columns
and the report. In statements %r21 is the allocation; `descriptor(...)` gives a matrix descriptor as a constant.
"""

import runpy
from pathlib import Path

import numpy as np
from ptx_emulator._layout import MatrixDescriptor, encode_tcgen05

S = runpy.run_path(str(Path(__file__).with_name("_snippets.py")))
BASE = 2048  # of the image in shared memory: the window starts at 1024
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate((E2M1, -E2M1))
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"


def descriptor(offset, leading, stride, swizzle="none", arch="sm_100a", **fields):
    """Constant of the matrix that starts `offset` bytes into the image."""
    return encode_tcgen05(MatrixDescriptor(BASE + offset, leading, stride, swizzle, **fields), arch)


def _columns(columns, move):
    """Statements for every 32 columns of the warp's lanes; `move(registers, column)`."""
    names = [f"%r{40 + i}" for i in range(32)]
    return "\n".join(move(names, column) for column in range(0, columns, 32))


def _fill(names, column):
    loads = " ".join(
        f"ld.global.v4.b32 {{{', '.join(names[i : i + 4])}}}, [%rd9+{4 * (column + i)}];" for i in range(0, 32, 4)
    )
    at = f"add.u32 %r23, %r22, {column};"
    return f"{loads} {at} tcgen05.st.sync.aligned.32x32b.x32.b32 [%r23], {{{', '.join(names)}}}; tcgen05.wait::st.sync.aligned;"


def _drain(names, column):
    stores = " ".join(
        f"st.global.v4.b32 [%rd10+{4 * (column + i)}], {{{', '.join(names[i : i + 4])}}};" for i in range(0, 32, 4)
    )
    at = f"add.u32 %r23, %r22, {column};"
    return f"{at} tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{', '.join(names)}}}, [%r23]; tcgen05.wait::ld.sync.aligned; {stores}"


def source(statements, size, columns, commit=COMMIT):
    """The body of the kernel."""
    allocated = max(32, 1 << (columns - 1).bit_length())
    return f"""
 ld.param.u64 %rd1, [image]; ld.param.u64 %rd2, [tensor]; ld.param.u64 %rd3, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, smem;
 mul.lo.u32 %r3, %r1, 16;
FILL: setp.ge.u32 %p1, %r3, {size}; @%p1 bra FILLED; cvt.u64.u32 %rd4, %r3; add.s64 %rd5, %rd1, %rd4;
 ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd5]; add.u32 %r8, %r2, %r3; st.shared.v4.b32 [%r8+1024], {{%r4, %r5, %r6, %r7}};
 add.u32 %r3, %r3, 2048; bra FILL;
FILLED: fence.proxy.async.shared::cta; shr.u32 %r20, %r1, 5; setp.ne.u32 %p4, %r20, 0; setp.ne.u32 %p5, %r1, 0; @%p4 bra ALLOCATED;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], {allocated};
ALLOCATED: @%p5 bra READY; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; ld.shared.b32 %r21, [%r2+16]; shl.b32 %r22, %r20, 21; add.u32 %r22, %r21, %r22;
 mul.wide.u32 %rd8, %r1, {4 * columns}; add.s64 %rd9, %rd2, %rd8; add.s64 %rd10, %rd3, %rd8;
 {_columns(columns, _fill)}
 tcgen05.fence::before_thread_sync; bar.sync 0; @%p5 bra WAIT; tcgen05.fence::after_thread_sync;
 {statements}
 {commit}
WAIT: {S["wait"]("%r2", 0, "W")}
 bar.sync 0; tcgen05.fence::after_thread_sync;
 {_columns(columns, _drain)}
 bar.sync 0; @%p4 ret; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r21, {allocated};
"""


def run(statements, shared, tensor, target="sm_100a", **options):
    """(tensor memory [128, columns] uint32, report); `shared` is uint8 of a multiple of 16 bytes."""
    shared = np.ascontiguousarray(shared).view(np.uint8).reshape(-1)
    columns = tensor.shape[1]
    out = np.zeros_like(tensor)
    body = source(statements, shared.size, columns)
    report = S["launch"](body, [shared, np.ascontiguousarray(tensor), out], ".param .u64 image, .param .u64 tensor, .param .u64 out",
                         block=128, target=target, shared=1024 + shared.size, outputs=[out], **options)  # fmt: skip
    return out, report


def packed(codes):
    """Two 4-bit codes a byte, low half first."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def scale_image(codes, lanes=128):
    """Scale codes [rows, count] as 32-bit columns [128, columns] of tensor memory: four consecutive factors of row r sit in
    lane r % 32 (and in the same lane of every other quarter), column r // 32, the next four a group of columns on."""
    rows, count = codes.shape
    groups, words = -(-rows // 128) * 4, -(-count // 4)
    image = np.zeros((32, groups * words), np.uint32)
    for row in range(rows):
        for index in range(count):
            image[row % 32, row // 32 + index // 4 * groups] |= np.uint32(codes[row, index]) << np.uint32(
                8 * (index % 4)
            )
    return np.tile(image, (lanes // 32, 1))
