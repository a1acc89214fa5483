"""Our plan of a case of the linear-attention benchmark, bound to its operands. Used by linear_attention.py; needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._bare_launch import bare_launch
from ._gpu_timing import host_times
from ._la_cases import Decode, Forward

__all__ = ["Ours", "engine_of"]


def engine_of(case: Any) -> str:
    return f"linear_attention:{case.op}_decode" if isinstance(case, Decode) else f"linear_attention:{case.op}_sm90"


class Ours:
    """The bound run of the engine's plan for each set of slots, and the front door of the same call.

    ``outputs`` has O of the last call and, of a prefill, the final state. Raises NoEngineError where the engine declines.
    """

    def __init__(self, case: Forward | Decode, x: dict[str, torch.Tensor], engine: str | None = None) -> None:
        from linear_attention.plans import plan_for
        from linear_attention.torch_ops import operands, recipe

        import cudnn_core

        self.case, self._x = case, x
        op = f"{case.op}_decode" if isinstance(case, Decode) else case.op
        device = x["q"].device
        self._rule = {"match": {"op": op}, "use": engine or engine_of(case)}
        self._runs: list[tuple[Callable[..., object], Any]] = []
        with cudnn_core.configure(strict=True, rule=[self._rule]):
            for number in range(_sets(case)):
                arguments = _arguments(case, x, number)
                found = recipe(op, arguments)
                if not number:
                    made = operands(found, arguments)
                    assert found.configuration is not None
                    entry = plan_for(found.configuration, device, "", found.hint)
                    self.outputs = {"O": made.outputs["O"]}
                    if not isinstance(case, Decode):
                        self.outputs["final_state"] = made.outputs["final_state"]
                inputs = operands(found, arguments).inputs
                tensors = {**inputs, **self.outputs, **({} if "final_state" in self.outputs else _in_place(inputs))}
                pack = cudnn_core.pack(entry.plan, {entry.uids[port]: tensor for port, tensor in tensors.items()})
                self._runs.append((entry.plan.bind(pack), pack))
        self.plan = entry.plan
        self._space = torch.empty(max(1, self.plan.workspace_size), dtype=torch.uint8, device=device)
        self._workspace = self._space.data_ptr()
        self._device = (device.index or 0) if device.type == "cuda" else None

    def __call__(self, i: int) -> None:
        run, pack = self._runs[i % len(self._runs)]
        # The public torch.cuda.current_stream() makes an object, which takes as long as a launch.
        stream = 0 if self._device is None else torch._C._cuda_getCurrentRawStream(self._device)
        run(pack.pointers, self._workspace, stream)

    def host_times(self) -> dict[str, float]:
        """Microseconds of host time of the bound run, and of a launch of its kernel through the driver."""
        (run, pack), stream = self._runs[0], torch.cuda.Stream()
        pointers, workspace, where = pack.pointers, self._workspace, stream.cuda_stream
        bare = bare_launch(lambda s: run(pointers, workspace, s), where)
        return host_times({"run": lambda: run(pointers, workspace, where), "driver": bare})

    def front_door(self) -> Callable[[int], object]:
        """The function that a model calls, on the same engine."""
        import linear_attention as la

        decode, gdn = isinstance(self.case, Decode), self.case.op == "gdn"
        name = ("gated_delta_net" if gdn else "kimi_delta_attention") + ("_decode" if decode else "")
        function, plan_name = getattr(la, name), self._rule["use"]
        x = {port: tensor for port, tensor in self._x.items() if port != "slots"}
        if decode:
            sets, slots = len(self._x["slots"]), list(self._x["slots"])
            x |= {"output_final_state": True, "overwrite_initial_state": True}  # type: ignore[dict-item]
            return lambda i: function(**x, state_indices=slots[i % sets], plan_name=plan_name)
        return lambda i: function(**x, output_final_state=True, plan_name=plan_name)


def _sets(case: Any) -> int:
    return case.sets if isinstance(case, Decode) else 1


def _in_place(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"final_state": inputs["initial_state"]}


def _arguments(case: Any, x: dict[str, torch.Tensor], number: int) -> dict[str, Any]:
    """The arguments of the package's torch op, by name."""
    decode = isinstance(case, Decode)
    found: dict[str, Any] = {
        **{port: x[port] for port in ("q", "k", "v", "g", "beta")},
        "cu_seqlens": x.get("cu_seqlens"), "initial_state": x.get("initial_state"), "a_log": None, "dt_bias": None,
        "state_indices": x["slots"][number] if decode else None,
        "scale": None, "output_final_state": True, "use_qk_l2norm": False, "use_beta_sigmoid": False,
        "allow_neg_eigval": False, "safe_gate": False, "gate_domain": "log", "overwrite_initial_state": decode,
        "state_layout": "v_major", "plan_name": None, "check": False,
    }  # fmt: skip
    if decode:
        found |= {"num_accepted_tokens": None, "tokens_per_sequence": 0}
    else:
        found |= {"checkpoint_every_n_tokens": 0, "checkpoint_dtype": None, "batch_invariant": False}
    if case.op == "kda":
        found |= {"gate_lower_bound": None, "gate_activation": "sigmoid"}
    return found
