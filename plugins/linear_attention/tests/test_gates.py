"""Gates and update weights in the emulator, against the formulas in fp64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
import ptx_emulator
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import runtime
from linear_attention.kernels.gates import Beta, Gate

from cudnn_core import HostBlock

LANES = 128
UNIT = 2.0**-24

# (gate, what it is in fp64); the amplitude is 1.5 and the bias 0.25
GATES = {
    "plain": (Gate(), lambda x: np.minimum(x, 0)),
    "linear": (Gate("linear"), lambda x: np.log(np.clip(x, np.float32(1e-10), 1))),
    "softplus": (Gate(safe="softplus", a_log=True, bias=True), lambda x: -1.5 * np.logaddexp(x + 0.25, 0)),
    "softplus without parameters": (Gate(safe="softplus"), lambda x: -np.logaddexp(x, 0)),
    "sigmoid": (Gate(safe="sigmoid", lower_bound=-3.0, a_log=True, bias=True),
                lambda x: -3 / (1 + np.exp(-1.5 * (x + 0.25)))),
    "sigmoid without parameters": (Gate(safe="sigmoid"), lambda x: -5 / (1 + np.exp(-x))),
}  # fmt: skip
BETAS = {
    "value": (Beta(), lambda x: x),
    "sigmoid": (Beta(True), lambda x: 1 / (1 + np.exp(-x))),
    "doubled": (Beta(True, True), lambda x: 2 / (1 + np.exp(-x))),
}


class Table:
    """Row i of y: function i of x, a thread for each element. ``words`` are the addresses of x and y, and the size of x."""

    def __init__(self, functions):
        self.functions = functions

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        block = cute.make_tensor(
            cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(3)
        )
        size = Int32(block[2])
        x, y = (cute.make_ptr(Float32, block[i], cute.AddressSpace.gmem, assumed_align=16) for i in range(2))
        shape = (len(self.functions), size)
        rows = cute.make_tensor(y, cute.make_layout(shape, stride=(size, 1)))
        self.kernel(cute.make_tensor(x, cute.make_layout(size)), rows).launch(
            grid=[size // LANES, 1, 1], block=[LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        at = cute.arch.block_idx()[0] * LANES + cute.arch.thread_idx()[0]
        for row, function in enumerate(self.functions):
            y[row, at] = function(x[at])


def evaluated(functions, x, tmp, arch="sm_80"):
    y = np.empty((len(functions), len(x)), np.float32)
    options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {tmp}"
    compiled = cute.compile(Table(functions).host, Int64(0), runtime.make_fake_stream(), options=options)
    words = np.array([x.ctypes.data, y.ctypes.data, len(x)], np.int64)
    block = HostBlock(words.tobytes(), (0, 8), ())
    ptx_emulator.launch(compiled, block, None, buffers=[x, y], outputs=[y], check="raise")
    return y


def points():
    spread = np.concatenate([np.linspace(-90, 90, 300), np.linspace(-4, 4, 300), np.geomspace(1e-12, 2, 100)])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1.0, 0.5]
    x = np.concatenate([spread, special]).astype(np.float32)
    return np.resize(x, -(-len(x) // LANES) * LANES)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    amplitude, bias = Float32, Float32
    gates = [gate for gate, _ in GATES.values()]
    betas = [beta.value for beta, _ in BETAS.values()]
    functions = [lambda x, g=g: g.log_decay(x, amplitude(1.5), bias(0.25)) for g in gates]
    functions += [lambda x, g=g: g.decay(x, amplitude(1.5), bias(0.25)) for g in gates]
    rows = iter(evaluated(functions + betas, points(), tmp_path_factory.mktemp("gates")))
    names = [("log", name) for name in GATES] + [("decay", name) for name in GATES] + [("beta", name) for name in BETAS]
    return dict(zip(names, rows, strict=True))


def allowed(x):
    """Relative error: a few roundings, and that of an exponent's product."""
    return UNIT * (8 + 2 * np.minimum(np.abs(1.5 * x), 90))


def close(have, want, allowed):
    """Equal, or within the relative error; where a factor is below the smallest normal number, the product may be 0."""
    with np.errstate(invalid="ignore"):
        error = np.abs(have - want)
        fine = (have == want) | (error <= allowed * np.abs(want)) | (error <= 8 * 2.0**-126)
    fine |= np.isnan(have) & np.isnan(want)
    assert fine.all(), (have[~fine], want[~fine])


@pytest.mark.parametrize("name", GATES)
def test_log_decays(found, name):
    x = points().astype(np.float64)
    with np.errstate(all="ignore"):
        close(found["log", name].astype(np.float64), GATES[name][1](x), allowed(x))
    assert not (found["log", name] > 0).any()


@pytest.mark.parametrize("name", GATES)
def test_decays(found, name):
    x = points().astype(np.float64)
    with np.errstate(all="ignore"):
        log = GATES[name][1](x)
        # The error of a log decay is an absolute one, in relation to its own size.
        close(found["decay", name].astype(np.float64), np.exp(log), UNIT * (8 + 8 * np.minimum(np.abs(log), 120)))
    have = found["decay", name]
    assert not ((have > 1) | (have < 0)).any()


@pytest.mark.parametrize("name", BETAS)
def test_update_weights(found, name):
    x = points().astype(np.float64)
    with np.errstate(all="ignore"):
        close(found["beta", name].astype(np.float64), BETAS[name][1](x), allowed(x))


def test_combinations_that_no_op_has_are_refused():
    with pytest.raises(ValueError, match="no gate"):
        Gate("linear", "softplus")
    with pytest.raises(ValueError, match="doubled"):
        Beta(False, True)
