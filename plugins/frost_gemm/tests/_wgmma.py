"""Hopper GEMMs without the GPU: compiled for sm_90a, executed in the emulator, compared with the numpy executor.

``run`` makes operands of small integers, so that every sum is exact whatever its order. Rows of memory are padded to 16 bytes: M, N
and K may be anything.
"""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import ptx_emulator
import torch
from frost_gemm import compile as compiling
from frost_gemm.facts import arch_facts
from frost_gemm.ir import Gemm, Matrix, Program, Ref, Store, argument_words
from frost_gemm.layout import plan_layout
from frost_gemm.reference import execute, rounded

from cudnn_core import CompileCache, DeviceInfo, HostBlock

TORCH = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int32": torch.int32, "int8": torch.int8,
    "uint8": torch.uint8, "boolean": torch.uint8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
ENGINE = "frost_gemm:sm90_wgmma@1"


def facts(sms=132):
    return replace(arch_facts(DeviceInfo.preset("H200")), sm_count=sms)


def plain(
    a="bfloat16", b=None, out="float32", a_major="k", b_major="k", store_major="n", batched=(True, True), **options
):
    """C = A B^T."""
    accumulate = "int32" if a == "int8" else "float32"
    return Program(
        a=(Matrix(a, a_major, batched[0]),),
        b=(Matrix(b or a, b_major, batched[1]),),
        gemms=(Gemm(dtype=accumulate),),
        stores=(Store(Ref("acc", 0), out, store_major),),
        accumulate=accumulate,
        **options,
    )


@functools.cache
def _cache():
    return CompileCache("frost_gemm", root=Path(tempfile.mkdtemp(prefix="frost-tests-")))


@functools.cache
def compiled(program, config, sms):
    made = facts(sms)
    return compiling.compiled(program, config, plan_layout(program, config, made), made, ENGINE, cache=_cache())


class Operands:
    """The tensors of a launch, and their values as float64."""

    def __init__(self, program, mnkl, seed, low, high):
        self.program, self.mnkl = program, mnkl
        self.rng, self.low, self.high = np.random.default_rng(seed), low, high
        self.memory, self.tensors, self.scalars = [], {}, {}
        m, n, k, batch = mnkl
        for group, members, rows in (("a", program.a, m), ("b", program.b, n)):
            for i, member in enumerate(members):
                self.tensor(
                    f"{group}{i}", member.dtype, (batch if member.batched else 1, rows, k), member.major, fill=True
                )
        for i, aux in enumerate(program.aux):
            keep = {"scalar": (0, 0), "row": (1, 0), "col": (0, 1), "full": (1, 1)}[aux.kind]
            shape = (batch if aux.batched else 1, m if keep[0] else 1, n if keep[1] else 1)
            self.tensor(f"aux{i}", aux.dtype, shape, aux.major, fill=True)
            if aux.by_value:
                self.scalars[f"aux{i}"] = self.tensors[f"aux{i}"].contiguous().view(torch.uint8).numpy().tobytes()
        for i, store in enumerate(program.stores):
            self.tensor(f"store{i}", store.dtype, (batch, m, n), store.major)
        for i, reduction in enumerate(program.reductions):
            shape = tuple(
                1 if axis in reduction.axes else extent for axis, extent in zip("lmn", (batch, m, n), strict=True)
            )
            self.tensor(f"reduction{i}", reduction.dtype, shape, "n")

    def tensor(self, name, dtype, shape, major, fill=False):
        """[L, rows, columns]; ``major`` "m" and "mn" are the rows."""
        turned = major in ("m", "mn")
        batch, lines, extent = (shape[0], shape[2], shape[1]) if turned else shape
        kind = TORCH[dtype]
        memory = torch.zeros((batch, lines, -(-extent // 16) * 16), dtype=kind)
        if fill:
            memory.copy_(torch.from_numpy(self.rng.integers(self.low, self.high, memory.shape)).to(kind))
        self.memory.append(memory)
        held = memory[:, :, :extent]
        self.tensors[name] = held.transpose(1, 2) if turned else held

    def values(self, group, count):
        return [self.tensors[f"{group}{i}"].double().numpy() for i in range(count)]

    def written(self):
        """What the kernel overwrites, whole."""
        names = [name for name in self.tensors if name.startswith(("store", "reduction"))]
        return [memory for name, memory in zip(self.tensors, self.memory, strict=True) if name in names]

    def block(self):
        index = argument_words(self.program)
        words = np.zeros(len(index), np.int64)
        for name, value in zip("mnkl", self.mnkl, strict=True):
            words[index[name]] = value
        addresses, values = [], []
        for name, held in self.tensors.items():
            place = index[f"{name}.address"]
            if name in self.scalars:
                values.append((8 * place, self.scalars[name]))
                continue
            words[place] = held.data_ptr()
            addresses.append(8 * place)
            strides = (0 if extent == 1 else stride for extent, stride in zip(held.shape, held.stride(), strict=True))
            words[[place + 3, place + 1, place + 2]] = list(strides)
        return HostBlock(words.tobytes(), tuple(addresses), tuple(values))


def run(program, config, m=136, n=72, k=136, batch=1, *, sms=4, seed=0, schedule="late", strict=False, low=-3, high=4):
    """Launch ``program`` on random integers of [low, high) and check every output: equal, and no finding of the emulator."""
    operands = Operands(program, (m, n, k, batch), seed, low, high)
    report = ptx_emulator.launch(
        compiled(program, config, sms).artifact, operands.block(), None, buffers=operands.memory, outputs=operands.written(),
        check="raise", seed=seed, schedule=schedule, strict=strict,
    )  # fmt: skip
    counts = len(program.a), len(program.b), len(program.aux)
    want = execute(
        program, *(operands.values(group, count) for group, count in zip(("a", "b", "aux"), counts, strict=True))
    )
    stores = [rounded(values, store.dtype) for values, store in zip(want.stores, program.stores, strict=True)]
    for group, arrays in (("store", stores), ("reduction", want.reductions)):
        for found, expected in zip(operands.values(group, len(arrays)), arrays, strict=True):
            np.testing.assert_array_equal(found, expected)
    return report
