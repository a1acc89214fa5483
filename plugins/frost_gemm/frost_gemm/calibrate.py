"""Fits the cost model to measurements, and takes them: ``python -m frost_gemm.calibrate RESULTS.json [--measure] [--write]``.

``--measure`` times what the engine of the GPU at hand proposes for a sweep of shapes, and writes RESULTS.json; needs torch. Without it
RESULTS.json is read and the coefficients (``model.Coefficients``) are fitted to it. ``--write`` stores them in the package:
``calibration/smXX.json``, which ``model`` reads, and the error of the estimates in ``calibration/errors.json``, which cudnn_core reads.

RESULTS.json: ``{"device": DeviceInfo.to_dict(), "samples": [{"work": {...}, "shape": [m, n, k, l], "config": {...}, "us": 12.3}]}``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from cudnn_core import DeviceInfo

from .config import TileConfig
from .facts import ArchFacts, arch_facts
from .model import CALIBRATION, Coefficients, Model, Shape, Work, coefficients, machine, work

__all__ = ["Fit", "Sample", "fit", "main", "samples_of"]

# Steps of the search, as factors of a coefficient; each round tries every coefficient up and down.
STEPS = (2.0, 1.5, 1.2, 1.08, 1.03, 1.01)
ROUNDS = 10
NEAR = 1.3
WEIGHT = (
    3  # a sample counts by (quickest time of its problem / its time) to this power: the quick ones are what matters
)
HELD_OUT = 3  # every third problem is not fitted to: the stated error is of those


class Sample(NamedTuple):
    """One measurement: ``us`` of a launch of ``config``."""

    work: Work
    shape: Shape
    config: TileConfig
    us: float

    @property
    def problem(self) -> tuple[Work, Shape]:
        return self.work, self.shape


class Fit(NamedTuple):
    """p90_error  90th percentile of |estimate / time - 1| of the problems that were not fitted to, over the configurations that are
               at most NEAR times slower than the quickest: what is estimated for a ranking is one of those
    regret     mean of (time of the configuration that the model picks) / (time of the quickest), over all problems"""

    coefficients: Coefficients
    p90_error: float
    regret: float


def samples_of(document: dict[str, Any]) -> list[Sample]:
    return [
        Sample(Work(**row["work"]), Shape(*row["shape"]), TileConfig(**row["config"]), float(row["us"]))
        for row in document["samples"]
    ]


def fit(samples: Sequence[Sample], device: DeviceInfo, start: Coefficients | None = None) -> Fit:
    """The coefficients that all samples give, with the error that a fit without every third problem makes on those.

    Raises ValueError for fewer than three problems.
    """
    facts = _facts(device)
    problems = list(dict.fromkeys(sample.problem for sample in samples))
    if len(problems) < HELD_OUT:
        raise ValueError(f"{len(problems)} problems are too few to fit to: {HELD_OUT} at least")
    quickest: dict[tuple[Work, Shape], float] = {}
    for sample in samples:
        quickest[sample.problem] = min(sample.us, quickest.get(sample.problem, sample.us))
    start = start or coefficients(facts.target, facts.mma)

    held = set(problems[HELD_OUT - 1 :: HELD_OUT])
    blind = _descend([sample for sample in samples if sample.problem not in held], quickest, device, facts, start)
    errors = sorted(
        abs(estimate / sample.us - 1)
        for sample, estimate in _estimates(samples, device, facts, blind)
        if sample.problem in held and sample.us <= NEAR * quickest[sample.problem]
    )
    best = _descend(samples, quickest, device, facts, start)
    return Fit(
        _rounded(best), errors[min(len(errors) - 1, int(0.9 * len(errors)))], _regret(samples, device, facts, best)
    )


def _descend(
    samples: Sequence[Sample],
    quickest: dict[tuple[Work, Shape], float],
    device: DeviceInfo,
    facts: ArchFacts,
    best: Coefficients,
) -> Coefficients:
    """Coordinate descent on the weighted mean of squared logarithms of estimate / time."""
    weights = [(quickest[sample.problem] / sample.us) ** WEIGHT for sample in samples]

    def loss(c: Coefficients) -> float:
        if max(c.tensor, c.promote, c.alone, c.dram) > 1:  # shares of a rate
            return math.inf
        estimates = _estimates(samples, device, facts, c)
        squares = [math.log(estimate / sample.us) ** 2 for sample, estimate in estimates]
        return float(sum(map(mul, weights, squares)) / sum(weights))

    least = loss(best)
    for step in STEPS:
        for _ in range(ROUNDS):
            before = least
            for field in fields(Coefficients):
                for factor in (step, 1 / step):
                    changed = replace(best, **{field.name: getattr(best, field.name) * factor})
                    value = loss(changed)
                    if value < least:
                        best, least = changed, value
            if least > before * 0.999:
                break
    return best


def _estimates(
    samples: Sequence[Sample], device: DeviceInfo, facts: ArchFacts, c: Coefficients
) -> Iterator[tuple[Sample, float]]:
    gpu = machine(device, facts, c)
    for sample in samples:
        yield sample, Model(sample.work, sample.shape, gpu, c).us(sample.config)


def _regret(samples: Sequence[Sample], device: DeviceInfo, facts: ArchFacts, c: Coefficients) -> float:
    rows: dict[tuple[Work, Shape], list[tuple[float, float]]] = defaultdict(list)
    for sample, estimate in _estimates(samples, device, facts, c):
        rows[sample.problem].append((estimate, sample.us))
    return statistics.fmean(min(found)[1] / min(us for _, us in found) for found in rows.values())


def _rounded(c: Coefficients) -> Coefficients:
    return Coefficients(**{name: float(f"{value:.4g}") for name, value in asdict(c).items()})


def _facts(device: DeviceInfo) -> ArchFacts:
    facts = arch_facts(device)
    if facts is None:
        raise ValueError(f"there are no kernels for {device!r}")
    return facts


def store(found: Fit, device: DeviceInfo, count: int, folder: Path) -> list[Path]:
    """Write the coefficients and the error; those of other architectures stay."""
    facts = _facts(device)
    folder.mkdir(exist_ok=True)
    path = folder / f"{facts.target.replace('_', '').removesuffix('a')}.json"
    document = {
        "device": device.device_name,
        "samples": count,
        "regret": round(found.regret, 4),
        "coefficients": asdict(found.coefficients),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    errors = folder / "errors.json"
    table: dict[str, Any] = json.loads(errors.read_text()) if errors.is_file() else {"schema": 1, "sm": {}}
    table["sm"][facts.target.removeprefix("sm_")] = {"p90_error": round(found.p90_error, 4)}
    errors.write_text(json.dumps(table, indent=1) + "\n")
    return [path, errors]


# M, N, K of the sweep: large, memory-bound, and everything between
SHAPES = (
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (4096, 4096, 16384), (4096, 14336, 4096),
    (16, 8192, 8192), (32, 4096, 14336), (64, 8192, 8192), (128, 8192, 8192), (256, 4096, 4096), (512, 8192, 8192),
    (1000, 3000, 2000), (512, 512, 8192), (128, 128, 16384), (3072, 1024, 512),
)  # fmt: skip
TYPES = (("bfloat16", "bfloat16"), ("fp8_e4m3", "bfloat16"))


def measure() -> dict[str, Any]:
    """Times of every configuration that the engine proposes for the sweep, on the current GPU."""
    import cudnn_core

    device = cudnn_core.device_info(0)
    samples = []
    for dtype, out in TYPES:
        for m, n, k in SHAPES:
            g = cudnn_core.Graph(io_data_type=dtype, intermediate_data_type="float32", compute_data_type="float32")
            b = g.tensor(dim=(1, k, n), stride=(n * k, 1, k))
            g.matmul(g.tensor(dim=(1, m, k)), b).set_output(True).set_data_type(out)
            samples += list(_timed(g.freeze("cuda"), Shape(m, n, k), device))
    return {"device": device.to_dict(), "samples": samples}


def _timed(graph: Any, shape: Shape, device: DeviceInfo) -> Iterator[dict[str, Any]]:
    import torch

    from cudnn_core import Declined, ExecutionContext, PlanConfig

    from .engines import Sm90Wgmma, Sm100Tcgen05
    from .lower import lower

    facts, ctx = _facts(device), ExecutionContext(None, device)
    name, engine = {"wgmma": ("sm90_wgmma", Sm90Wgmma()), "tcgen05": ("sm100_tcgen05", Sm100Tcgen05())}[facts.mma]
    answer = engine.check_support(graph, ctx)
    program = graph.facts(lower).program
    if isinstance(answer, Declined) or program is None:
        return
    operands = tuple(operand._replace(alignment=256) for operand in graph.operands)
    kinds = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
    total = sum(math.prod(operand.dim) * kinds[operand.dtype].itemsize for operand in operands)
    # So many sets of operands that none is in L2 when it is read again. Random numbers: the clock follows the power that they take.
    copies = max(2, min(16, 3 * (device.l2_cache_bytes or 0) // total + 1))
    buffers = [
        [torch.randn(operand.dim, device="cuda").to(kinds[operand.dtype]) for operand in operands]
        for _ in range(copies)
    ]
    pointers = [tuple(buffer.data_ptr() for buffer in row) for row in buffers]
    stream = torch.cuda.current_stream().cuda_stream
    for config in answer.configs:
        plan = engine.build_plan(graph, PlanConfig(f"frost_gemm:{name}@1", config.knobs), ctx)
        run = plan.bind(operands)  # type: ignore[attr-defined]
        us = _median_us([partial(run, row, 0, stream) for row in pointers])
        tile = TileConfig.from_knobs(config.knobs)
        sys.stderr.write(f"{shape} {operands[0].dtype} {us:9.2f} us  {tile}\n")
        yield {"work": asdict(work(program)), "shape": list(shape), "config": asdict(tile), "us": us}


def _median_us(runs: list[Callable[[], None]], repeats: int = 7) -> float:
    """Microseconds of one run, in batches long enough that the host does not count."""
    import torch

    def batch(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for i in range(count):
            runs[i % len(runs)]()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / count

    batch(3)
    count = max(8, min(400, int(4000 / max(batch(8), 1.0))))
    return statistics.median(batch(count) for _ in range(repeats))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m frost_gemm.calibrate", description="Fit the cost model of frost_gemm."
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument(
        "--measure", action="store_true", help="time the sweep on this GPU and write RESULTS.json first"
    )
    parser.add_argument("--write", action="store_true", help="store the coefficients in the package")
    options = parser.parse_args(arguments)
    if options.measure:
        options.results.write_text(json.dumps(measure()))
    document = json.loads(options.results.read_text())
    device, samples = DeviceInfo.from_json(document["device"]), samples_of(document)
    facts = _facts(device)
    now = coefficients(facts.target, facts.mma)
    say = sys.stdout.write
    say(f"{len(samples)} samples of {device.device_name}; regret now {_regret(samples, device, facts, now):.3f}\n")
    found = fit(samples, device)
    say(f"fitted: p90 error {found.p90_error:.1%} of problems not fitted to, regret {found.regret:.3f}\n")
    for name, value in asdict(found.coefficients).items():
        say(f"  {name:20} {value:.4g}\n")
    if options.write:
        for path in store(found, device, len(samples), CALIBRATION):
            say(f"written: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
