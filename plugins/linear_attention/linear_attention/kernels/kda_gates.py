"""Decays of the channels of one head: ``gates`` with what is constant in a channel worked out beforehand. Imported by ``prepare_kda``.

The lower-bound form is 2^(lower_bound log2(e) s), s = 1 / (1 + 2^x), x = -exp(a_log) log2(e) (g + dt_bias): as x = g c + d it takes six
instructions. The other forms are ``Gate.decay``. Errors are those of ``gates``.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from .gates import LOG2_E, Gate
from .tiles import assembly

__all__ = ["Decays"]


class Decays:
    """``biases``: of this thread's channels; ``amplitude``: of the head."""

    def __init__(self, gate: Gate, amplitude: Float32, biases: list[Any]) -> None:
        self.gate, self.amplitude, self.biases = gate, amplitude, biases
        self.bounded = gate.safe == "sigmoid"
        if self.bounded:
            self.factor = amplitude * Float32(-LOG2_E) if gate.has_a_log else Float32(-LOG2_E)
            self.summands = [self.factor * bias for bias in biases] if gate.has_bias else None

    def of(self, values: list[Any]) -> list[Any]:
        """The decays of a token's gates."""
        if not self.bounded:
            return [self.gate.decay(g, self.amplitude, bias) for g, bias in zip(values, self.biases, strict=True)]
        found = []
        for i, g in enumerate(values):
            x = g * self.factor if self.summands is None else _fma(g, self.factor, self.summands[i])
            weight = _approximate("rcp", _approximate("ex2", x) + Float32(1.0))
            found.append(_approximate("ex2", weight * Float32(self.gate.lower_bound * LOG2_E)))
        return found


def _fma(a: Float32, b: Float32, c: Float32) -> Float32:
    found: Float32 = assembly("fma.rn.f32 $r0, $i0, $i1, $i2;", [Float32], inputs=[a, b, c], volatile=False)[0]
    return found


def _approximate(name: str, x: Float32) -> Float32:
    found: Float32 = assembly(f"{name}.approx.ftz.f32 $r0, $i0;", [Float32], inputs=[x], volatile=False)[0]
    return found
