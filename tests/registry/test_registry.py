"""Snapshots: states and reasons, conflicts, the once-cells, and what happens between threads."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest

from cudnn_core import _registry
from cudnn_core._config import Config, ConfigWarning, Named
from cudnn_core._declines import Decline
from cudnn_core._errors import ConfigError, ManifestError
from cudnn_core._registry import EngineBroken, EngineLookupError
from tests.zoo._make import ENGINE, GROUP, manifest, write_dist, write_plugin


def states(registry):
    return {entry.short_id: entry.state for entry in registry.engines}


def codes(entry):
    return [reason.code for reason in entry.reasons]


def test_listing_imports_no_plugin(site, registry_of):
    write_plugin(site, "alpha", version="1.2")
    registry = registry_of()
    (entry,) = registry.engines
    assert (str(entry), entry.short_id, entry.dist, entry.version) == (
        "alpha:main@1",
        "alpha:main",
        "acme-alpha",
        "1.2",
    )
    assert (entry.state, entry.reasons) == ("eligible", ())
    assert entry.package_dir == str(site / "alpha")
    assert "alpha" not in sys.modules


def test_an_engine_is_imported_and_constructed_once(site, registry_of, config):
    write_plugin(site, "alpha", code=ENGINE.format(plugin="alpha") + "\n    made = 0\n" + INIT)
    entry = registry_of().get("alpha:main")
    first = entry.instance()
    assert entry.instance() is first
    config(Config(order=("alpha:*",)))
    other = _registry.current().get("alpha:main")
    assert other is not entry
    assert other.instance() is first
    assert sys.modules["alpha"].Engine.made == 1


INIT = """
    def __init__(self):
        type(self).made += 1
        import time
        time.sleep(0.02)
"""


def test_many_threads_construct_one_engine(site, registry_of):
    write_plugin(site, "alpha", code=ENGINE.format(plugin="alpha") + "\n    made = 0\n" + INIT)
    registry_of()
    start = threading.Barrier(8)
    found = []

    def ask():
        start.wait()
        found.append(_registry.current().get("alpha:main").instance())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert sys.modules["alpha"].Engine.made == 1


def test_a_slow_import_does_not_hold_up_readers_or_other_plugins(site, registry_of):
    code = "import threading\ngate = threading.Event()\nimport sys\nsys.modules['gate_of_slow'] = gate\ngate.wait(10)\n"
    write_plugin(site, "slow", code=code + ENGINE.format(plugin="slow"))
    write_plugin(site, "quick")
    registry = registry_of()
    thread = threading.Thread(target=registry.get("slow:main").instance)
    thread.start()
    try:
        limit = time.monotonic() + 10
        while "gate_of_slow" not in sys.modules and time.monotonic() < limit:
            time.sleep(0.005)
        assert states(_registry.current()) == {"quick:main": "eligible", "slow:main": "eligible"}
        assert registry.get("quick:main").instance()
        assert thread.is_alive()
    finally:
        sys.modules.pop("gate_of_slow").set()
        thread.join(10)


def test_threads_that_ask_first_get_one_catalogue(site, registry_of, monkeypatch):
    write_plugin(site, "alpha")
    registry_of()
    start = threading.Barrier(4)
    found = []

    def ask():
        start.wait()
        found.append(_registry.current().find("alpha:main")._record)

    # Undone here, not at the end of the test: by then registry_of has put back what it found.
    with monkeypatch.context() as patch:
        patch.setattr(_registry, "_state", None)
        patch.setattr(_registry, "scan", slowly(_registry.scan))
        patch.setattr(sys, "path", [str(site), *sys.path])
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


def slowly(function):
    def slow(*arguments):
        time.sleep(0.05)
        return function(*arguments)

    return slow


def test_a_failure_is_remembered_with_its_traceback_and_warned_about_once(site, registry_of, caplog):
    write_plugin(site, "broken", code="def explode():\n    raise ValueError('boom')\nexplode()\n")
    entry = registry_of().find("broken:main")
    assert entry.state == "eligible"
    with caplog.at_level(logging.WARNING, "cudnn_core"):
        for _ in range(2):
            with pytest.raises(EngineBroken) as broken:
                entry.instance()
    assert len(caplog.records) == 1
    assert broken.value.decline.code == "plugin.broken"
    assert "ValueError: boom" in broken.value.decline.actual
    assert broken.value.decline.origin == f"{site / 'broken' / '__init__.py'}:2"
    assert "explode()" in broken.value.traceback
    assert entry.state == "quarantined"
    assert codes(entry) == ["plugin.broken"]
    assert "boom" in entry.failure.traceback
    with pytest.raises(EngineLookupError, match="boom") as refused:
        _registry.current().get("broken:main")
    assert refused.value.kind == "unavailable"


def test_a_failed_import_names_the_missing_module_and_the_chain(site, registry_of):
    code = "try:\n    import absent_module\nexcept ImportError as e:\n    raise ImportError('needs it', name='absent_module') from e\n"
    write_plugin(site, "alpha", code=code)
    with pytest.raises(EngineBroken) as broken:
        registry_of().find("alpha:main").instance()
    decline = broken.value.decline
    assert (decline.code, decline.expected) == ("dep.import_failed", "absent_module")
    assert decline.actual.startswith("ImportError: needs it <- ModuleNotFoundError: No module named 'absent_module'")


def test_a_factory_that_does_not_exist_is_the_plugins_own_fault(site, registry_of):
    write_plugin(site, "alpha", manifest("alpha", engine={"factory": "alpha.absent:Engine"}))
    with pytest.raises(EngineBroken) as broken:
        registry_of().find("alpha:main").instance()
    assert broken.value.decline.code == "plugin.broken"


def test_a_keyboard_interrupt_is_not_swallowed(site, registry_of):
    write_plugin(site, "alpha", code="raise KeyboardInterrupt\n")
    entry = registry_of().find("alpha:main")
    with pytest.raises(KeyboardInterrupt):
        entry.instance()
    assert entry.state == "eligible"


def test_quarantine_takes_an_engine_out_until_refresh(site, registry_of, monkeypatch):
    write_plugin(site, "alpha")
    registry = registry_of()
    entry = registry.get("alpha:main")
    said = [Decline("plugin.broken", "alpha:main", actual=actual) for actual in ("raised", "again")]
    first = [registry.quarantine(entry, EngineBroken("alpha:main", reason, "Traceback ...")) for reason in said]
    assert first == [True, False]
    assert entry.state == "quarantined"
    assert [reason.actual for reason in entry.reasons] == ["raised"]
    with pytest.raises(EngineBroken, match="raised"):
        entry.instance()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert _registry.refresh().get("alpha:main").state == "eligible"


def test_an_engines_environment_is_its_distribution_and_what_it_requires(site, registry_of):
    write_dist(site, "DSL_Kit", "4.7")
    document = manifest("alpha", requires=[{"dist": "dsl.kit", "version": ">=4"}, {"dist": "absent-kit"}])
    write_plugin(site, "alpha", document)
    entry = registry_of().find("alpha:main")
    assert entry.environment() == {entry.dist: entry.version, "absent-kit": "", "dsl-kit": "4.7"}


def test_refresh_sees_what_was_installed_meanwhile(site, registry_of, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(site)])
    before = registry_of()
    write_plugin(site, "late")
    assert _registry.current() is before
    after = _registry.refresh()
    assert [entry.id for entry in after.engines] == ["late:main@1"]
    assert before.engines == ()
    assert after.epoch > before.epoch


def test_two_distributions_with_one_plugin_id_are_both_quarantined_and_both_named(site, registry_of, config):
    write_plugin(site, "twin", dist="twin-one", version="1.1")
    write_plugin(site, "twin", dist="twin-two", package="twin_two", version="2.2")
    registry = registry_of()
    assert [(entry.id, entry.state, entry.dist) for entry in registry.engines] == [
        ("twin", "quarantined", "twin-one"),
        ("twin", "quarantined", "twin-two"),
    ]
    for entry in registry.engines:
        (decline,) = entry.reasons
        assert decline.code == "plugin.conflict"
        assert all(name in str(decline.actual) for name in ("twin-one 1.1", "twin-two 2.2", str(site)))
        assert "[plugins.resolve]" in decline.hint
    config(Config(resolve={"twin": "Twin_Two"}))
    resolved = _registry.current()
    assert [(entry.id, entry.state, entry.dist) for entry in resolved.engines] == [
        ("twin", "quarantined", "twin-one"),
        ("twin:main@1", "eligible", "twin-two"),
    ]
    assert type(resolved.get("twin:main").instance()).__module__ == "twin_two"


def test_resolving_to_a_distribution_that_is_not_there_leaves_both_out(site, registry_of, config):
    write_plugin(site, "twin", dist="twin-one")
    write_plugin(site, "twin", dist="twin-two", package="twin_two")
    config(Config(resolve={"twin": "twin-three"}))
    assert {entry.state for entry in registry_of().engines} == {"quarantined"}


def test_one_entry_point_name_twice_in_one_distribution_is_a_conflict(site, registry_of):
    lines = f"[{GROUP}]\nalpha = alpha:cudnn_plugin.toml\nalpha = alpha:cudnn_plugin.toml\n"
    write_plugin(site, "alpha", entry_points=lines)
    assert [entry.state for entry in registry_of().engines] == ["quarantined", "quarantined"]


def test_the_configuration_disables_with_its_reasons_and_nothing_is_imported(site, registry_of, config):
    write_plugin(site, "denied", code="raise RuntimeError\n")
    write_plugin(site, "alpha")
    write_plugin(site, "risky", manifest("risky", engine={"maturity": "experimental"}))
    config(Config(deny=(Named("denied", "f:3"),), disable=(Named("alpha:*", "f:5"),)))
    registry = registry_of()
    assert states(registry) == {"alpha:main": "disabled", "denied:main": "disabled", "risky:main": "disabled"}
    by_id = {entry.short_id: entry for entry in registry.engines}
    assert codes(by_id["denied:main"]) == ["config.not_allowed"]
    assert (codes(by_id["alpha:main"]), by_id["alpha:main"].reasons[0].origin) == (["config.disabled"], "f:5")
    assert codes(by_id["risky:main"]) == ["config.maturity"]
    assert {item.plugin: item.state for item in registry.plugins} == {
        "alpha": "eligible",
        "denied": "disabled",
        "risky": "eligible",
    }


def test_snapshots_follow_the_configuration_and_return_with_it(site, registry_of, config):
    write_plugin(site, "alpha")
    first = registry_of()
    assert _registry.current() is first
    before = config(Config())
    second = _registry.current()
    assert second is not first
    for index in range(20):
        config(Config(order=(f"alpha:{index}*",)))
        _registry.current()
    config(before)
    assert states(_registry.current()) == {"alpha:main": "eligible"}


def test_unmet_requirements_filter_an_engine_without_importing(site, registry_of):
    write_dist(site, "Needed-One", "1.5")
    rows = [
        {**manifest("alpha")["engine"][0], "name": "met", "requires": [{"dist": "needed_one", "version": ">=1.4"}]},
        {**manifest("alpha")["engine"][0], "name": "old", "requires": [{"dist": "needed_one", "version": ">=2"}]},
        {**manifest("alpha")["engine"][0], "name": "accepted"}
        | {"requires": [{"dist": "needed_one", "version": ">=2", "accept": ["1.*"]}]},
        {**manifest("alpha")["engine"][0], "name": "missing", "requires": [{"dist": "nowhere"}]},
    ]
    write_plugin(site, "alpha", {**manifest("alpha"), "engine": rows}, code="raise RuntimeError\n")
    registry = registry_of()
    assert states(registry) == {
        "alpha:met": "eligible",
        "alpha:old": "filtered",
        "alpha:accepted": "eligible",
        "alpha:missing": "filtered",
    }
    assert codes(registry.find("alpha:old")) == ["dep.too_old"]
    assert codes(registry.find("alpha:missing")) == ["dep.missing"]
    assert registry.find("alpha:missing").reasons[0].subject == "nowhere"


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("alpha", "unknown", "not an engine id"),
        ("alpha:mian", "unknown", "did you mean 'alpha:main'"),
        ("alpha:main@9", "unknown", "revision 1 is installed"),
        ("alpha:main/eng7", "unknown", "no variant"),
        ("alhpa:main", "not_installed", "did you mean 'alpha'"),
    ],
)
def test_an_engine_is_unknown_or_not_installed(site, registry_of, name, kind, text):
    write_plugin(site, "alpha")
    with pytest.raises(EngineLookupError, match=text) as refused:
        registry_of().get(name)
    assert refused.value.kind == kind


@pytest.mark.parametrize("name", ["alpha:main", "alpha:main@1", "alpha:main/eng7", "alpha:main@1/eng7"])
def test_an_engine_is_found_by_every_form_of_its_id(site, registry_of, name):
    write_plugin(site, "alpha", manifest("alpha", engine={"variants": "eng[0-9]+"}))
    assert registry_of().get(name).id == "alpha:main@1"


def test_a_quarantined_plugins_engine_is_unavailable_with_its_reason(site, registry_of):
    write_plugin(site, "alpha", manifest("alpha", api="1.99"))
    registry = registry_of()
    assert registry.find("alpha:main").state == "quarantined"
    with pytest.raises(EngineLookupError, match=r"api\.too_new") as refused:
        registry.get("alpha:main")
    assert refused.value.kind == "unavailable"
    assert [reason.code for reason in refused.value.reasons] == ["api.too_new"]


def test_an_unknown_engine_in_the_configuration_warns_once_and_raises_under_strict(site, registry_of, config):
    write_plugin(site, "alpha")
    registry_of()
    config(Config(disable=(Named("alpha:mian", "f:5"),)))
    with pytest.warns(ConfigWarning, match="alpha:mian"):
        _registry.current()
    _registry.current()
    config(Config(disable=(Named("alpha:mian", "f:5"),), strict=True))
    with pytest.raises(ConfigError, match="alpha:main"):
        _registry.current()
    assert _registry.current(enforce=False).find("alpha:main").state == "eligible"


OP = """
from cudnn_core._ops._schema import Op, Port, TensorSpec

def infer(node):
    return {{"Y": TensorSpec(dim=node.inputs["X"].dim)}}

ROW = Op("{name}", inputs=(Port("X"),), outputs=(Port("Y"),), infer=infer)

def make():
    return ROW
"""


@pytest.mark.parametrize("factory", ["ROW", "make"])
def test_a_plugins_op_row_is_loaded_when_it_is_asked_for(site, registry_of, factory):
    from cudnn_core._ops._table import lookup

    op = {"name": "acme_norm", "factory": f"alpha.ops:{factory}"}
    files = {"__init__.py": "", "ops.py": OP.format(name="acme_norm")}
    write_plugin(site, "alpha", manifest("alpha", op=[op]), files)
    registry = registry_of()
    assert registry.op_factories == {"acme_norm": f"alpha.ops:{factory}"}
    assert "alpha" not in sys.modules
    assert registry.op_row("acme_norm").name == "acme_norm"
    assert lookup("acme_norm") is registry.op_row("acme_norm")


def test_an_op_that_two_plugins_or_the_core_claim_is_left_out_with_the_reason(site, registry_of):
    write_plugin(site, "alpha", manifest("alpha", op=[{"name": "acme", "factory": "alpha:X"}]))
    write_plugin(site, "beta", manifest("beta", op=[{"name": "acme", "factory": "beta:X"}]))
    own = [{"name": "matmul", "factory": "gamma:X"}, {"name": "gamma_op", "factory": "gamma:Y"}]
    write_plugin(site, "gamma", manifest("gamma", op=own))
    registry = registry_of()
    assert set(registry.op_factories) == {"gamma_op"}
    assert {name: decline.code for name, decline in registry.op_declines.items()} == {
        "acme": "plugin.conflict",
        "matmul": "plugin.conflict",
    }
    assert all(dist in str(registry.op_declines["acme"].actual) for dist in ("acme-alpha", "acme-beta"))
    assert set(states(registry).values()) == {"eligible"}
    with pytest.raises(EngineLookupError, match="acme-alpha"):
        registry.op_row("acme")


@pytest.mark.parametrize(
    "code", ["raise ValueError('boom')", "ROW = 42", "", "ROW = lambda: None", OP.format(name="other_name")]
)
def test_a_broken_op_factory_is_reported_as_broken(site, registry_of, code):
    op = [{"name": "acme_norm", "factory": "alpha.ops:ROW"}]
    write_plugin(site, "alpha", manifest("alpha", op=op), {"__init__.py": "", "ops.py": code})
    with pytest.raises(EngineBroken) as broken:
        registry_of().op_row("acme_norm")
    assert broken.value.decline.code == "plugin.broken"
    assert broken.value.decline.subject == "op acme_norm"


def provider(name, code="VERSION = 92100\n", **top):
    return manifest(name, provides={"backend": f"{name}.api"}, **top), {
        "__init__.py": ENGINE.format(plugin=name),
        "api.py": code,
    }


def test_a_provider_is_imported_when_it_is_asked_for(site, registry_of):
    write_plugin(site, "alpha", *provider("alpha"))
    registry = registry_of()
    assert "alpha" not in sys.modules
    assert registry.provider("backend").VERSION == 92100
    assert registry.provider("frontend") is None


def test_a_broken_denied_or_ambiguous_provider_is_none_with_the_reason(site, registry_of, config):
    write_plugin(site, "alpha", *provider("alpha", "raise OSError('no libcudnn')\n"))
    registry = registry_of()
    assert registry.provider("backend") is None
    assert "no libcudnn" in registry.provider_declines("backend")[0].actual
    write_plugin(site, "beta", *provider("beta"))
    both = registry_of()
    assert both.provider("backend") is None
    assert [item.code for item in both.provider_declines("backend")] == ["plugin.conflict"]
    config(Config(deny=(Named("alpha", "f:1"),)))
    assert _registry.current().provider("backend").VERSION == 92100


def test_executors_are_loaded_by_name(site, registry_of):
    line = f"[{GROUP}]\nalpha = alpha:cudnn_plugin.toml\n[cudnn_core.executors]\nemulator = alpha:Engine\n"
    write_plugin(site, "alpha", entry_points=line)
    registry = registry_of()
    assert registry.executor("emulator").__name__ == "Engine"
    with pytest.raises(EngineLookupError, match="did you mean 'emulator'") as refused:
        registry.executor("emulatr")
    assert refused.value.kind == "not_installed"
    write_dist(site, "rival", entry_points="[cudnn_core.executors]\nemulator = rival:Run\n")
    with pytest.raises(EngineLookupError, match=r"plugin\.conflict") as refused:
        registry_of().executor("emulator")
    assert refused.value.kind == "unavailable"


def test_a_json_manifest_error_names_field_and_file(site, registry_of):
    write_plugin(site, "alpha", manifest("alpha", engine={"sm": ["sm90"]}), fmt="json")
    (entry,) = registry_of().engines
    (decline,) = entry.reasons
    assert (decline.code, decline.subject) == ("plugin.bad_manifest", "engine[0].sm[0]")
    assert decline.origin == str(site / "alpha" / "cudnn_plugin.json")


def test_a_snapshot_of_what_was_replaced_while_it_was_made_is_not_published(site, registry_of, config):
    write_plugin(site, "alpha")
    registry_of()

    class Refreshing(Config):
        calls = 0

        def plugin_declines(self, plugin):
            Refreshing.calls += 1
            if Refreshing.calls == 1:
                _registry._change_temporaries(lambda items: items)  # what another thread may do at this point
            return []

    config(Refreshing())
    registry = _registry.current()
    assert registry._catalogue is _registry._state.catalogue
    assert _registry.current() is registry


def test_engines_stand_in_a_stable_order(site, registry_of):
    for name in ("zeta", "alpha", "mid"):
        write_plugin(site, name)
    first = [str(entry) for entry in registry_of().engines]
    assert first == ["alpha:main@1", "mid:main@1", "zeta:main@1"]
    assert [str(entry) for entry in registry_of().engines] == first


class InProcess:
    def check_support(self, graph, ctx):
        return None

    def build_plan(self, graph, config, ctx):
        return None


def test_a_temporary_plugin_comes_and_goes_in_every_thread(site, registry_of):
    from cudnn_core.testing._temporary import temporary_plugin

    write_plugin(site, "alpha")
    registry_of()
    document = {"plugin": "mine", "engine": [{"name": "fast", "ops": ["*"], "devices": ["cpu"]}]}
    with temporary_plugin(document, {"fast": InProcess}) as registry:
        assert states(registry) == {"alpha:main": "eligible", "mine:fast": "eligible"}
        assert isinstance(registry.get("mine:fast").instance(), InProcess)
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(map(str, _registry.current().engines)))
        thread.start()
        thread.join(10)
        assert "mine:fast@1" in seen
        with temporary_plugin({**document, "plugin": "alone"}, {"fast": InProcess}, isolated=True) as inner:
            assert states(inner) == {"alone:fast": "eligible"}
        assert "mine:fast" in states(_registry.current())
    assert states(_registry.current()) == {"alpha:main": "eligible"}


def test_a_temporary_plugin_is_validated_and_conflicts_like_any_other(site, registry_of):
    from cudnn_core.testing._temporary import temporary_plugin

    write_plugin(site, "alpha")
    registry_of()
    row = {"name": "main", "ops": ["*"]}
    with (
        pytest.raises(ManifestError, match="did you mean 'engine'"),
        temporary_plugin({"plugin": "mine", "engin": [row]}, {"main": InProcess}),
    ):
        pass
    with temporary_plugin({"plugin": "alpha", "engine": [row]}, {"main": InProcess}) as registry:
        assert {entry.state for entry in registry.engines} == {"quarantined"}
    assert states(_registry.current()) == {"alpha:main": "eligible"}


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("# there is no Engine\n", None),
        ("class Engine:\n    def __init__(self, device):\n        pass\n", None),
        ("class Engine:\n    pass\n", None),
        ("import a_module_that_nobody_has\n", 1),
        ("\n\nEngine = = 1\n", 3),
        ("class Engine:\n    def __init__(self):\n        int('x')\n", 3),
        ("from cudnn_core import Graph\n\nEngine = lambda: Graph().tensor(dim='no')\n", 3),
    ],
)
def test_the_origin_of_a_failure_is_the_plugins_line_or_its_manifest(site, registry_of, code, line):
    write_plugin(site, "alpha", code=code)
    entry = registry_of().get("alpha:main")
    with pytest.raises(EngineBroken) as caught:
        entry.instance()
    expected = f"{site}/alpha/__init__.py:{line}" if line else f"{site}/alpha/cudnn_plugin.toml"
    assert caught.value.decline.origin == expected
