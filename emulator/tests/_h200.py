"""What an H200 returned (driver 580, CUDA 13.0), recorded once: record_tables.py checks it on another one, or records anew.

data/h200_numerics.xz: every opcode on 32 lanes. data/h200_matrix.xz: mma.sync, wgmma, ldmatrix and stmatrix. Each is one
line of JSON and a blob, compressed.
"""

import json
import lzma
from functools import cache
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
LANES = 32


@cache
def load(name):
    """(index, blob) of a recording."""
    head, _, blob = lzma.decompress((DATA / f"{name}.xz").read_bytes()).partition(b"\n")
    return json.loads(head), blob


@cache
def _numerics():
    index, blob = load("h200_numerics")
    arrays, at = {}, 0
    for op, types in index.items():
        arrays[op] = []
        for dtype in types:
            arrays[op].append(np.frombuffer(blob, f"<{dtype}", LANES, at))
            at += arrays[op][-1].nbytes
    assert at == len(blob)
    return arrays


def opcodes():
    return sorted(_numerics())


def recorded(op):
    """(sources, result) of an opcode; names end in "/TABLE" where lop3 has its immediate."""
    *sources, result = _numerics()[op]
    return sources, result
