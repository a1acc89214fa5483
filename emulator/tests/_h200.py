"""Recorded results of an H200 (driver 580, CUDA 13.0): every opcode of tests/data/h200_numerics.npz on 96 lanes."""

import json
from functools import cache
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"


@cache
def _load():
    with np.load(DATA / "h200_numerics.npz") as stored:
        return json.loads(stored["index"].tobytes()), stored["blob"].tobytes()


def opcodes():
    return sorted({name.rpartition("|")[0] for name in _load()[0]})


def _array(name):
    index, blob = _load()
    dtype, offset = index[name]
    return np.frombuffer(blob, dtype, 96, offset)


def recorded(op):
    """(sources, result) of an opcode."""
    index, _ = _load()
    count = sum(name.startswith(op + "|") and name[-1] != "d" for name in index)
    return [_array(f"{op}|{i}") for i in range(count)], _array(f"{op}|d")
