"""Matrix instructions of sm_100a, sm_103a and sm_107a with collectors: the atom of a DSL operation whose operands are kept.

The DSL (4.8.1) gives collectors to the fp8 operation of sm_107 alone. Its atom of sm_107 is that of the others with two more fields, and
compiles for all three; what it makes of them is read back from PTX by the tests. Imported by ``tcgen05``.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, vector
from cutlass.cute.atom import make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.nvgpu.tcgen05.mma import Sm100MmaTraits
from cutlass.cutlass_dsl import T

__all__ = ["mma_atom"]

LANE_MASK_WORDS = 4  # of the lanes of D in one CTA that stay as they are; 0: none does


def mma_atom(op: Any, a: str, b: str) -> cute.MmaAtom:
    """The atom of ``op``, a dense tcgen05 operation. ``a``, ``b``: "discard", "fill", "use" or "lastuse" of a collector."""
    if a == b == "discard":
        return cute.make_mma_atom(op)
    kind = cute_nvgpu.MmaAtomSM107UMMAType.get(
        _pack_shape(op.shape_mnk).type.attribute,
        op.cta_group.value,
        op.a_major_mode._to_ir(),
        op.b_major_mode._to_ir(),
        *(_element(dtype) for dtype in (op.a_dtype, op.b_dtype, op.acc_dtype)),
        op.a_src._to_ir(),
        0,  # D is not scaled
        tcgen05.CollectorOp(a).value,
        tcgen05.CollectorOp(b).value,
    )
    words = LANE_MASK_WORDS * op.cta_group.value
    mask = vector.from_elements(ir.VectorType.get([words], Int32.mlir_type), [Int32(0).ir_value()] * words)
    flags = [Boolean(False).ir_value() for _ in range(3)]  # accumulate, negate A, negate B: ``set`` changes them
    return cute.MmaAtom(op, Sm100MmaTraits(make_atom(kind, [*flags, mask])))


def _element(dtype: Any) -> Any:
    """The type of an element; integers say that they are signed."""
    return {cutlass.Int8: T.si8, cutlass.Int32: T.si32}.get(dtype, lambda: dtype.mlir_type)()
