"""``Config``: the merged configuration, immutable, and the questions that planning asks it.

``merge`` folds layers, lowest first, into one. Imported by the configuration's state and check; the registry, the planner
and the ranking hold a Config and call its methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from .._declines import Decline
from ._grammar import bare_id, engine_matches, is_exact, split_engine
from ._layer import KEYS, Layer
from ._locate import Path
from ._rules import Rule, RuleSubject
from ._source import ConfigValue, Entry, dotted

__all__ = ["Config", "KnobSetting", "Named", "merge"]


class Named(NamedTuple):
    """A name or glob, and where it was written."""

    pattern: str
    origin: str


class KnobSetting(NamedTuple):
    """A knob of the engines that ``engine`` (an id or glob) covers."""

    engine: str
    knob: str
    value: Any
    origin: str


class Config(NamedTuple):
    """The merged configuration. ``Config()`` is the built-in one.

    strict         a pin that declines raises, and so does what otherwise only warns
    allow, deny    plugin globs; ``allow`` None admits every installed plugin
    resolve        plugin id -> distribution that provides it, where several claim it
    enable         engine globs whose experimental engines take part; ``disable`` wins over it
    order          engine globs, preferred first
    require        behaviour notes that every engine must have
    max_workspace  bytes, or None for no limit
    rules          highest layer first, in file order within a layer
    settings       knob defaults in ascending precedence; ``knobs`` has them by engine glob
    log, cache_dir level of the "cudnn_core" logger and directory of the caches, or None
    values         everything that a layer has set, with its origin
    """

    strict: bool = False
    allow: tuple[str, ...] | None = None
    deny: tuple[Named, ...] = ()
    resolve: Mapping[str, str] = MappingProxyType({})
    enable: tuple[Named, ...] = ()
    disable: tuple[Named, ...] = ()
    order: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    max_workspace: int | None = None
    rules: tuple[Rule, ...] = ()
    settings: tuple[KnobSetting, ...] = ()
    log: str | None = None
    cache_dir: str | None = None
    values: tuple[ConfigValue, ...] = ()

    @property
    def digest(self) -> str:
        """64 hex digits of all that can change a decision; independent of where it was written."""
        return _digest(self)

    @property
    def knobs(self) -> Mapping[str, Mapping[str, Any]]:
        """Engine glob -> knob -> value, as written; ``knobs_for`` applies the precedence."""
        tables: dict[str, dict[str, Any]] = {}
        for setting in self.settings:
            tables.setdefault(setting.engine, {})[setting.knob] = setting.value
        return MappingProxyType({engine: MappingProxyType(table) for engine, table in tables.items()})

    def origin(self, key: str, item: object = None) -> str:
        """Where the value of a dotted key (``engines.max_workspace``) was set, or ``built-in``.

        Layers add to some lists (``engines.require``): ``item`` is the member of such a list that is asked about.
        """
        return next(
            (value.origin for value in self.values if value.key == key and item in (None, value.value)), "built-in"
        )

    def plugin_declines(self, plugin: str) -> list[Decline]:
        """Why the plugin may not take part: every reason, or nothing."""
        reasons = []
        if self.allow is not None and not any(fnmatchcase(plugin, pattern) for pattern in self.allow):
            reasons.append(
                Decline(
                    "config.not_allowed",
                    subject=plugin,
                    expected=list(self.allow),
                    actual=plugin,
                    hint="add it to plugins.allow",
                    origin=self.origin("plugins.allow"),
                )
            )
        reasons += [
            Decline("config.not_allowed", subject=plugin, hint=f"plugins.deny has {pattern!r}", origin=origin)
            for pattern, origin in self.deny
            if fnmatchcase(plugin, pattern)
        ]
        return reasons

    def engine_declines(self, engine: str, maturity: str = "stable") -> list[Decline]:
        """Why the engine ``plugin:engine[/variant]`` may not take part: every reason, or nothing."""
        engine = bare_id(engine)
        reasons = self.plugin_declines(split_engine(engine)[0])
        reasons += [
            Decline("config.disabled", subject=engine, hint=f"engines.disable has {pattern!r}", origin=origin)
            for pattern, origin in self.disable
            if engine_matches(pattern, engine)
        ]
        if maturity == "experimental" and not any(_enables(pattern, engine) for pattern, _ in self.enable):
            reasons.append(
                Decline(
                    "config.maturity",
                    subject=engine,
                    expected="engines.enable",
                    actual=maturity,
                    hint=f'engines.enable = ["{engine}"] admits it',
                    origin="built-in",
                )
            )
        return reasons

    def matching_rules(self, subject: RuleSubject) -> list[Rule]:
        """The rules that apply, in precedence order: the first with ``use`` pins, every ``avoid`` counts."""
        return [rule for rule in self.rules if rule.matches(subject)]

    def knobs_for(self, engine: str) -> dict[str, tuple[Any, str]]:
        """Knob -> (value, origin) of the ``[engine."...".knobs]`` tables that cover the engine.

        A higher layer wins; within a layer an exact name over a glob, then the later line.
        """
        return {
            setting.knob: (setting.value, setting.origin)
            for setting in self.settings
            if engine_matches(setting.engine, engine)
        }

    def order_index(self, engine: str) -> int | None:
        """The position of the first glob of ``order`` that covers the engine, or None."""
        return next((index for index, pattern in enumerate(self.order) if engine_matches(pattern, engine)), None)


def merge(layers: Sequence[Layer]) -> Config:
    """Fold validated layers, lowest first."""
    single: dict[Path, Entry] = {}
    united: dict[Path, dict[Any, Entry]] = {}
    knobs: list[tuple[int, bool, Entry]] = []
    for depth, layer in enumerate(layers):
        for entry in layer.entries:
            key = KEYS.get(entry.path)
            if key is not None and key.union:
                united.setdefault(entry.path, {}).setdefault(entry.value, entry)
            elif entry.path[0] == "engine":
                knobs.append((depth, is_exact(str(entry.path[1])), entry))
            else:
                single[entry.path] = entry
    knobs.sort(key=lambda item: item[:2])
    settings: dict[Path, Entry] = {}
    for _, _, entry in knobs:
        settings.pop(entry.path, None)  # so that the dict stays in ascending precedence
        settings[entry.path] = entry
    rules = tuple(rule for layer in reversed(layers) for rule in layer.rules)

    def one(*path: str) -> Any:
        return single[path].value if path in single else None

    def union(*path: str) -> tuple[Named, ...]:
        return tuple(Named(entry.value, entry.origin) for entry in united.get(path, {}).values())

    entries = [*single.values(), *(entry for group in united.values() for entry in group.values())]
    entries += settings.values()
    entries.sort(key=_place)
    values = [ConfigValue(dotted(entry.path), _plain(entry.value), entry.origin) for entry in entries]
    values += [ConfigValue(f"rule[{index}]", rule.to_dict(), rule.origin) for index, rule in enumerate(rules)]
    return Config(
        strict=bool(one("strict")),
        allow=one("plugins", "allow"),
        deny=union("plugins", "deny"),
        resolve=MappingProxyType(
            {str(p[2]): entry.value for p, entry in single.items() if p[:2] == ("plugins", "resolve")}
        ),
        enable=union("engines", "enable"),
        disable=union("engines", "disable"),
        order=one("engines", "order") or (),
        require=tuple(note.pattern for note in union("engines", "require")),
        max_workspace=one("engines", "max_workspace"),
        rules=rules,
        settings=tuple(
            KnobSetting(str(entry.path[1]), str(entry.path[3]), entry.value, entry.origin)
            for entry in settings.values()
        ),
        log=one("log"),
        cache_dir=one("cache_dir"),
        values=tuple(values),
    )


def _place(entry: Entry) -> int:
    """Where ``config show`` lists an entry: in the order of KEYS."""
    return next(index for index, path in enumerate(KEYS) if entry.path[: len(path)] == path)


def _enables(pattern: str, engine: str) -> bool:
    """Like engine_matches, but a pattern with a variant admits the engine itself, so that its variants are looked at."""
    plugin, name, variant = split_engine(pattern)
    if variant and not split_engine(engine)[2]:
        pattern = f"{plugin}:{name}"
    return engine_matches(pattern, engine)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _digest(config: Config) -> str:
    from .._canonical import digest

    facts = {
        "strict": config.strict,
        "allow": config.allow,
        "deny": sorted({named.pattern for named in config.deny}),
        "resolve": dict(config.resolve),
        "enable": sorted({named.pattern for named in config.enable}),
        "disable": sorted({named.pattern for named in config.disable}),
        "order": config.order,
        "require": sorted(config.require),
        "max_workspace": config.max_workspace,
        "rules": [rule.to_dict() for rule in config.rules],
        "knobs": [[setting.engine, setting.knob, setting.value] for setting in config.settings],
    }
    return digest(facts)
