"""The cases of the linear-attention benchmark: shapes, operands, and the least time that bytes and products take.

Operands are torch tensors by port, unit keys and queries, so that every peer gets the same numbers without a norm in its kernel. Used
by linear_attention.py; needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CASES", "COPY_TBPS", "GATES", "PEAK_TFLOPS", "Decode", "Forward", "Measured", "chosen"]

COPY_TBPS, PEAK_TFLOPS = 4.27, 790.0  # an H200: device-to-device copy, read and write counted; large bf16 products
GATES = ("strong", "weak")
_CHUNK = 64  # tokens of a chunk, in the count of operations
_COLD_BYTES = 128 << 20  # of states in rotation: twice an H200's L2
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _gates(kind: str, *dim: int, make: torch.Generator, device: str) -> torch.Tensor:
    """Log decays: strong ones forget within a few tokens, weak ones (a 16th) within a few dozen."""
    g = torch.nn.functional.logsigmoid(torch.randn(dim, generator=make, device=device))
    return g if kind == "strong" else g / 16


def _tokens(op: str, tokens: int, case: Any, kind: str, make: torch.Generator, device: str) -> dict[str, torch.Tensor]:
    def normal(*dim: int) -> torch.Tensor:
        return torch.randn(dim, generator=make, device=device)

    heads, values, size = case.heads, case.values, case.size
    channels = (size,) if op == "kda" else ()
    unit = torch.nn.functional.normalize
    return {
        "q": unit(normal(tokens, heads, size), dim=-1).bfloat16(),
        "k": unit(normal(tokens, heads, size), dim=-1).bfloat16(),
        "v": normal(tokens, values, size).bfloat16(),
        "g": _gates(kind, tokens, values, *channels, make=make, device=device),
        "beta": normal(tokens, values).sigmoid(),
    }


@dataclass(frozen=True)
class Forward:
    """A prefill of ``sequences`` sequences of ``length`` tokens, with a final state and no initial one.

    heads, values   heads of q and k, and of v; ``size``: both head dimensions
    quick           whether it is among those of ``--quick``
    most_us         the time that we mean to need at most, or None
    """

    op: str
    sequences: int
    length: int
    heads: int
    values: int
    most_us: float | None = None
    size: int = 128
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} forward {self.sequences}x{self.length} {self.heads}/{self.values}"

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def flops(self) -> float:
        """Of the chunked form: K K^T, Q K^T, the inverse; with the state K S, Q S, K^T U; T Y and P U."""
        c, k, v = _CHUNK, self.size, self.size
        per_token = 4 * c * k + 2 * c * c / 3 + 6 * k * v + 4 * c * v
        return self.tokens * self.values * per_token

    @property
    def bytes(self) -> float:
        """Of q, k, v, o, beta and g, once each. States are negligible."""
        heads, values, size = self.heads, self.values, self.size
        gate = 4 * values * (size if self.op == "kda" else 1)
        return self.tokens * (2 * size * (2 * heads + 2 * values) + 4 * values + gate)

    @property
    def floor_us(self) -> float:
        return max(self.bytes / COPY_TBPS / 1e6, self.flops / PEAK_TFLOPS / 1e6)

    def operands(self, gates: str, device: str = "cuda") -> dict[str, torch.Tensor]:
        make = torch.Generator(device=device).manual_seed(self.tokens + 31 * self.heads + 7 * self.values)
        x = _tokens(self.op, self.tokens, self, gates, make, device)
        bounds = torch.arange(self.sequences + 1, dtype=torch.int32) * self.length
        return {**x, "cu_seqlens": bounds.to(device)}


@dataclass(frozen=True)
class Decode:
    """One token for each of ``batch`` sequences, whose states are rows of a pool and change in place.

    The rows rotate over ``sets`` sets, so that no call finds its states in L2. ``state``: fp32 or bf16. ``least_tbps``: of state
    traffic, what we mean to reach; 0: nothing is said.
    """

    op: str
    batch: int
    state: str
    heads: int = 32
    size: int = 128
    quick: bool = False
    least_tbps: float = 0.0

    @property
    def values(self) -> int:
        return self.heads

    @property
    def name(self) -> str:
        return f"{self.op} decode batch {self.batch} {self.state}"

    @property
    def state_bytes(self) -> int:
        """Of the states of one call."""
        return self.batch * self.values * self.size * self.size * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES[self.state]

    @property
    def sets(self) -> int:
        return min(128, max(2, -(-_COLD_BYTES // self.state_bytes)))

    @property
    def most_us(self) -> float | None:
        return self.bytes / self.least_tbps / 1e6 if self.least_tbps else None

    @property
    def bytes(self) -> float:
        """The states, read and written; the rest is negligible."""
        return 2.0 * self.state_bytes

    @property
    def floor_us(self) -> float:
        return self.bytes / COPY_TBPS / 1e6

    def operands(self, gates: str = "weak", device: str = "cuda") -> dict[str, torch.Tensor]:
        """With ``initial_state``, the pool [sets * batch, HV, V, K], and ``slots`` [sets, batch]."""
        make = torch.Generator(device=device).manual_seed(self.batch)
        x = _tokens(self.op, self.batch, self, gates, make, device)
        rows = self.sets * self.batch
        pool = torch.empty((rows, self.values, self.size, self.size), dtype=self.dtype, device=device)
        pool.normal_(generator=make).mul_(0.25)
        slots = torch.arange(rows, dtype=torch.int32, device=device).reshape(self.sets, self.batch)
        return {**x, "initial_state": pool, "slots": slots}


CASES: tuple[Any, ...] = (
    Forward("gdn", 1, 32768, 32, 32, most_us=550, quick=True),
    Forward("gdn", 4, 8192, 32, 32, most_us=450),
    Forward("gdn", 1, 32768, 16, 64, most_us=800),
    Forward("gdn", 1, 32768, 2, 8, most_us=250),
    Forward("gdn", 1, 32768, 16, 16, most_us=380),
    Forward("kda", 1, 32768, 32, 32, most_us=750, quick=True),
    Forward("kda", 1, 32768, 64, 64, most_us=1450),
    *(
        Decode(
            op,
            batch,
            state,
            quick=batch == 64 and state == "fp32",
            least_tbps={64: 3.4, 256: 3.8}.get(batch, 0.0) if state == "fp32" else 0.0,
        )
        for op in ("gdn", "kda")
        for state in ("fp32", "bf16")
        for batch in (1, 64, 256)
    ),
)


def chosen(only: list[str], quick: bool) -> list[Any]:
    """The cases whose name contains one of the texts; without texts all, or those of ``--quick``."""
    if only:
        return [case for case in CASES if any(text in case.name for text in only)]
    return [case for case in CASES if case.quick or not quick]


@dataclass
class Measured:
    """Times in us of one case and kind of gates, by callable: GPU time, and with the host's part; ``host``: of the host alone."""

    graph: dict[str, float] = field(default_factory=dict)
    eager: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
