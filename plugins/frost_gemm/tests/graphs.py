"""Graphs that several tests use."""

from __future__ import annotations

import cudnn_core


def matmul(
    dtype="bfloat16", m=64, n=128, k=256, batch=1, b_k_major=True, out="bfloat16", a_stride=None, b_stride=None, compute="",
    c_stride=None, b_dtype="",
):  # fmt: skip
    """(graph, product): A [batch, m, k] x B [batch, k, n], B contiguous along K unless told otherwise."""
    exact = "int32" if dtype == "int8" else "float32"
    g = cudnn_core.Graph(io_data_type=dtype, intermediate_data_type=exact, compute_data_type=compute or exact)
    a = g.tensor(dim=(batch, m, k), stride=a_stride, name="A")
    stride = b_stride or ((n * k, 1, k) if b_k_major else None)
    b = g.tensor(dim=(batch, k, n), stride=stride, name="B", data_type=b_dtype or dtype)
    c = g.matmul(A=a, B=b)
    if c_stride:
        c.set_stride(c_stride)
    return g, c.set_data_type(out)


def plain(*args, **fields):
    """The product alone."""
    g, c = matmul(*args, **fields)
    c.set_output(True).set_name("C")
    return g


def bias_relu(*args, **fields):
    """relu(A B + bias)."""
    g, c = matmul(*args, **{"out": "float32", **fields})
    bias = g.tensor(dim=(1, 1, c.get_dim()[-1]), name="bias", data_type="bfloat16")
    y = g.relu(g.add(c, bias))
    y.set_output(True).set_name("Y").set_data_type("bfloat16")
    return g


def dequantised(stored="int8", m=24, n=40, k=64, a_op="", b_k_major=True):
    """A B, where B is ``stored`` in memory and scaled on its way, and ``a_op`` is applied to A."""
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    a = g.tensor(dim=(1, m, k), name="A")
    if a_op:
        a = g.identity(getattr(g, a_op)(a)).set_data_type("bfloat16")
    stride = (n * k, 1, k) if b_k_major else None
    b = g.tensor(dim=(1, k, n), stride=stride, name="B", data_type=stored)
    scale = g.tensor(dim=(1, 1, 1), name="scale", data_type="float32")
    c = g.matmul(A=a, B=g.mul(b, scale).set_data_type("bfloat16"))
    c.set_output(True).set_name("C").set_data_type("float32")
    return g
