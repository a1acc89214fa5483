"""Hooks: what they can do, and that a broken one stops nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cudnn_core import _registry
from cudnn_core._config import Config, Named
from cudnn_core._errors import ManifestError
from cudnn_core._hooks import HOOKS, Check, EngineFailure, Registrar, call_isolated
from cudnn_core.testing._temporary import temporary_plugin
from tests.zoo._make import ENGINE, manifest, write_plugin

ROOT = Path(__file__).resolve().parents[2]


def with_hooks(site, name, hooks):
    document = manifest(name, hooks=[f"{name}.hooks"])
    write_plugin(site, name, document, {"__init__.py": ENGINE.format(plugin=name), "hooks.py": hooks})


def test_there_are_four_hooks():
    assert HOOKS == (
        "cudnn_core_register",
        "cudnn_core_plan_selected",
        "cudnn_core_engine_failed",
        "cudnn_core_doctor",
    )


def test_without_hooks_pluggy_is_not_imported(site):
    write_plugin(site, "alpha")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(site)!r}]\n"
        "from cudnn_core import _registry\nfrom cudnn_core._config import Config\n"
        "_registry._current_config = lambda c=Config(): c\n"
        f"with _registry.installed_on([{str(site)!r}]) as registry:\n"
        "    registry.call_hooks('cudnn_core_doctor', env={})\n"
        "    print(registry.engines[0].state, *(name in sys.modules for name in\n"
        "          ('pluggy', 'alpha', 'torch', 'numpy', 'importlib.metadata', 'packaging')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["eligible"] + ["False"] * 6, done.stderr


def test_a_hook_registers_computed_engines(site, registry_of):
    hooks = """
from alpha import Engine

def cudnn_core_register(registrar):
    for size in (64, 128):
        registrar.engine(f"tile_{size}", lambda: Engine(), ops=["matmul"], sm=["90a"], revision=2)
    registrar.engine("by_name", "alpha:Engine", ops=["*"])
"""
    with_hooks(site, "alpha", hooks)
    registry = registry_of()
    assert [str(entry) for entry in registry.engines] == [
        "alpha:main@1",
        "alpha:tile_64@2",
        "alpha:tile_128@2",
        "alpha:by_name@1",
    ]
    assert {type(entry.instance()).__name__ for entry in registry.engines} == {"Engine"}
    assert registry.reports == ()


def test_a_hook_may_be_marked_with_pluggys_marker(site, registry_of):
    hooks = """
import pluggy

@pluggy.HookimplMarker("cudnn_core")(specname="cudnn_core_doctor")
def look(env):
    return [Check("marked", True)]

from cudnn_core._hooks import Check
"""
    with_hooks(site, "alpha", hooks)
    (result,) = registry_of().call_hooks("cudnn_core_doctor", env={})
    assert result.value == [Check("marked", True)]


def test_a_hook_that_asks_for_the_registry_sees_what_is_known_without_it(site, registry_of):
    hooks = """
def cudnn_core_register(registrar):
    from cudnn_core._registry import current
    assert "alpha:main@1" in map(str, current().engines)
    registrar.engine("late", "alpha:Engine", ops=["*"])
"""
    with_hooks(site, "alpha", hooks)
    assert [str(entry) for entry in registry_of().engines] == ["alpha:main@1", "alpha:late@1"]
    assert [str(entry) for entry in _registry.current().engines] == ["alpha:main@1", "alpha:late@1"]


WRAPPER = """
import pluggy

@pluggy.HookimplMarker("cudnn_core")(wrapper=True)
def cudnn_core_register(registrar):
    return (yield)
"""


def test_threads_that_ask_first_all_see_the_computed_engines(site, registry_of, monkeypatch):
    hooks = """
import time

def cudnn_core_register(registrar):
    time.sleep(0.05)
    registrar.engine("slow", "alpha:Engine", ops=["*"])
"""
    with_hooks(site, "alpha", hooks)
    with monkeypatch.context() as patch:
        patch.setattr(
            _registry, "_state", _registry._State(_registry._Catalogue(_registry._Installed([str(site)])), {})
        )
        start = threading.Barrier(4)
        found = []

        def ask():
            start.wait()
            found.append([str(entry) for entry in _registry.current().engines])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert found == [["alpha:main@1", "alpha:slow@1"]] * 4


@pytest.mark.parametrize(
    ("hooks", "code", "text"),
    [
        ("def cudnn_core_registr(registrar):\n    pass\n", "plugin.unknown_hook", "cudnn_core_register"),
        ("def cudnn_core_register(registry):\n    pass\n", "plugin.broken", "registrar"),
        ("def cudnn_core_register(registrar):\n    1 / 0\n", "plugin.broken", "ZeroDivisionError"),
        ("def cudnn_core_register(registrar):\n    raise SystemExit\n", "plugin.broken", "SystemExit"),
        ("def cudnn_core_register(registrar):\n    registrar.engine('x', 3)\n", "plugin.broken", "callable"),
        ("def cudnn_core_register(registrar):\n    registrar.engine('x', 'a:B', osp=[])\n", "plugin.broken", "ops"),
        (
            "def cudnn_core_register(registrar):\n    registrar.engine('main', 'a:B', ops=['*'])\n",
            "plugin.conflict",
            "own engine",
        ),
        ("import absent_module\n", "dep.import_failed", "absent_module"),
        ("raise ValueError('boom')\n", "plugin.broken", "boom"),
        (
            WRAPPER,
            "plugin.broken",
            "wrapper",
        ),
    ],
)
def test_a_plugin_with_broken_hooks_is_quarantined_alone(site, registry_of, hooks, code, text):
    with_hooks(site, "broken", hooks)
    with_hooks(site, "sound", "def cudnn_core_doctor(env):\n    return []\n")
    registry = registry_of()
    by_id = {entry.short_id: entry for entry in registry.engines}
    assert by_id["sound:main"].state == "eligible"
    assert by_id["broken"].state == "quarantined"
    assert by_id["broken"].reasons[0].code == code
    assert text in str(by_id["broken"].reasons[0])
    assert [result.plugin for result in registry.call_hooks("cudnn_core_doctor", env={})] == ["sound"]


def test_a_raising_hook_does_not_stop_the_next_and_is_reported(site, registry_of, caplog):
    with_hooks(site, "alpha", "def cudnn_core_plan_selected(decision):\n    raise RuntimeError('telemetry')\n")
    with_hooks(site, "beta", "seen = []\ndef cudnn_core_plan_selected(decision):\n    seen.append(decision)\n")
    registry = registry_of()
    results = call_isolated("cudnn_core_plan_selected", decision="the decision")
    assert [(result.plugin, result.error and result.error.code) for result in results] == [
        ("alpha", "plugin.broken"),
        ("beta", None),
    ]
    assert sys.modules["beta.hooks"].seen == ["the decision"]
    assert [report.subject for report in registry.reports] == ["alpha: hook cudnn_core_plan_selected"]
    assert "telemetry" in caplog.text
    assert registry.get("alpha:main").state == "eligible"


@pytest.mark.parametrize("returned", ["42", "[1, 2]", "'text'", "[Check('fine', True), 42]", "(i for i in [1 / 0])"])
def test_garbage_from_the_doctor_hook_is_reported_and_the_rest_kept(site, registry_of, returned):
    hooks = f"from cudnn_core._hooks import Check\ndef cudnn_core_doctor(env):\n    return {returned}\n"
    with_hooks(site, "alpha", hooks)
    (result,) = registry_of().call_hooks("cudnn_core_doctor", env={})
    assert result.error.code == "plugin.broken"
    assert (result.value or []) == ([Check("fine", True)] if "fine" in returned else [])


def test_garbage_from_an_observer_is_reported_even_if_its_repr_raises(site, registry_of):
    hooks = """
class Evil:
    def __repr__(self):
        raise RuntimeError

def cudnn_core_engine_failed(failure):
    return Evil()
"""
    with_hooks(site, "alpha", hooks)
    failure = EngineFailure("p:e@1", "build_plan", None)
    (result,) = registry_of().call_hooks("cudnn_core_engine_failed", failure=failure)
    assert (result.value, result.error.expected) == (None, "None")


def test_garbage_from_register_is_reported_and_the_engines_stay(site, registry_of):
    hooks = "def cudnn_core_register(registrar):\n    registrar.engine('x', 'alpha:Engine', ops=['*'])\n    return 42\n"
    with_hooks(site, "alpha", hooks)
    registry = registry_of()
    assert registry.get("alpha:x").state == "eligible"
    assert [report.actual for report in registry.reports] == ["42"]


def test_a_denied_plugins_hooks_are_not_imported(site, registry_of, config):
    with_hooks(site, "alpha", "raise RuntimeError\n")
    config(Config(deny=(Named("alpha", "f:1"),)))
    registry = registry_of()
    assert [entry.state for entry in registry.engines] == ["disabled"]
    assert registry.call_hooks("cudnn_core_doctor", env={}) == []
    assert "alpha.hooks" not in sys.modules


def test_a_temporary_plugin_registers_through_its_hook(site, registry_of):
    registry_of()

    class Hooks:
        def cudnn_core_register(self, registrar):
            registrar.engine("computed", Sound, ops=["*"], devices=["cpu"])

    class Sound:
        def check_support(self, graph, ctx):
            return None

        def build_plan(self, graph, config, ctx):
            return None

    with temporary_plugin({"plugin": "notebook"}, hooks=[Hooks()]) as registry:
        assert [str(entry) for entry in registry.engines] == ["notebook:computed@1"]
        assert isinstance(registry.get("notebook:computed").instance(), Sound)
    assert _registry.current().engines == ()


def test_calling_a_hook_that_does_not_exist_is_a_bug_of_the_caller(site, registry_of):
    registry_of()
    with pytest.raises(ValueError, match="cudnn_core_doctor"):
        call_isolated("cudnn_core_docter")


def test_the_registrar_refuses_what_a_manifest_would_be_refused_for():
    registrar = Registrar("alpha")
    registrar.engine("one", "a:B", ops=["*"])
    with pytest.raises(ManifestError, match="registered twice"):
        registrar.engine("one", "a:B", ops=["*"])
    with pytest.raises(ManifestError, match="a name"):
        registrar.engine("No", "a:B", ops=["*"])
    with pytest.raises(ManifestError, match="ops"):
        registrar.engine("two", "a:B")
