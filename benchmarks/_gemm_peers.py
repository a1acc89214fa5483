"""The peers of the GEMM benchmark: cuBLAS through torch, the cuDNN backend through its frontend, torch.compile, quack.

``peers(case, setup)`` gives a callable for each peer that is installed and can run the case; it takes the index of the set of buffers
and writes ``y`` of that set where the peer's API lets it. A peer that is missing or fails is left out with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ._gemm_cases import Case, Setup

__all__ = ["peers"]

Call = Callable[[int], object]


def peers(case: Case, setup: Setup, skip: frozenset[str] = frozenset()) -> tuple[dict[str, Call], dict[str, str]]:
    """The callables by name, and for each peer that is left out why."""
    found: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name, make in _MAKERS.items():
        if name in skip:
            continue
        try:
            for label, call in make(case, setup):
                call(0)
                torch.cuda.synchronize()
                found[label] = call
        except Exception as error:  # a peer's failure is a note of the table, whatever it is
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
    return found, missing


def _matrices(setup: Setup, *names: str) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(one[name][0] for name in names) for one in setup.sets]


def _cublas(case: Case, setup: Setup) -> Iterator[tuple[str, Call]]:
    count = len(setup.sets)
    if case.kind == "plain" and case.dtype == "bfloat16":
        sets = _matrices(setup, "x", "w", "y")
        yield "cublas", lambda i: torch.mm(sets[i % count][0], sets[i % count][1], out=sets[i % count][2])
    elif case.kind == "plain":
        scaled = _matrices(setup, "x", "w", "y", "scale_x", "scale_w")
        for label, fast in (("cublas", False), ("cublas fast accumulation", True)):

            def call(i: int, fast: bool = fast) -> object:
                x, w, y, scale_x, scale_w = scaled[i % count]
                return torch._scaled_mm(
                    x, w, scale_x[0], scale_w[0], out_dtype=torch.bfloat16, use_fast_accum=fast, out=y
                )

            yield label, call
    else:
        inputs = [{name: t[0] for name, t in one.items() if name != "y"} for one in setup.sets]
        yield "torch eager", lambda i: setup.expression(**inputs[i % count])


def _compiled(case: Case, setup: Setup) -> Iterator[tuple[str, Call]]:
    if case.kind == "plain":  # for a bare product it calls cuBLAS
        return
    inputs = [{name: t[0] for name, t in one.items() if name != "y"} for one in setup.sets]
    count = len(inputs)
    run: Any = torch.compile(setup.expression, dynamic=False)
    yield "torch.compile", lambda i: run(**inputs[i % count])


def _cudnn(case: Case, setup: Setup) -> Iterator[tuple[str, Call]]:
    """The backend through the frontend's own API, its first plan by heuristic mode A."""
    import cudnn

    types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
             torch.float32: cudnn.data_type.FLOAT}  # fmt: skip
    handle = cudnn.create_handle()
    g = cudnn.pygraph(
        handle=handle, io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )  # fmt: skip

    def tensor(name: str, buffer: torch.Tensor) -> Any:
        return g.tensor(name=name, dim=list(buffer.shape), stride=list(buffer.stride()), data_type=types[buffer.dtype])

    t = {name: tensor(name, buffer) for name, buffer in setup.sets[0].items() if name != "y"}
    if case.kind == "swiglu":
        gate, up = (g.matmul(A=t["x"], B=t[w]) for w in ("w_gate", "w_up"))
        y = g.mul(a=g.swish(input=gate), b=up)
    else:
        y = g.matmul(A=t["x"], B=t["w"])
        if "scale_x" in t:
            y = g.mul(a=g.mul(a=y, b=t["scale_x"]), b=t["scale_w"])
        if case.kind == "bias_gelu":
            y = g.gelu(input=g.add(a=y, b=t["bias"]))
    y.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)
    g.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, g.get_workspace_size()), dtype=torch.uint8, device="cuda")
    packs: list[Mapping[Any, torch.Tensor]] = [
        {**{t[name]: buffer for name, buffer in one.items() if name != "y"}, y: one["y"]} for one in setup.sets
    ]

    def call(i: int) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        g.execute(packs[i % len(packs)], workspace, handle=handle)

    yield "cudnn backend", call


def _quack(case: Case, setup: Setup) -> Iterator[tuple[str, Call]]:
    if case.kind != "plain" or case.dtype != "bfloat16":
        return
    from quack.gemm_interface import gemm

    sets = _matrices(setup, "x", "w", "y")
    yield (
        "quack",
        lambda i: gemm(sets[i % len(sets)][0], sets[i % len(sets)][1], out=sets[i % len(sets)][2], tuned=False),
    )


_MAKERS: dict[str, Callable[[Case, Setup], Iterator[tuple[str, Call]]]] = {
    "cublas": _cublas, "cudnn": _cudnn, "compile": _compiled, "quack": _quack,
}  # fmt: skip
