"""The command ``cudnn-core`` (also ``python -m cudnn_core``): ``main`` reads the arguments and runs one verb.

Exit codes, the same for every verb:

0  ok
1  findings: the command worked, and what it found is negative. No engine runs the graph (NoEngineError), a plan does not
   build or an engine fails (BuildError, EngineBroken), outputs differ from the reference, a decision is not what was saved,
   a check, lint, probe or test fails
2  usage: the arguments are wrong, or a file that they name is missing, unreadable or malformed (graph, decision, device,
   inputs), an unknown device, engine, executor or size
3  environment: a configuration source can't be used (ConfigError; for ``config check`` it is a finding), a dependency,
   plugin, device or the reference engine is missing (DriverError, HandleError), a file can't be written, or the command
   itself broke (a traceback follows)

With ``--json`` standard output holds one JSON document and nothing else, whatever plugins print; an error is ``{"schema": 1, "error": {"exit",
"type", "message"}}``. Messages, progress and logs go to standard error. Verbs are imported when they run: a cold
``cudnn-core engines`` must stay near the cost of the registry.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ._output import Failure, UsageProblem, documents_only, fail

__all__ = ["main"]

OK, FINDINGS, USAGE, ENVIRONMENT = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's); returns the exit code."""
    arguments, rest = _split(list(sys.argv[1:] if argv is None else argv))
    try:
        if "--json" not in arguments:
            return _perform(arguments, rest, False)
        with documents_only():
            return _perform(arguments, rest, True)
    except BrokenPipeError:  # the reader of a pipe has gone; so that the interpreter's last flush stays silent
        sys.stdout = open("/dev/null", "w", encoding="utf-8")  # noqa: PTH123, SIM115
        return 141


def _perform(arguments: list[str], rest: list[str] | None, as_json: bool) -> int:
    from ._parser import parse

    try:
        options = parse(arguments, rest)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except UsageProblem as error:
        return fail(error, USAGE, as_json)
    with warnings.catch_warnings():
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("default", category)
        warnings.showwarning = _show_warning
        try:
            return _dispatch(options)
        except KeyboardInterrupt:
            print("cudnn-core: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:
            raise
        except Exception as error:
            code = exit_code(error)
            if code is None:
                import traceback

                traceback.print_exc()
                code = ENVIRONMENT
            return fail(error, code, as_json)


def exit_code(error: Exception) -> int | None:
    """The exit code of an error, by the table above; None for one that nobody raises on purpose."""
    from .. import _errors

    if isinstance(error, Failure):
        return error.exit_code
    from .._registry import EngineLookupError

    if isinstance(error, EngineLookupError):
        return {"unknown": USAGE, "not_installed": ENVIRONMENT}.get(error.kind, FINDINGS)
    from .._decision import DecisionError

    if isinstance(error, (_errors.GraphError, DecisionError)):
        return USAGE
    if isinstance(error, (_errors.ConfigError, _errors.DriverError, _errors.HandleError)):
        return ENVIRONMENT
    if isinstance(error, _errors.CudnnCoreError):
        return FINDINGS
    return ENVIRONMENT if isinstance(error, OSError) else None


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """The arguments before the first ``--``, and those after it, which some verbs hand on."""
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _dispatch(options: Any) -> int:
    from importlib import import_module

    module, _, function = options.handler.partition(":")
    verb = getattr(import_module(f".{module}", __name__), function)
    return int(verb(options))


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print(f"cudnn-core: warning: {message}", file=sys.stderr)
