"""Host overhead of cudnn_core, against the budgets of the architecture (section 14).

    python benchmarks/host_overhead.py [--json [FILE]] [--only import] [--check]      (make bench)

Needs no GPU. The peer of the execute cases is nvidia-cudnn-frontend 1.32.0, driven with a no-op engine; without it, or
without torch, those cases are left out and said so.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

from benchmarks import _execution, _planning, _startup  # noqa: E402
from benchmarks._harness import Report, finish, options  # noqa: E402

_CASES = {
    "import": _startup.imports,
    "discovery": _startup.discovery,
    "check_support": _planning.checks,
    "planning": _planning.planning,
    "execute": _execution.execution,
    "bind": _execution.binding,
    "plugins": _execution.plugins,
}


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--only", nargs="+", choices=_CASES, default=list(_CASES), metavar="CASE", help=", ".join(_CASES)
    )
    args = parser.parse_args(argv)
    report = Report(table=args.json != "-", quick=args.quick)
    for name in args.only:
        if name == "execute" and find_spec("torch") is None:
            report.note("execute: left out, it needs torch")
        else:
            _CASES[name](report)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
