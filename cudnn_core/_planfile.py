"""Plan files: a canonical JSON header and hashed payloads; no pickle, no code.

    magic (16 bytes) | header length (8, little-endian) | sha256 of the header (32) | header | payloads

The header has the graph, the engine, its knobs, the device and the decision; the engine may add a header and named payloads
of its own. The hashes find damage, not an attacker: native payloads are used only with ``trust=True``. Imported by the plan
and by ``Graph.serialize``.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._canonical import COUNT, LIST, OBJECT, STR, TEXT, FormatError, dumps, loads, one_of, optional, plain, take
from ._decision import HEX, Decision
from ._engine import PlanConfig
from ._errors import BuildError, CudnnCoreError, GraphTypeError, HandleError
from ._hooks import describe
from ._ranking import member_id

if TYPE_CHECKING:
    from ._device import DeviceInfo
    from ._engine import CompiledPlan
    from ._graph._frozen import FrozenGraph
    from ._graph._graph import Graph
    from ._handle import Handle
    from ._plan import Plan
    from ._registry import Registry

__all__ = ["load", "load_bytes", "save", "to_bytes"]

_MAGIC = b"cudnn_core plan\0"
_HEADER_LIMIT = 64 << 20
_FIELDS = {
    "schema": one_of(1),
    "core": STR,
    "graph": OBJECT,
    "graph_key": HEX,
    "engine": TEXT,
    "knobs": OBJECT,
    "variant": STR,
    "dist": STR,
    "version": STR,
    "device": OBJECT,
    "workspace_size": COUNT,
    "decision": OBJECT,
    "engine_header": optional(OBJECT),
    "payloads": LIST,
}
_PAYLOAD = {"name": STR, "size": COUNT, "sha256": HEX}


def to_bytes(plan: Plan, *, payloads: bool = True) -> bytes:
    """The plan as bytes; ``payloads=False`` leaves the engine's payloads out, so that loading rebuilds."""
    from . import __version__
    from ._graph._json import to_dict

    engine_header: Any = None
    parts: dict[str, bytes] = {}
    serialize = getattr(plan._compiled, "serialize", None)
    if payloads and serialize is not None:
        try:
            engine_header, parts = serialize()
            parts = {str(name): bytes(data) for name, data in dict(parts).items()}
            engine_header = plain(dict(engine_header))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and the like are a plugin's failure too
            raise BuildError(f"engine {plan.engine} could not serialize its plan: {describe(error)}") from error
    row = plan.decision.winner
    header = {
        "schema": 1,
        "core": __version__,
        "graph": to_dict(plan.graph),
        "graph_key": plan.graph.key,
        "engine": plan.engine,
        "knobs": plain(plan.knobs),
        "variant": plan.config.variant,
        "dist": row.dist if row else "",
        "version": row.version if row else "",
        "device": plan.device.to_dict(),
        "workspace_size": plan.workspace_size,
        "decision": {**plan.decision.to_dict(), "digest": plan.decision.digest},
        "engine_header": engine_header,
        "payloads": [
            {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in parts.items()
        ],
    }
    text = dumps(header).encode()
    return b"".join((_MAGIC, struct.pack("<Q", len(text)), hashlib.sha256(text).digest(), text, *parts.values()))


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    target = _path(path)
    data = to_bytes(plan)
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise BuildError(f"the plan can't be written to {target}: {error}") from None


def _path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise GraphTypeError(f"a plan file is named by a path, got {path!r}") from None


def load(path: str | os.PathLike[str], handle: Handle | None, *, trust: bool) -> Plan:
    source = _path(path)
    try:
        data = source.read_bytes()
    except (OSError, ValueError) as error:
        raise BuildError(f"the plan {path} can't be read: {error}") from None
    try:
        return load_bytes(data, handle, trust=trust)[0]
    except BuildError as error:
        raise BuildError(f"{path}: {error}", decline=error.decline) from error.__cause__


def load_bytes(
    data: bytes, handle: Handle | None, *, trust: bool = False, enforce_precompiled: bool = False
) -> tuple[Plan, Graph]:
    """(plan, its graph) from ``to_bytes``; BuildError says what is wrong with the data or with this machine."""
    header, parts = _parse(data)
    from ._building import finish
    from ._graph._graph import Graph
    from ._graph._json import from_dict

    try:
        graph = from_dict(Graph, header["graph"])
        decision = Decision.from_json(dumps(header["decision"]))
        device = _device(header["device"], handle)
        frozen = graph.freeze(device.type)
    except (BuildError, HandleError):
        raise
    except CudnnCoreError as error:
        raise BuildError(f"not a usable plan: {error}") from error
    if frozen.key != header["graph_key"]:
        raise BuildError("the plan's graph does not have the key that the header states")
    compiled, config = _compiled(header, parts, decision, frozen, device, handle, trust, enforce_precompiled)
    plan = finish(frozen, compiled, config, decision, device, handle, graph._bindings, list(graph.tensors))
    if plan.workspace_size > header["workspace_size"]:
        raise BuildError(
            f"engine {plan.engine} needs a workspace of {plan.workspace_size} bytes here, the plan states"
            f" {header['workspace_size']}"
        )
    return plan, graph


def _check_decision(decision: Decision, header: Mapping[str, Any]) -> None:
    """The decision must be the one that chose this engine for this graph."""
    row = decision.winner
    config = row.config if row is not None else None
    stated = PlanConfig(header["engine"], header["knobs"], header["variant"])
    for what, have, want in (
        ("graph", decision.graph_key, header["graph_key"]),
        ("engine", decision.selected, member_id(stated)),
        ("config", config and plain(config), plain(stated)),
    ):
        if have != want:
            raise BuildError(f"the plan's decision is of another {what}: {have}, not {want}")


def _compiled(
    header: Mapping[str, Any],
    parts: dict[str, bytes],
    decision: Decision,
    frozen: FrozenGraph,
    device: DeviceInfo,
    handle: Handle | None,
    trust: bool,
    enforce_precompiled: bool,
) -> tuple[CompiledPlan, PlanConfig]:
    from ._building import build_config, compiled_by
    from ._candidates import Filters, Request, examine, variant_declines
    from ._config import current as current_config
    from ._guard import report
    from ._ranking import Candidate
    from ._records import EngineBroken
    from ._registry import current as current_registry

    registry = current_registry()
    name = header["engine"]
    try:
        entry = registry.get(name)
        spec = entry.spec
        assert spec is not None
        if not spec.has_variant(header["variant"]):
            raise BuildError(f"engine {name} has no variant {header['variant']!r}")
        config = PlanConfig(spec.id, spec.complete_knobs(header["knobs"]), header["variant"])
    except BuildError:
        raise
    except CudnnCoreError as error:
        raise BuildError(_unavailable(header, error, registry)) from error
    if dict(config.knobs) != header["knobs"]:
        raise BuildError(f"engine {name} has other knobs than the plan: {dict(config.knobs)}, not {header['knobs']}")
    _check_decision(decision, header)
    request = Request(frozen, device, handle, frozen.hint_sizes(), Filters(), True, registry, current_config(), ())
    found = examine(request, entry)
    if not isinstance(found, Candidate):
        raise BuildError(f"engine {name} can't run the plan's graph here: " + "; ".join(map(str, found.reasons)))

    def allowed(variant: str) -> None:
        barred = variant_declines(request, spec, variant) if variant else ()
        if barred:
            raise BuildError(f"the plan is of {name}/{variant}: " + "; ".join(map(str, barred)), decline=barred[0])

    allowed(config.variant)
    load_plan = getattr(entry.instance(), "load_plan", None)
    if header["engine_header"] is not None and trust and load_plan is not None:
        try:
            compiled = compiled_by(
                request,
                entry,
                config,
                "load_plan",
                lambda: load_plan(header["engine_header"], parts, frozen, request.building),
            )
        except EngineBroken as broken:
            report(request, entry, broken)
            raise BuildError(f"engine {name} could not load its payloads: {broken.decline}") from broken
    elif enforce_precompiled:
        why = "trust=True is needed for native payloads" if parts and load_plan else "the plan has no compiled payloads"
        raise BuildError(f"enforce_precompiled: {why}")
    else:
        compiled = build_config(request, entry, config)
    allowed(config.variant or getattr(compiled, "variant", ""))
    return compiled, config


def _unavailable(header: Mapping[str, Any], error: CudnnCoreError, registry: Registry) -> str:
    """Why the engine of a plan can't be used here, and what helps: that depends on what is here instead."""
    from ._snapshot import EngineLookupError

    name, dist = header["engine"], header["dist"]
    if isinstance(error, EngineLookupError) and error.kind == "not_installed":
        return f"the plan needs engine {name}" + (f": pip install {dist}" if dist else "") + f" ({error})"
    text = f"the plan needs engine {name} as it was when the plan was saved: {error}"
    if isinstance(error, EngineLookupError) and error.kind == "unavailable":
        text = f"the plan needs an engine that can't be used: {error}"
    here = {f"{item.dist} {item.version}" for item in registry.plugins if item.plugin == name.partition(":")[0]}
    made = f"{dist} {header['version']}"
    if dist and here and here != {made}:
        text += f"; the plan was made with {made}, installed is {', '.join(sorted(here))}"
    return text


def _device(saved: Mapping[str, Any], handle: Handle | None) -> DeviceInfo:
    """The device to run on; BuildError if it is not like the one that the plan was built for."""
    from ._context import resolve_device
    from ._device import DeviceInfo

    wanted = DeviceInfo.from_json(saved)
    here = resolve_device(handle=handle)
    if wanted.type == "cpu" and handle is None and here.type == "cuda":
        from ._device import device_info

        here = device_info("cpu")
    same = wanted.type == here.type and (wanted.type == "cpu" or wanted.key() == here.key())
    if not same:
        raise BuildError(f"the plan was built for {wanted!r}, this is {here!r}")
    return here


def _parse(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    start = len(_MAGIC) + 8 + 32
    if len(data) < start or not data.startswith(_MAGIC):
        raise BuildError("not a cudnn-core plan")
    (length,) = struct.unpack_from("<Q", data, len(_MAGIC))
    if length > _HEADER_LIMIT or len(data) < start + length:
        raise BuildError("the plan is truncated")
    text = data[start : start + length]
    if hashlib.sha256(text).digest() != data[start - 32 : start]:
        raise BuildError("the plan's header is damaged: its hash does not match")
    try:
        header = loads(text)
    except FormatError as error:
        raise BuildError(f"the plan's header can't be read: {error}") from None
    if not isinstance(header, dict) or header.get("schema") != 1:
        raise BuildError("the plan has an unknown schema")
    try:
        take(header, _FIELDS, "header")
        for index, row in enumerate(header["payloads"]):
            take(row, _PAYLOAD, f"header.payloads[{index}]")
    except FormatError as error:
        raise BuildError(f"the plan is malformed: {error}") from None
    parts: dict[str, bytes] = {}
    offset = start + length
    for row in header["payloads"]:
        if row["name"] in parts:
            raise BuildError(f"the plan has two payloads {row['name']!r}")
        part = data[offset : offset + row["size"]]
        offset += row["size"]
        if len(part) != row["size"]:
            raise BuildError(f"the plan is truncated in payload {row['name']!r}")
        if hashlib.sha256(part).hexdigest() != row["sha256"]:
            raise BuildError(f"payload {row['name']!r} of the plan is damaged: its hash does not match")
        parts[row["name"]] = part
    if offset != len(data):
        raise BuildError(f"the plan has {len(data) - offset} bytes after its last payload")
    return header, parts
