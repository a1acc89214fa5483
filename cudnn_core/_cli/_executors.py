"""Executors and their options: ``--executor NAME`` and ``--executor-option KEY=VALUE``. Imported by run.

An executor is called as ``executor(plan, pack, workspace, **options)``. Its options are its keyword-only parameters; the
annotation of one (int, float, bool, str or a Literal of strings) says what a VALUE may be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from .._errors import nearest
from ._output import Failure, UsageProblem

__all__ = ["executor_named"]

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def executor_named(name: str | None, settings: Iterable[str]) -> tuple[Callable[..., None] | None, dict[str, Any]]:
    """The installed executor and its options from KEY=VALUE; (None, {}) without a name.

    Raises EngineLookupError for a name that no one has, UsageProblem for an option that it does not take.
    """
    given = list(settings)
    if name is None:
        if given:
            raise UsageProblem(f"--executor-option {given[0]}: there is no --executor")
        return None, {}
    from .._registry import current

    found = current().executor(name)
    if not callable(found):
        raise Failure(f"executor {name} is {found!r}, which can't be called")
    return found, _options(found, name, given) if given else {}


def _options(executor: Any, name: str, settings: list[str]) -> dict[str, Any]:
    known = _known(executor)
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        where = f"--executor-option {setting}"
        if not equals:
            raise UsageProblem(f"{where}: KEY=VALUE is needed")
        if key not in known:
            listed = f": {', '.join(known)}" if known else " none"
            raise UsageProblem(f"{where}: executor {name} has no option {key!r}{nearest(key, known)}; it has{listed}")
        try:
            options[key] = _value(known[key], text)
        except ValueError as error:
            raise UsageProblem(f"{where}: {error}") from None
    return options


def _known(executor: Any) -> Mapping[str, Any]:
    """Annotation of each keyword-only parameter."""
    try:
        parameters = inspect.signature(executor, eval_str=True).parameters
    except (ValueError, TypeError, NameError):  # no signature, or an annotation that only a type checker can resolve
        try:
            parameters = inspect.signature(executor).parameters
        except (ValueError, TypeError):
            return {}
    return {key: item.annotation for key, item in parameters.items() if item.kind is item.KEYWORD_ONLY}


def _value(kind: Any, text: str) -> Any:
    """``text`` as an int, float, bool or str, or one of the strings of a Literal. Raises ValueError."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if text not in choices:
            raise ValueError(f"one of {', '.join(map(str, choices))} is needed")
        return text
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError("true or false is needed")
        return _BOOLEANS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{'an integer' if kind is int else 'a number'} is needed") from None
    return text
