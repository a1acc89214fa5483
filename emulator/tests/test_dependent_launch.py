"""Launches with programmatic stream serialization: global memory belongs to the launches before until griddepcontrol.wait."""

import runpy
from pathlib import Path

import numpy as np
import ptx_emulator
import pytest

HERE = Path(__file__).parent
S = runpy.run_path(str(HERE / "_snippets.py"))
HOSTS = runpy.run_path(str(HERE / "_hosts.py"))
kinds = S["kinds"]
WAIT = "griddepcontrol.wait;"
POINTER = " ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;"
BARRIER = """
 mov.b32 %r20, smem; setp.ne.u32 %p9, %r1, 0;
 @!%p9 mbarrier.init.shared.b64 [%r20], 1;
 @!%p9 fence.mbarrier_init.release.cluster;
 bar.sync 0;
"""
BULK = """
 setp.ne.u32 %p9, %r1, 0; mov.b32 %r21, smem; add.u32 %r21, %r21, 64;
 @%p9 bra END;
"""
EXPECT = " mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], 16;"

# one access each, by warp 0
ACCESSES = {
    "ld": "ld.global.b32 %r2, [%rd3];",
    "generic ld": "ld.b32 %r2, [%rd3];",
    "st": "st.global.b32 [%rd3], %r1;",
    "atom": "atom.global.add.u32 %r2, [%rd3], 1;",
    "red": "red.global.add.u32 [%rd3], 1;",
    "cp.async": "mov.b32 %r2, smem; cp.async.ca.shared.global [%r2], [%rd1], 4; cp.async.wait_all;",
    "bulk load": BULK + EXPECT + " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%rd1], 16, [%r20];"
    + S["wait"]("%r20", 0, "L") + "END:",
    "bulk store": BULK + " st.shared.v4.b32 [%r21], {%r1, %r1, %r1, %r1}; fence.proxy.async.shared::cta;"
    " cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r21], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    "END:",
    "bulk reduction": BULK + " st.shared.v4.b32 [%r21], {%r1, %r1, %r1, %r1}; fence.proxy.async.shared::cta;"
    " cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r21], 16; cp.async.bulk.commit_group;"
    " cp.async.bulk.wait_group 0; END:",
}  # fmt: skip


def launch(body, block=32, programmatic=True, **options):
    out = np.zeros(1024, np.uint32)
    return S["launch"](POINTER + BARRIER + body, [out], ".param .u64 out", block=block, shared=256, target="sm_90a",
                       programmatic=programmatic, **options)  # fmt: skip


@pytest.mark.parametrize("name", ACCESSES)
def test_an_access_before_the_wait_is_reported_with_its_line(name):
    access = ACCESSES[name]
    findings = launch("\n" + access).findings
    assert {f.kind for f in findings} == {"dependent_launch"}
    assert "of argument out" in findings[0].message
    text = S["source"](POINTER + BARRIER + "\n" + access, ".param .u64 out", "sm_90a", 256).splitlines()
    assert all("[%rd1]" in text[f.ptx_line - 1] or "[%rd3]" in text[f.ptx_line - 1] for f in findings)
    assert not launch(WAIT + access).findings
    assert not launch(access, programmatic=False).findings
    assert kinds(launch(access + WAIT.replace("wait", "launch_dependents"))) == {"dependent_launch"}


def test_parameters_and_variables_of_the_module_are_not_of_the_launches_before():
    text = S["source"]("ld.const.u32 %r1, [table]; ld.param.u64 %rd1, [out];", ".param .u64 out")
    text = text.replace(".visible", ".const .align 4 .b8 table[4] = {1, 2, 3, 4};\n.visible")
    assert not ptx_emulator.run_ptx(text, "k", 1, 32, args=[np.zeros(4, np.uint32)], programmatic=True).findings


# warp 0 waits; warp 1 gets past the synchronisation and stores
SYNCHRONISED = {
    "bar.sync": ("bar.sync 1, 64;", "bar.sync 1, 64;"),
    "bar.arrive": ("bar.arrive 1, 64;", "bar.sync 1, 64;"),
    "mbarrier": ("@!%p9 mbarrier.arrive.shared.b64 %rd9, [%r20];", S["wait"]("%r20", 0, "L")),
    "cluster barrier": (
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    ),
    "copy after the wait": (
        "@%p9 bra DONE; " + EXPECT + " mov.b32 %r21, smem; add.u32 %r21, %r21, 64; cp.async.bulk.shared::cluster.global"
        ".mbarrier::complete_tx::bytes [%r21], [%rd1], 16, [%r20]; DONE:",
        S["wait"]("%r20", 0, "L"),
    ),
}


@pytest.mark.parametrize("name", SYNCHRONISED)
def test_synchronisation_with_a_warp_that_waited_is_enough(name):
    give, take = SYNCHRONISED[name]
    body = """
 setp.lt.u32 %p2, %r1, 32;
 @!%p2 bra TAKER;
 {first}
 {give}
 {last}
 bra JOIN;
TAKER: {take}
 st.global.b32 [%rd3], %r1;
JOIN:
"""
    assert not launch(body.format(first=WAIT, give=give, take=take, last=""), block=64).findings
    late = launch(body.format(first="", give=give, take=take, last=WAIT), block=64).findings
    assert {f.kind for f in late} == {"dependent_launch"}
    assert any("cta 0 warp 1" in f.agents for f in late)


def test_no_synchronisation_with_the_warp_that_waited_is_reported():
    body = f"setp.lt.u32 %p2, %r1, 32;\n @!%p2 bra TAKER;\n {WAIT}\n TAKER: st.global.b32 [%rd3], %r1;"
    (finding,) = launch(body, block=64).findings
    assert (finding.kind, finding.agents) == ("dependent_launch", ("cta 0 warp 1",))


@pytest.mark.parametrize("cluster", [1, 2])
def test_every_cta_waits_for_itself(cluster):
    body = f"""
 mov.u32 %r3, %ctaid.x; setp.eq.u32 %p2, %r3, 0; mul.wide.u32 %rd4, %r3, 128; add.s64 %rd3, %rd3, %rd4;
 @!%p2 bra NEXT;
 {WAIT}
NEXT: st.global.b32 [%rd3], %r1;"""
    (finding,) = launch(body, grid=2, cluster=cluster).findings
    assert finding.kind == "dependent_launch"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "emulator_cache"))


@pytest.fixture(scope="module")
def hosts():
    """Host objects whose launch has the attribute with the value 0, 1."""
    body = "dim one = {1, 1, 1}, block = {32, 1, 1}; *result = run(one, block, one, 0, a);"
    return [HOSTS["host_object"](body, programmatic=value) for value in (0, 1)]


@HOSTS["needs_compiler"]
@pytest.mark.parametrize(
    ("attribute", "option", "waits", "found"),
    [(0, None, False, False), (1, None, False, True), (1, None, True, False), (0, True, False, True), (1, False, False, False)],
)  # fmt: skip
def test_the_attribute_of_the_launch_decides_unless_the_caller_does(hosts, attribute, option, waits, found):
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    ptx = HOSTS["axpy"]()
    if waits:
        ptx = ptx.replace("mov.u32 %r2", WAIT + " mov.u32 %r2", 1)
    report = ptx_emulator.launch(hosts[attribute], x, y, 1.0, 32, ptx=ptx, programmatic=option)
    assert kinds(report) == ({"dependent_launch"} if found else set())
    assert (y == x).all()
