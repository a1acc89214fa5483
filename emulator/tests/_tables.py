"""The recorded tables as PTX programs: one kernel for every opcode and every matrix case of `_h200`, with its inputs.

`programs()` are those of the kept recordings, `programs(seeded=True)` the same ones with inputs from seeds. record_tables.py
runs them on a GPU, test_record_tables.py in the emulator. PTX ISA: "Matrix fragments", "wgmma.mma_async",
"Warp-level matrix load instruction"; operands are .bN registers, which fit every instruction type of their size.
"""

import hashlib
import re
import runpy
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

_H200 = runpy.run_path(str(Path(__file__).with_name("_h200.py")))
LANES, load, opcodes, recorded = (_H200[name] for name in ("LANES", "load", "opcodes", "recorded"))
HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
IMAGE = 49152  # bytes of a wgmma's shared memory
SAMPLE = 27  # of the threads of a wgmma whose results are kept
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
# codes of -4 to 4, whose sums of products are exact, where no byte is a number of its own
_SMALL = {"f16": (np.float16, 0), "bf16": (np.float32, 16), "tf32": (np.float32, 0)}
_FP8 = {"e4m3": 0x38, "e5m2": 0x3C}  # code of 1.0


class Program(NamedTuple):
    """`text` is an entry called `name`: parameters are the addresses of the output and of the inputs."""

    name: str
    what: str
    text: str
    inputs: tuple[np.ndarray, ...]
    output: np.ndarray
    threads: int
    shared: int
    case: dict


def programs(seeded=False):
    """Every recorded program, those of opcodes first."""
    made = [_numeric(op, i, seeded) for i, op in enumerate(opcodes())]
    cases, blob = load("h200_matrix")
    make = {"wgmma": _wgmma, "mma": _mma, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix}
    for i, case in enumerate(cases):
        made.append(make[case["what"]](case, f"m{i}", np.frombuffer(blob, np.uint8), seeded))
    return made


def kept(program):
    """What the H200 returned: an array for an opcode, ldmatrix, stmatrix and mma; (sample, digest) for wgmma."""
    if program.what in opcodes():
        return recorded(program.what)[1]
    start, size = program.case["out"]
    raw = np.frombuffer(load("h200_matrix")[1], np.uint8)[start : start + size]
    return (raw, program.case["digest"]) if "digest" in program.case else raw


def same(program, result):
    """Whether `result` is bit for bit what was kept."""
    expected = kept(program)
    if isinstance(expected, tuple):
        return digest(result) == expected[1] and sample(result).tobytes() == expected[0].tobytes()
    return result.tobytes() == expected.tobytes()


def digest(result):
    """Of all registers of a wgmma."""
    return hashlib.sha256(result.tobytes()).hexdigest()[:16]


def sample(result):
    """The registers of a wgmma that are kept."""
    return result.reshape(128, -1)[::SAMPLE]


# --- seeds
def _words(name, count):
    """`count` 64-bit words: raw PCG64, the same in every numpy."""
    return np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)


def _operands(op, types):
    """A quarter each of special values, of floats near 1, of small integers, and of random bits."""
    arrays = []
    for i, dtype in enumerate(types):
        width = np.dtype(dtype).itemsize * 8
        words = _words(f"{op}|{i}", LANES)
        mantissa, bias = {16: (10, 15), 32: (23, 127), 64: (52, 1023)}[width]
        top, infinity = 1 << (width - 1), (2 * bias + 1) << mantissa
        special = [0, top, 1, top | 1, top - 1, 2 * top - 1, infinity, top | infinity, infinity | 1, infinity - 1, 1 << mantissa,
                   (1 << mantissa) - 1, bias << mantissa, 8, 16, 31, 32, 63, 255, 0x7F80, 0x8000, 0xFF81]  # fmt: skip
        near = ((bias - 8 + words % np.uint64(17)).astype(np.uint64) << np.uint64(mantissa)) | (
            words >> np.uint64(20) & np.uint64((1 << mantissa) - 1)
        )
        lanes = np.arange(LANES)
        kinds = (lanes + lanes // 4 * i) % 4  # so that each kind of one source meets each of another
        values = np.where(
            kinds == 0, np.array(special, np.uint64)[(words >> np.uint64(8)) % np.uint64(len(special))], words
        )
        values = np.where(kinds == 1, near | (words >> np.uint64(63)) << np.uint64(width - 1), values)
        values = np.where(kinds == 2, words % np.uint64(66), values)
        arrays.append((values & np.uint64((1 << width) - 1)).astype(dtype))
    return arrays


def _elements(name, kind, size):
    """`size` bytes of elements: -4 to 4, or any integer."""
    words = _words(name, size)
    if kind in ("s8", "u8"):
        return (words >> np.uint64(13)).astype(np.uint8)
    numbers = (words % np.uint64(9)).astype(np.int64) - 4
    if kind in _SMALL:
        dtype, shift = _SMALL[kind]
        codes = numbers.astype(dtype)
        if shift:
            codes = (codes.view(np.uint32) >> shift).astype(np.uint16)
        return codes.view(np.uint8)[:size]
    one, mantissa = _FP8[kind], 3 if kind == "e4m3" else 2
    exponent = np.frexp(np.maximum(np.abs(numbers), 1).astype(float))[1] - 1
    codes = one + (exponent << mantissa) + ((np.abs(numbers) - (1 << exponent)) << mantissa >> exponent)
    return np.where(numbers == 0, 0, codes | np.where(numbers < 0, 128, 0)).astype(np.uint8)


# --- opcodes
def _numeric(op, index, seeded):
    sources, result = recorded(op)
    if seeded:
        sources = _operands(op, [a.dtype for a in sources])
    name, _, table = op.partition("/")
    types = [8 * a.dtype.itemsize for a in sources]
    predicate = result.dtype == bool
    width = 16 if predicate else 8 * result.dtype.itemsize
    registers = " ".join(f".reg .b{w} %s{i};" for i, w in enumerate(types))
    loads = "\n".join(f" {_element(f'p{i}', w)} ld.global.b{w} %s{i}, [%a];" for i, w in enumerate(types))
    arguments = ", ".join([f"%s{i}" for i in range(len(types))] + ([table] if table else []))
    body = f"{name} {'%q' if predicate else '%d'}, {arguments};" + (" selp.b16 %d, 1, 0, %q;" if predicate else "")
    text = f"""
.visible .entry n{index}({_parameters(len(types))})
{{
 .reg .pred %q; .reg .b32 %t; .reg .b64 %a, %o; .reg .b{width} %d; {registers}
 mov.u32 %t, %tid.x;
{loads}
 {body}
 {_element("out", 8 if predicate else width)} st.global.{"u8" if predicate else f"b{width}"} [%a], %d;
 ret;
}}
"""
    return Program(f"n{index}", op, text, tuple(sources), np.zeros_like(result), LANES, 0, {})


def _parameters(count):
    return ", ".join(f".param .u64 {name}" for name in ["out", *(f"p{i}" for i in range(count))])


def _element(parameter, width):
    """%a: the address of thread %t's element."""
    return f"ld.param.u64 %a, [{parameter}]; mul.wide.u32 %o, %t, {width // 8}; add.s64 %a, %a, %o;"


# --- matrices
def _bytes(blob, reference):
    return blob[reference[0] : sum(reference)]


def _rows(count, prefix, what="b32"):
    return f".reg .{what} %{prefix}<{max(count, 1)}>;"


def _list(prefix, count):
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def _thread_words(parameter, count, instruction, prefix):
    """Move `count` words of each thread between global memory and registers."""
    lines = [f" ld.param.u64 %a, [{parameter}]; mul.wide.u32 %o, %t, {4 * count}; add.s64 %a, %a, %o;"]
    for i in range(count):
        at, register = f"[%a+{4 * i}]", f"%{prefix}{i}"
        lines.append(
            f" ld.global.b32 {register}, {at};" if instruction == "ld" else f" st.global.b32 {at}, {register};"
        )
    return "\n".join(lines)


def _fill(parameter, size, threads):
    """Copy `size` bytes to shared memory, a word for each thread at a time; then everybody sees them."""
    lines = [f" ld.param.u64 %a, [{parameter}]; mul.wide.u32 %o, %t, 4; add.s64 %a, %a, %o; shl.b32 %b, %t, 2; add.u32 %b, %m, %b;",
             f" mov.u32 %i, 0;\nfill: ld.global.b32 %w, [%a]; st.shared.b32 [%b], %w; add.s64 %a, %a, {4 * threads};",
             f" add.u32 %b, %b, {4 * threads}; add.u32 %i, %i, {4 * threads}; setp.lt.u32 %q, %i, {size}; @%q bra fill;",
             " fence.proxy.async; bar.sync 0;"]  # fmt: skip
    return "\n".join(lines)


def _entry(name, inputs, body, registers=""):
    return f"""
.visible .entry {name}({_parameters(inputs)})
{{
 .reg .pred %q, %z; .reg .b32 %t, %m, %b, %i, %w; .reg .b64 %a, %o; {registers}
 mov.u32 %t, %tid.x; mov.u32 %m, smem;
{body}
 ret;
}}
"""


def _wgmma(case, name, blob, seeded):
    kind, n, k = case["type"], case["n"], case["k"]
    image = _elements(f"{kind} image", kind, IMAGE) if seeded else _bytes(blob, case["image"])
    inputs = [image]
    count, integer = n // 2, kind in ("s8", "u8")
    form = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{'s32' if integer else 'f32'}.{kind}.{kind}"
    flags = ", %z" if integer else ", %z, 1, 1"
    if BITS[kind] == 16:
        flags += f", {case['tb']}" if case["rs"] else f", {case['ta']}, {case['tb']}"
    descriptor = "mov.b64 %{0}, {1}; add.s64 %{0}, %{0}, %c;"
    body = [_fill("p0", IMAGE, 128), " cvt.u64.u32 %c, %m; shr.u64 %c, %c, 4; setp.ne.b32 %z, %m, %m;"]
    body.append(" " + descriptor.format("y", case["b"]))
    if case["rs"]:
        inputs.append(_elements(f"{kind} a", kind, 2048) if seeded else _bytes(blob, case["a"]))
        body.append(_thread_words("p1", 4, "ld", "r"))
        a = _list("r", 4)
    else:
        body.append(" " + descriptor.format("x", case["a"]))
        a = "%x"
    body.append(f" wgmma.fence.sync.aligned;\n {form} {_list('d', count)}, {a}, %y{flags};")
    body.append(" wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    body.append(_thread_words("out", count, "st", "d"))
    registers = f"{_rows(count, 'd')} {_rows(4, 'r')} .reg .b64 %c, %x, %y;"
    text = _entry(name, len(inputs), "\n".join(body), registers)
    output = np.zeros((128, count), np.uint32)
    return Program(name, _title(case), text, tuple(inputs), output, 128, IMAGE, case)


def _mma(case, name, blob, seeded):
    kind, acc, na, nb, nc = (case[key] for key in ("type", "acc", "na", "nb", "nc"))
    size = 128 * (na + nb)
    image = _elements(f"{kind} {case['shape']}", kind, size) if seeded else _bytes(blob, case["image"])
    form = f"mma.sync.aligned.{case['shape']}.row.col.{acc}.{kind}.{kind}.{acc}"
    zeros = "\n".join(f" mov.b32 %d{i}, 0;" for i in range(nc))
    a, b = "{" + ", ".join(f"%r{i}" for i in range(na)) + "}", "{" + ", ".join(f"%r{na + i}" for i in range(nb)) + "}"
    d = _list("d", nc)
    body = f"{_thread_words('p0', na + nb, 'ld', 'r')}\n{zeros}\n {form} {d}, {a}, {b}, {d};\n{_thread_words('out', nc, 'st', 'd')}"
    text = _entry(name, 1, body, f"{_rows(na + nb, 'r')} {_rows(nc, 'd')}")
    return Program(name, _title(case), text, (image,), np.zeros((32, nc), np.uint32), 32, 0, case)


def _matrix_form(case, instruction):
    return f"{instruction}.sync.aligned.m8n8.x{case['num']}{'.trans' if case['trans'] else ''}.shared.b16"


def _ldmatrix(case, name, blob, seeded):
    num = case["num"]
    image = _elements(_title(case), "u8", 512) if seeded else _bytes(blob, case["image"])
    load_it = f" shl.b32 %b, %t, 4; add.u32 %b, %m, %b; {_matrix_form(case, 'ldmatrix')} {_list('d', num)}, [%b];"
    body = "\n".join([_fill("p0", 512, 32), load_it, _thread_words("out", num, "st", "d")])
    return Program(name, _title(case), _entry(name, 1, body, _rows(num, "d")), (image,), np.zeros((32, num), np.uint32), 32, 512,
                   case)  # fmt: skip


def _stmatrix(case, name, blob, seeded):
    """The output is 512 bytes of shared memory, zero before."""
    num = case["num"]
    image = _elements(_title(case), "u8", 128 * num) if seeded else _bytes(blob, case["image"])
    zeros = "\n".join(f" mov.b32 %d{i}, 0;" for i in range(4))
    clear = " shl.b32 %b, %t, 4; add.u32 %b, %m, %b; st.shared.v4.b32 [%b], {%d0, %d1, %d2, %d3}; bar.sync 0;"
    store = f" {_matrix_form(case, 'stmatrix')} [%b], {_list('r', num)}; bar.sync 0; ld.shared.v4.b32 {{%d0, %d1, %d2, %d3}}, [%b];"
    body = "\n".join([_thread_words("p0", num, "ld", "r"), zeros, clear, store, _thread_words("out", 4, "st", "d")])
    return Program(name, _title(case), _entry(name, 1, body, f"{_rows(num, 'r')} {_rows(4, 'd')}"), (image,),
                   np.zeros((32, 4), np.uint32), 32, 512, case)  # fmt: skip


def _title(case):
    keys = ("what", "shape", "type", "acc", "n", "k", "ta", "tb", "rs", "num", "trans")
    return re.sub(r"\s+", " ", " ".join(str(case.get(key, "")) for key in keys)).strip()
