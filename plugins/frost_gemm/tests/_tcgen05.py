"""Blackwell and Rubin GEMMs without the GPU: compiled for the device's own target, executed in the emulator, compared with numpy.

``run`` makes operands of small integers, so that every sum is exact whatever its order.
"""

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ptx_emulator
import torch
from frost_gemm import compile as compiling
from frost_gemm.config import TileConfig
from frost_gemm.facts import arch_facts
from frost_gemm.ir import Gemm, Matrix, Program, Ref, Store, argument_words
from frost_gemm.layout import plan_layout

from cudnn_core import CompileCache, DeviceInfo, HostBlock

TORCH = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int32": torch.int32, "int8": torch.int8,
    "uint8": torch.uint8, "boolean": torch.uint8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
ENGINE = "frost_gemm:sm100_tcgen05@1"


def facts(device):
    return arch_facts(DeviceInfo.preset(device))


def tile(m=128, n=64, k=128, cluster_m=1, cluster_n=1, pair=False, **knobs):
    """A configuration; with ``pair``, ``m`` and ``cluster_m`` are of one CTA's and of one pair's."""
    group = 2 if pair else 1
    return TileConfig(m * group, n, k, cluster_m * group, cluster_n, cta_group=group, **knobs)


def plain(a="bfloat16", b=None, out="float32", a_major="k", b_major="k", store_major="n", batched=(True, True)):
    """C = A B^T."""
    accumulate = "int32" if a == "int8" else "float32"
    return Program(
        a=(Matrix(a, a_major, batched[0]),),
        b=(Matrix(b or a, b_major, batched[1]),),
        gemms=(Gemm(dtype=accumulate),),
        stores=(Store(Ref("acc", 0), out, store_major),),
        accumulate=accumulate,
    )


@functools.cache
def _cache():
    return CompileCache("frost_gemm", root=Path(tempfile.mkdtemp(prefix="frost-tests-")))


@functools.cache
def compiled(program, config, device):
    made = facts(device)
    return compiling.compiled(program, config, plan_layout(program, config, made), made, ENGINE, cache=_cache())


@dataclass
class Run:
    """What a launch left: ``report``, and ``store`` and ``reduction`` as float64 arrays [L, M, N]."""

    report: ptx_emulator.Report
    a: list
    b: list
    aux: list
    store: list = field(default_factory=list)
    reduction: list = field(default_factory=list)

    def product(self, gemm, a=0, b=0):
        """The exact product of two operands, [L, M, N]."""
        return np.matmul(self.a[a], self.b[b].transpose(0, 2, 1))


def recorded(program, config, device, m, n, k, batch=1):
    """The launches of the host function, without running them; and the layout."""
    tensors = {}
    for group, members, rows in (("a", program.a, m), ("b", program.b, n)):
        for i, member in enumerate(members):
            tensors[f"{group}{i}"] = torch.zeros((batch, rows, k), dtype=TORCH[member.dtype])
    for i, store in enumerate(program.stores):
        tensors[f"store{i}"] = torch.zeros((batch, m, n), dtype=TORCH[store.dtype])
    block = _block(program, (m, n, k, batch), tensors)
    launches = ptx_emulator.record(
        compiled(program, config, device).artifact, block, None, buffers=list(tensors.values())
    )
    return launches, plan_layout(program, config, facts(device))


def run(
    program, config, device="B200", m=136, n=72, k=136, batch=1, *, seed=0, schedule="late", low=-3, high=4, mutant=("", "")
):  # fmt: skip
    """Launch ``program`` on random integers of [low, high). A finding of the emulator is an error.

    ``mutant``: the first one of these texts in the kernel is replaced with the second one.
    """
    rng = np.random.default_rng(seed)
    tensors, arrays = {}, {"a": [], "b": [], "aux": []}

    def tensor(name, dtype, shape, major, values=None):
        """A tensor [L, rows, cols]; ``major`` "n" and "k" are the last axis."""
        held = torch.zeros(shape, dtype=TORCH[dtype]) if values is None else torch.tensor(values).to(TORCH[dtype])
        if major in ("m", "mn"):
            held = held.transpose(1, 2).contiguous().transpose(1, 2)
        tensors[name] = held
        return held

    def integers(shape):
        return rng.integers(low, high, shape).astype(np.float64)

    for group, members, rows in (("a", program.a, m), ("b", program.b, n)):
        for i, member in enumerate(members):
            arrays[group].append(integers((batch if member.batched else 1, rows, k)))
            tensor(f"{group}{i}", member.dtype, None, member.major, arrays[group][-1])
    for i, member in enumerate(program.aux):
        keep = {"scalar": (0, 0), "row": (1, 0), "col": (0, 1), "full": (1, 1)}[member.kind]
        shape = (batch if member.batched else 1, m if keep[0] else 1, n if keep[1] else 1)
        arrays["aux"].append(integers(shape))
        tensor(f"aux{i}", member.dtype, None, member.major, arrays["aux"][-1])
    stores = [tensor(f"store{i}", s.dtype, (batch, m, n), s.major) for i, s in enumerate(program.stores)]
    reductions = []
    for i, member in enumerate(program.reductions):
        shape = tuple(1 if axis in member.axes else extent for axis, extent in zip("lmn", (batch, m, n), strict=True))
        reductions.append(tensor(f"reduction{i}", member.dtype, shape, "n"))

    artifact = compiled(program, config, device).artifact
    assert mutant[0] in artifact.ptx
    report = ptx_emulator.launch(
        artifact, _block(program, (m, n, k, batch), tensors), None,
        buffers=list(tensors.values()), outputs=stores + reductions, check="raise", seed=seed, schedule=schedule,
        ptx=artifact.ptx.replace(*mutant, 1),
    )  # fmt: skip
    found = Run(report, **arrays)
    found.store = [store.double().numpy() for store in stores]
    found.reduction = [reduction.double().numpy() for reduction in reductions]
    return found


def _block(program, mnkl, tensors):
    index = argument_words(program)
    words = np.zeros(len(index), np.int64)
    for name, value in zip("mnkl", mnkl, strict=True):
        words[index[name]] = value
    addresses, values = [], []
    by_value = {f"aux{i}" for i, aux in enumerate(program.aux) if aux.by_value}
    for name, held in tensors.items():
        place = index[f"{name}.address"]
        if name in by_value:
            values.append((8 * place, held.view(torch.uint8).numpy().tobytes()))
            continue
        words[place] = held.data_ptr()
        addresses.append(8 * place)
        batch, row, col = (
            0 if extent == 1 else stride for extent, stride in zip(held.shape, held.stride(), strict=True)
        )
        words[place + 1 : place + 4] = row, col, batch
    return HostBlock(words.tobytes(), tuple(addresses), tuple(values))
