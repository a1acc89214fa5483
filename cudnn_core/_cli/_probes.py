"""The probes of ``cudnn-core doctor``. Each is a generator of lines named after what it looks at."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ._doctor import Line

if TYPE_CHECKING:
    from .._registry import PluginEntry

__all__ = ["PROBES"]

_SLOW_IMPORT = 2.0  # seconds; an engine's decision must not need its toolchain


def versions(options: Any) -> Iterator[Line]:
    import platform

    from .. import __version__
    from .._engine import API

    yield Line("versions", "ok", f"cudnn-core {__version__}", f"engine API {API[0]}.{API[1]}")
    yield Line("versions", "ok", f"Python {platform.python_version()}", sys.executable)


def metadata(options: Any) -> Iterator[Line]:
    """Distributions whose metadata can't be used, that hide each other, or that lie in the current directory."""
    from .._discovery import scan
    from .._metadata import differences

    found = scan(thorough=True)
    for broken in found.broken:
        yield Line("metadata", "problem", broken.path, broken.reason)
    for skipped in found.shadowed:
        yield Line("metadata", "info", f"{skipped.dist} {skipped.version} at {skipped.path}", f"hidden by {skipped.by}")
    for skipped in found.ignored:
        why = "lies in the current directory, which registers nothing"
        yield Line("metadata", "info", f"{skipped.dist} {skipped.version} at {skipped.path}", why)
    if not found.broken:
        yield Line("metadata", "ok", f"{len(found.dists)} distributions", "all readable")
    differing = differences(found)  # the fast scan and importlib.metadata must see the same plugins
    for difference in differing:
        yield Line("metadata", "problem", "plugins", difference)
    if not differing:
        yield Line("metadata", "ok", f"{len(found.plugins)} plugins", "importlib.metadata agrees")


def plugins(options: Any) -> Iterator[Line]:
    """Manifests, conflicts, the API handshake and requirements: what is known without running plugin code."""
    from .._registry import current

    registry = current(enforce=False)
    if not registry.plugins:
        from .._decision_text import PIP_LINE

        yield Line("plugins", "problem", "no plugin is installed", PIP_LINE)
    for plugin in registry.plugins:
        level = {"quarantined": "problem", "disabled": "info"}.get(plugin.state, "ok")
        detail = "; ".join(map(str, plugin.reasons)) or plugin.state
        yield Line("plugins", level, f"{plugin.plugin} ({plugin.dist} {plugin.version})", detail)
    for entry in registry.engines:
        if entry.spec is not None and entry.state == "filtered":
            yield Line("plugins", "info", entry.id, "; ".join(map(str, entry.reasons)))
    for report in registry.reports:
        yield Line("plugins", "problem", report.subject, str(report))


def imports(options: Any) -> Iterator[Line]:
    """Every plugin's code, each in a child process with a time limit, so that one that hangs is found and named."""
    from .._registry import current
    from ._child import examine

    for plugin in current(enforce=False).plugins:
        if plugin.state != "eligible":
            yield Line("imports", "info", plugin.plugin, f"not run: it is {plugin.state}")
        elif plugin.origin == "temporary_plugin":
            yield Line("imports", "info", plugin.plugin, "not run: it lives in this process")
        else:
            yield from _imports_of(plugin, examine(plugin.plugin, options.time_limit))


def _imports_of(plugin: PluginEntry, found: Any) -> Iterator[Line]:
    who = f"{plugin.plugin} ({plugin.dist} {plugin.version})"
    for step in found.steps:
        level = "problem" if step.error else "info" if step.seconds > _SLOW_IMPORT else "ok"
        yield Line("imports", level, f"{step.what} of {who}", step.error or f"{step.seconds * 1e3:.0f} ms")
    for check in found.checks:
        yield Line("imports", "ok" if check["ok"] else "problem", f"{plugin.plugin}: {check['name']}", check["detail"])
    if found.hung:
        detail = f"still not done after {found.limit:g} s; the child was ended"
        yield Line("imports", "problem", f"{found.hung} of {who} hangs", detail)
    elif found.died:
        yield Line("imports", "problem", f"{who} ended its process", found.died)


def cache(options: Any) -> Iterator[Line]:
    """The cache folder: there, this user's, nobody else's. Nothing is made."""
    from .._store import UnusableError, cache_root, make_private

    root = cache_root()
    if root is None:
        yield Line("cache", "problem", "no cache folder", "set CUDNN_CORE_CACHE_DIR or HOME")
        return
    if not os.path.lexists(root):
        parent = next((folder for folder in root.parents if folder.exists()), root)
        writable = os.access(parent, os.W_OK | os.X_OK)
        detail = "made when it is first needed" if writable else f"can't be made: {parent} is not writable"
        yield Line("cache", "ok" if writable else "problem", str(root), detail)
        return
    mode = root.lstat().st_mode & 0o777
    try:
        make_private(root)
    except UnusableError as error:
        yield Line("cache", "problem", str(root), f"{error}; compiled kernels are kept in memory only")
        return
    if not os.access(root, os.W_OK | os.X_OK):
        yield Line("cache", "problem", str(root), "not writable")
    elif mode & 0o077:
        yield Line("cache", "info", str(root), f"its mode was {mode:04o}; it is 0700 now")
    else:
        yield Line("cache", "ok", str(root), f"mode {mode:04o}")


def cuda(options: Any) -> Iterator[Line]:
    """The driver, the binding and the devices."""
    from .. import _driver
    from .._device import device_info
    from .._env import driver_version, runtime_version

    driver = _driver.driver()
    if driver is None:
        yield Line("cuda", "info", "no GPU", str(_driver.why_absent()))
        return
    yield Line("cuda", "ok", f"driver {driver_version()}", f"runtime {runtime_version()}")
    for ordinal in range(driver.device_count()):
        info = device_info(ordinal)
        yield Line("cuda", "ok", f"cuda:{ordinal}", f"{info.device_name} sm_{info.arch}, {info.sm_count} SMs")


def backend(options: Any) -> Iterator[Line]:
    """What answers for cuDNN itself. Asking runs plugin code, so only the claim is looked at."""
    from .._registry import current

    claims = [
        plugin.plugin
        for plugin in current(enforce=False).plugins
        if plugin.state == "eligible" and plugin.manifest is not None and "backend" in plugin.manifest.provides
    ]
    if len(claims) > 1:
        yield Line("backend", "problem", "several plugins provide the backend", ", ".join(claims))
    else:
        yield Line(
            "backend", "ok" if claims else "info", "cuDNN backend", claims[0] if claims else "no plugin provides it"
        )


def configuration(options: Any) -> Iterator[Line]:
    from .._config import foreign_files
    from ._config import findings

    for path, why in foreign_files():
        yield Line("configuration", "info", path, f"does not count as a project configuration: {why}")

    found = findings()
    for finding in found:
        level = "problem" if finding.severity == "error" or finding.origin == f"env:{finding.key}" else "info"
        yield Line("configuration", level, f"{finding.origin} {finding.key}".strip(), finding.message)
    if not found:
        from .._config import current

        yield Line("configuration", "ok", f"{len(current().values)} values", "cudnn-core config show lists them")


def kit(options: Any) -> Iterator[Line]:
    """What `cudnn-core plugin test` needs."""
    from importlib.util import find_spec

    missing = [name for name in ("pytest", "numpy") if find_spec(name) is None]
    detail = f"needs {', '.join(missing)}: pip install {' '.join(missing)}" if missing else "ready"
    yield Line("kit", "info" if missing else "ok", "conformance kit", detail)


PROBES: tuple[Callable[[Any], Iterable[Line]], ...] = (
    versions,
    metadata,
    plugins,
    imports,
    cache,
    cuda,
    backend,
    configuration,
    kit,
)
