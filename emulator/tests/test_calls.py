"""Device functions, printf and assertions: PTX as nvcc writes it."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, UnsupportedError, run_ptx

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 p0, .param .b64 p1);
.extern .func __assertfail (.param .b64 p0, .param .b64 p1, .param .b32 p2, .param .b64 p3, .param .b64 p4) .noreturn;
.extern .func (.param .b32 r) unknown (.param .b32 p0);
"""
# norm(a) = a.x * a.x + a.y * a.y, and sign(n): -1, 0 or 1, by different ways out
FUNCTIONS = """
.func (.param .b32 out) sign(.param .b32 n);
.func (.param .b32 out) norm(.param .align 8 .b8 a[8])
{
 .reg .b32 %r<4>;
 ld.param.v2.b32 {%r1, %r2}, [a]; mul.lo.s32 %r1, %r1, %r1; mad.lo.s32 %r3, %r2, %r2, %r1; st.param.b32 [out], %r3; ret;
}
"""
SIGN = """
.func (.param .b32 out) sign(.param .b32 n)
{
 .reg .pred %p<2>; .reg .b32 %r<3>;
 ld.param.b32 %r1, [n]; setp.ge.s32 %p1, %r1, 0; @%p1 bra NOT; st.param.b32 [out+0], -1; ret;
NOT: setp.eq.s32 %p1, %r1, 0; selp.b32 %r2, 0, 1, %p1; st.param.b32 [out+0], %r2;
}
"""
ENTRY = """
.visible .entry k(.param .u64 in, .param .u64 out)
{
 .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
 ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
 ld.global.b32 %r2, [%rd1]; mov.b32 %r4, 7; setp.gt.s32 %p1, %r2, 3; @!%p1 bra SMALL;
 { .param .align 8 .b8 param0[8]; st.param.v2.b32 [param0], {%r2, %r1}; .param .b32 retval0; call.uni (retval0), norm, (param0); ld.param.b32 %r4, [retval0]; }
 bra DONE;
SMALL: { .param .b32 param0; st.param.b32 [param0], %r2; .param .b32 retval0; call (retval0), sign, (param0); ld.param.b32 %r4, [retval0+0]; }
DONE: st.global.b32 [%rd2], %r4; ret;
}
"""


def numbers():
    return np.arange(32, dtype=np.int32) * 3 % 17 - 5, np.zeros(32, np.int32)


@pytest.mark.parametrize("text", [FUNCTIONS + SIGN + ENTRY, FUNCTIONS + ENTRY + SIGN])
def test_device_functions_are_called(text):
    values, out = numbers()
    report = run_ptx(HEAD + text, "k", 1, 32, args=[values, out])
    assert not report.findings
    norm = values * values + np.arange(32) ** 2
    assert (out == np.where(values > 3, norm, np.sign(values))).all()


def test_a_guarded_call_reaches_the_guarded_lanes_only():
    values, out = numbers()
    text = ENTRY.replace("@!%p1 bra SMALL;", "mov.pred %p1, %p1;").replace(
        "call.uni (retval0), norm", "@%p1 call (retval0), norm"
    )
    text = text.replace("ld.param.b32 %r4, [retval0]; }", "ld.param.b32 %r4, [retval0]; selp.b32 %r4, %r4, 9, %p1; }")
    report = run_ptx(HEAD + FUNCTIONS + SIGN + text, "k", 1, 32, args=[values, out])
    assert not report.findings
    assert (out == np.where(values > 3, values * values + np.arange(32) ** 2, 9)).all()


def test_shared_variables_of_a_function_are_the_same_in_every_call():
    out = np.zeros(2, np.uint32)
    text = """
.func (.param .b32 r) next() { .reg .b32 %r<3>; .shared .align 4 .b8 count[4]; ld.shared.b32 %r1, [count]; add.u32 %r2, %r1, 1; st.shared.b32 [count], %r2;
 st.param.b32 [r], %r1; ret; }
.visible .entry k(.param .u64 out) { .reg .b32 %r<4>; .reg .b64 %rd<2>; .param .b32 a; .param .b32 b; ld.param.u64 %rd1, [out];
 call (a), next; call (b), next, (); ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b]; sub.u32 %r3, %r2, %r1; st.global.b32 [%rd1], %r3; ret; }"""
    report = run_ptx(HEAD + text, "k", 1, 1, args=[out])
    assert out[0] == 1
    assert [f.kind for f in report.findings] == ["uninitialised"]  # the counter starts as nothing


def test_what_cannot_be_called_is_an_error():
    values, out = numbers()
    text = FUNCTIONS + SIGN + ENTRY
    with pytest.raises(UnsupportedError, match=r"unknown has no body.*|.*unknown has no body"):
        run_ptx(HEAD + text.replace("call (retval0), sign", "call (retval0), unknown"), "k", 1, 32, args=[values, out])
    again = SIGN.replace("ld.param.b32 %r1, [n];", "ld.param.b32 %r1, [n]; call (out), sign, (n);")
    with pytest.raises(EmulationError, match="recursive"):
        run_ptx(HEAD + FUNCTIONS + again + ENTRY, "k", 1, 32, args=[values, out])
    indirect = text.replace(
        "call.uni (retval0), norm, (param0);", "mov.b64 %rd4, 0; call (retval0), %rd4, (param0), proto;"
    )
    with pytest.raises(UnsupportedError, match="indirect call"):
        run_ptx(HEAD + indirect, "k", 1, 32, args=[values, out])


def text_variable(name, text):
    raw = text.encode() + b"\0"
    return f".global .align 1 .b8 {name}[{len(raw)}] = {{{', '.join(map(str, raw))}}};\n"


PRINT = """
.visible .entry k() { .local .align 8 .b8 buffer[40]; .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<9>; .reg .f64 %fd<2>;
 mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 30; @%p1 ret; mov.u64 %rd1, buffer; cvta.local.u64 %rd1, %rd1; mov.b64 %fd1, 0d3FF8000000000000; mov.u64 %rd2, word;
 cvta.global.u64 %rd2, %rd2; mov.b32 %r2, -7; st.local.b32 [buffer], %r1; st.local.f64 [buffer+8], %fd1; st.local.u64 [buffer+16], %rd2; st.local.b32 [buffer+24], %r2;
 mov.b64 %rd5, 1099511627776; st.local.b64 [buffer+32], %rd5; mov.u64 %rd3, format; cvta.global.u64 %rd4, %rd3;
 { .param .b64 param0; st.param.b64 [param0], %rd4; .param .b64 param1; st.param.b64 [param1], %rd1; .param .b32 retval0; call.uni (retval0), vprintf, (param0, param1); }
 ret; }"""


def test_printf_prints_lane_by_lane(capfd):
    text = text_variable("format", "%3d|%-6.2f|%s %% %x %lld\n") + text_variable("word", "abc") + PRINT
    report = run_ptx(HEAD + text, "k", 1, 32, args=[])
    assert not report.findings
    assert (
        capfd.readouterr().out == " 30|1.50  |abc % fffffff9 1099511627776\n 31|1.50  |abc % fffffff9 1099511627776\n"
    )


ASSERT = """
.visible .entry k(.param .u64 out) { .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<9>;
 ld.param.u64 %rd5, [out]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 5; @%p1 bra FINE; mov.u64 %rd1, said; cvta.global.u64 %rd1, %rd1; mov.u64 %rd2, file;
 cvta.global.u64 %rd2, %rd2; mov.u64 %rd3, func; cvta.global.u64 %rd3, %rd3; mov.b64 %rd4, 1; mov.b32 %r2, 12;
 { .param .b64 param0; st.param.b64 [param0], %rd1; .param .b64 param1; st.param.b64 [param1], %rd2; .param .b32 param2; st.param.b32 [param2], %r2;
   .param .b64 param3; st.param.b64 [param3], %rd3; .param .b64 param4; st.param.b64 [param4], %rd4; call.uni __assertfail, (param0, param1, param2, param3, param4); }
FINE: mul.wide.u32 %rd6, %r1, 4; add.s64 %rd5, %rd5, %rd6; st.global.b32 [%rd5], %r1; ret; }"""


def test_a_failed_assertion_is_a_finding_and_ends_its_lanes():
    out = np.full(32, 99, np.uint32)
    text = text_variable("said", "x > 0") + text_variable("file", "a.cu") + text_variable("func", "void k()") + ASSERT
    (finding,) = run_ptx(HEAD + text, "k", 1, 32, args=[out]).findings
    assert finding.kind == "assertion"
    assert finding.message == "a.cu:12: void k(): assertion `x > 0` failed in lanes 5"
    assert out.tolist() == [99 if i == 5 else i for i in range(32)]


def test_a_trap_is_a_finding():
    report = run_ptx(HEAD + ".visible .entry k() { trap; ret; }", "k", 1, 32, args=[])
    assert [f.kind for f in report.findings] == ["assertion"]
