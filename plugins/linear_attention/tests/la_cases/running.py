"""A case on an engine, compared with the recurrence. Imports the front doors' internals, so that a test sees every operand.

``engine`` is an id such as "linear_attention:gdn_sm90", or "" for the best one.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from linear_attention.graphs import build
from linear_attention.plans import plan_for, run
from linear_attention.torch_ops import Call, Recipe, operands, recipe

import cudnn_core

from . import recurrence

__all__ = ["arguments", "call", "check", "error", "expected", "graph_of", "outputs", "pinned"]

_DEFAULTS = {
    "scale": None, "output_final_state": False, "use_qk_l2norm": False, "use_beta_sigmoid": False,
    "allow_neg_eigval": False, "safe_gate": False, "gate_domain": "log", "overwrite_initial_state": False,
    "plan_name": None, "check": False,
}  # fmt: skip
_PORTS = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "a_log", "dt_bias", "state_indices")


@contextmanager
def pinned(op: str, engine: str) -> Any:
    """Plans of ``op`` are the engine's, or there are none."""
    rule = {"match": {"op": op}, "use": engine}
    with cudnn_core.configure(strict=True, rule=[rule]) if engine else nullcontext():
        yield


def arguments(case: Any, device: str = "cpu", tensors: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """The arguments of the torch op, by name."""
    x: dict[str, Any] = {**dict.fromkeys(_PORTS), **_DEFAULTS, "state_layout": case.layout}
    if case.decodes:
        x |= {"num_accepted_tokens": None, "tokens_per_sequence": 0}
    else:
        x |= {"checkpoint_every_n_tokens": 0, "checkpoint_dtype": None, "batch_invariant": False}
    if case.op.startswith("kda"):
        x |= {"gate_lower_bound": None, "gate_activation": "sigmoid"}
    return {**x, **(case.tensors(device) if tensors is None else tensors), **case.options}


def call(case: Any, device: str = "cpu", tensors: dict[str, torch.Tensor] | None = None) -> tuple[Recipe, Call]:
    """What is to be run, and the operands, with fresh outputs of NaN."""
    x = arguments(case, device, tensors)
    found = recipe(case.op, x)
    made = operands(found, x)
    for tensor in made.made.values():
        tensor.fill_(torch.nan)
    return found, made


def graph_of(case: Any) -> tuple[cudnn_core.Graph, dict[str, int]]:
    """The case's graph, with runtime sizes, and the uids of its ports."""
    configuration = call(case)[0].configuration
    assert configuration is not None
    return build(configuration)


def outputs(
    case: Any, device: str = "cpu", engine: str = "", tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Run the case; outputs by port with states [.., V, K], on the device."""
    found, made = call(case, device, tensors)
    assert found.configuration is not None
    with pinned(case.op, engine):
        entry = plan_for(found.configuration, made.inputs["q"].device, "", found.hint)
    if engine:
        assert entry.plan.engine.startswith(f"{engine}@"), entry.plan.decision
    run(entry, {**made.inputs, **made.outputs})
    return made.outputs


def expected(case: Any, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Of the recurrence, from the values that the operands really hold."""
    x = {port: _array(value) for port, value in (tensors or case.tensors()).items()}
    if case.layout == "k_major" and "initial_state" in x:
        x["initial_state"] = np.swapaxes(x["initial_state"], -1, -2)
    function = recurrence.decode if case.decodes else recurrence.prefill
    return function(case.op, x, **case.options)


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return value.double().numpy() if value.dtype.is_floating_point else value.numpy()


def error(found: torch.Tensor, want: Any) -> float:
    """Relative RMS error; of a result that must be 0, the largest value."""
    have, want = _array(found), np.asarray(want)
    if not np.isfinite(have).all():
        return float("inf")
    size = float(np.sqrt(np.mean(want**2))) if want.size else 0.0
    if size == 0.0:
        return float(np.abs(have).max(initial=0.0))
    return float(np.sqrt(np.mean((have - want) ** 2)) / size)


def check(case: Any, found: dict[str, Any], want: dict[str, Any] | None = None) -> None:
    """Assert that outputs are the expected ones: as a whole, and O in every sequence by itself."""
    want = expected(case) if want is None else want
    for port, tensor in found.items():
        have = error(tensor, want[port])
        assert have <= case.allowed, (case.name, port, have)
    start = 0
    for number, length in enumerate(case.lengths):
        rows = slice(start, start + length)
        start += length
        if length:
            have = error(found["O"][rows], want["O"][rows])
            # A short sequence is a small sample: a rounding more or less shows.
            assert have <= 3 * case.allowed, (case.name, "O of sequence", number, have)
