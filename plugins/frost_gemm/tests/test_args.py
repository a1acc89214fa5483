"""Words of the argument block as a kernel receives them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
from _epilogue import block, compile_host
from cutlass import Int32, Int64, cute
from frost_gemm.ir import Aux, Gemm, Matrix, Program, Reduction, Ref, Store, argument_words
from frost_gemm.kernels.args import ELEMENTS, Args, matrix, output, unpack
from ptx_emulator import launch

ACC = Ref("acc", 0)
PROGRAM = Program(
    a=(Matrix("bfloat16", "k"), Matrix("fp8_e4m3", "mn", batched=False)),
    b=(Matrix("bfloat16", "mn", alignment=8),),
    gemms=(Gemm(),),
    aux=(
        Aux("float32", "scalar", by_value=True),
        Aux("float32", "scalar", True, alignment=4),
        Aux("bfloat16", "row", False, "m", alignment=16),
        Aux("bfloat16", "col", True, "n", alignment=2),
        Aux("int8", "full", True, "n", alignment=16),
    ),
    stores=(Store(ACC, "int32", "n"), Store(ACC, "bfloat16", "m"), Store(ACC, "float32", "")),
    reductions=(Reduction(ACC, "ADD", "n"), Reduction(ACC, "ADD", "lmn")),
)
SHAPE = (24, 40, 56, 3)


class Echo:
    """Writes what it finds in its arguments to store 0, in order."""

    def __init__(self):
        self.expected = []  # (word, or a constant) in the order of the kernel's output
        self.alignments = {}

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        args = unpack(PROGRAM, words)
        self.note(args)
        self.kernel(args).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    def note(self, args):
        assert matrix(args, "b", 0) is args.b[0]
        assert output(args, 1) is args.store[1]
        for name, tensors in (("a", args.a), ("b", args.b), ("store", args.store)):
            self.alignments |= {f"{name}{i}": tensor.iterator.alignment for i, tensor in enumerate(tensors)}

    @cute.kernel
    def kernel(self, args: Args):
        target = args.store[0]
        for place, value in enumerate(self.listed(args)):
            target[place // 40, place % 40, 0] = Int32(value)
        target[23, 38, 2] = Int32(args.aux[0])
        target[23, 39, 2] = args.workspace.toint().to(Int32)

    def listed(self, args):
        found = [args.m, args.n, args.k, args.l]
        self.expected = ["m", "n", "k", "l"]
        for name in ("a", "b", "aux", "store", "reduction"):
            for i, tensor in enumerate(getattr(args, name)):
                if isinstance(tensor, cute.Tensor):
                    found += [*tensor.shape, *tensor.stride]
                    self.expected += tensor_words(name, i, tensor)
        return found


def tensor_words(name, index, tensor):
    """The words that the shape and the strides of a tensor come from; constants for what is static."""
    extents = ("n" if name == "b" else "m", "k" if name in ("a", "b") else "n", "l")
    shape = [extent if isinstance(extent, int) else word for extent, word in zip(tensor.shape, extents, strict=True)]
    words = [f"{name}{index}.{word}" for word in ("row", "col", "batch")]
    return shape + [
        stride if isinstance(stride, int) else word for stride, word in zip(tensor.stride, words, strict=True)
    ]


@pytest.fixture(scope="module")
def echoed():
    echo = Echo()
    function = compile_host(echo.host, "sm_90a")
    memory, out = np.zeros(64, np.uint8), np.zeros((3, 24, 40), np.int32)
    operands = {}
    for place, word in enumerate(argument_words(PROGRAM)):
        if word.endswith(".address"):
            operands[word.removesuffix(".address")] = (memory, tuple(16 * (10 * place + i) for i in range(3)))
    operands["aux0"] = np.float32(-7).tobytes()
    operands["store0"] = (out, (40, 1, 960))
    words = np.frombuffer(bytearray(block(PROGRAM, SHAPE, operands).data), np.int64)
    launch(function, block(PROGRAM, SHAPE, operands), None, buffers=[memory, out], check="raise")
    return echo, out, {name: int(words[index]) for name, index in argument_words(PROGRAM).items()}


def test_every_extent_and_stride_reaches_its_tensor(echoed):
    echo, out, words = echoed
    want = [words[word] if isinstance(word, str) else word for word in echo.expected]
    np.testing.assert_array_equal(out.reshape(-1)[: len(want)], want)
    assert len(want) == 4 + 6 * (3 + 4 + 3 + 2)  # by-value scalars are no tensors


def test_what_the_program_fixes_is_static(echoed):
    echo, _, _ = echoed
    names = [word for word in echo.expected if isinstance(word, str)]
    dynamic = {name for name in names if "." in name}
    assert dynamic == {
        *("a0.row", "a0.batch", "a1.col", "b0.col", "b0.batch", "aux1.batch", "aux3.batch", "aux4.row", "aux4.batch"),
        *("store0.row", "store0.batch", "store1.col", "store1.batch", "store2.row", "store2.col", "store2.batch"),
        *("reduction0.row", "reduction0.batch"),
    }
    assert echo.alignments == {"a0": 16, "a1": 16, "b0": 8, "store0": 16, "store1": 16, "store2": 4}


def test_a_by_value_scalar_is_its_value(echoed):
    _, out, _ = echoed
    assert out[2, 23, 38] == -7
    assert out[2, 23, 39] == 0  # no workspace


def test_every_type_of_a_program_has_elements():
    from frost_gemm.layout import BITS

    assert ELEMENTS.keys() == BITS.keys()
    assert all(ELEMENTS[name].width == bits for name, bits in BITS.items())
