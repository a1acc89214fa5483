"""Configuration: which engines take part, in what order, with which knobs. TOML files, variables and ``configure()``.

``current()`` is the merged, immutable Config in force. Imported by the registry, the planner, the ranking, the caches and
the command line; ``docs/configuration.md`` is the user's page. Importing it reads no file.
"""

from __future__ import annotations

from ._check import ConfigWarning, Finding, check, describe, enforce
from ._model import Config, KnobSetting, Named, merge
from ._rules import Match, Rule, RuleSubject
from ._source import ConfigValue
from ._sources import foreign_files, unknown_variables
from ._state import Configured, configure, current, epoch, load, reload

__all__ = [
    "Config",
    "ConfigValue",
    "ConfigWarning",
    "Configured",
    "Finding",
    "KnobSetting",
    "Match",
    "Named",
    "Rule",
    "RuleSubject",
    "check",
    "configure",
    "current",
    "describe",
    "enforce",
    "epoch",
    "foreign_files",
    "load",
    "merge",
    "reload",
    "unknown_variables",
]
