"""What each recorded kernel computes: its arguments and numpy's answer. Needs numpy alone, so the tests need no DSL.

A `Case` names a recording under tests/data/kernels. Inputs are small integers (or exact fp8 and fp4 values with scales
that are powers of two), so that every answer is exact in float32 whatever the order of accumulation.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Case(NamedTuple):
    """One kernel on one architecture."""

    name: str
    module: str
    function: str
    arch: str
    make: Callable[[np.random.Generator], tuple[list[np.ndarray], np.ndarray]]  # -> arguments (output last), answer
    options: tuple = ()  # compile-time arguments


def e4m3_code(values):
    """Codes of e4m3 for integers of magnitude below 8."""
    magnitude = np.abs(values).astype(int)
    table = np.array([0x00, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E], np.uint8)
    return table[magnitude] | np.where(np.signbit(values), 0x80, 0).astype(np.uint8)


def _copy(rng):
    source = rng.standard_normal((64, 32)).astype(np.float32)
    return [source, np.zeros_like(source)], 2 * source


def _gemm(m, n, k, dtype=np.float16):
    def make(rng):
        a, b = rng.integers(-3, 4, (m, k)).astype(dtype), rng.integers(-3, 4, (n, k)).astype(dtype)
        return [a, b, np.zeros((m, n), np.float32)], a.astype(np.float32) @ b.astype(np.float32).T

    return make


def scale_chunks(codes):
    """Scale codes [rows, blocks] in the order of the tcgen05 scale-factor chunk: 32 x 4 x 4 bytes per 128 rows."""
    rows, blocks = codes.shape
    return np.ascontiguousarray(codes.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4))


def _mxf8(m, n, k):
    def make(rng):
        a, b = rng.integers(-7, 8, (m, k)), rng.integers(-7, 8, (n, k))
        ea, eb = rng.integers(-2, 3, (m, k // 32)), rng.integers(-2, 3, (n, k // 32))
        wide = [np.repeat(np.exp2(e), 32, 1) for e in (ea, eb)]
        arguments = [e4m3_code(a), e4m3_code(b), *(scale_chunks((e + 127).astype(np.uint8)) for e in (ea, eb))]
        return [*arguments, np.zeros((m, n), np.float32)], ((a * wide[0]) @ (b * wide[1]).T).astype(np.float32)

    return make


def _nvf4(m, n, k):
    def make(rng):
        a, b = rng.integers(0, 16, (m, k)).astype(np.uint8), rng.integers(0, 16, (n, k)).astype(np.uint8)
        ea, eb = rng.integers(-1, 2, (m, k // 16)), rng.integers(-1, 2, (n, k // 16))
        wide = [E2M1[v] * np.repeat(np.exp2(e), 16, 1) for v, e in ((a, ea), (b, eb))]
        packed = [v[:, 0::2] | v[:, 1::2] << 4 for v in (a, b)]
        scales = [scale_chunks(((e + 7) << 3).astype(np.uint8)) for e in (ea, eb)]
        return [*packed, *scales, np.zeros((m, n), np.float32)], (wide[0] @ wide[1].T).astype(np.float32)

    return make


def _table():
    blackwell = ("sm_100a", "sm_103a", "sm_107a")
    rows = [("tma_copy", "tma_copy", "tma_copy", ("sm_90a", "sm_100a"), _copy, ())]
    rows += [
        ("wgmma_gemm", "wgmma_gemm", "wgmma_gemm", ("sm_90a",), _gemm(64, 64, 128), ()),
        ("tcgen05_gemm", "tcgen05_gemm", "tcgen05_gemm", blackwell, _gemm(128, 64, 128), (1, 32)),
        ("tcgen05_gemm_pair", "tcgen05_gemm", "tcgen05_gemm", blackwell, _gemm(256, 64, 128), (2, 64)),
        ("mxf8_gemm", "block_scaled_gemm", "mxf8_gemm", blackwell, _mxf8(128, 128, 128), ()),
        ("nvf4_gemm", "block_scaled_gemm", "nvf4_gemm", blackwell, _nvf4(128, 128, 128), ()),
        ("clc_gemm", "clc_gemm", "clc_gemm", blackwell, _gemm(384, 32, 128), ()),
    ]
    return [Case(n, m, f, arch, make, options) for n, m, f, archs, make, options in rows for arch in archs]


CASES = {f"{case.name}.{case.arch}": case for case in _table()}
