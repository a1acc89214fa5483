"""Testing support for plugins: the conformance kit and in-process plugins.

    pytest -p cudnn_core.testing --cudnn-plugin NAME          the kit (docs/writing-an-engine.md)
    with cudnn_core.testing.temporary_plugin(manifest, ...):  a plugin that lives in this process

``Case`` is a graph for the kit's library, for functions that ``--cudnn-cases`` names. Importing this package imports neither
pytest nor anything that an engine may not import.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._cases import Case
    from ._temporary import temporary_plugin

__all__ = ["Case", "temporary_plugin"]

# What pytest loads along with `-p cudnn_core.testing`.
pytest_plugins = ("cudnn_core.testing._plugin",)

_PUBLIC = {"Case": "_cases", "temporary_plugin": "_temporary"}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = found
    return found
