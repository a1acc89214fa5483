"""Every Blackwell and Rubin part compiles every kind of program under every kind of configuration, for its own target.

A covering sample: every value of every axis appears, in random company. What the compiler made is read back from the PTX and from the
header of the cubin.
"""

import random
import re
import struct
from dataclasses import replace

import pytest
from frost_gemm.ir import Aux, Gemm, Matrix, Op, Program, Reduction, Ref, Store
from frost_gemm.layout import LayoutError, plan_layout

pytest.importorskip("cutlass")
from _tcgen05 import compiled, facts, tile

ACC, VAL, AUX = (lambda i, kind=kind: Ref(kind, i) for kind in ("acc", "val", "aux"))
EM_CUDA, EIFMT_SVAL, EIATTR_FRAME_SIZE = 190, 4, 17


def made(a, b, majors, **parts):
    accumulate = "int32" if a == "int8" else "float32"
    gemms, stored = parts.pop("gemms", 1), parts.pop("weights", "")
    return Program(
        a=(Matrix(a, majors[0]),),
        b=tuple(weights(b, majors[1], stored) for _ in range(gemms)),
        gemms=tuple(Gemm(0, i, accumulate) for i in range(gemms)),
        accumulate=accumulate,
        **parts,
    )


def weights(dtype, major, stored):
    """B as it is multiplied, or made of ``stored`` elements."""
    if not stored:
        return Matrix(dtype, major)
    return Matrix(stored, major, mma_dtype=dtype, prologue=(Op("neg", (Ref("val", -1),), dtype),))


def float_op(name, *args, **attrs):
    return Op(name, args, "float32", attrs=tuple(sorted(attrs.items())))


EPILOGUES = {
    "plain": {"stores": (Store(ACC(0), "float16"),)},
    "bias, gelu": {
        "aux": (Aux("bfloat16", "col", alignment=16),),
        "ops": (float_op("add", ACC(0), AUX(0)), float_op("gelu", VAL(0))),
        "stores": (Store(VAL(1), "bfloat16"),),
    },
    "alpha, beta": {
        "aux": (Aux("float32", "scalar", by_value=True), Aux("float32", "scalar"), Aux("bfloat16", "full", True, "n", alignment=16)),
        "ops": (float_op("mul", ACC(0), AUX(0)), float_op("mul", AUX(2), AUX(1)), float_op("add", VAL(0), VAL(1))),
        "stores": (Store(VAL(2), "bfloat16"),),
    },
    "SwiGLU": {
        "gemms": 2,
        "ops": (float_op("swish", ACC(0), swish_beta=1.0), float_op("mul", VAL(0), ACC(1))),
        "stores": (Store(VAL(1), "bfloat16"), Store(ACC(0), "bfloat16")),
    },
    "quantised, amax": {
        "aux": (Aux("float32", "row", alignment=16), Aux("float32", "scalar")),
        "ops": (float_op("mul", ACC(0), AUX(0)), float_op("mul", VAL(0), AUX(1))),
        "stores": (Store(VAL(1), "fp8_e4m3"),),
        "reductions": (Reduction(VAL(0), "AMAX", "lmn"),),
    },
    "sums of rows and columns": {
        "stores": (Store(ACC(0), "float32"),),
        "reductions": (Reduction(ACC(0), "ADD", "n"), Reduction(ACC(0), "AVG", "lm")),
    },
    "int8 weights": {"weights": "int8", "stores": (Store(ACC(0), "float16"),)},
    "taps of both majors": {
        "aux": (Aux("float16", "full", False, "m", alignment=4),),
        "ops": (float_op("relu", ACC(0), lower_clip=0.0), float_op("cmp_gt", VAL(0), AUX(0))),
        "stores": (Store(ACC(0), "float32"), Store(VAL(0), "bfloat16", "m"), Store(VAL(1), "boolean"), Store(VAL(0), "float16", "n", 2)),
    },
}  # fmt: skip

AXES = {
    "device": ("B200", "B300", "R200"),
    "types": (
        ("bfloat16", "bfloat16"), ("float16", "float16"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"), ("int8", "int8"),
    ),
    "majors": (("k", "k"), ("mn", "k"), ("k", "mn"), ("mn", "mn")),
    "epilogue": tuple(EPILOGUES),
    "pair": (False, True),
    "m": (128, 256),
    "n": (16, 32, 64, 96, 128, 192, 256),
    "k": (64, 128, 256),
    "cluster": ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4)),
    "split_k": (1, 2, 4),
}  # fmt: skip


def sample(count):
    """``count`` kernels that fit, none twice; each axis goes through all its values before one comes again."""
    rng = random.Random(5)
    rest = {axis: [] for axis in AXES}
    found, seen = [], set()
    while len(found) < count:
        choice = {}
        for axis, values in AXES.items():
            rest[axis] = rest[axis] or rng.sample(values, len(values))
            choice[axis] = rest[axis].pop()
        if choice["split_k"] > 1 and rng.random() < 0.6:
            choice["split_k"] = 1  # the plain kernels are the ones in use
        built = _built(choice)
        if built is not None and built not in seen:
            seen.add(built)
            found.append((choice, built))
    for axis, values in AXES.items():
        assert {choice[axis] for choice, _ in found} == set(values), axis
    return found


def _built(choice):
    program = made(*choice["types"], choice["majors"], **EPILOGUES[choice["epilogue"]])
    config = tile(
        choice["m"], n=choice["n"], k=choice["k"], cluster_m=choice["cluster"][0], cluster_n=choice["cluster"][1], pair=choice["pair"],
        split_k=choice["split_k"],
    )  # fmt: skip
    try:
        plan_layout(program, config, facts(choice["device"]))
    except LayoutError:
        return None
    return program, config, choice["device"]


def label(item):
    choice, _ = item
    words = [choice["device"], "x".join(choice["types"]), "".join(choice["majors"]), choice["epilogue"]]
    return " ".join(
        map(
            str,
            [
                *words,
                choice["m"],
                choice["n"],
                choice["k"],
                choice["cluster"],
                choice["split_k"],
                "pair" * choice["pair"],
            ],
        )
    )


def check(program, config, device):
    kernel = compiled(program, config, device)
    target = facts(device).target
    assert re.findall(r"^\.target (\S+)", kernel.ptx, re.MULTILINE) == [target]
    assert kernel.cubin[:4] == b"\x7fELF"
    machine, flags = struct.unpack_from("<H", kernel.cubin, 18)[0], struct.unpack_from("<I", kernel.cubin, 48)[0]
    assert machine == EM_CUDA
    assert f"sm_{flags >> 8 & 0xFF}a" == target
    assert f"tcgen05.mma.cta_group::{config.cta_group}.kind::{_kind(program)}" in kernel.ptx
    assert set(frames(kernel.cubin)) == {0}, "bytes of local memory: registers do not suffice"
    return kernel


def frames(cubin):
    """Bytes of local memory of every function of a cubin: EIATTR_FRAME_SIZE of its .nv.info sections."""
    start, (size, count, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    for name, _, _, _, offset, length in sections:
        if not cubin.startswith(b".nv.info", sections[names][4] + name):
            continue
        at = offset
        while at < offset + length:
            kind, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if (kind, attribute) == (EIFMT_SVAL, EIATTR_FRAME_SIZE):
                yield struct.unpack_from("<II", cubin, at + 4)[1]
            at += 4 + (value if kind == EIFMT_SVAL else 0)


def _kind(program):
    return {"bfloat16": "f16", "float16": "f16", "int8": "i8"}.get(program.a[0].mma_dtype, "f8f6f4")


GATE = sample(48)


@pytest.mark.parametrize("item", GATE, ids=label)
def test_kernel_compiles_for_its_target(item):
    check(*item[1])


@pytest.mark.L2
@pytest.mark.parametrize("item", sample(240)[48:], ids=label)
def test_more_kernels_compile_for_their_target(item):
    check(*item[1])


def test_kernels_of_two_parts_are_made_in_one_process():
    """Each for its own target, whatever was compiled before; the third time is the first kernel again."""
    program, config = made("fp8_e4m3", "fp8_e4m3", ("k", "k"), **EPILOGUES["plain"]), tile()
    kernels = {device: check(program, config, device) for device in ("B200", "R200", "B300")}
    assert len({kernel.cubin for kernel in kernels.values()}) == 3
    assert compiled(program, config, "B200") is kernels["B200"]


@pytest.mark.parametrize(("device", "k_bytes"), [("B200", 32), ("B300", 32), ("R200", 64)])
def test_fp8_uses_the_widest_instruction_of_the_part(device, k_bytes):
    """A stage of 128 bytes of K takes 128 / k_bytes instructions."""
    program = made("fp8_e4m3", "fp8_e4m3", ("k", "k"), **EPILOGUES["plain"])
    assert compiled(program, tile(), device).ptx.count("tcgen05.mma.cta_group::1") == 128 // k_bytes


@pytest.mark.parametrize("epilogue", ["alpha, beta", "quantised, amax", "int8 weights"])
def test_nothing_touches_global_memory_or_takes_a_tile_before_the_launch_ahead_has_ended(epilogue):
    """Each warp waits before its role begins; from the launch before, others may still read what this one writes."""
    ptx = compiled(made("bfloat16", "bfloat16", ("k", "k"), **EPILOGUES[epilogue]), tile(), "R200").ptx
    (body,) = (entry for entry in ptx.split(".entry")[1:] if "tcgen05.mma" in entry)
    before, wait, after = body.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    touches = re.compile(r"\b(?:ld|st|red|atom)\.(?:[a-z_:]+\.)*global|cp\.async\.bulk\.tensor|try_cancel")
    assert wait
    assert not touches.search(before)
    assert touches.search(after)


def collectors(program, config, device):
    """What the MMAs say about the collectors, in the order in which they are issued, and how often."""
    ptx = compiled(program, config, device).ptx
    return re.findall(r"tcgen05\.mma\.\S*?kind::\w+\.?(\S*) \[", ptx)


DISCARD, KEEP_B = (
    "collector::a::discard",
    ["collector::a::discard.collector::b::fill", "collector::a::discard.collector::b::lastuse"],
)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_two_blocks_of_rows_share_b_on_10_7_alone(dtype, pair):
    """The first MMA of each K block fills the collector of B, the second one is its last use; one block keeps nothing."""
    program = made(dtype, dtype, ("k", "k"), **EPILOGUES["plain"])
    high, low = tile(256, pair=pair), tile(pair=pair)
    steps = {"bfloat16": 4, "fp8_e4m3": 2}[dtype]
    assert collectors(program, high, "R200") == steps * KEEP_B
    assert collectors(program, low, "R200") == steps * [DISCARD]
    for device in ("B200", "B300"):
        assert set(collectors(program, high, device)) == {DISCARD}


@pytest.mark.parametrize("device", ["B200", "B300", "R200"])
def test_gate_and_up_share_a_on_every_part(device):
    program = made("bfloat16", "bfloat16", ("k", "k"), **EPILOGUES["SwiGLU"])
    assert collectors(program, tile(), device) == 4 * ["collector::a::fill", "collector::a::lastuse"]


@pytest.mark.parametrize(("device", "n", "words"), [("R200", 144, ".exclusive"), ("R200", 128, ""), ("B200", 144, "")])
def test_all_columns_of_tensor_memory_are_one_exclusive_allocation(device, n, words):
    ptx = compiled(made("bfloat16", "bfloat16", ("k", "k"), **EPILOGUES["plain"]), tile(256, n=n), device).ptx
    assert re.findall(r"tcgen05\.(alloc|dealloc)(\.exclusive)?\.", ptx) == [("alloc", words), ("dealloc", words)]


def test_a_longer_name_for_every_choice_that_changes_the_kernel():
    program = made("bfloat16", "bfloat16", ("k", "k"), **EPILOGUES["plain"])
    names = {
        compiled(program, config, "B200").name
        for config in (tile(), tile(pair=True), tile(split_k=2), replace(tile(), tile_n=128))
    }
    assert len(names) == 4
