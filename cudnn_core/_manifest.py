"""A plugin's manifest: parsing, validation and the coarse filter. Data only; no plugin code runs here.

Every field is a *necessary* condition: the filter may let a graph through that ``check_support`` declines, never the other
way round. Imported by the registry, the configuration check and ``cudnn-core plugin lint``.

``load`` reads TOML or JSON, ``api_decline`` is the version handshake (to be asked first: a newer manifest may have fields
that this core does not know), ``from_document`` validates. ``parse`` does all three for a manifest that must be valid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ._declines import Decline
from ._dtypes import STORAGE_DTYPES
from ._engine import API
from ._errors import ManifestError, nearest
from ._filter import filter_graph
from ._knobs import TYPES, KnobSpec, complete_knobs, knob_declines
from ._sm import SmPattern, parse_sm
from ._versions import Requirement

__all__ = ["IDENTIFIER", "EngineSpec", "Manifest", "api_decline", "filter_graph", "from_document", "load", "parse"]

SCHEMA = 1
MATURITIES = ("stable", "preview", "experimental")
TIERS = ("normal", "reference")
DEVICES = ("cuda", "cpu")
DEFAULT_EFFICIENCY = 0.5

IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,47}\Z")
_OP_NAME = re.compile(r"\*\Z|" + IDENTIFIER.pattern)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_API = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\Z")
_SPECIFIER = re.compile(r"\s*(~=|[=!<>]=|[<>])\s*[0-9A-Za-z.*+!-]+\s*(,\s*(~=|[=!<>]=|[<>])\s*[0-9A-Za-z.*+!-]+\s*)*\Z")
_MAX_BYTES = 1 << 20


class EngineSpec(NamedTuple):
    """One ``[[engine]]`` table, complete. The field names are the manifest's."""

    plugin: str
    name: str
    factory: str
    revision: int = 1
    ops: tuple[str, ...] = ("*",)
    anchors: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cuda",)
    sm: tuple[SmPattern, ...] = ()
    dtypes: tuple[str, ...] = ()
    maturity: str = "stable"
    tier: str = "normal"
    aot: bool = False
    efficiency: float = DEFAULT_EFFICIENCY
    notes: frozenset[str] = frozenset()
    variants: str = ""
    knobs: Mapping[str, KnobSpec] = MappingProxyType({})
    requires: tuple[Requirement, ...] = ()

    @property
    def short_id(self) -> str:
        """``plugin:engine``"""
        return f"{self.plugin}:{self.name}"

    @property
    def id(self) -> str:
        """``plugin:engine@revision``"""
        return f"{self.plugin}:{self.name}@{self.revision}"

    def has_variant(self, variant: str) -> bool:
        """Whether ``variant`` names a member of the engine ("" is the engine itself)."""
        return not variant or (bool(self.variants) and re.fullmatch(self.variants, variant) is not None)

    def complete_knobs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every knob: ``given`` over the defaults. Raises KnobError, whose ``declines`` list all that is wrong."""
        return complete_knobs(self.short_id, self.knobs, given)

    def knob_declines(self, given: Mapping[str, Any]) -> list[Decline]:
        """All that is wrong with ``given``."""
        return knob_declines(self.knobs, given)


class Manifest(NamedTuple):
    """A whole manifest. ``ops`` maps the plugin's own op names to factories, ``provides`` services to modules."""

    plugin: str
    api: tuple[int, int]
    engines: tuple[EngineSpec, ...] = ()
    ops: Mapping[str, str] = MappingProxyType({})
    hooks: tuple[str, ...] = ()
    provides: Mapping[str, str] = MappingProxyType({})
    where: str = ""


def parse(data: str | bytes | Mapping[str, Any], fmt: str = "toml", where: str = "") -> Manifest:
    """The manifest in ``data``; ``fmt`` is "toml" or "json" (a mapping is taken as it is).

    Raises ManifestError, whose ``subject`` is the dotted field; ``where`` is named in its text.
    """
    document = load(data, fmt, where) if isinstance(data, (str, bytes)) else data
    refused = api_decline(document)
    if refused is not None:
        raise ManifestError(_at(f"{refused}", where), subject="api")
    return from_document(document, where)


def load(data: str | bytes, fmt: str, where: str = "") -> dict[str, Any]:
    """The document, not yet validated."""
    if len(data) > _MAX_BYTES:
        raise ManifestError(_at(f"a manifest has at most {_MAX_BYTES} bytes, this one {len(data)}", where))
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        document = _load_json(text) if fmt == "json" else _load_toml(text)
    except (ValueError, RecursionError) as error:  # tomli's, json's and the decoder's errors are ValueErrors
        raise ManifestError(_at(f"not {fmt.upper()}: {error}", where)) from None
    if not isinstance(document, dict):
        raise ManifestError(_at(f"a manifest is a table, not {type(document).__name__}", where))
    return document


def api_decline(document: Mapping[str, Any], api: tuple[int, int] = API) -> Decline | None:
    """``api.too_new`` or ``api.too_old`` if the manifest's ``api`` is not one that this core serves.

    None for a missing or malformed one too: that is a finding of ``from_document``.
    """
    found = _API.match(document["api"]) if isinstance(document.get("api"), str) else None
    if found is None:
        return None
    wanted = (int(found[1]), int(found[2]))
    ours = f"{api[0]}.{api[1]}"
    if wanted[0] > api[0] or (wanted[0] == api[0] and wanted[1] > api[1]):
        hint = "upgrade cudnn-core, or install an older release of the plugin"
        return Decline("api.too_new", str(document.get("plugin", "")), f"at most {ours}", document["api"], hint)
    if wanted[0] < api[0]:
        hint = "install a newer release of the plugin"
        return Decline("api.too_old", str(document.get("plugin", "")), f"at least {api[0]}.0", document["api"], hint)
    return None


def from_document(document: Mapping[str, Any], where: str = "") -> Manifest:
    """The validated manifest; raises ManifestError."""
    top = _Table(document, "", where)
    schema = top.take("schema", int)
    if schema != SCHEMA:
        raise top.error("schema", f"schema {schema} is not one that this core reads ({SCHEMA})")
    plugin = top.identifier("plugin")
    api = _API.match(top.take("api", str))
    if api is None:
        raise top.error("api", 'must be "MAJOR.MINOR"')
    hooks = top.strings("hooks", (), _MODULE, "a dotted module name")
    requires = _requirements(top)
    provides = {
        key: _matching(top, f"provides.{key}", value, _MODULE, "a dotted module name")
        for key, value in top.take("provides", dict, {}).items()
    }
    engines = [_engine(table, plugin, requires) for table in top.tables("engine")]
    _reject_repeats(top, "engine", [spec.name for spec in engines])
    ops: list[tuple[str, str]] = []
    for table in top.tables("op"):
        ops.append((table.identifier("name"), table.factory()))
        table.done()
    _reject_repeats(top, "op", [name for name, _ in ops])
    top.done()
    return Manifest(plugin, (int(api[1]), int(api[2])), tuple(engines), dict(ops), hooks, provides, where)


def _engine(table: _Table, plugin: str, shared: tuple[Requirement, ...]) -> EngineSpec:
    ops = table.strings("ops", None, _OP_NAME, "an op name, a group or '*'")
    anchors = table.strings("anchors", (), _OP_NAME, "an op name, a group or '*'")
    efficiency = table.take("efficiency", float, DEFAULT_EFFICIENCY)
    if not 0 < efficiency <= 1:
        raise table.error("efficiency", f"must lie in (0, 1], got {efficiency}")
    variants = table.take("variants", str, "")
    try:
        re.compile(variants)
    except re.error as error:
        raise table.error("variants", f"{variants!r} is not a regular expression: {error}") from None
    revision = table.take("revision", int, 1)
    if revision < 1:
        raise table.error("revision", f"must be 1 or more, got {revision}")
    spec = EngineSpec(
        plugin=plugin,
        name=table.identifier("name"),
        factory=table.factory(),
        revision=revision,
        ops=ops,
        anchors=anchors or ops,
        devices=table.strings("devices", ("cuda",), choices=DEVICES),
        sm=tuple(_sm(table, index, text) for index, text in enumerate(table.strings("sm", ()))),
        dtypes=table.strings("dtypes", (), choices=STORAGE_DTYPES),
        maturity=table.choice("maturity", MATURITIES),
        tier=table.choice("tier", TIERS),
        aot=table.take("aot", bool, False),
        efficiency=efficiency,
        notes=frozenset(table.strings("notes", (), IDENTIFIER, "a note name")),
        variants=variants,
        knobs={name: _knob(knob, name) for name, knob in table.named_tables("knobs")},
        requires=shared + _requirements(table),
    )
    table.done()
    return spec


def _sm(table: _Table, index: int, text: str) -> SmPattern:
    try:
        return parse_sm(text)
    except ManifestError as error:
        raise table.error(f"sm[{index}]", str(error)) from None


def _knob(table: _Table, name: str) -> KnobSpec:
    kind = table.choice("type", tuple(TYPES), required=True)
    choices = tuple(table.take("choices", list, ()))
    if "choices" in table.document and not choices:
        raise table.error("choices", "must not be empty")
    numeric = kind in ("int", "float")
    limits: dict[str, Any] = {}
    for key in ("min", "max", "multiple_of"):
        if key in table.document:
            if choices or not numeric:
                raise table.error(key, "is for int and float knobs without choices")
            limits[key] = table.take(key, int if kind == "int" or key == "multiple_of" else float)
    if limits.get("multiple_of", 1) < 1:
        raise table.error("multiple_of", "must be 1 or more")
    if not choices and kind == "bool":
        choices = (False, True)
    if kind == "float":
        choices = tuple(float(item) if _is_number(item) else item for item in choices)
    spec = KnobSpec(name, kind, None, choices, limits.get("min"), limits.get("max"), limits.get("multiple_of"))
    for index, item in enumerate(choices):
        if not spec._has_type(item):
            raise table.error(f"choices[{index}]", f"{item!r} is not of type {kind}")
    if "default" in table.document:
        default = table.document["default"]
        table.seen.add("default")
    elif choices:
        default = choices[0]
    elif spec.min is not None:
        default = spec.min
    else:
        raise table.error("default", "is needed: there are neither choices nor a min")
    wrong = spec.decline(default)
    if wrong is not None:
        raise table.error("default", f"is outside the knob's own domain: {wrong}")
    table.done()
    return spec._replace(default=float(default) if kind == "float" else default)


def _requirements(table: _Table) -> tuple[Requirement, ...]:
    found = []
    for item in table.tables("requires"):
        dist = item.take("dist", str)
        if not re.match(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z", dist):
            raise item.error("dist", f"{dist!r} is not a distribution's name")
        version = item.take("version", str, "")
        if version and not _SPECIFIER.match(version):
            raise item.error("version", f"{version!r} is not a version condition like '>=4.7,<5'")
        found.append(Requirement(dist, version, item.strings("accept", ())))
        item.done()
    return tuple(found)


class _Missing(NamedTuple):
    pass


_MISSING = _Missing()
_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "a table"}


class _Table:
    """One table of a manifest: typed access by key, and at the end a complaint about keys that nobody asked for."""

    __slots__ = ("document", "path", "seen", "where")

    def __init__(self, document: Mapping[str, Any], path: str, where: str) -> None:
        self.document = document
        self.path = path
        self.where = where
        self.seen: set[str] = set()

    def error(self, key: str, message: str) -> ManifestError:
        return ManifestError(_at(message, self.where), subject=f"{self.path}.{key}" if self.path else key)

    def take(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        self.seen.add(key)
        value = self.document.get(key, _MISSING)
        if type(value) is kind:
            return value
        if value is _MISSING:
            if default is _MISSING:
                raise self.error(key, "is missing" + self._misspelt(key))
            return default
        good = _is_number(value) if kind is float else isinstance(value, kind)
        if not good or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"must be {_NAMES[kind]}, got {value!r}")
        return value

    def strings(
        self,
        key: str,
        default: tuple[str, ...] | None,
        pattern: re.Pattern[str] | None = None,
        what: str = "a string",
        choices: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        """A list of distinct strings; ``default`` None: required. An explicit list may not be empty if it has one."""
        if default is not None and key not in self.document:
            self.seen.add(key)
            return default
        values = self.take(key, list)
        for index, item in enumerate(values):
            if not isinstance(item, str):
                raise self.error(f"{key}[{index}]", f"must be a string, got {item!r}")
            if choices and item not in choices:
                known = ", ".join(choices)
                raise self.error(f"{key}[{index}]", f"{item!r} is not one of {known}{nearest(item, choices)}")
            if pattern is not None and not pattern.match(item):
                raise self.error(f"{key}[{index}]", f"{item!r} is not {what}")
        if not values and (default is None or default):
            raise self.error(key, "must not be empty")
        _reject_repeats(self, key, values)
        return tuple(values)

    def choice(self, key: str, choices: tuple[str, ...], *, required: bool = False) -> str:
        value: str = self.take(key, str, _MISSING if required else choices[0])
        if value not in choices:
            raise self.error(key, f"{value!r} is not one of {', '.join(choices)}{nearest(value, choices)}")
        return value

    def identifier(self, key: str) -> str:
        return _matching(self, key, self.take(key, str), IDENTIFIER, "a name like 'sm90_wgmma' ([a-z][a-z0-9_]{0,47})")

    def factory(self) -> str:
        return _matching(self, "factory", self.take("factory", str), _FACTORY, "of the form 'package.module:Name'")

    def tables(self, key: str) -> list[_Table]:
        """An array of tables."""
        return [self._table(f"{key}[{index}]", item) for index, item in enumerate(self.take(key, list, []))]

    def named_tables(self, key: str) -> list[tuple[str, _Table]]:
        """A table of tables; their names are identifiers."""
        found = []
        for name, item in self.take(key, dict, {}).items():
            _matching(self, f"{key}.{name}", name, IDENTIFIER, "a name ([a-z][a-z0-9_]{0,47})")
            found.append((name, self._table(f"{key}.{name}", item)))
        return found

    def done(self) -> None:
        """Raises for keys that were never asked for."""
        for key in self.document:
            if key not in self.seen:
                raise self.error(str(key), f"unknown field{nearest(str(key), self.seen)}")

    def _table(self, key: str, item: Any) -> _Table:
        if not isinstance(item, dict):
            raise self.error(key, f"must be a table, got {item!r}")
        return _Table(item, f"{self.path}.{key}" if self.path else key, self.where)

    def _misspelt(self, key: str) -> str:
        """A hint if the missing ``key`` stands there under a similar name."""
        from difflib import get_close_matches

        close = get_close_matches(key, [str(item) for item in self.document], n=1, cutoff=0.6)
        return f" (there is {close[0]!r})" if close and close[0] not in self.seen else ""


def _matching(table: _Table, key: str, value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.match(value):
        raise table.error(key, f"{value!r} is not {what}")
    return value


def _reject_repeats(table: _Table, key: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise table.error(key, f"{twice!r} occurs twice")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _at(message: str, where: str) -> str:
    return f"{message} [{where}]" if where else message


def _load_toml(text: str) -> Any:
    import tomli

    return tomli.loads(text)


def _load_json(text: str) -> Any:
    from ._canonical import FormatError, loads

    try:
        return loads(text)
    except FormatError as error:
        raise ValueError(str(error).removeprefix("not JSON: ")) from None
