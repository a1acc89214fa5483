"""One layer of configuration: raw tables in, validated entries out, or a ConfigError that names the place.

The table ``KEYS`` states every key: how it is read, how layers merge it, and whether a project file may set it.
Imported by the merge and by the configuration's state; files and variables reach it through ``parse_layer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from .._versions import normalise
from ._grammar import check_engine, check_plugin, engine_matches, is_exact, parse_size, split_engine
from ._locate import Path
from ._rules import Rule, parse_knobs, parse_rule
from ._source import Entry, Source

__all__ = ["KEYS", "LOG_LEVELS", "Layer", "flat_settings", "parse_layer"]

LOG_LEVELS = ("debug", "info", "warning", "error", "off")
_NOTE = re.compile(r"[a-z][a-z0-9_]*")
_DIST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")

Parse = Callable[[Source, Path, Any], "Iterable[Entry]"]


class Layer(NamedTuple):
    """A validated layer. ``kind`` as in Source; entries in file order."""

    kind: str
    label: str
    entries: tuple[Entry, ...]
    rules: tuple[Rule, ...]


class Key(NamedTuple):
    """A key of the configuration.

    parse    source, path, raw value -> entries
    union    layers add to each other; otherwise a later layer replaces the entry of the same path
    project  a project file may set it, because it can only restrict
    """

    parse: Parse
    union: bool = False
    project: bool = False


# Readers of values.


def _schema(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    if isinstance(raw, bool) or raw != 1 or not isinstance(raw, int):
        raise source.error(path, f"this version reads schema 1, got {raw!r}")
    return ()


def _strict(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    strict = source.boolean(path, raw)
    if source.kind == "project" and not strict:
        raise source.error(path, "a project file may only restrict: strict may only be true")
    return (Entry(path, strict, source.origin(path)),)


def _log(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    level = source.string(path, raw).lower()
    if level not in LOG_LEVELS:
        raise source.error(path, f"{raw!r} is not one of {', '.join(LOG_LEVELS)}")
    return (Entry(path, level, source.origin(path)),)


def _cache_dir(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    if source.kind not in ("env", "api"):
        raise source.error(path, "a configuration file names no paths; set CUDNN_CORE_CACHE_DIR")
    text = str(raw) if isinstance(raw, FilePath) else source.string(path, raw)
    if not FilePath(text).is_absolute() or "\0" in text:
        raise source.error(path, f"{text!r} is not an absolute path")
    return (Entry(path, text, source.origin(path)),)


def _size(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    return (Entry(path, source.parsed(path, parse_size, raw), source.origin(path)),)


def _whole_list(check: Callable[[str], None]) -> Parse:
    def parse(source: Source, path: Path, raw: object) -> Iterable[Entry]:
        return (Entry(path, tuple(source.strings(path, raw, check)), source.origin(path)),)

    return parse


def _each_of(check: Callable[[str], None]) -> Parse:
    def parse(source: Source, path: Path, raw: object) -> Iterable[Entry]:
        return [Entry(path, item, source.origin(path, item)) for item in source.strings(path, raw, check)]

    return parse


def _check_note(text: str) -> None:
    if not _NOTE.fullmatch(text):
        raise ValueError(f"{text!r} is not a behaviour note like 'deterministic'")


def _resolve(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    for plugin, dist in source.table(path, raw).items():
        here = (*path, plugin)
        source.parsed(here, check_plugin, plugin)
        if not is_exact(plugin):
            raise source.error(here, "needs the exact id of one plugin")
        if not _DIST.fullmatch(source.string(here, dist)):
            raise source.error(here, f"{dist!r} is not the name of a distribution")
        yield Entry(here, normalise(dist), source.origin(here))


def _engine(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    for pattern, table in source.table(path, raw).items():
        here = (*path, pattern)
        source.parsed(here, check_engine, pattern)
        for key, value in source.table(here, table).items():
            if key != "knobs":
                raise source.unknown((*here, key), ("knobs",))
            knobs = parse_knobs(source, (*here, key), value)
            for name, setting in knobs.items():
                knob = (*here, key, name)
                yield Entry(knob, setting, source.origin(knob))


KEYS: dict[Path, Key] = {
    ("schema",): Key(_schema, project=True),
    ("strict",): Key(_strict, project=True),
    ("log",): Key(_log),
    ("cache_dir",): Key(_cache_dir),
    ("plugins", "allow"): Key(_whole_list(check_plugin)),
    ("plugins", "deny"): Key(_each_of(check_plugin), union=True),
    ("plugins", "resolve"): Key(_resolve),
    ("engines", "disable"): Key(_each_of(check_engine), union=True, project=True),
    ("engines", "enable"): Key(_each_of(check_engine), union=True),
    ("engines", "order"): Key(_whole_list(check_engine), project=True),
    ("engines", "require"): Key(_each_of(_check_note), union=True, project=True),
    ("engines", "max_workspace"): Key(_size),
    ("engine",): Key(_engine, project=True),
}
_TABLES = ("plugins", "engines")
_TOP = ("rule", *dict.fromkeys(str(path[0]) for path in KEYS))
_LEAVES = {str(path[1]): path for path in KEYS if len(path) == 2}


def parse_layer(source: Source, raw: Mapping[str, Any]) -> Layer:
    """Validate a layer. Raises ConfigError at the first thing that is wrong."""
    if source.kind in ("file", "project") and "schema" not in raw:
        raise source.error((), "schema = 1 is missing")
    entries: list[Entry] = []
    rules: list[Rule] = []
    for name, value in raw.items():
        if name == "rule":
            items = source.array(("rule",), value)
            rules += [parse_rule(source, ("rule", index), item) for index, item in enumerate(items)]
        elif name in _TABLES:
            for leaf, item in source.table((name,), value).items():
                entries += _parse_key(source, (name, leaf), item)
        else:
            entries += _parse_key(source, (name,), value)
    layer = Layer(source.kind, source.label, tuple(entries), tuple(rules))
    _refuse_contradictions(source, layer)
    return layer


def _parse_key(source: Source, path: Path, raw: object) -> Iterable[Entry]:
    key = KEYS.get(path)
    if key is None:
        choices = [str(known[1]) for known in KEYS if len(known) == 2 and known[0] == path[0]] or list(_TOP)
        home = _LEAVES.get(str(path[-1]))
        raise source.unknown(path, choices, f" (did you mean {'.'.join(map(str, home))!r}?)" if home else "")
    if source.kind == "project" and not key.project:
        allowed = ", ".join(
            ".".join(map(str, known)) for known, row in KEYS.items() if row.project and known[0] != "schema"
        )
        raise source.error(path, f"a project file may only restrict, with rule, {allowed}")
    return key.parse(source, path, raw)


def _refuse_contradictions(source: Source, layer: Layer) -> None:
    """What one layer must not say at once. Between layers there is precedence instead."""
    said: dict[Path, list[Entry]] = {}
    for entry in layer.entries:
        said.setdefault(entry.path, []).append(entry)
    disabled = [entry.value for entry in said.get(("engines", "disable"), ())]
    denied = [entry.value for entry in said.get(("plugins", "deny"), ())]

    for entry in said.get(("engines", "enable"), ()):
        pattern = _covering(disabled, entry.value)
        if pattern:
            raise source.error(
                entry.path, f"contradicts engines.disable, which has {pattern!r}: {entry.value!r}", entry.value
            )
    for entry in said.get(("plugins", "allow"), ()):
        for plugin in entry.value:
            if plugin in denied:
                raise source.error(entry.path, f"contradicts plugins.deny: {plugin!r} is in both", plugin)
    for index, rule in enumerate(layer.rules):
        path: Path = ("rule", index, "use")
        pattern = _covering(disabled, rule.use)
        if pattern:
            raise source.error(path, f"contradicts engines.disable, which has {pattern!r}: {rule.use!r}")
        if rule.use and split_engine(rule.use)[0] in denied:
            raise source.error(path, f"contradicts plugins.deny, which has the plugin of {rule.use!r}")


def _covering(patterns: Iterable[str], engine: str) -> str:
    """The pattern that is ``engine``, or that covers it if it is an exact name; or an empty string."""
    for pattern in patterns:
        if pattern == engine or (engine and is_exact(engine) and engine_matches(pattern, engine)):
            return pattern
    return ""


def flat_settings(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``configure()``'s keywords as the tables of a file: ``disable=[...]`` is ``engines={"disable": [...]}``.

    A key of ``[plugins]`` or ``[engines]`` may stand alone, and ``knobs={engine: {knob: value}}`` for the ``engine`` table.
    """
    raw: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in _LEAVES and name != "knobs":
            raw[name] = dict(source.table((name,), value)) if name in (*_TABLES, "engine") else value
    for name, value in settings.items():
        if name in _LEAVES:
            table, leaf = map(str, _LEAVES[name])
            if leaf in raw.setdefault(table, {}):
                raise source.error((name,), f"is given twice, alone and in {table}")
            raw[table][leaf] = value
        elif name == "knobs":
            if "engine" in raw:
                raise source.error(("knobs",), "is given twice, alone and in engine")
            raw["engine"] = {engine: {"knobs": knobs} for engine, knobs in source.table(("knobs",), value).items()}
    return raw
