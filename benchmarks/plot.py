"""Draws a result file of the benchmarks: ours against the best peer, one bar a case.

    python benchmarks/plot.py benchmarks/results/gemm_h200.json [OUT.svg]

Needs matplotlib. A bar is the peer's time over ours: above 1 ours is quicker; the mark is the target.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(source: Path, target: Path) -> int:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "benchmarks"  # the same file for the same numbers
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["ratio"] and row["unit"] == "us" and not row["case"].startswith(" ")]
    names = [f"{row['case']}  ({row['peer_name']})" for row in rows]
    speed = [1 / row["ratio"] for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1))
    axes.barh(names, speed, color=["#4477aa" if value >= 1 else "#cc6677" for value in speed])
    targets = [(i, 1 / row["budget"]) for i, row in enumerate(rows) if row.get("gate") == "ratio"]
    axes.plot([value for _, value in targets], [i for i, _ in targets], "k|", markersize=9, label="target")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("time of the best peer / ours")
    axes.set_title(rows[0]["machine"] if rows else source.name, fontsize=9)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    path = Path(sys.argv[1])
    raise SystemExit(main(path, Path(sys.argv[2]) if len(sys.argv) == 3 else path.with_suffix(".svg")))
