"""The row of ``moe_grouped_matmul``. Imported by the table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from cudnn_core import Checks, FrozenNode

    from .rows import Emitter

__all__ = ["ROWS"]


def _check(c: Checks, node: FrozenNode) -> None:
    offsets = node.inputs["first_token_offset"]
    experts = node.inputs["weight"].dim[0]
    count = math.prod(offsets.dim) if all(isinstance(size, int) for size in offsets.dim) else None
    # With boundaries the rows behind the last one belong to no group; the backend knows starts only. Group g has expert g modulo
    # their number.
    starts = (
        isinstance(count, int) and isinstance(experts, int) and (count % experts == 0 if experts > 1 else count == 1)
    )
    c.require(
        starts,
        "shape.range",
        "moe_grouped_matmul.first_token_offset",
        "one start for each group (no end), a multiple of the experts",
        count,
    )


def _emit(e: Emitter, node: FrozenNode) -> None:
    made = e.target.moe_grouped_matmul(
        token=e.input(node.inputs["token"]),
        weight=e.input(node.inputs["weight"]),
        first_token_offset=e.input(node.inputs["first_token_offset"]),
        token_index=e.optional(node, "token_index"),
        token_ks=e.optional(node, "token_ks"),
        mode=e.enum("moe_grouped_matmul_mode", node.attrs["mode"]),
        compute_data_type=e.dtype(node.compute_dtype),
        top_k=node.attrs["top_k"] or 0,
        top_k_scores=e.optional(node, "top_k_scores"),
    )
    e.result(made, node.outputs["Y"])


ROWS = {"moe_grouped_matmul": Row(_emit, _check, columns={"first_token_offset": 3}, kind="moe")}
