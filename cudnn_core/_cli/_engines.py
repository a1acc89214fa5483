"""``cudnn-core engines``: every known engine, whatever its state. Reads manifests and runs no plugin's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._output import aligned, emit_json

if TYPE_CHECKING:
    from .._registry import EngineEntry, Registry

__all__ = ["engines"]


def engines(options: Any) -> int:
    from fnmatch import fnmatchcase

    from .._registry import current

    entries = [
        entry
        for entry in current().engines
        if fnmatchcase(entry.short_id, options.pattern) or fnmatchcase(entry.id, options.pattern)
    ]
    if options.json:
        emit_json({"schema": 1, "engines": [_facts(entry) for entry in entries]})
    else:
        print(_table(entries, options.verbose) if entries else _nothing(options.pattern, current()))
    return 0 if entries else 1


def _nothing(pattern: str, registry: Registry) -> str:
    if pattern != "*":
        from .._errors import nearest

        if any(plugin.plugin == pattern for plugin in registry.plugins):
            return f'no installed engine matches {pattern}: that is a plugin, whose engines are "{pattern}:*"'
        names = [name for entry in registry.engines for name in (entry.short_id, entry.id)]
        return f"no installed engine matches {pattern}{nearest(pattern, names)}"
    from .._decision_text import PIP_LINE

    return f"no engine is installed: {PIP_LINE}"


def _facts(entry: EngineEntry) -> dict[str, Any]:
    spec = entry.spec
    facts: dict[str, Any] = {
        "id": entry.id,
        "plugin": entry.plugin,
        "dist": entry.dist,
        "version": entry.version,
        "origin": entry.origin,
        "state": entry.state,
        "reasons": [reason.to_dict() for reason in entry.reasons],
    }
    if spec is not None:
        facts["manifest"] = {
            "ops": spec.ops,
            "anchors": spec.anchors,
            "devices": spec.devices,
            "sm": [pattern.text for pattern in spec.sm],
            "dtypes": spec.dtypes,
            "maturity": spec.maturity,
            "tier": spec.tier,
            "aot": spec.aot,
            "efficiency": spec.efficiency,
            "notes": sorted(spec.notes),
            "variants": spec.variants,
            "knobs": {name: knob._asdict() for name, knob in spec.knobs.items()},
            "requires": [str(item) for item in spec.requires],
        }
    return facts


def _table(entries: list[EngineEntry], verbose: bool) -> str:
    rows = []
    for entry in entries:
        spec = entry.spec
        where = [*spec.devices, *(f"sm_{pattern.text}" for pattern in spec.sm)] if spec else ["-"]
        kind = [] if spec is None else [spec.maturity, *([spec.tier] if spec.tier != "normal" else [])]
        anchors = ", ".join(spec.anchors) if spec else "-"
        reasons = entry.reasons
        text = str(reasons[0]) if reasons else ""
        if len(reasons) > 1:
            text += f" +{len(reasons) - 1} more"
        notes = ", ".join(sorted(spec.notes)) if spec else ""
        dist = f"{entry.dist} {entry.version}"
        rows.append([entry.id, entry.state, dist, " ".join(where), anchors, ", ".join(kind), notes, text])
    header = ("engine", "state", "distribution", "devices", "ops", "kind", "notes", "reason")
    lines = aligned(rows, header).splitlines()
    if not verbose:
        return "\n".join(lines)
    detailed = lines[:1]
    for line, entry in zip(lines[1:], entries, strict=True):
        detailed += [line, f"    {entry.origin}", *(f"    {reason}" for reason in entry.reasons)]
        if entry.spec is not None:
            knobs = [f"{knob.name} = {knob.default}" for knob in entry.spec.knobs.values()]
            detailed += [f"    knobs: {', '.join(knobs)}"] * bool(knobs)
    return "\n".join(detailed)
