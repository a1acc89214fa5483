"""config check: findings against the installed engines and the op table, and the warning about unknown engines."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from cudnn_core import _config
from cudnn_core._errors import ConfigError
from cudnn_core._manifest import parse

FROST = """
schema = 1
plugin = "frost_gemm"
api = "1.0"
[[engine]]
name = "sm90_wgmma"
factory = "frost_gemm:A"
ops = ["matmul"]
notes = ["deterministic"]
[engine.knobs.tile_m]
type = "int"
choices = [64, 128]
[[engine]]
name = "sm90_streamk"
factory = "frost_gemm:B"
ops = ["matmul"]
"""
BACKEND = """
schema = 1
plugin = "cudnn_backend"
api = "1.0"
[[engine]]
name = "graph"
factory = "cudnn_backend:C"
ops = ["*"]
variants = "eng[0-9]+"
"""


@pytest.fixture
def registry():
    entries = [
        SimpleNamespace(id=spec.id, spec=spec, dist=dist)
        for text, dist in ((FROST, "cudnn-core-frost-gemm"), (BACKEND, "cudnn-core-backend"))
        for spec in parse(text).engines
    ]
    return SimpleNamespace(engines=tuple(entries))


@pytest.fixture
def findings(world, registry):
    """``findings(text)`` -> the findings of a file with that text."""

    def run(text: str):
        world.write("named", text)
        return _config.check(world.load(), registry)

    return run


def only(findings, severity, key, line, *words):
    assert [(item.severity, item.key, item.origin.rpartition(":")[2]) for item in findings] == [
        (severity, key, str(line))
    ]
    for word in words:
        assert word in findings[0].message


def test_a_good_configuration_has_no_findings(findings):
    text = """
        [plugins]
        allow = ["frost_gemm", "cudnn_*"]
        [plugins.resolve]
        frost_gemm = "cudnn_core.frost_gemm"
        [engines]
        disable = ["frost_gemm:sm90_streamk", "cudnn_backend:graph/eng7"]
        order = ["frost_gemm:*"]
        require = ["deterministic"]
        [[rule]]
        match = { op = "matmul", m = "..64", n = 1, k = 2, batch = 3, dtype = { A = "float16", C = "float16" } }
        use = "frost_gemm:sm90_wgmma"
        knobs = { tile_m = 64 }
        [engine."frost_gemm:sm90_wgmma".knobs]
        tile_m = 128
        """
    assert findings(text) == []


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("[engines]\ndisable = ['frost_gemm:sm90_wgma']", "engines.disable", 3),
        ("[engines]\nenable = ['frost_gemm:sm90_wgma']", "engines.enable", 3),
        ("[engines]\norder = ['frost_gemm:sm90_wgma']", "engines.order", 3),
        ("[[rule]]\nuse = 'frost_gemm:sm90_wgma'", "rule[0].use", 2),
        ("[[rule]]\nname = 'x'\navoid = ['frost_gemm:sm90_wgma']", "rule[0] 'x'.avoid", 2),
        ("[engine.'frost_gemm:sm90_wgma'.knobs]\na = 1", 'engine."frost_gemm:sm90_wgma"', 3),
    ],
)
def test_an_unknown_engine_is_found_wherever_it_is_named(findings, text, key, line):
    only(findings(text + "\n"), "error", key, line, "did you mean 'frost_gemm:sm90_wgmma'?")


def test_an_engine_of_an_absent_plugin_says_so(findings):
    only(findings("[engines]\ndisable = ['acme:norm']\n"), "error", "engines.disable", 3, "no plugin 'acme'")


def test_a_glob_that_covers_nothing_is_a_warning(findings):
    only(findings("[engines]\ndisable = ['acme:*']\n"), "warning", "engines.disable", 3, "covers no installed engine")


def test_an_impossible_variant_is_unknown(findings):
    only(findings("[engines]\ndisable = ['cudnn_backend:graph/engine7']\n"), "error", "engines.disable", 3)
    only(findings("[engines]\ndisable = ['frost_gemm:sm90_wgmma/eng7']\n"), "error", "engines.disable", 3)


def test_unknown_plugins(findings):
    only(findings("[plugins]\ndeny = ['frost_gem']\n"), "warning", "plugins.deny", 3, "did you mean 'frost_gemm'?")
    only(findings("[plugins]\nallow = ['*', 'acme']\n"), "warning", "plugins.allow", 3, "no plugin 'acme'")


def test_resolve_to_a_distribution_that_does_not_provide_the_plugin(findings):
    text = "[plugins.resolve]\nfrost_gemm = 'cudnn-core-frost'\n"
    only(findings(text), "error", "plugins.resolve.frost_gemm", 3, "cudnn-core-frost-gemm")


@pytest.mark.parametrize(
    ("knob", "message"),
    [("tile_n = 64", "knob.unknown knob:tile_n"), ("tile_m = '64'", "knob.type"), ("tile_m = 65", "knob.domain")],
)
def test_knobs_are_validated_against_the_manifest(findings, knob, message):
    table = f"[engine.'frost_gemm:sm90_wgmma'.knobs]\n{knob}\n"
    key = f'engine."frost_gemm:sm90_wgmma".knobs.{knob.split()[0]}'
    only(findings(table), "error", key, 3, message)
    rule = f"[[rule]]\nuse = 'frost_gemm:sm90_wgmma'\nknobs = {{ {knob} }}\n"
    only(findings(rule), "error", "rule[0].knobs", 2, message)


def test_a_note_that_no_engine_has(findings):
    only(
        findings("[engines]\nrequire = ['determinstic']\n"),
        "warning",
        "engines.require",
        3,
        "did you mean 'deterministic'?",
    )


@pytest.mark.parametrize(
    ("match", "key", "words"),
    [
        ("op = 'matmul', mm = 1", "rule[0].match.mm", ["no dim 'mm'", "batch, k, m, n"]),
        ("op = 'matmul', dtype = { D = 'float16' }", "rule[0].match.dtype.D", ["no operand 'D'", "A, B, C"]),
    ],
)
def test_a_match_that_no_graph_can_meet(findings, match, key, words):
    only(findings(f"[[rule]]\nmatch = {{ {match} }}\navoid = ['frost_gemm:*']\n"), "error", key, 2, *words)


def test_a_glob_of_ops_may_have_any_dim(findings):
    assert findings("[[rule]]\nmatch = { op = 'mat*', mm = 1 }\navoid = ['frost_gemm:*']\n") == []


def test_an_enable_or_a_pin_that_another_layer_bars(world, registry):
    world.write("system", "[engines]\ndisable = ['frost_gemm:*']\n")
    world.write("named", "[engines]\nenable = ['frost_gemm:sm90_wgmma']\n[[rule]]\nuse = 'frost_gemm:sm90_wgmma'\n")
    found = _config.check(world.load(), registry)
    assert [(item.severity, item.key) for item in found] == [("warning", "engines.enable"), ("warning", "rule[0].use")]
    assert all(f"{world.system}:3" in item.message for item in found)
    config = world.load(allow=["cudnn_backend"], rule=[{"use": "acme:x"}])
    assert any("leaves 'acme' out" in item.message for item in _config.check(config))


def test_a_pin_behind_one_with_the_same_match(world):
    world.write("system", "[[rule]]\nmatch = { op = 'a*', m = 1 }\nuse = 'a:x'\n")
    world.write("named", "[[rule]]\nmatch = { m = 1, op = 'a*' }\nuse = 'a:y'\n")
    only(_config.check(world.load()), "warning", "rule[1].use", 2, f"rule[0] at {world.named}:2")


def test_a_finding_reads_like_a_compiler_message(world, findings):
    (finding,) = findings("[engines]\ndisable = ['acme:*']\n")
    assert str(finding) == f"{world.named}:3: warning: engines.disable: 'acme:*' covers no installed engine"


def test_at_run_time_an_unknown_engine_warns_and_raises_under_strict(world, registry):
    world.write("named", "[engines]\ndisable = ['frost_gemm:sm90_wgma', 'acme:*']\n")
    with pytest.warns(_config.ConfigWarning, match="did you mean 'frost_gemm:sm90_wgmma'") as caught:
        _config.enforce(world.load(), registry)
    assert len(caught) == 1
    with pytest.raises(ConfigError, match="did you mean") as error:
        _config.enforce(world.load(strict=True), registry)
    assert (error.value.origin, error.value.key) == (f"{world.named}:3", "engines.disable")


def test_engines_of_a_quarantined_plugin_are_not_called_unknown(world, registry):
    world.write("named", "[engines]\ndisable = ['broken:engine']\n")
    entry = SimpleNamespace(id="broken", spec=None, dist="acme-broken")
    registry = SimpleNamespace(engines=(*registry.engines, entry))
    only(_config.check(world.load(), registry), "warning", "engines.disable", 3, "the plugin is quarantined")
    _config.enforce(world.load(strict=True), registry)


def test_at_run_time_a_good_configuration_is_silent(world, registry):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _config.enforce(world.load(disable=["frost_gemm:*", "acme:*"]), registry)


# describe


def test_describe_lists_built_in_values_too(world):
    world.write("named", "[engines]\nmax_workspace = '1 kB'\n")
    listed = {value.key: (value.value, value.origin) for value in _config.describe(world.load())}
    assert listed["engines.max_workspace"] == (1000, f"{world.named}:3")
    assert listed["strict"] == (False, "built-in")
    assert listed["plugins.allow"] == ("every installed plugin", "built-in")


def test_a_trial_of_an_ops_dims_logs_nothing(findings, caplog):
    assert findings("[[rule]]\nuse = 'frost_gemm:sm90_wgmma'\n[rule.match]\nop = 'matmul'\nm = 4\n") == []
    assert not caplog.records  # matmul has no dims at rank 1


def test_a_knob_that_no_engine_takes_is_warned_of_and_an_error_under_strict(world, registry):
    world.write("named", '[engine."frost_gemm:sm90_wgmma".knobs]\ntile_n = 64\n')
    with pytest.warns(_config.ConfigWarning, match="tile_n.*tile_m"):
        _config.enforce(world.load(), registry)
    world.write("named", 'strict = true\n[engine."frost_gemm:sm90_wgmma".knobs]\ntile_m = 65\n')
    with pytest.raises(ConfigError, match="tile_m"):
        _config.enforce(world.load(), registry)
