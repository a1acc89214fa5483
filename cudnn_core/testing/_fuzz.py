"""Random graphs, seeded: mutations of the case library that are still valid. Imported by the kit's static checks.

Types come from the whole vocabulary and attributes from the op table, so that graphs lie on both sides of any manifest's
borders; what the graph's own validation refuses is thrown away.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._dtypes import STORAGE_DTYPES
from .._errors import CudnnCoreError
from .._graph._graph import Graph
from .._ops._table import lookup

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph
    from ._cases import Case

__all__ = ["forget", "fuzzed", "mutate"]

_SIZES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 64, 100, 128, 256)
_COMPUTE = ("float32", "float64", "float16", "bfloat16", "int32")
_made: dict[tuple[int, int], list[FrozenGraph]] = {}


def fuzzed(cases: Sequence[Case], count: int, seed: int = 2026) -> Iterator[FrozenGraph]:
    """``count`` valid graphs: every case as it is, then mutations of them in turn."""
    key = (hash(tuple(case.name for case in cases)), count)
    if key not in _made:
        _made[key] = list(_generate(cases, count, random.Random(seed)))  # noqa: S311  test data
    return iter(_made[key])


def forget() -> None:
    """Drop the generated graphs: an engine has changed one."""
    _made.clear()


def _generate(cases: Sequence[Case], count: int, rng: random.Random) -> Iterator[FrozenGraph]:
    documents = [json.loads(case.graph.to_json()) for case in cases]
    rng.shuffle(documents)
    made = 0
    for attempt in range(8 * count):
        if made >= count or not documents:
            return
        document = documents[attempt % len(documents)]
        changed = document if attempt < len(documents) // 4 else mutate(document, rng)
        try:
            graph = Graph.from_json(json.dumps(changed)).freeze()
        except CudnnCoreError:
            continue
        made += 1
        yield graph


def mutate(document: Any, rng: random.Random) -> Any:
    """A copy with one to three changes."""
    changed = json.loads(json.dumps(document))
    for _ in range(rng.randint(1, 3)):
        rng.choice(_MUTATIONS)(changed, rng)
    return changed


def _retype_all(document: Any, rng: random.Random) -> None:
    """One type becomes another wherever it occurs."""
    old = rng.choice([tensor["data_type"] for tensor in document["tensors"]])
    new = rng.choice(STORAGE_DTYPES)
    for tensor in document["tensors"]:
        if tensor["data_type"] == old:
            tensor["data_type"] = new


def _retype_one(document: Any, rng: random.Random) -> None:
    rng.choice(document["tensors"])["data_type"] = rng.choice(STORAGE_DTYPES)


def _resize(document: Any, rng: random.Random) -> None:
    """One size becomes another wherever it occurs; strides keep their order and are packed."""
    sizes = [size for tensor in document["tensors"] for size in tensor["dim"] if isinstance(size, int) and size > 1]
    if not sizes:
        return
    old, new = rng.choice(sizes), rng.choice(_SIZES)
    for tensor in document["tensors"]:
        if old in tensor["dim"]:
            tensor["dim"] = [new if size == old else size for size in tensor["dim"]]
            _pack(tensor)


def _pack(tensor: Any, order: Sequence[int] | None = None) -> None:
    if not all(isinstance(value, int) for value in (*tensor["dim"], *tensor["stride"])):
        return
    if order is None:
        order = sorted(range(len(tensor["dim"])), key=lambda axis: (tensor["stride"][axis], -axis))
    running = 1
    for axis in order:
        tensor["stride"][axis] = running
        running *= max(tensor["dim"][axis], 1)


def _restride(document: Any, rng: random.Random) -> None:
    tensor = rng.choice(document["tensors"])
    order = list(range(len(tensor["dim"])))
    rng.shuffle(order)
    _pack(tensor, order)


def _expose(document: Any, rng: random.Random) -> None:
    """A virtual tensor becomes an output."""
    virtual = [tensor for tensor in document["tensors"] if tensor["role"] == "virtual"]
    if virtual:
        rng.choice(virtual)["role"] = "output"


def _recompute(document: Any, rng: random.Random) -> None:
    rng.choice(document["nodes"])["compute_data_type"] = rng.choice(_COMPUTE)


def _reattribute(document: Any, rng: random.Random) -> None:
    """An attribute takes another value of its type."""
    node = rng.choice(document["nodes"])
    attrs = [attr for attr in lookup(node["op"]).attrs if attr.type in ("enum", "bool", "float", "int")]
    if not attrs:
        return
    attr = rng.choice(attrs)
    values = {
        "enum": attr.choices,
        "bool": (False, True),
        "float": (0.0, 0.5, 2.0),
        "int": (0, 1, 2, 4),
    }[attr.type]
    node["attrs"][attr.name] = rng.choice(values)


def _append(document: Any, rng: random.Random) -> None:
    """A pointwise op behind an output."""
    outputs = [tensor for tensor in document["tensors"] if tensor["role"] == "output"]
    if not outputs:
        return
    source = rng.choice(outputs)
    uid = 1 + max(tensor["uid"] for tensor in document["tensors"])
    document["tensors"].append({**source, "uid": uid, "name": f"{source['name']}_{uid}"})
    source["role"] = rng.choice(("virtual", "output"))
    op = rng.choice(("relu", "gelu", "tanh", "identity", "neg", "sigmoid", "abs"))
    attrs = {attr.name: attr.default for attr in lookup(op).attrs}
    document["nodes"].append(
        {
            "op": op,
            "name": f"{op}_{uid}",
            "compute_data_type": document["nodes"][-1]["compute_data_type"],
            "inputs": {"in0": source["uid"]},
            "outputs": {"out": uid},
            "attrs": attrs,
        }
    )


_MUTATIONS: tuple[Callable[[Any, random.Random], None], ...] = (
    _retype_all,
    _retype_one,
    _resize,
    _restride,
    _expose,
    _recompute,
    _reattribute,
    _append,
)
