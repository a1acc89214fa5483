import pytest
from ptx_emulator import EmulationError, UnsupportedError, run_ptx
from ptx_emulator._ptx import Addr, Imm, Pair, Reg, Vec, parse

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def only(text):
    module = parse(HEAD + text)
    return next(iter(module.entries.values()))


def test_reads_parameters_with_their_alignment():
    entry = only(".entry k(.param .u8 a, .param .align 64 .b8 m[128], .param .u64 .ptr .global .align 16 p) { ret; }")
    assert [(p.name, p.offset, p.size) for p in entry.params] == [("a", 0, 1), ("m", 64, 128), ("p", 192, 8)]


@pytest.mark.parametrize("align", [1, 16])
def test_the_alignment_behind_ptr_is_not_the_parameters(align):
    entry = only(f".entry k(.param .u32 a, .param .u64 .ptr .global .align {align} p, .param .u32 b) {{ ret; }}")
    assert [(p.name, p.offset) for p in entry.params] == [("a", 0), ("p", 8), ("b", 16)]


def test_operands_become_objects():
    entry = only(""".entry k() { .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd1;
        @!%p1 ld.shared.v2.b32 {%r1, %r2}, [%rd1+-8];
        shfl.sync.idx.b32 %r3|%p1, %r1, 0, 31, -1;
        mov.b32 %r4, 0f3F800000; }""")
    load, shuffle, move = entry.instructions
    assert load.predicate == Reg("%p1", entry.instructions[0].predicate.slot, "pred", True)
    assert isinstance(load.operands[0], Vec)
    assert isinstance(load.operands[1], Addr)
    assert load.operands[1].offset == -8
    assert isinstance(shuffle.operands[0], Pair)
    assert shuffle.operands[4] == Imm(-1)
    assert move.operands[1] == Imm(0x3F800000, 4)
    assert load.modifiers == ("shared", "v2", "b32")


def test_a_name_declared_in_a_scope_hides_the_outer_one():
    entry = only(""".entry k() { .reg .pred P; { .reg .pred P; setp.eq.b32 P, 0, 0; } setp.eq.b32 P, 0, 0; }""")
    inner, outer = entry.instructions
    assert inner.operands[0].slot != outer.operands[0].slot


def test_equal_labels_in_sibling_scopes_are_told_apart():
    entry = only(""".entry k() {
        { WAIT: bra.uni DONE; bra.uni WAIT; DONE: }
        { WAIT: bra.uni DONE; bra.uni WAIT; DONE: }
    }""")
    assert [i.operands[0].target for i in entry.instructions] == [2, 0, 4, 2]


def test_lines_and_sources_are_kept():
    entry = only("""
.entry k() {
 .reg .b32 %r1;
 .loc 1 42 7
 mov.b32 %r1, 1;
}
 .file 1 "kernel.py"
""")
    assert entry.instructions[0].line == 8
    assert entry.instructions[0].source == "kernel.py:42"


def test_shared_variables_get_aligned_offsets():
    entry = only(".shared .align 16 .b8 a[20]; .entry k() { .shared .align 8 .b64 b[2]; ret; }")
    assert entry.shared == {"a": (0, 20), "b": (24, 16)}
    assert entry.static_shared == 40


def test_what_cannot_be_read_names_its_line():
    with pytest.raises(EmulationError, match="line 5"):
        parse(HEAD + "\n.sampler foo;")


def test_an_instruction_that_is_not_covered_is_refused_before_the_run():
    with pytest.raises(UnsupportedError, match=r"tex\.2d.*line 5") as caught:
        run_ptx(
            HEAD + ".entry k() { .reg .b32 %r<9>;\n tex.2d.v4.s32.s32 {%r1,%r2,%r3,%r4}, [%r5, {%r6,%r7}]; }",
            "k",
            1,
            32,
        )
    assert caught.value.line == 5
