"""The four hooks, run by pluggy at plan and CLI time only; never while a plan runs.

A plugin's manifest lists modules under ``hooks``; a function of one of the names below in such a module is an
implementation and may take any subset of the arguments. Importing pluggy (20 ms) happens when the first plugin with hooks
is used. Imported by the registry and the CLI.

Isolation: an implementation that raises or returns rubbish is reported and stops nobody else. Each plugin has a plugin
manager of its own, so that leaving a plugin out (denied, quarantined, temporary) leaves out its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from ._declines import Decline
from ._errors import ManifestError, nearest

if TYPE_CHECKING:
    from ._decision import Decision
    from ._manifest import EngineSpec
    from ._registry import Registry

__all__ = [
    "HOOKS",
    "Check",
    "EngineFailure",
    "HookResult",
    "PluginHooks",
    "Registrar",
    "call_isolated",
    "describe",
    "message_of",
    "short_repr",
]

PROJECT = "cudnn_core"

# (plugin, hook) of the hooks that run in this context.
_running: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("cudnn_core.hooks", default=())


class Check(NamedTuple):
    """One line of ``cudnn-core doctor``."""

    name: str
    ok: bool
    detail: str = ""


class EngineFailure(NamedTuple):
    """An engine that raised or failed to build.

    stage      "import", "check_support", "estimate", "build_plan" or "load_plan"
    decline    the reason that its row in decisions gives
    traceback  the text of where it raised
    """

    engine: str
    stage: str
    decline: Decline
    traceback: str = ""


class HookResult(NamedTuple):
    """What one implementation gave: ``value``, or the reason why that does not count."""

    plugin: str
    value: Any = None
    error: Decline | None = None


class Specs:
    """The hooks."""

    def cudnn_core_register(self, registrar: Registrar) -> None:
        """Add engines that a manifest can't list: computed sets, tests, notebooks."""

    def cudnn_core_plan_selected(self, decision: Decision) -> None:
        """A plan was chosen. An observer: it can't change the decision."""

    def cudnn_core_engine_failed(self, failure: EngineFailure) -> None:
        """An engine raised, or could not build a plan."""

    def cudnn_core_doctor(self, env: Mapping[str, str]) -> Iterable[Check]:
        """Further checks for ``cudnn-core doctor``; must not touch the network."""
        return ()


HOOKS: tuple[str, ...] = tuple(name for name in vars(Specs) if name.startswith(f"{PROJECT}_"))


class Registrar:
    """What ``cudnn_core_register`` is given, one per plugin."""

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.engines: list[tuple[EngineSpec, Callable[[], Any] | None]] = []

    def engine(self, name: str, factory: str | Callable[[], Any], **fields: Any) -> None:
        """Add ``plugin:name``. ``factory`` makes the engine (or is ``"module:Name"``); ``fields`` are a manifest's.

        Raises ManifestError for what a manifest's ``[[engine]]`` table would be refused for.
        """
        from ._engine import API
        from ._manifest import SCHEMA, from_document

        text = factory if isinstance(factory, str) else "registered:by_hook"
        if not isinstance(factory, str) and not callable(factory):
            raise ManifestError(f"{factory!r} is neither 'module:Name' nor callable", subject=f"engine.{name}.factory")
        table = {"name": name, "factory": text, **fields}
        document = {"schema": SCHEMA, "plugin": self.plugin, "api": f"{API[0]}.{API[1]}", "engine": [table]}
        spec = from_document(document, "cudnn_core_register").engines[0]
        if any(known.name == name for known, _ in self.engines):
            raise ManifestError(f"engine {name!r} is registered twice", subject=f"engine.{name}")
        self.engines.append((spec, None if isinstance(factory, str) else factory))


class PluginHooks:
    """The hook modules of one plugin. ``modules`` are names, or objects that stand in for modules."""

    def __init__(self, plugin: str, modules: Sequence[Any]) -> None:
        self.plugin = plugin
        self._manager: Any = None
        self._modules = modules

    def load(self) -> list[Decline]:
        """Import the modules and collect their implementations; what is wrong with them.

        An exception of the import is the caller's.
        """
        from importlib import import_module

        modules = [
            (item, import_module(item)) if isinstance(item, str) else (repr(item), item) for item in self._modules
        ]
        declines = [decline for name, module in modules for decline in self._unknown(name, module)]
        if declines:
            return declines
        self._manager = _new_manager()
        for name, module in modules:
            self._manager.register(module, name=name)
        return []

    def call(self, name: str, **arguments: Any) -> list[HookResult]:
        """Every implementation of hook ``name``, one after the other, each in isolation.

        A hook that plans is not called for the plans that it makes itself.
        """
        if self._manager is None or (self.plugin, name) in _running.get():
            return []
        caller = getattr(self._manager.hook, name)
        token = _running.set((*_running.get(), (self.plugin, name)))
        try:
            return [self._call_one(name, impl, arguments) for impl in reversed(caller.get_hookimpls())]
        finally:
            _running.reset(token)

    def _call_one(self, name: str, impl: Any, arguments: Mapping[str, Any]) -> HookResult:
        try:
            value = impl.function(*[arguments[argument] for argument in impl.argnames])
            if name == "cudnn_core_doctor" and value is not None:
                value = list(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and the like are a plugin's failure too
            return HookResult(self.plugin, None, self._broken(name, "no exception", describe(error)))
        if name == "cudnn_core_doctor":
            value = value or []
            wrong = [item for item in value if not isinstance(item, Check)]
            if wrong:
                good = [item for item in value if isinstance(item, Check)]
                return HookResult(self.plugin, good, self._broken(name, "cudnn_core Check items", short_repr(wrong[0])))
        elif value is not None:
            return HookResult(self.plugin, None, self._broken(name, "None", short_repr(value)))
        return HookResult(self.plugin, value)

    def _broken(self, hook: str, expected: str, actual: str) -> Decline:
        return Decline("plugin.broken", f"{self.plugin}: hook {hook}", expected, actual)

    def _unknown(self, name: str, module: Any) -> list[Decline]:
        """Misspelt hooks, arguments that no hook has, and wrappers (which could swallow other plugins' calls)."""
        declines = []
        known = {hook: getattr(Specs, hook).__code__.co_varnames[1:] for hook in HOOKS}
        for attribute, function in _functions(module):
            marked = getattr(function, f"{PROJECT}_impl", None) or {}
            hook = marked.get("specname") or attribute
            subject = f"{self.plugin}: {name}.{attribute}"
            if hook not in known:
                hint = nearest(hook, HOOKS).strip(" ()")
                declines.append(Decline("plugin.unknown_hook", subject, expected=list(HOOKS), actual=hook, hint=hint))
                continue
            if marked.get("wrapper") or marked.get("hookwrapper"):
                declines.append(Decline("plugin.broken", subject, expected="a plain function", actual="a hook wrapper"))
            extra = [argument for argument in _arguments(function) if argument not in known[hook]]
            if extra:
                expected = f"arguments among {', '.join(known[hook])}"
                declines.append(Decline("plugin.broken", subject, expected=expected, actual=", ".join(extra)))
        return declines


def call_isolated(name: str, registry: Registry | None = None, **arguments: Any) -> list[HookResult]:
    """Call hook ``name`` of every healthy, allowed plugin of ``registry`` (default: the current one).

    Never raises for what an implementation does: errors are in the results, in ``registry.reports`` and in the log.
    """
    if name not in HOOKS:
        raise ValueError(f"{name!r} is not a hook{nearest(name, HOOKS)}")
    if registry is None:
        from ._registry import current

        registry = current()
    return registry.call_hooks(name, **arguments)


def _new_manager() -> Any:
    import pluggy

    class Manager(pluggy.PluginManager):  # type: ignore[misc]
        """Takes functions by their name, so that a hook module need not import pluggy for its marker."""

        def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
            opts = super().parse_hookimpl_opts(plugin, name)
            if opts is None and name in HOOKS and callable(getattr(plugin, name, None)):
                opts = pluggy.HookimplMarker(PROJECT)(lambda: None).cudnn_core_impl
            return opts

    spec = pluggy.HookspecMarker(PROJECT)
    for hook in HOOKS:
        spec(getattr(Specs, hook))
    manager = Manager(PROJECT)
    manager.add_hookspecs(Specs)
    return manager


def _functions(module: Any) -> list[tuple[str, Any]]:
    """The functions of ``module`` that are hooks by name or by mark."""
    found = []
    for name in sorted(set(dir(module))):
        value = getattr(module, name, None)
        if not callable(value) or isinstance(value, type):
            continue
        if name.startswith(f"{PROJECT}_") or isinstance(getattr(value, f"{PROJECT}_impl", None), dict):
            found.append((name, value))
    return found


def _arguments(function: Any) -> tuple[str, ...]:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return ()
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names[1:] if hasattr(function, "__self__") else names


def message_of(error: BaseException) -> str:
    """The text of any exception; never raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its str() raises {type(broken).__name__})"


def describe(error: BaseException) -> str:
    """``Type: message``."""
    return f"{type(error).__name__}: {message_of(error)}"


def short_repr(value: object) -> str:
    """The repr of anything, at most 200 characters of it; never raises."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= 200 else text[:197] + "..."
