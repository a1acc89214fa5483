"""Graphs that cudnn-core's kit runs in addition to its library, for ``--cudnn-cases kit_cases:cases``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cudnn_core
from cudnn_core.testing import Case


def cases() -> Iterator[Case]:
    yield Case("acme_rmsnorm_gated-17x96", lambda: _gated((17, 96), (1, 96)), special=True)
    yield Case("acme_rmsnorm_gated-2x3x5x40", lambda: _gated((2, 3, 5, 40), (40,), save=True))
    yield Case("acme_rmsnorm_gated-empty", lambda: _gated((0, 32), (1, 32)))
    rows = cudnn_core.Dim("rows", min=0, max=300, multiple_of=2)
    sizes = [{"rows": size} for size in (0, 2, 300)]
    yield Case("acme_rmsnorm_gated-runtime-rows", lambda: _gated((2, rows, 32), (1, 1, 32)), sizes=sizes)
    yield Case("matmul-bias-gelu-strided-operands", _strided)


def _graph() -> cudnn_core.Graph:
    return cudnn_core.Graph(io_data_type="float32", compute_data_type="float32", intermediate_data_type="float32")


def _gated(dim: tuple[Any, ...], scale: tuple[int, ...], save: bool = False) -> cudnn_core.Graph:
    graph = _graph()
    x, gate, weight = (graph.tensor(d, name=name) for d, name in ((dim, "x"), (dim, "gate"), (scale, "scale")))
    y, inv_rms = graph.acme_rmsnorm_gated(x, gate, weight, epsilon=1e-5, save_inv_rms=save)
    y.set_output(True).set_name("y")
    if save:
        inv_rms.set_output(True).set_name("inv_rms")
    return graph


def _strided() -> cudnn_core.Graph:
    """Nothing here has an axis of unit stride, so that everything goes through the workspace."""
    graph = _graph()
    a = graph.tensor((2, 33, 20), (2 * 33 * 40, 80, 2), name="a")
    b = graph.tensor((2, 20, 12), (20 * 24 * 3, 72, 3), name="b")
    bias = graph.tensor((1, 1, 12), (24, 24, 2), name="bias")
    y = graph.gelu(graph.bias(graph.matmul(a, b), bias)).set_output(True).set_name("y")
    y.set_stride((33 * 36, 36, 3))
    return graph
