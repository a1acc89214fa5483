"""What people read of a decision: the table of ``explain`` and the text of a NoEngineError.

Every name and value passes ``escape``: plugin names, paths and file contents may hold control characters.
Imported by ``_decision``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import CudnnCoreError

if TYPE_CHECKING:
    from ._decision import Decision, EngineDecision
    from ._declines import Decline

__all__ = ["apart", "device_text", "escape", "nearest_decline", "nearest_miss", "table"]

PIP_LINE = "pip install cudnn-core[cpu]"

_WIDTH = 160  # of a reason in the folded table, without its origin
_GROUPS = 8  # groups of reasons in an error text


def escape(text: object) -> str:
    """``text`` on one line, with control, direction and other unprintable characters as ``\\xNN`` or ``\\uNNNN``."""
    string = str(text)
    if string.isprintable():
        return string
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in string)


def table(decision: Decision, verbose: bool) -> str:
    """See ``Decision.table``."""
    rows = [_columns(engine, verbose) for engine in decision.engines]
    widths = [max((len(row[index]) for row in rows), default=0) for index in range(4)]
    lines = [_header(decision)]
    for engine, (name, time, basis, state, *rest) in zip(decision.engines, rows, strict=True):
        cells = (name.ljust(widths[0]), time.rjust(widths[1]), basis.ljust(widths[2]), state.ljust(widths[3]))
        lines.append("  ".join((*cells, *rest)).rstrip())
        if verbose:
            lines += [f"      {_reason(reason)}" for reason in engine.reasons[1:]]
            lines += [f"      {_notes(engine)}"] * bool(engine.notes)
    if not rows:
        lines.append(f"  no engine is installed: {PIP_LINE}")
    return "\n".join(lines)


def nearest_miss(decision: Decision, verbose: bool = False) -> str:
    """See ``_decision.nearest_miss``."""
    graph = escape(decision.summary) or f"graph {escape(decision.graph_key)[:12]}"
    subject = f"no engine can run {graph} on {device_text(decision.device)}"
    if not decision.engines:
        return f"{subject}: no engine is installed; try `{PIP_LINE}`"
    missed = _missed(decision)
    if not missed:
        return subject
    lines = [f"{subject}; the nearest miss is {_line(missed[0])}"]
    groups: dict[str, list[str]] = {}
    for engine in missed:
        for reason in engine.reasons:
            ids = groups.setdefault(_reason(reason), [])
            if engine.id not in ids:
                ids.append(engine.id)
    # Shortest decline list first, as `missed` is; within one list what stops most engines first.
    ordered = sorted(groups.items(), key=lambda item: (_length(missed, item[1][0]), -len(item[1]), item[0]))
    shown = ordered if verbose else ordered[:_GROUPS]
    for text, ids in shown:
        who = "1 engine" if len(ids) == 1 else f"{len(ids)} engines"
        lines.append(f"  {who}: {text}  ({_some(ids)})")
    if len(ordered) > len(shown):
        lines.append(f"  +{len(ordered) - len(shown)} more reasons; `cudnn-core explain --verbose` prints them all")
    return "\n".join(lines)


def nearest_decline(decision: Decision) -> str:
    """See ``_decision.nearest_decline``."""
    missed = _missed(decision)
    return _line(missed[0]) if missed else f"no other engine is installed; try `{PIP_LINE}`"


def device_text(device: dict[str, Any]) -> str:
    """``NVIDIA H200 sm_90a``, or the device's type."""
    from ._device import DeviceInfo

    name = escape(device.get("device_name") or device.get("type") or "an unknown device")
    try:
        arch = DeviceInfo.from_json(device).arch
    except CudnnCoreError:  # a saved record may describe anything
        arch = ""
    return f"{name} sm_{arch}" if arch else name


def apart(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Two devices in words; where the words are the same, with the first fact that differs."""
    one, other = device_text(a), device_text(b)
    if one == other:
        key = next(key for key in (*a, *b) if a.get(key) != b.get(key))
        one, other = f"{one} with {key} {a.get(key)}", f"{key} {b.get(key)}"
    return f"{one}, not {other}"


def _header(decision: Decision) -> str:
    graph = escape(decision.summary) or f"graph {escape(decision.graph_key)[:12]}"
    return f"{graph} | {device_text(decision.device)} | {_sources(decision)}"


def _sources(decision: Decision) -> str:
    """``config 2 files, 1 env``: the distinct places that set a value."""
    origins = {origin for _, _, origin in decision.config if origin and origin not in ("built-in", "default", "hint")}
    env = {origin for origin in origins if origin.startswith("env:")}
    calls = {origin for origin in origins if origin.endswith(")")}
    files = {_file(origin) for origin in origins - env - calls}
    parts = [
        f"{len(found)} {one if len(found) == 1 else many}"
        for found, one, many in ((files, "file", "files"), (env, "env", "env"), (calls, "call", "calls"))
        if found
    ]
    return f"config {', '.join(parts) or 'built-in'}"


def _file(origin: str) -> str:
    name, colon, line = origin.rpartition(":")
    return name if colon and line.isdigit() else origin


def _columns(engine: EngineDecision, verbose: bool) -> list[str]:
    """Marked id, time, basis, state, and what remains of the line, unaligned."""
    mark = "*" if engine.state == "selected" else " "
    row = [f"{mark} {escape(engine.id)}", _us(engine.us), engine.basis or "", engine.state]
    if engine.reasons:
        more = f" +{len(engine.reasons) - 1} more" if len(engine.reasons) > 1 else ""
        row.append(_reason(engine.reasons[0]) if verbose else _folded(engine.reasons[0]) + more)
    if engine.notes and engine.state == "selected" and not verbose:
        row.append(_notes(engine))
    if engine.dist and (verbose or engine.state == "quarantined"):
        row.append(f"(dist {escape(engine.dist)} {escape(engine.version)}".rstrip() + ")")
    return row


def _us(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.3g} us" if us < 100 else f"{us:.0f} us"


def _notes(engine: EngineDecision) -> str:
    return f"notes: {escape(', '.join(engine.notes or ()))}"


def _reason(reason: Decline) -> str:
    return escape(str(reason))


def _folded(reason: Decline) -> str:
    """A reason of limited width; its origin, which says where to look, is never cut."""
    text = _reason(reason._replace(origin=""))
    text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
    return f"{text} [{escape(reason.origin)}]" if reason.origin else text


def _missed(decision: Decision) -> list[EngineDecision]:
    """The engines that can't run the graph, the nearest one first."""
    could = ("selected", "outranked", "eligible")
    return sorted((engine for engine in decision.engines if engine.state not in could), key=_distance)


def _line(engine: EngineDecision) -> str:
    return f"{escape(engine.id)} ({engine.state}): {'; '.join(map(_reason, engine.reasons))}"


def _some(ids: list[str]) -> str:
    shown = ", ".join(map(escape, ids[:3]))
    return f"{shown} +{len(ids) - 3} more" if len(ids) > 3 else shown


def _distance(engine: EngineDecision) -> tuple[bool, bool, int, str]:
    """How far an engine is from running the graph. One that is built for other operations never comes near; one that only
    the configuration stops is nearest."""
    foreign = any(reason.code in ("op.anchor", "op.unsupported") for reason in engine.reasons)
    configured = all(reason.code.startswith("config.") for reason in engine.reasons)
    return foreign, not configured, len(engine.reasons), engine.id


def _length(missed: list[EngineDecision], engine_id: str) -> int:
    return next(index for index, engine in enumerate(missed) if engine.id == engine_id)
