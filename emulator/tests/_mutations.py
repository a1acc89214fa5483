"""Bugs made in the PTX of the recorded kernels and of a chain of dependent launches, by pattern: what the emulator has to catch.

A `Family` is one way to be wrong: a class (the row of the score), a label, a pattern that a whole statement matches,
and the statement that replaces it ("" removes it). It makes one mutant per matching statement of a kernel, at most
`limit`. `MAP_FAMILIES` edit the tensor maps among the parameters instead. Mutants that the ISA or the use in these
kernels make harmless are not made; `HARMLESS` lists them with the reason, so that the choice can be checked.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

KERNELS = (
    "tma_copy.sm_90a", "wgmma_gemm.sm_90a", "tcgen05_gemm.sm_100a", "tcgen05_gemm_pair.sm_103a", "mxf8_gemm.sm_107a",
    "nvf4_gemm.sm_100a", "clc_gemm.sm_100a", "dependent_chain",
)  # fmt: skip


class Family(NamedTuple):
    group: str
    label: str
    pattern: str
    rewrite: Callable[[re.Match], str]
    limit: int = 99


class Mutant(NamedTuple):
    """`ptx` or `parameters` is None where the mutant keeps the kernel's own."""

    group: str
    kernel: str
    label: str
    line: int
    statement: str
    ptx: str | None
    parameters: list[bytes] | None

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.label} @{self.line}"


def _gone(_):
    return ""


def _flip(bit):
    """The statement with one bit of its last integer flipped."""
    return lambda m: f"{m[1]}{int(m[2]) ^ (1 << bit)};"


def _scaled(operation):
    """expect_tx of a computed number of bytes."""
    return lambda m: f"{{ .reg .b32 q; {operation.format(m[3])} {m[1]}{m[2]}, q; }}"


WAIT = r"(mbarrier\.try_wait\.parity\S*) (\S+), (\[\S+\]), (\S+), (\d+);"
EXPECT = r"(mbarrier\.arrive\.expect_tx\S* \S+, )(\[[^]]*\]), (%r\d+);"
MATRIX = r"(or\.b64 %rd\d+, %rd\d+, )(-?\d{15,});"  # the constant part of a matrix descriptor
INSTRUCTION = r"(selp\.b32 %r\d+, )(\d{8,}), (\d{8,}), (%p\d+);"  # that of an instruction descriptor


def _instruction(bit):
    return lambda m: f"{m[1]}{int(m[2]) ^ (1 << bit)}, {int(m[3]) ^ (1 << bit)}, {m[4]};"


def _matrix(bit):
    def rewrite(m):
        value = (int(m[2]) % 2**64) ^ (1 << bit)
        return f"{m[1]}{value - 2**64 if value >= 2**63 else value};"

    return rewrite


FAMILIES = (
    Family("fence", "proxy fence removed", r"fence\.proxy\.async\S*;", _gone),
    Family("fence", "mbarrier init fence removed", r"fence\.mbarrier_init\S*;", _gone),
    Family("fence", "wgmma fence removed", r"wgmma\.fence\S*;", _gone),
    Family("wait", "mbarrier wait removed", WAIT, lambda m: f"setp.eq.u32 {m[2]}, 0, 0;"),
    Family("wait", "mbarrier tested, not waited for", r"bra\.uni +LAB_WAIT;", _gone),
    Family("wait", "tensor memory load not waited for", r"tcgen05\.wait::ld\S*;", _gone),
    Family("wait", "wgmma wait removed", r"wgmma\.wait_group\S* \d+;", _gone),
    Family("wait", "wgmma wait one group short", r"(wgmma\.wait_group\S*) (\d+);", lambda m: f"{m[1]} {int(m[2]) + 1};"),
    Family("phase parity", "parity inverted", WAIT,
           lambda m: f"{{ .reg .b32 q; xor.b32 q, {m[4]}, 1; {m[1]} {m[2]}, {m[3]}, q, {m[5]}; }}"),
    Family("phase parity", "parity stuck at 0", WAIT, lambda m: f"{m[1]} {m[2]}, {m[3]}, 0, {m[5]};"),
    Family("transaction count", "half the bytes expected", EXPECT, _scaled("shr.u32 q, {}, 1;")),
    Family("transaction count", "twice the bytes expected", EXPECT, _scaled("shl.b32 q, {}, 1;")),
    Family("transaction count", "16 bytes too few expected", EXPECT, _scaled("sub.s32 q, {}, 16;")),
    Family("transaction count", "arrive without expect_tx", EXPECT,
           lambda m: m[1].replace(".expect_tx", "") + m[2] + ", 1;"),
    Family("transaction count", "expect_tx removed", EXPECT, _gone),
    Family("arrive", "arrive removed", r"mbarrier\.arrive\.shared\S* \S+, \[[^]]*\], \S+;", _gone),
    Family("arrive", "two arrivals in place of one", r"(mbarrier\.arrive\.shared\S* \S+, \[[^]]*\], )\S+;", lambda m: m[1] + "2;"),
    Family("arrive", "init count one too high", r"(mbarrier\.init\S* \[[^]]*\], )(%r\d+);",
           lambda m: f"{{ .reg .b32 q; add.s32 q, {m[2]}, 1; {m[1]}q; }}"),
    Family("arrive", "init removed", r"mbarrier\.init\S* .*;", _gone),
    Family("commit", "tcgen05 commit removed", r"tcgen05\.commit\S* .*;", _gone),
    Family("commit", "commit of a pair at the leader only", r"(tcgen05\.commit\S* \[\S+\], )%rs\d+;", lambda m: m[1] + "1;"),
    Family("commit", "wgmma commit removed", r"wgmma\.commit_group\S*;", _gone),
    Family("commit", "bulk commit removed", r"cp\.async\.bulk\.commit_group;", _gone),
    Family("store wait", "store wait removed", r"cp\.async\.bulk\.wait_group\S* \d+;", _gone),
    Family("store wait", "store wait one group short", r"(cp\.async\.bulk\.wait_group\S*) (\d+);",
           lambda m: f"{m[1]} {int(m[2]) + 1};"),
    Family("barrier", "barrier removed", r"bar\.sync .*;", _gone),
    Family("barrier", "barrier for one warp more", r"(bar\.sync \d+, )(\d+);", lambda m: f"{m[1]}{int(m[2]) + 32};"),
    Family("barrier", "cluster wait removed", r"barrier\.cluster\.wait\S*;", _gone),
    Family("barrier", "cluster arrive removed", r"barrier\.cluster\.arrive\S*;", _gone),
    Family("dependent launch", "griddepcontrol.wait removed", r"griddepcontrol\.wait;", _gone),
    Family("dependent launch", "trigger moved before the wait", r"(griddepcontrol\.wait;) (griddepcontrol\.launch_dependents;)",
           lambda m: f"{m[2]} {m[1]}"),
    Family("descriptor", "stride dimension offset wrong", MATRIX, _matrix(33)),
    Family("descriptor", "start address off by 32 bytes", MATRIX, _matrix(1)),
    Family("descriptor", "k step missing", r"(or\.b32 %r\d+, %r\d+, )2;", lambda m: m[1] + "0;"),
    Family("swizzle", "matrix swizzle mode wrong", MATRIX, _matrix(62)),
    Family("swizzle", "swizzle of the thread's address wrong", r"(and\.b32 %r\d+, %r\d+, )112;", lambda m: m[1] + "48;", 2),
    Family("instruction descriptor", "N wrong", INSTRUCTION, _instruction(17)),
    Family("instruction descriptor", "M wrong", INSTRUCTION, _instruction(27)),
    Family("instruction descriptor", "type of A wrong", INSTRUCTION, _instruction(7)),
    Family("instruction descriptor", "type of B wrong", INSTRUCTION, _instruction(10)),
    Family("instruction descriptor", "A transposed", INSTRUCTION, _instruction(15)),
    Family("instruction descriptor", "B transposed", INSTRUCTION, _instruction(16)),
    Family("instruction descriptor", "A negated", INSTRUCTION, _instruction(13)),
    Family("scale offset", "scales of B where those of A are", r"(add\.s32 %r\d+, %r\d+, )132;", lambda m: m[1] + "128;"),
    Family("scale offset", "scales one column further", r"(tcgen05\.mma\S*block_scale\S* .*\[%r\d+)(\], %p\d+;)", lambda m: f"{m[1]}+1{m[2]}"),
    Family("scale offset", "scale id of B dropped", r"(and\.b32 %r\d+, %r\d+, )48;", lambda m: m[1] + "0;"),
    Family("scale offset", "scale id of A dropped", r"(and\.b32 %r\d+, %r\d+, )1610612736;", lambda m: m[1] + "0;"),
    Family("scale offset", "scales not copied", r"tcgen05\.cp\S* .*;", _gone),
    Family("scale offset", "scales copied from 32 bytes further", r"(tcgen05\.cp\S* \[\S+\], )(%rd\d+);",
           lambda m: f"{{ .reg .b64 q; add.s64 q, {m[2]}, 2; {m[1]}q; }}"),
    Family("accumulate", "accumulator not cleared", r"(tcgen05\.mma\S* .*, )(%p\d+);",
           lambda m: f"{{ .reg .pred q; setp.eq.u32 q, 0, 0; {m[1]}q; }}", 1),
    Family("accumulate", "accumulator always cleared", r"(tcgen05\.mma\S* .*, )(%p\d+);",
           lambda m: f"{{ .reg .pred q; setp.ne.u32 q, 0, 0; {m[1]}q; }}"),
    Family("accumulate", "MMA removed", r"(tcgen05\.mma|wgmma\.mma_async)\S* .*;", _gone, 2),
    Family("tensor memory", "not allocated", r"tcgen05\.alloc\S* .*;", _gone),
    Family("tensor memory", "half the columns", r"(tcgen05\.(?:de)?alloc\S* \S+, )(%r\d+);",
           lambda m: f"{{ .reg .b32 q; shr.u32 q, {m[2]}, 1; {m[1]}q; }}"),
    Family("tensor memory", "not freed", r"tcgen05\.dealloc\S* .*;", _gone),
    Family("tensor memory", "lanes of another warp", r"(and\.b32 %r\d+, %r\d+, )14680064;", lambda m: m[1] + "12582912;"),
    Family("transfer", "load removed", r"cp\.async\.bulk\.\S*mbarrier\S* .*;", _gone),
    Family("transfer", "store removed", r"cp\.async\.bulk\.tensor\S*bulk_group\S* .*;", _gone),
    Family("transfer", "coordinates exchanged", r"(cp\.async\.bulk\.tensor.*\{)(%r\d+), (%r\d+)(\}.*;)",
           lambda m: f"{m[1]}{m[3]}, {m[2]}{m[4]}"),
    Family("transfer", "shared address 16 bytes off", r"(cp\.async\.bulk\.tensor\S*mbarrier\S* \[)(%r\d+)((?:\+\d+)?\].*;)",
           lambda m: f"{{ .reg .b32 q; add.s32 q, {m[2]}, 16; {m[1]}q{m[3]} }}"),
    Family("launch control", "no request", r"clusterlaunchcontrol\.try_cancel\S* .*;", _gone),
    Family("launch control", "answer ignored", r"(clusterlaunchcontrol\.query_cancel\.is_canceled\S* )(%p\d+), \S+;",
           lambda m: f"setp.ne.u32 {m[2]}, 0, 0;"),
    Family("launch control", "wrong coordinate", r"(clusterlaunchcontrol\.query_cancel\.get_first_ctaid::)x(.*;)",
           lambda m: f"{m[1]}y{m[2]}"),
)  # fmt: skip


def _map_bits(offset, bit):
    def rewrite(raw):
        changed = bytearray(raw)
        changed[offset + bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return rewrite


MAP_FAMILIES = (
    ("swizzle", "swizzle mode of the tensor map wrong", _map_bits(8, 13)),
    ("descriptor", "box of the tensor map wrong", _map_bits(55, 3)),
    ("descriptor", "stride of the tensor map wrong", _map_bits(12, 2)),
)

_LATER = "named barrier 1 already orders every read of tensor memory before the dealloc, the commit every MMA"
_ONE_TILE = "with one k-tile nobody waits for the stage a second time"
_ZERO = "the scale id is 0 here: all four bytes of the column, or its first"
HARMLESS: dict[tuple[str, str, int], str] = {  # (kernel, label, number of the site) -> reason
    ("tcgen05_gemm.sm_100a", "barrier removed", 2): _LATER,
    ("tcgen05_gemm_pair.sm_103a", "barrier removed", 2): _LATER,
    ("mxf8_gemm.sm_107a", "barrier removed", 2): _LATER,
    ("nvf4_gemm.sm_100a", "barrier removed", 2): _LATER,
    ("clc_gemm.sm_100a", "barrier removed", 3): _LATER,
    ("tcgen05_gemm_pair.sm_103a", "barrier removed", 0): "the cluster barrier that follows orders the same",
    ("tcgen05_gemm_pair.sm_103a", "cluster wait removed", 1): "the dealloc of a pair is itself collective",
    ("mxf8_gemm.sm_107a", "mbarrier wait removed", 0): _ONE_TILE,
    ("mxf8_gemm.sm_107a", "mbarrier tested, not waited for", 0): _ONE_TILE,
    ("mxf8_gemm.sm_107a", "init count one too high", 1): _ONE_TILE,
    ("mxf8_gemm.sm_107a", "tcgen05 commit removed", 0): _ONE_TILE,
    ("mxf8_gemm.sm_107a", "accumulator always cleared", 0): "the first MMA of the only tile clears it anyway",
    ("mxf8_gemm.sm_107a", "scale id of A dropped", 0): _ZERO,
    ("mxf8_gemm.sm_107a", "scale id of B dropped", 0): _ZERO,
    ("nvf4_gemm.sm_100a", "scale id of A dropped", 0): _ZERO,
    ("nvf4_gemm.sm_100a", "scale id of B dropped", 0): _ZERO,
    ("clc_gemm.sm_100a", "init count one too high", 7): "of three tiles only one uses the second accumulator",
}  # fmt: skip


def mutants_of(kernel: str, recorded: dict) -> list[Mutant]:
    """Every mutant of one recording, in the order of the tables."""
    lines = recorded["ptx"].split("\n")
    statements = [re.sub(r"\s+", " ", re.sub(r"//.*", "", text)).strip() for text in lines]
    made = []
    for family in FAMILIES:
        pattern = re.compile(family.pattern)
        sites = [i for i, statement in enumerate(statements) if pattern.fullmatch(statement)][: family.limit]
        for number, i in enumerate(sites):
            if (kernel, family.label, number) in HARMLESS:
                continue
            new = family.rewrite(pattern.fullmatch(statements[i]))
            if new == statements[i]:
                continue
            text = "\n".join([*lines[:i], new, *lines[i + 1 :]])
            made.append(Mutant(family.group, kernel, family.label, i + 1, statements[i], text, None))
    parameters = [bytes.fromhex(p) for p in recorded["parameters"]]
    for group, label, rewrite in MAP_FAMILIES:
        maps = [i for i, raw in enumerate(parameters) if len(raw) == 128]
        for number, i in enumerate(maps):
            if (kernel, label, number) not in HARMLESS:
                edited = [rewrite(raw) if i == j else raw for j, raw in enumerate(parameters)]
                made.append(Mutant(group, kernel, label, -i, f"parameter {i}", None, edited))
    return made


def sample(mutants: list[Mutant], count: int = 250, seed: int = 0) -> list[Mutant]:
    """`count` mutants, the same for the same seed: one of every family in every kernel, then others at random."""
    mixed = list(mutants)
    random.Random(seed).shuffle(mixed)
    first: dict[tuple[str, str], Mutant] = {}
    for mutant in mixed:
        first.setdefault((mutant.kernel, mutant.label), mutant)
    taken = list(first.values())
    names = {id(mutant) for mutant in taken}
    return taken + [mutant for mutant in mixed if id(mutant) not in names][: max(count - len(taken), 0)]
