"""The arguments of every verb, in one place, so that building the parser imports no verb.

``handler`` of the parsed options is ``"module:function"`` of the verb, relative to this package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ._output import UsageProblem

__all__ = ["parse"]

_EPILOG = """\
exit codes:
  0  ok
  1  findings: no engine, outputs or a decision that differ, a failed check, lint, probe or test
  2  usage: wrong arguments, or a file named by them that can't be read
  3  environment: unusable configuration, a missing dependency, plugin or device, an internal error

With --json standard output is one JSON document; messages go to standard error.
"""
_GRAPH = "graph JSON file (Graph.to_json), or - for standard input"
_DEVICE = 'an ordinal, "cpu", "cuda", a preset like H200, or a file with device JSON (default: the current device)'


class _Parser(argparse.ArgumentParser):
    """Raises UsageProblem instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageProblem(f"{message} (see {self.prog} --help)")


class _Version(argparse.Action):
    """Prints the version, and reads it only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .. import __version__

        print(f"cudnn-core {__version__}")
        parser.exit()


def parse(arguments: Sequence[str], rest: Sequence[str] | None) -> argparse.Namespace:
    """The options of one verb; ``rest`` is what stood after ``--``. Raises UsageProblem, and SystemExit for --help."""
    options = _build_parser().parse_args(arguments)
    if rest is not None and not hasattr(options, "rest"):
        raise UsageProblem("this verb takes no arguments after --")
    if rest is not None:
        options.rest = list(rest)
    return options


def _build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = _Parser(
        "cudnn-core",
        description="Which engine runs a graph, why, and how fast.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)
    _engines(verbs)
    _explain(verbs)
    _run(verbs)
    _bench(verbs)
    _config(verbs)
    _doctor(verbs)
    _plugin(verbs)
    _demo(verbs)
    return parser


def _verb(verbs: Any, name: str, handler: str, text: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.set_defaults(handler=handler)
    verb.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    return verb


def _engines(verbs: Any) -> None:
    verb = _verb(verbs, "engines", "_engines:engines", "list every known engine and its state")
    verb.add_argument("pattern", nargs="?", default="*", metavar="GLOB", help='like "frost_gemm:*" (default: all)')
    verb.add_argument("--verbose", action="store_true", help="every reason, and where the plugin is installed")


def _explain(verbs: Any) -> None:
    verb = _verb(verbs, "explain", "_explain:explain", "say which engine is chosen for a graph, and why no other one")
    _graph_arguments(verb)
    verb.add_argument("--replay", metavar="FILE", help="compare with a saved decision; exit 1 if they differ")
    verb.add_argument("--save", metavar="FILE", help="write the decision")
    verb.add_argument("--verbose", action="store_true", help="print every reason and the notes of every engine")


def _run(verbs: Any) -> None:
    verb = _verb(verbs, "run", "_run:run", "run a graph and check its outputs against the reference")
    _graph_arguments(verb)
    verb.add_argument(
        "--inputs",
        metavar="FILE",
        help=".npz with an array for each input, by name or uid; one of another float type is rounded, with a note",
    )
    verb.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    verb.add_argument("--executor", metavar="NAME", help="run the plan's artifacts with an installed executor")
    verb.add_argument(
        "--executor-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the executor, like seed=3 or timeout=60 of the emulator (repeatable)",
    )
    verb.add_argument("--outputs", metavar="FILE", help="write the outputs to this .npz file")


def _bench(verbs: Any) -> None:
    verb = _verb(verbs, "bench", "_bench:bench", "time every eligible engine and record which is fastest")
    _graph_arguments(verb)
    verb.add_argument("--repeats", type=_positive, default=20, help="timings for each engine and config (default: 20)")
    verb.add_argument("--warmup", type=_positive, default=3, help="untimed runs before them (default: 3)")
    verb.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for the timings, without builds (default: 60)",
    )
    verb.add_argument("--engine", metavar="GLOB", help="only these engines; such a run writes no record")
    verb.add_argument(
        "--members",
        type=_count,
        default=8,
        metavar="N",
        help="of each engine with variants, time up to N further members that it proposes (default: 8)",
    )
    verb.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    verb.add_argument("--no-record", action="store_true", help="print the times and write nothing")


def _config(verbs: Any) -> None:
    group = verbs.add_parser("config", help="check or show the configuration", allow_abbrev=False)
    actions = group.add_subparsers(metavar="check|show", required=True, parser_class=_Parser)
    check = _verb(actions, "check", "_config:check", "list what is wrong or doubtful in the configuration")
    check.add_argument("file", nargs="?", metavar="FILE", help="check with this file in place of CUDNN_CORE_CONFIG")
    _verb(actions, "show", "_config:show", "print every merged value and where it was set")


def _doctor(verbs: Any) -> None:
    verb = _verb(verbs, "doctor", "_doctor:doctor", "probe the installation: plugins, caches, driver, configuration")
    verb.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds for the import of a plugin (default: 30)"
    )
    verb.add_argument("--verbose", action="store_true", help="print the probes that are fine, too, with all details")


def _plugin(verbs: Any) -> None:
    group = verbs.add_parser("plugin", help="make, check or test a plugin", allow_abbrev=False)
    actions = group.add_subparsers(metavar="new|lint|test", required=True, parser_class=_Parser)
    new = _verb(actions, "new", "_new:new", "write a complete plugin distribution that passes the conformance kit")
    new.add_argument("name", help="the plugin's id: [a-z][a-z0-9_]*")
    new.add_argument("--dir", metavar="DIR", help="the folder to make (default: NAME)")
    lint = _verb(actions, "lint", "_lint:lint", "check a plugin without running its code")
    lint.add_argument(
        "subject", metavar="PATH_OR_NAME", help="a project folder, a wheel, or an installed plugin or dist"
    )
    lint.add_argument("--no-build", action="store_true", help="don't build a project folder's wheel to look into it")
    test = _verb(actions, "test", "_test:test", "run the conformance kit on an installed plugin")
    test.add_argument("name", help="the plugin's id")
    _hands_on(test, "pytest")


def _demo(verbs: Any) -> None:
    verb = _verb(verbs, "demo", "_demo:demo", "run the sentence search example of a source checkout")
    _hands_on(verb, "the example")


def _hands_on(verb: argparse.ArgumentParser, to: str) -> None:
    verb.usage = f"{verb.format_usage().removeprefix('usage: ').strip()} [-- ARGS]"
    verb.description = f"{verb.description} ARGS after -- go to {to}."
    verb.set_defaults(rest=[])


def _graph_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("graph", metavar="GRAPH.json", help=_GRAPH)
    verb.add_argument("--device", help=_DEVICE)
    verb.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a runtime size, for graphs that have some (repeatable)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value
