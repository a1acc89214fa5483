"""``cudnn-core config check`` and ``config show``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .._errors import ConfigError
from ._output import UsageProblem, aligned, emit_json

if TYPE_CHECKING:
    from .._config import Finding

__all__ = ["check", "findings", "show"]


def check(options: Any) -> int:
    """Findings, one a line; exit 1 if one of them is an error."""
    if options.file and not os.path.isfile(options.file):  # noqa: PTH113
        raise UsageProblem(f"{options.file}: no such file")
    with _named(options.file):
        found = findings()
    errors = sum(finding.severity == "error" for finding in found)
    if options.json:
        emit_json({"schema": 1, "errors": errors, "findings": [finding._asdict() for finding in found]})
    else:
        for finding in found:
            print(finding)
        print(f"{errors} errors, {len(found) - errors} warnings" if found else "ok")
    return 1 if errors else 0


@contextlib.contextmanager
def _named(file: str | None) -> Iterator[None]:
    """``file`` in the place of CUDNN_CORE_CONFIG."""
    if not file:
        yield
        return
    from .._config import reload

    before = os.environ.get("CUDNN_CORE_CONFIG")
    os.environ["CUDNN_CORE_CONFIG"] = os.path.abspath(file)  # noqa: PTH100
    reload()
    try:
        yield
    finally:
        del os.environ["CUDNN_CORE_CONFIG"]
        if before is not None:
            os.environ["CUDNN_CORE_CONFIG"] = before
        reload()


def findings() -> list[Finding]:
    """What is wrong or doubtful in the configuration in force, given what is installed; variables that nobody reads."""
    from .._config import Finding, current, unknown_variables
    from .._config import check as check_config
    from .._registry import current as current_registry

    found = [Finding("warning", name, message, f"env:{name}") for name, message in unknown_variables()]
    try:
        return check_config(current(), current_registry(enforce=False)) + found
    except ConfigError as error:
        return [Finding("error", error.key, error.text, error.origin), *found]


def show(options: Any) -> int:
    """Every value with its origin, the built-in ones included."""
    from .._config import current, describe

    config = current()
    values = describe(config)
    if options.json:
        emit_json({"schema": 1, "digest": config.digest, "values": [value._asdict() for value in values]})
    else:
        print(aligned([(value.key, _text(value.value), value.origin) for value in values], ("key", "value", "origin")))
    return 0


def _text(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
