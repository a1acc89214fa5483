"""The lowering table: core op -> row. A new op is a row of one of these modules. Imported by ``program`` and the package."""

from __future__ import annotations

from . import block_scale, conv, matmul, moe, norm, pointwise, reduction, sdpa, structural
from .rows import Row

__all__ = ["MISSING", "OPS"]

OPS: dict[str, Row] = {
    name: row
    for module in (matmul, pointwise, reduction, norm, conv, sdpa, block_scale, moe, structural)
    for name, row in module.ROWS.items()
}

# Operations of the binding that no core op stands for; the README lists them. The binding's second names of an op are not here.
MISSING: tuple[str, ...] = (
    *("adalayernorm", "adalayernorm_backward", "batchnorm", "batchnorm_backward", "batchnorm_inference"),
    *("conv_dgrad", "conv_wgrad", "genstats", "instancenorm", "instancenorm_backward", "layernorm_backward"),
    *("moe_grouped_matmul_bwd", "rmsnorm_backward", "rope", "rope_backward"),
    *("sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward", "sdpa_mxfp8", "sdpa_mxfp8_backward"),
)
