"""Small stand-ins: a device with round rates, registry entries, frozen graphs built without the builders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cudnn_core._dims import packed_strides
from cudnn_core._dtypes import data_type
from cudnn_core._engine import Estimate, PlanConfig, Support
from cudnn_core._graph._frozen import FrozenGraph, FrozenNode, FrozenTensor
from cudnn_core._ranking import Candidate

KEY = "ab" * 32


def make_device(arch="90a", bandwidth=4e12, peaks=None, name="Fake 90", type="cuda"):
    peaks = {"bfloat16": 1e15} if peaks is None else peaks
    return SimpleNamespace(
        type=type,
        arch=arch,
        device_name=name,
        memory_bandwidth=bandwidth,
        peak=peaks.get,
        key=lambda: (type, (9, 0), 132, 232448, 0),
    )


def make_candidate(
    engine="p:e",
    *,
    revision=1,
    tier="normal",
    efficiency=0.5,
    maturity="stable",
    us=None,
    basis="model",
    calibration="",
    package_dir=None,
    knobs=None,
    variant="",
    configs=(),
    dists=(),
):
    full = f"{engine}@{revision}"
    spec = SimpleNamespace(id=full, short_id=engine, tier=tier, efficiency=efficiency, maturity=maturity)
    config = PlanConfig(full, knobs or {}, variant)
    estimate = None if us is None else Estimate(us, basis, calibration)
    entry = SimpleNamespace(id=full, spec=spec, package_dir=package_dir, environment=lambda: dict(dists))
    return Candidate(entry, Support((config,)), config, estimate, tuple(configs))


def make_order(*engines):
    """A configuration whose order rules name these engines."""
    return SimpleNamespace(order_index=lambda name: engines.index(name) if name in engines else None)


def make_tensor(index, dim, dtype="bfloat16", role="input", **more):
    return FrozenTensor(
        index=index, uid=index, name=f"t{index}", dtype=data_type(dtype), dim=dim, stride=packed_strides(dim), role=role,
        **more,
    )  # fmt: skip


def make_node(index, op, inputs, outputs, attrs=None):
    return FrozenNode(
        index=index, op=op, name="", compute_dtype=data_type.FLOAT, inputs=inputs, outputs=outputs, attrs=attrs or {}
    )


def make_graph(tensors, nodes):
    return FrozenGraph(name="g", key=KEY, tensors=tuple(tensors), nodes=tuple(nodes))


def make_matmul(m, n, k, relu=False):
    """C = A @ B in bfloat16, and a relu whose input stays on chip."""
    a, b = make_tensor(0, (1, m, k)), make_tensor(1, (1, k, n))
    c = make_tensor(2, (1, m, n), role="virtual" if relu else "output")
    nodes = [make_node(0, "matmul", {"A": a, "B": b}, {"C": c}, {"padding": 0.0})]
    tensors = [a, b, c]
    if relu:
        tensors.append(make_tensor(3, (1, m, n), role="output"))
        nodes.append(make_node(1, "relu", {"in0": c}, {"out": tensors[3]}))
    return make_graph(tensors, nodes)


@pytest.fixture(scope="session")
def fake():
    return SimpleNamespace(
        KEY=KEY,
        device=make_device,
        candidate=make_candidate,
        order=make_order,
        tensor=make_tensor,
        node=make_node,
        graph=make_graph,
        matmul=make_matmul,
    )
