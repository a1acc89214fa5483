"""The frontend's select and deselect methods: which plans of a graph may be used. Mixed into the classic sequence.

They hold for what is planned or built after the call, by ``plan`` as by ``build_plans``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .._arguments import as_int
from .._enums import behavior_note, numerical_note
from .._errors import GraphError
from ._calls import names, note_names, unknown_engines

if TYPE_CHECKING:
    from .._candidates import Filters

__all__ = ["PlanSelection"]


class PlanSelection:
    """What the caller excludes."""

    def _init_selection(self) -> None:
        self._deselected: list[str] = []
        self._required_notes: list[str] = []
        self._barred_notes: list[str] = []
        self._workspace_limit: int | None = None

    def deselect_engines(self, engine_names: Iterable[str]) -> Any:
        """Exclude engines by exact name or glob (``"plugin:*"``), never by substring.

        A pattern that covers no installed engine has no effect: a ConfigWarning, or a GraphError in a strict configuration.
        """
        patterns = names(engine_names, "deselect_engines")
        for message in unknown_engines(patterns):
            from .._config import ConfigWarning, current

            if current().strict:
                raise GraphError(message)
            warnings.warn(message, ConfigWarning, stacklevel=2)
        self._deselected.extend(patterns)
        return self

    def deselect_workspace_greater_than(self, workspace_limit: int) -> Any:
        """Exclude plans whose ``engine_workspace_size`` is greater, known before they are built or not."""
        self._workspace_limit = as_int(workspace_limit, "workspace_limit")
        return self

    def select_behavior_notes(self, notes: Iterable[object]) -> Any:
        self._required_notes.extend(note_names(behavior_note, notes, "select_behavior_notes"))
        return self

    def deselect_behavior_notes(self, notes: Iterable[object]) -> Any:
        self._barred_notes.extend(note_names(behavior_note, notes, "deselect_behavior_notes"))
        return self

    def select_numeric_notes(self, notes: Iterable[object]) -> Any:
        self._required_notes.extend(note_names(numerical_note, notes, "select_numeric_notes"))
        return self

    def deselect_numeric_notes(self, notes: Iterable[object]) -> Any:
        self._barred_notes.extend(note_names(numerical_note, notes, "deselect_numeric_notes"))
        return self

    def _filters(self) -> Filters:
        from .._candidates import Filters

        return Filters(
            deselect=tuple(self._deselected),
            require_notes=tuple(self._required_notes),
            bar_notes=tuple(self._barred_notes),
            max_workspace=self._workspace_limit,
        )
