"""Graphs of gdn_decode and kda_decode for cudnn-core's kit: ``--cudnn-cases decode_kit:cases``, with this folder on the path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from cudnn_core import Dim, Graph
from cudnn_core.testing import Case

__all__ = ["cases"]

DOMAIN = {"q": (-0.25, 0.25), "k": (-0.125, 0.125), "g": (-2.0, 0.0), "beta": (0.0, 1.0), "initial_state": (-1.0, 1.0)}
HEADS, SIZE = 4, 64


def _graph(op: str, sequences: Any, most: int = 1, pool: Any = None, io: str = "bfloat16", **options: Any) -> Graph:
    graph = Graph(io_data_type=io, intermediate_data_type="float32", compute_data_type="float32")
    tokens = most * sequences
    q, k, v = (graph.tensor(dim=(tokens, HEADS, SIZE), name=name) for name in "qkv")
    channels = (SIZE,) if op == "kda_decode" else ()
    g = graph.tensor(dim=(tokens, HEADS, *channels), data_type="float32", name="g")
    beta = graph.tensor(dim=(tokens, HEADS), data_type="float32", name="beta")
    rows = sequences if pool is None else pool
    x: dict[str, Any] = {
        "initial_state": graph.tensor((rows, HEADS, SIZE, SIZE), data_type="float32", name="initial_state")
    }
    if pool is not None:
        x["state_indices"] = graph.tensor(dim=(sequences,), data_type="int32", name="state_indices")
    if options.get("safe_gate"):
        x["a_log"] = graph.tensor(dim=(HEADS,), data_type="float32", name="a_log")
    made = getattr(graph, op)(q=q, k=k, v=v, g=g, beta=beta, **x, **options, tokens_per_sequence=most)
    for name, tensor in zip(("O", "final_state"), made, strict=False):
        if tensor is not None:
            tensor.set_output(True).set_name(name)
    return graph


def cases() -> Iterator[Case]:
    for op in ("gdn_decode", "kda_decode"):
        made = partial(_graph, op, output_final_state=True)
        activated = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "safe_gate": True}
        wide = {**DOMAIN, "q": (-2.0, 2.0), "k": (-2.0, 2.0), "g": (-3.0, 3.0)}
        slots = {"state_indices": [4, -1, 0]}
        sizes = [{"n": 1}, {"n": 7}]
        yield Case(f"{op}-fixed", partial(made, sequences=3), op=op, domain=DOMAIN)
        yield Case(f"{op}-batch", partial(made, sequences=Dim("n", min=1, max=64)), op=op, domain=DOMAIN, sizes=sizes)
        yield Case(f"{op}-tokens", partial(made, sequences=2, most=4), op=op, domain=DOMAIN)
        yield Case(f"{op}-pool", partial(_graph, op, sequences=3, pool=5), op=op, domain=DOMAIN, values=slots)
        yield Case(f"{op}-activated", partial(made, sequences=2, io="float16", **activated), op=op, domain=wide)
