"""Hand-written PTX around a body: loaded by the machine tests with runpy, so that tests stay independent files."""

import numpy as np
from ptx_emulator import run_ptx

HEAD = """.version 8.8
.target {target}
.address_size 64
{dynamic}
.visible .entry k({params})
{{
 .reg .pred %p<16>; .reg .b16 %rs<16>; .reg .b32 %r<128>; .reg .b64 %rd<64>; .reg .f32 %f<128>; .reg .b128 %q<2>;
{body}
 ret;
}}
"""


def source(body, params="", target="sm_100a", shared=0):
    dynamic = ".extern .shared .align 1024 .b8 smem[];" if shared else ""
    return HEAD.format(body=body, params=params, target=target, dynamic=dynamic)


def launch(body, args=(), params="", grid=1, block=32, cluster=1, target="sm_100a", shared=0, **options):
    """Run `body`; parameters named in `params`; `shared` bytes of dynamic shared memory called smem."""
    text = source(body, params, target, shared)
    return run_ptx(text, "k", grid, block, cluster, args, dynamic_smem=shared, **options)


def kinds(report):
    return {finding.kind for finding in report.findings}


def core_matrices(matrix):
    """K-major canonical layout without swizzle: 8 rows x 16 bytes contiguous, then along K, then along the rows."""
    rows, columns = matrix.shape
    per = 16 // matrix.dtype.itemsize
    blocks = matrix.reshape(rows // 8, 8, columns // per, per).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks)


# wait for phase `parity` of the mbarrier at %r{address}; uses %p15 and a label of its own
def wait(address, parity, label):
    return f"""
{label}: mbarrier.try_wait.parity.shared.b64 %p15, [{address}], {parity};
 @!%p15 bra {label};
"""
