"""One record per installed plugin: its manifest as data, and once-cells for everything that runs its code.

The cells are the only mutable state below a registry snapshot: each is written once, under the plugin's own lock (imports
under a lock that other plugins or readers need would deadlock with Python's import locks). Imported by the registry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._declines import Decline
from ._discovery import Found
from ._errors import CudnnCoreError, ManifestError
from ._hooks import HookResult, PluginHooks, Registrar, describe, short_repr
from ._locks import ForkLock
from ._manifest import EngineSpec, Manifest, api_decline, from_document, load
from ._origin import read_bytes

__all__ = ["Cell", "EngineBroken", "PluginRecord", "failure", "import_object", "record_of"]

# Frames that no plugin wrote: the core's and the import machinery's.
_NOT_PLUGINS = (
    __file__[: -len("_records.py")],
    importlib.import_module.__code__.co_filename,
    "<frozen importlib",
)


class EngineBroken(CudnnCoreError):  # noqa: N818  says what happened to the engine, as the states do
    """A plugin's code failed. ``decline`` is the reason, ``traceback`` the text of where, ``stage`` what it was asked for."""

    def __init__(self, subject: str, decline: Decline, traceback: str = "", stage: str = "import") -> None:
        super().__init__(f"{subject}: {decline}")
        self.decline = decline
        self.traceback = traceback
        self.stage = stage


class Cell:
    """Holds a value, and a failure, which counts more; ``reported``: the hooks were told of it."""

    __slots__ = ("failure", "reported", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.failure: EngineBroken | None = None
        self.reported = False


class PluginRecord:
    """One distribution's claim to a plugin id.

    problem    why the manifest can't be used, whatever the configuration says; else None
    factories  engine or op name -> callable, for plugins that live in this process
    reports    what its hooks did wrong, in order
    """

    def __init__(
        self,
        found: Found,
        manifest: Manifest | None,
        problem: Decline | None = None,
        *,
        factories: Mapping[str, Callable[[], Any]] | None = None,
        hooks: Sequence[Any] = (),
    ) -> None:
        self.found = found
        self.manifest = manifest
        self.problem = problem
        self.reports: list[Decline] = []
        self._factories = dict(factories or {})
        self._hooks = PluginHooks(found.plugin, (*(manifest.hooks if manifest else ()), *hooks))
        self._has_hooks = bool(hooks or (manifest and manifest.hooks))
        self._lock = ForkLock()
        self._cells: dict[str, Cell] = {}
        self._computed: tuple[EngineSpec, ...] | None = None
        self._registering = False
        self._hook_declines: tuple[Decline, ...] = ()

    def __repr__(self) -> str:
        return f"<plugin {self.found.plugin} of {self.found.dist} {self.found.version}>"

    @property
    def where(self) -> str:
        """The file that names the plugin's code: its manifest, or what stands for it."""
        return self.found.manifest_path or self.found.origin

    def cell(self, what: str) -> Cell:
        """The cell of ``engine:NAME``, ``op:NAME`` or ``module:NAME``."""
        return self._cells.setdefault(what, Cell())

    def engine(self, spec: EngineSpec) -> Any:
        """The engine of ``spec``, imported and constructed once. Raises EngineBroken, every time, if that failed."""

        def make() -> Any:
            factory = self._factories.get(spec.name) or import_object(spec.factory)
            engine = factory()
            missing = [name for name in ("check_support", "build_plan") if not callable(getattr(engine, name, None))]
            if missing:
                raise TypeError(f"{spec.factory} made {short_repr(engine)}, which has no {' and no '.join(missing)}")
            return engine

        return self._once(f"engine:{spec.name}", spec.short_id, spec.factory, make)

    def op_row(self, name: str) -> Any:
        """The row of the plugin's op ``name``: what its factory names, called if that is not a row itself."""
        assert self.manifest is not None
        factory = self.manifest.ops[name]

        def make() -> Any:
            from ._ops._schema import Op

            row = self._factories.get(name) or import_object(factory)
            if not isinstance(row, Op) and callable(row):
                row = row()
            if not isinstance(row, Op) or row.name != name:
                raise TypeError(f"{factory} is {short_repr(row)}, not the row of {name!r}")
            return row

        return self._once(f"op:{name}", f"op {name}", factory, make)

    def module(self, name: str) -> Any:
        """Module ``name`` of the plugin."""
        return self._once(f"module:{name}", name, f"{name}:", lambda: importlib.import_module(name))

    def computed(self) -> tuple[EngineSpec, ...]:
        """Engines that the plugin's hooks registered; runs the hooks once. Empty for a hook that asks while it runs."""
        if self._computed is None:
            with self._lock:
                if self._registering:
                    return ()
                if self._computed is None:
                    self._registering = True
                    try:
                        self._computed = self._run_register() if self._has_hooks else ()
                    finally:
                        self._registering = False
        return self._computed

    def hook_declines(self) -> tuple[Decline, ...]:
        """Why the hook modules can't be used; known after ``computed``."""
        return self._hook_declines

    def call_hooks(self, name: str, **arguments: Any) -> list[HookResult]:
        results = self._hooks.call(name, **arguments)
        for result in results:
            if result.error is not None:
                self.reports.append(result.error)
                _warn("%s", result.error)
        return results

    def _run_register(self) -> tuple[EngineSpec, ...]:
        try:
            declines = self._hooks.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and the like are a plugin's failure too
            declines = [failure(error, f"{self.found.plugin}: hooks", "", self.where).decline]
        registrar = Registrar(self.found.plugin)
        if not declines:
            raised = [r.error for r in self.call_hooks("cudnn_core_register", registrar=registrar) if r.error]
            declines = [error for error in raised if error.expected == "no exception"]
        names = {spec.name for spec in self.manifest.engines} if self.manifest else set()
        for spec, _ in registrar.engines:
            if spec.name in names:
                declines.append(Decline("plugin.conflict", spec.short_id, "a new name", "the manifest's own engine"))
        if declines:
            self._hook_declines = tuple(declines)
            return ()
        self._factories.update({spec.name: factory for spec, factory in registrar.engines if factory is not None})
        return tuple(spec for spec, _ in registrar.engines)

    def _once(self, what: str, subject: str, factory: str, make: Callable[[], Any]) -> Any:
        cell = self.cell(what)
        if cell.value is None and cell.failure is None:
            with self._lock:
                if cell.value is None and cell.failure is None:
                    try:
                        cell.value = make()
                    except KeyboardInterrupt:
                        raise
                    except BaseException as error:  # SystemExit and the like are a plugin's failure too
                        cell.failure = failure(error, subject, factory, self.where)
                        _warn("%s (the plugin is left out until the registry is refreshed)", cell.failure)
        if cell.failure is not None:
            raise cell.failure
        return cell.value


def record_of(found: Found) -> PluginRecord:
    """Read and check the manifest of ``found``; whatever is wrong with it becomes the record's ``problem``."""
    if found.problem is not None:
        return PluginRecord(found, None, found.problem)
    fmt = "json" if found.manifest_path.endswith(".json") else "toml"
    try:
        data = found.manifest if found.manifest is not None else read_bytes(found.manifest_path, (1 << 20) + 1)
        document = load(data, fmt)
        refused = api_decline(document)
        if refused is not None:
            return PluginRecord(found, None, refused._replace(origin=found.manifest_path))
        manifest = from_document(document, "")
        if manifest.plugin != found.plugin:
            raise ManifestError(f"{manifest.plugin!r} is not the entry point's name {found.plugin!r}", subject="plugin")
    except (OSError, ManifestError) as error:
        subject = error.subject if isinstance(error, ManifestError) else ""
        text = error.text if isinstance(error, ManifestError) else str(error)
        reason = Decline("plugin.bad_manifest", subject or found.plugin, actual=text, origin=found.manifest_path)
        return PluginRecord(found, None, reason)
    return PluginRecord(found, manifest)


def failure(error: BaseException, subject: str, factory: str, where: str = "") -> EngineBroken:
    """``error``, raised by plugin code, as data: ``dep.import_failed`` for an import of something else, else ``broken``.

    Its origin is the last line of the traceback that is not the core's, or ``where`` (the file that names the code) if
    there is none: a name that the code lacks, a constructor with other parameters.
    """
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    lines = [f"{name}:{line}" for name, line in frames if not name.startswith(_NOT_PLUGINS)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}")
    origin = lines[-1] if lines else where
    missing = error.name or "" if isinstance(error, ImportError) else ""
    own = factory.partition(":")[0]
    if isinstance(error, ImportError) and not (missing and f"{own}.".startswith(f"{missing}.")):
        decline = Decline(
            "dep.import_failed", subject, expected=missing or "import", actual=_chain(error), origin=origin
        )
    else:
        decline = Decline("plugin.broken", subject, actual=_chain(error), origin=origin)
    return EngineBroken(subject, decline, text)


def _chain(error: BaseException) -> str:
    """The exception and its causes, newest first."""
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        parts.append(describe(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return " <- ".join(parts)


def import_object(path: str) -> Any:
    """What ``package.module:attribute.path`` names."""
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    return value


def _warn(message: str, *arguments: object) -> None:
    import logging

    logging.getLogger("cudnn_core").warning(message, *arguments)
