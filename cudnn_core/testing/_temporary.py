"""``temporary_plugin``: a plugin that lives in this process, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .._discovery import Found
from .._engine import API
from .._manifest import SCHEMA, parse
from .._records import PluginRecord
from .._registry import Registry, in_process

__all__ = ["temporary_plugin"]


@contextmanager
def temporary_plugin(
    manifest: str | Mapping[str, Any],
    factories: Mapping[str, Callable[[], Any]] | None = None,
    *,
    hooks: Sequence[Any] = (),
    isolated: bool = False,
) -> Iterator[Registry]:
    """Add a plugin for the duration of the block; yields the registry that has it.

    manifest   TOML text or a mapping; ``schema`` and ``api`` may be left out of a mapping, and an engine's or op's
               ``factory`` if its name is a key of ``factories``
    factories  engine or op name -> class, callable or op row, used in place of an import
    hooks      modules, or objects with methods, that implement hooks (``cudnn_core_register(self, registrar)``)
    isolated   hide every other plugin

    Raises ManifestError for an invalid manifest.
    """
    factories = dict(factories or {})
    if not isinstance(manifest, str):
        manifest = _completed(manifest, factories)
    parsed = parse(manifest, "toml", "temporary_plugin")
    found = Found(parsed.plugin, f"{parsed.plugin} (in process)", "0", "temporary_plugin", "")
    with in_process(PluginRecord(found, parsed, factories=factories, hooks=hooks), isolated=isolated) as registry:
        yield registry


def _completed(manifest: Mapping[str, Any], factories: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {"schema": SCHEMA, "api": f"{API[0]}.{API[1]}", **manifest}
    for key in ("engine", "op"):
        if isinstance(document.get(key), (list, tuple)):
            document[key] = [
                {"factory": "temporary:factory", **table} if table.get("name") in factories else table
                for table in document[key]
            ]
    return document
