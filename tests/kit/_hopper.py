"""How Hopper's tensor cores add products of 8-bit floats, in numpy."""

import numpy as np

__all__ = ["hopper_matmul"]


def hopper_matmul(a, b, promote=128):
    """a [..., M, K] @ b [..., K, N] in fp64, exact but for what one wgmma after the other drops.

    An instruction aligns 32 products and the accumulator to the largest exponent among them and cuts them 13 bits behind its
    leading one. Every ``promote`` terms the accumulator is added to a float32 sum and starts anew.
    """
    total = 0.0
    for start in range(0, a.shape[-1], promote):
        sums = 0.0
        for k in range(start, min(start + promote, a.shape[-1]), 32):
            sums = _wgmma(sums, a[..., k : k + 32], b[..., k : k + 32, :])
        total = (total + sums).astype(np.float32)
    return total.astype(np.float64)


def _wgmma(sums, a, b):
    products = np.swapaxes(a, -1, -2)[..., :, :, None] * b[..., :, None, :]  # [..., K, M, N]
    largest = np.maximum(np.abs(products).max(-3), np.abs(sums))
    unit = 2.0 ** (np.frexp(largest)[1] - 1 - 13)
    return unit * (np.trunc(products / unit[..., None, :, :]).sum(-3) + np.trunc(sums / unit))
