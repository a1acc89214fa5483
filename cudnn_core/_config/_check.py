"""What is doubtful in a configuration that is valid: ``cudnn-core config check``, and the warning about unknown engines.

A Config is checked against a registry (names, knobs, notes) and against the op table (what a rule can match at all).
Imported by the command line (``check``, ``describe``), by the registry (``enforce``) and by ``configure()``, which tries its
settings (``enforce``, ``names_engines``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from .._errors import ConfigError, CudnnCoreError, nearest
from ._grammar import engine_matches, is_exact, split_engine
from ._model import Config
from ._rules import Rule
from ._source import ConfigValue

if TYPE_CHECKING:
    from .._ops._schema import Op
    from .._registry import Registry

__all__ = ["ConfigWarning", "Finding", "check", "describe", "enforce", "names_engines"]


class ConfigWarning(UserWarning):
    """The configuration, or a call, names an engine that is not installed, or gives a knob what the engine does not take."""


class Finding(NamedTuple):
    """One finding. ``severity`` is "error" (it can't work) or "warning" (it has no effect here)."""

    severity: str
    key: str
    message: str
    origin: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.origin, self.severity, self.key, self.message)))


class _Reference(NamedTuple):
    """A place of the configuration that names engines."""

    key: str
    pattern: str
    origin: str


def check(config: Config, registry: Registry | None = None) -> list[Finding]:
    """Every finding; without a registry only those that need none."""
    findings = [*_ineffective(config), *(item for rule in _numbered(config) for item in _check_match(*rule))]
    if registry is not None:
        specs = _specs(registry)
        plugins = _plugins(registry)
        findings += _unknown_engines(config, registry)
        findings += _unknown_plugins(config, plugins, registry)
        findings += _bad_knobs(config, specs)
        findings += _unknown_notes(config, specs)
    return findings


def enforce(config: Config, registry: Registry) -> None:
    """Warn about exact engine names that no installed engine has, and knobs that the engine does not take; ConfigError under
    ``strict``."""
    for finding in (*_unknown_engines(config, registry), *_bad_knobs(config, _specs(registry))):
        if finding.severity == "error":
            if config.strict:
                raise ConfigError(finding.message, origin=finding.origin, key=finding.key)
            warnings.warn(f"{finding.origin}: {finding.key}: {finding.message}", ConfigWarning, stacklevel=2)


def names_engines(config: Config) -> bool:
    """Whether it names an engine exactly, or sets knobs: only then can ``enforce`` find what nobody has."""
    return bool(config.settings) or any(is_exact(reference.pattern) for reference in _references(config))


def describe(config: Config) -> list[ConfigValue]:
    """Every value with its origin for ``config show``, the built-in ones included."""
    values = list(config.values)
    have = {value.key for value in values}
    built_in = Config()
    defaults: dict[str, object] = {
        "strict": built_in.strict,
        "log": built_in.log,
        "cache_dir": built_in.cache_dir,
        "plugins.allow": "every installed plugin",
        "engines.order": list(built_in.order),
        "engines.max_workspace": built_in.max_workspace,
    }
    return [ConfigValue(key, value, "built-in") for key, value in defaults.items() if key not in have] + values


def _numbered(config: Config) -> Iterator[tuple[str, Rule]]:
    for index, rule in enumerate(config.rules):
        yield (f"rule[{index}] {rule.name!r}" if rule.name else f"rule[{index}]"), rule


def _references(config: Config) -> Iterator[_Reference]:
    for key, named in (("engines.disable", config.disable), ("engines.enable", config.enable)):
        for pattern, origin in named:
            yield _Reference(key, pattern, origin)
    for pattern in config.order:
        yield _Reference("engines.order", pattern, config.origin("engines.order"))
    for key, rule in _numbered(config):
        if rule.use:
            yield _Reference(f"{key}.use", rule.use, rule.origin)
        for pattern in rule.avoid:
            yield _Reference(f"{key}.avoid", pattern, rule.origin)
    for engine, origin in {setting.engine: setting.origin for setting in reversed(config.settings)}.items():
        yield _Reference(f'engine."{engine}"', engine, origin)


# Against the configuration itself.


def _ineffective(config: Config) -> Iterator[Finding]:
    for pattern, origin in config.enable:
        reason = _barred(config, pattern)
        if reason:
            yield Finding("warning", "engines.enable", f"{pattern!r} has no effect: {reason}", origin)
    seen: list[tuple[str, Rule]] = []
    for key, rule in _numbered(config):
        if not rule.use:
            continue
        reason = _barred(config, rule.use)
        if reason:
            yield Finding("warning", f"{key}.use", f"{rule.use!r} can't be selected: {reason}", rule.origin)
        for other_key, other in seen:
            if other.match == rule.match and dict(other.versions) == dict(rule.versions):
                message = f"never applies: {other_key} at {other.origin} has the same match and comes first"
                yield Finding("warning", f"{key}.use", message, rule.origin)
                break
        seen.append((key, rule))


def _barred(config: Config, pattern: str) -> str:
    """Why no engine that an exact ``pattern`` names can take part, or an empty string."""
    if not is_exact(pattern):
        return ""
    plugin = split_engine(pattern)[0]
    for glob, origin in config.disable:
        if engine_matches(glob, pattern):
            return f"engines.disable has {glob!r} at {origin}"
    for glob, origin in config.deny:
        if fnmatchcase(plugin, glob):
            return f"plugins.deny has {glob!r} at {origin}"
    if config.allow is not None and not any(fnmatchcase(plugin, glob) for glob in config.allow):
        return f"plugins.allow at {config.origin('plugins.allow')} leaves {plugin!r} out"
    return ""


# Against the op table.


def _check_match(key: str, rule: Rule) -> Iterator[Finding]:
    from .._ops._table import lookup

    key = f"{key}.match"
    names = [op for op in rule.match.op or () if is_exact(op)]
    rows: list[Op] = []
    for name in names:
        try:
            rows.append(lookup(name))
        except CudnnCoreError as error:  # noqa: PERF203 - each op is reported on its own
            yield Finding("error", f"{key}.op", str(error), rule.origin)
    if not rows or len(rows) < len(rule.match.op or ()):
        return  # an op that is not named exactly may have any dim
    dims = [_dim_names(row) for row in rows]
    what = " or ".join(names)
    if all(known is not None for known in dims):
        known = sorted({name for group in dims for name in group or ()})
        for dim in rule.match.dims:
            if dim not in known:
                message = f"{what} has no dim {dim!r}{nearest(dim, known)}; it has {', '.join(known) or 'none'}"
                yield Finding("error", f"{key}.{dim}", message, rule.origin)
    operands = sorted({name for row in rows for name in row.operands})
    for operand in rule.match.dtype:
        if operand not in operands:
            message = (
                f"{what} has no operand {operand!r}{nearest(operand, operands)}; it has {', '.join(operands) or 'none'}"
            )
            yield Finding("error", f"{key}.dtype.{operand}", message, rule.origin)


def _dim_names(row: Op) -> set[str] | None:
    """The dim names of a row: what its function gives for nodes of small ranks; None if it takes none of them."""
    names: set[str] | None = None
    attrs = {attr.name: _some(attr.default, attr.type, attr.choices) for attr in row.attrs}
    for rank in range(1, 6):

        def port(variadic: bool, rank: int = rank) -> Any:
            tensor = SimpleNamespace(name="probe", dtype="float32", dim=(1,) * rank, stride=(1,) * rank)
            return (tensor, tensor) if variadic else tensor

        inputs = {item.name: port(item.variadic) for item in row.inputs}
        outputs = {item.name: port(item.variadic) for item in row.outputs}
        node: Any = SimpleNamespace(op=row.name, name="probe", inputs=inputs, outputs=outputs, attrs=attrs)
        try:
            names = (names or set()) | set(getattr(row.dims, "__wrapped__", row.dims)(node))  # a trial: nothing to log
        except (Exception, SystemExit):  # noqa: S112 - a row's function may take some ranks only, and fail as it likes for others
            continue
    return names


def _some(default: object, type: str, choices: tuple[str, ...]) -> object:
    from .._ops._schema import REQUIRED

    if default is not REQUIRED:
        return default
    return choices[0] if choices else {"ints": (1, 1, 1), "bool": False, "str": ""}.get(type, 1)


# Against the installed engines.


def _specs(registry: Registry) -> dict[str, Any]:
    """``plugin:engine`` -> manifest row."""
    return {spec.short_id: spec for entry in registry.engines if (spec := entry.spec) is not None}


def _plugins(registry: Registry) -> set[str]:
    return {split_engine(str(entry.id))[0] for entry in registry.engines}


def _known(pattern: str, specs: Mapping[str, Any]) -> list[Any]:
    """The manifest rows that ``pattern`` covers, or whose variants it may."""
    plugin, name, variant = split_engine(pattern)
    base = f"{plugin}:{name}"
    rows = [spec for engine, spec in specs.items() if engine_matches(base, engine)]
    if variant and is_exact(variant):
        rows = [spec for spec in rows if spec.has_variant(variant)]
    return rows if not variant else [spec for spec in rows if spec.variants]


def _unknown_engines(config: Config, registry: Registry) -> Iterator[Finding]:
    """An exact name that nothing has is an error; a glob that covers nothing may be meant for another machine.

    The engines of a plugin whose manifest is not usable are not known, so nothing is said against their names.
    """
    specs, plugins = _specs(registry), _plugins(registry)
    opaque = {split_engine(str(entry.id))[0] for entry in registry.engines if entry.spec is None}
    for key, pattern, origin in _references(config):
        if _known(pattern, specs):
            continue
        if not is_exact(pattern):
            yield Finding("warning", key, f"{pattern!r} covers no installed engine", origin)
            continue
        plugin = split_engine(pattern)[0]
        if plugin in opaque:
            yield Finding("warning", key, f"{pattern!r} can't be checked: the plugin is quarantined", origin)
            continue
        why = "" if plugin in plugins else f", and no plugin {plugin!r}"
        message = f"no engine {pattern!r} is installed{why}{nearest(pattern, specs)}"
        yield Finding("error", key, message, origin)


def _unknown_plugins(config: Config, plugins: set[str], registry: Registry) -> Iterator[Finding]:
    allow = [(pattern, config.origin("plugins.allow")) for pattern in config.allow or ()]
    for key, patterns in (("plugins.allow", allow), ("plugins.deny", config.deny)):
        for pattern, origin in patterns:
            if not any(fnmatchcase(plugin, pattern) for plugin in plugins):
                yield Finding("warning", key, f"no plugin {pattern!r} is installed{nearest(pattern, plugins)}", origin)
    for plugin, dist in config.resolve.items():
        key = f"plugins.resolve.{plugin}"
        dists = {str(entry.dist) for entry in registry.engines if split_engine(str(entry.id))[0] == plugin}
        if dist not in {_normalised(name) for name in dists}:
            message = f"no distribution {dist!r} provides the plugin {plugin!r}{nearest(dist, dists)}"
            yield Finding("error", key, message, config.origin(key))


def _normalised(dist: str) -> str:
    from .._versions import normalise

    return normalise(dist)


def _bad_knobs(config: Config, specs: Mapping[str, Any]) -> Iterator[Finding]:
    for setting in config.settings:
        for spec in _known(setting.engine, specs):
            key = f'engine."{setting.engine}".knobs.{setting.knob}'
            yield from _knob_findings(key, spec, {setting.knob: setting.value}, setting.origin)
    for key, rule in _numbered(config):
        for spec in _known(rule.use, specs) if rule.use and rule.knobs else ():
            yield from _knob_findings(f"{key}.knobs", spec, rule.knobs, rule.origin)


def _knob_findings(key: str, spec: Any, knobs: Mapping[str, Any], origin: str) -> Iterable[Finding]:
    return [Finding("error", key, f"{spec.short_id}: {decline}", origin) for decline in spec.knob_declines(knobs)]


def _unknown_notes(config: Config, specs: Mapping[str, Any]) -> Iterator[Finding]:
    known = {note for spec in specs.values() for note in spec.notes}
    for note in config.require:
        if note not in known:
            origin = next(v.origin for v in config.values if v.key == "engines.require" and v.value == note)
            message = f"no installed engine has the note {note!r}{nearest(note, known)}"
            yield Finding("warning", "engines.require", message, origin)
