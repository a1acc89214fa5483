"""The op table: name -> row. In-tree rows, then rows that plugins' manifests declare.

Imported by the graph (builders, validation), the configuration check and the roofline. A plugin's row is loaded only when
a builder of that name is used or a graph names the op.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .._errors import GraphError, ManifestError, nearest
from ._schema import Op

__all__ = ["all_builders", "in_tree", "lookup", "lookup_builder", "plugin_ops"]

_MODULES = (
    "_matmul",
    "_pointwise",
    "_reduction",
    "_structural",
    "_norm",
    "_sdpa",
    "_conv",
    "_block_scale",
    "_moe",
    "_linear_attention",
)

_rows: dict[str, Op] = {}
_builders: dict[str, Op] = {}


def in_tree() -> dict[str, Op]:
    """Every in-tree row by op name."""
    if not _rows:
        rows: dict[str, Op] = {}
        builders: dict[str, Op] = {}
        for module in _MODULES:
            for row in import_module(f"{__package__}.{module}").ROWS:
                rows[row.name] = row
                for builder in row.builders:
                    builders[builder] = row
        _builders.update(builders)
        _rows.update(rows)
    return _rows


def all_builders() -> dict[str, Op]:
    """Builder method name -> row, for the in-tree ops."""
    in_tree()
    return _builders


def lookup(name: str) -> Op:
    """The row of op ``name``; GraphError names the nearest op that exists."""
    row = in_tree().get(name) or _plugin_row(name)
    if row is None:
        raise GraphError(f"unknown op {name!r}{nearest(name, [*_rows, *plugin_ops()])}")
    return row


def lookup_builder(method: str) -> Op | None:
    """The row whose builder is called ``method``, or None."""
    row = all_builders().get(method)
    if row is None:
        row = _plugin_row(method)
        if row is not None and method not in row.builders:
            return None
    return row


def _of_a_barred_plugin(name: str) -> str | None:
    """Why the plugin that has the op is out of use: denied, disabled or quarantined."""
    from .._registry import current

    for plugin in current().plugins:
        if plugin.state != "eligible" and plugin.manifest is not None and name in plugin.manifest.ops:
            return f"plugin {plugin.plugin} is {plugin.state}: " + "; ".join(map(str, plugin.reasons))
    return None


def plugin_ops() -> Iterator[str]:
    """The names of the ops that usable plugins add."""
    from .._registry import current

    return iter(current().op_factories)


def _plugin_row(name: str) -> Op | None:
    from .._registry import current

    registry = current()
    if name not in registry.op_factories:
        barred = registry.op_declines.get(name) or _of_a_barred_plugin(name)
        if barred is not None:
            raise GraphError(f"op {name!r} of a plugin can't be used: {barred}")
        return None
    row = registry.op_row(name)
    if not isinstance(row, Op) or row.name != name:
        raise ManifestError(f"the factory of op {name!r} returned {row!r}, not its row", subject=f"op.{name}")
    return row
