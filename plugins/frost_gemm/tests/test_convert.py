"""Conversions of values in registers that no formula of the op table reaches."""

import os
import tempfile

import pytest

os.environ.setdefault("CUTE_DSL_NO_CACHE", "1")
pytest.importorskip("cutlass")
pytest.importorskip("ptx_emulator")

import cutlass
import ptx_emulator
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor
from frost_gemm.kernels.convert import floats_of_bytes

LANES, EACH = 32, 8


class Convert:
    def __init__(self, dtype):
        self.dtype = dtype

    @cute.jit
    def host(self, given: cute.Tensor, found: cute.Tensor):
        self.kernel(given, found).launch(grid=(1, 1, 1), block=(LANES, 1, 1))

    @cute.kernel
    def kernel(self, given: cute.Tensor, found: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        values = floats_of_bytes(given[lane, None].load(), self.dtype)
        out = cute.make_rmem_tensor(EACH, cutlass.Float32)
        out.store(values)
        for i in cutlass.range_constexpr(EACH):
            found[lane, i] = out[i]


@pytest.mark.parametrize(
    ("dtype", "element", "kind"),
    [("int8", cutlass.Int8, torch.int8), ("uint8", cutlass.Uint8, torch.uint8)],
    ids=["int8", "uint8"],
)
def test_every_byte_becomes_its_value(dtype, element, kind):
    given = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kind).reshape(LANES, EACH).contiguous()
    found = torch.full((LANES, EACH), float("nan"))
    with tempfile.TemporaryDirectory() as folder:
        fakes = [
            make_fake_compact_tensor(one, (LANES, EACH), stride_order=(1, 0), assumed_align=16)
            for one in (element, cutlass.Float32)
        ]
        options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
        compiled = cute.compile(Convert(dtype).host, *fakes, options=options)
    ptx_emulator.launch(
        compiled, from_dlpack(given, assumed_align=16), from_dlpack(found, assumed_align=16), check="raise"
    )
    assert torch.equal(found, given.float())
