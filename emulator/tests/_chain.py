"""Chains of dependent launches on one tensor, each written as a list of steps: loaded by tests with runpy.

    run(["write A", "wait, trigger, read A, write B"])

makes a kernel of each string, and a host function that launches them in turn, two CTAs of two warps each. An area (a
letter) has 512 bytes, of which a CTA uses its half, a thread 4. Steps:

    wait, trigger       griddepcontrol.wait, griddepcontrol.launch_dependents; "wait-trigger": both, in one line
    read A, write A     4 bytes a thread; "write A.lo" and "write A.hi": the lower or the upper two
    load A, store A     the first 16 bytes of the CTA's half, by a bulk copy; one load a kernel
    sync, exit          bar.sync, the end
    CTA0 step           in the first CTA only; likewise CTA1, warp0, warp1 and thread, one of a CTA: "CTA1 thread wait"

Each launch is programmatic, or those with a true value in `programmatic` are. `CHAIN` is a chain without a finding.
"""

import runpy
from functools import cache
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
HOSTS = runpy.run_path(str(HERE / "_hosts.py"))
WAIT = runpy.run_path(str(HERE / "_snippets.py"))["wait"]
needs_compiler = HOSTS["needs_compiler"]

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""
# kernel arguments: the tensor, and whether the launch is programmatic (for the host function)
KERNEL = """
.visible .entry step{number}(.param .u64 tensor, .param .u32 programmatic)
{{
 .reg .pred %p<16>; .reg .b16 %rs<4>; .reg .b32 %r<32>; .reg .b64 %rd<16>;
 ld.param.u64 %rd1, [tensor];
 mov.u32 %r1, %tid.x;
 mov.u32 %r2, %ctaid.x;
 mul.wide.u32 %rd2, %r2, 256;
 add.s64 %rd2, %rd1, %rd2;
 mul.wide.u32 %rd3, %r1, 4;
 add.s64 %rd3, %rd2, %rd3;
 setp.eq.u32 %p0, %r2, 0;
 setp.eq.u32 %p1, %r2, 1;
 setp.eq.u32 %p2, %r1, 0;
 setp.lt.u32 %p3, %r1, 32;
 setp.ge.u32 %p4, %r1, 32;
 mov.b32 %r20, smem;
 add.u32 %r21, %r20, 64;
 cvt.u16.u32 %rs1, %r1;
{body}
END: ret;
}}
"""
BULK = "cp.async.bulk"
STEPS = {
    "wait": "griddepcontrol.wait;",
    "trigger": "griddepcontrol.launch_dependents;",
    "wait-trigger": "griddepcontrol.wait; griddepcontrol.launch_dependents;",
    "sync": "bar.sync 1;",
    "exit": "bra END;",
    "read": "ld.global.b32 %r9, [%rd3+{at}];",
    "write": "st.global.b32 [%rd3+{at}], %r1;",
    "lo": "st.global.b16 [%rd3+{at}], %rs1;",
    "hi": "st.global.b16 [%rd3+{at}+2], %rs1;",
    "load": "@%p2 mbarrier.init.shared.b64 [%r20], 1; @%p2 fence.mbarrier_init.release.cluster; bar.sync 0;"
    " add.s64 %rd4, %rd2, {at}; @%p2 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], 16;"
    f" @%p2 {BULK}.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%rd4], 16, [%r20];"
    + WAIT("%r20", 0, "LOADED"),
    "store": "add.s64 %rd4, %rd2, {at}; @%p2 st.shared.v4.b32 [%r21], {{%r1, %r1, %r1, %r1}}; fence.proxy.async.shared::cta;"
    f" @%p2 {BULK}.global.shared::cta.bulk_group [%rd4], [%r21], 16; {BULK}.commit_group; {BULK}.wait_group 0;",
}  # fmt: skip
WHO = {"CTA0 ": "%p0", "CTA1 ": "%p1", "warp0 ": "%p3", "warp1 ": "%p4", "thread ": "%p2"}
AREAS = "ABCDEFGH"
BODY = """
    struct { void *data; } *x = a[0];
    dim one = {1, 1, 1}, two = {2, 1, 1}, block = {64, 1, 1};
    int i, n = *(int *)a[1];
    char name[] = "step0";
    *result = 0;
    for (i = 0; i < n && !*result; i++, name[4]++) {
        void *parameters[] = {&x->data, a[2 + i]};
        *result = _cudaLibraryGetKernel(&kernel, library, name);
        if (!*result) *result = run(two, block, one, 256, parameters);
    }
"""


@cache
def host():
    return HOSTS["host_object"](BODY, "step0", programmatic="*(unsigned *)parameters[1]")


def _statements(step, label):
    """The step's PTX, which those that are not to execute it jump over."""
    lines = []
    for prefix, predicate in WHO.items():
        if step.startswith(prefix):
            lines.append(f" @!{predicate} bra {label};")
            step = step.removeprefix(prefix)
    word, _, place = step.partition(" ")
    area, _, half = place.partition(".")
    text = STEPS[half or word].replace("LOADED", f"{label}LOADED")
    return "\n".join([*lines, " " + text.format(at=512 * AREAS.index(area or "A")), f"{label}:"])


def source(kernels):
    """PTX of kernels step0, step1 and so on."""
    texts = []
    for number, steps in enumerate(kernels):
        body = "\n".join(_statements(step, f"S{i}") for i, step in enumerate(steps.split(", ")))
        texts.append(KERNEL.format(number=number, body=body))
    return HEAD + "".join(texts)


# 1 writes A; 2 makes B of it; 3 runs beside 2 and is not complete before it; 4 uses what all have made
PREPARE = "wait, write A, write D, trigger"
SUMMARY = "wait-trigger, read A, write B"
BESIDE = "trigger, read D, write C, CTA1 thread wait"
SCAN = "wait, read A, read B, read C, write D"
CHAIN = (PREPARE, SUMMARY, BESIDE, SCAN)


def run(kernels, programmatic=None, ptx=None, **options):
    """The report. `ptx` in place of the kernels' own."""
    from ptx_emulator import launch

    flags = [True] * len(kernels) if programmatic is None else programmatic
    tensor = np.zeros(128 * len(AREAS), np.uint32)
    return launch(host(), tensor, len(kernels), *map(int, flags), ptx=ptx or source(kernels), **options)
