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

from ._canonical import FormatError, dumps, loads, plain
from ._engine import ExecutionContext, PlanConfig
from ._errors import BuildError, CudnnCoreError

if TYPE_CHECKING:
    from ._device import DeviceInfo
    from ._engine import CompiledPlan
    from ._graph._frozen import FrozenGraph
    from ._graph._graph import Graph
    from ._handle import Handle
    from ._plan import Plan

__all__ = ["load", "load_bytes", "save", "to_bytes"]

_MAGIC = b"cudnn_core plan\0"
_HEADER_LIMIT = 64 << 20
_FIELDS: dict[str, Any] = {
    "schema": int,
    "core": str,
    "graph": dict,
    "graph_key": str,
    "engine": str,
    "knobs": dict,
    "variant": str,
    "dist": str,
    "version": str,
    "device": dict,
    "workspace_size": int,
    "decision": dict,
    "engine_header": (dict, type(None)),
    "payloads": list,
}


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
        except Exception as error:
            raise BuildError(f"engine {plan.engine} could not serialize its plan: {error!r}") from error
    row = plan.decision.winner
    header = {
        "schema": 1,
        "core": __version__,
        "graph": to_dict(plan.graph),
        "graph_key": plan.graph.key,
        "engine": plan.engine,
        "knobs": plain(plan.knobs),
        "variant": plan.variant,
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
    target = Path(path)
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
    except OSError as error:
        raise BuildError(f"the plan can't be written to {target}: {error}") from None


def load(path: str | os.PathLike[str], handle: Handle | None, *, trust: bool) -> Plan:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BuildError(f"the plan {path} can't be read: {error}") from None
    try:
        return load_bytes(data, handle, trust=trust)[0]
    except BuildError as error:
        raise BuildError(f"{path}: {error}") from error.__cause__


def load_bytes(
    data: bytes, handle: Handle | None, *, trust: bool = False, enforce_precompiled: bool = False
) -> tuple[Plan, Graph]:
    """(plan, its graph) from ``to_bytes``; BuildError says what is wrong with the data or with this machine."""
    header, parts = _parse(data)
    from ._decision import Decision
    from ._graph._graph import Graph
    from ._graph._json import from_dict

    try:
        graph = from_dict(Graph, header["graph"])
        decision = Decision.from_json(dumps(header["decision"]))
        device = _device(header["device"], handle)
        frozen = graph.freeze(device.type)
    except BuildError:
        raise
    except CudnnCoreError as error:
        raise BuildError(f"not a usable plan: {error}") from error
    if frozen.key != header["graph_key"]:
        raise BuildError("the plan's graph does not have the key that the header states")
    compiled, config = _compiled(header, parts, frozen, device, handle, trust, enforce_precompiled)
    from ._planner import finish

    plan = finish(frozen, compiled, config, decision, device, handle, {}, list(graph.tensors))
    return plan, graph


def _compiled(
    header: Mapping[str, Any],
    parts: dict[str, bytes],
    frozen: FrozenGraph,
    device: DeviceInfo,
    handle: Handle | None,
    trust: bool,
    enforce_precompiled: bool,
) -> tuple[CompiledPlan, PlanConfig]:
    from ._candidates import Filters, Request, examine
    from ._config import current as current_config
    from ._plan import check_compiled
    from ._planner import build_config
    from ._ranking import Candidate
    from ._registry import current as current_registry

    registry = current_registry()
    name = header["engine"]
    try:
        entry = registry.get(name)
        assert entry.spec is not None
        if not entry.spec.has_variant(header["variant"]):
            raise BuildError(f"engine {name} has no variant {header['variant']!r}")
        config = PlanConfig(entry.spec.id, entry.spec.complete_knobs(header["knobs"]), header["variant"])
    except BuildError:
        raise
    except CudnnCoreError as error:
        hint = f": pip install {header['dist']}" if header["dist"] else ""
        raise BuildError(f"the plan needs engine {name}{hint} ({error})") from error
    if dict(config.knobs) != header["knobs"]:
        raise BuildError(f"engine {name} has other knobs than the plan: {dict(config.knobs)}, not {header['knobs']}")
    request = Request(frozen, device, handle, frozen.hint_sizes(), Filters(), True, registry, current_config(), ())
    found = examine(request, entry)
    if not isinstance(found, Candidate):
        raise BuildError(f"engine {name} can't run the plan's graph here: " + "; ".join(map(str, found.reasons)))
    load_plan = getattr(entry.instance(), "load_plan", None)
    if header["engine_header"] is not None and trust and load_plan is not None:
        try:
            compiled = load_plan(header["engine_header"], parts, frozen, ExecutionContext(handle, device))
        except Exception as error:
            raise BuildError(f"engine {name} could not load its payloads: {error}") from error
        check_compiled(compiled, name)
        return compiled, config
    if enforce_precompiled:
        why = "trust=True is needed for native payloads" if parts and load_plan else "the plan has no compiled payloads"
        raise BuildError(f"enforce_precompiled: {why}")
    return build_config(request, entry, config), config


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
    _check_header(header)
    parts: dict[str, bytes] = {}
    offset = start + length
    for row in header["payloads"]:
        if not isinstance(row, dict) or row.keys() != {"name", "size", "sha256"} or not isinstance(row["size"], int):
            raise BuildError("the plan's payload table is malformed")
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


def _check_header(header: Any) -> None:
    if not isinstance(header, dict) or header.get("schema") != 1:
        raise BuildError("the plan has an unknown schema")
    for name, kind in _FIELDS.items():
        if not isinstance(header.get(name, ...), kind):
            raise BuildError(f"the plan's header lacks a proper {name!r}")
    unknown = header.keys() - _FIELDS.keys()
    if unknown:
        raise BuildError(f"the plan's header has an unknown field {min(unknown)!r}")
