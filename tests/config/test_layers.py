"""Where configuration comes from: the order of layers, how they merge, and the variables."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from cudnn_core import _config
from cudnn_core._config import _sources
from cudnn_core._errors import ConfigError


def patterns(named):
    return [item.pattern for item in named]


def test_without_any_layer_everything_is_built_in(world):
    config = world.load()
    assert config == _config.Config()
    assert config.values == ()
    assert (config.strict, config.allow, config.max_workspace, config.order) == (False, None, None, ())


LAYERS = ["system", "user", "project", "named", "env", "api"]


@pytest.mark.parametrize("low", range(5))
def test_each_layer_overrides_the_one_below(world, low):
    """`engines.order` and `strict` from two neighbours: the higher one wins, and is named as the origin."""

    def say(layer, value):
        if layer == "env":
            world.environ["CUDNN_CORE_STRICT"] = value
        elif layer == "api":
            return {"strict": value == "true"}
        else:
            world.write(layer, f"strict = {value}\n")
        return {}

    below, above = LAYERS[low : low + 2]
    low_value, high_value = ("false", "true") if above == "project" else ("true", "false")
    overlay = {**say(below, low_value), **say(above, high_value)}
    config = world.load(**overlay)
    assert config.strict is (high_value == "true")
    origin = {
        "user": f"{world.user}:2",
        "project": f"{world.project}:2",
        "named": f"{world.named}:2",
        "env": "env:CUDNN_CORE_STRICT",
        "api": "configure()",
    }[above]
    assert config.origin("strict") == origin


def test_all_layers_at_once_in_order(world):
    for layer in ("system", "user", "project", "named"):
        world.write(layer, f'[[rule]]\nname = "{layer}"\navoid = ["a:b"]\n')
    config = world.load(rule=[{"name": "api", "avoid": ["a:b"]}])
    assert [rule.name for rule in config.rules] == ["api", "named", "project", "user", "system"]


def test_the_system_file_is_under_etc():
    assert str(_sources.SYSTEM_FILE) == "/etc/cudnn_core/config.toml"


def test_xdg_config_home_moves_the_user_file(world, tmp_path):
    world.write("user", "strict = false\n")
    elsewhere = tmp_path / "xdg" / "cudnn_core"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.toml").write_text("schema = 1\nstrict = true\n")
    world.environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert world.load().strict is True


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_an_empty_or_relative_xdg_config_home_is_ignored(world, value):
    world.write("user", "strict = true\n")
    world.environ["XDG_CONFIG_HOME"] = value
    assert world.load().strict is True


# Merging.


def test_deny_disable_enable_and_require_add_up(world):
    world.write(
        "system",
        '[plugins]\ndeny = ["a"]\n[engines]\ndisable = ["a:x"]\nenable = ["b:x"]\nrequire = ["deterministic"]\n',
    )
    world.write(
        "named",
        '[plugins]\ndeny = ["b", "a"]\n[engines]\ndisable = ["a:y"]\nenable = ["b:y"]\nrequire = ["cuda_graph"]\n',
    )
    config = world.load()
    assert patterns(config.deny) == ["a", "b"]
    assert patterns(config.disable) == ["a:x", "a:y"]
    assert patterns(config.enable) == ["b:x", "b:y"]
    assert config.require == ("deterministic", "cuda_graph")
    assert [item.origin for item in config.disable] == [f"{world.system}:5", f"{world.named}:5"]


def test_a_later_layer_cannot_undo_a_disable(world):
    world.write("system", '[engines]\ndisable = ["a:x"]\n')
    world.environ["CUDNN_CORE_ENGINES"] = "+a:x"
    assert [decline.code for decline in world.load().engine_declines("a:x")] == ["config.disabled"]


def test_allow_order_and_scalars_are_replaced(world):
    world.write("system", '[plugins]\nallow = ["a", "b"]\n[engines]\norder = ["a:*", "b:*"]\nmax_workspace = "1 MiB"\n')
    world.write("named", '[plugins]\nallow = ["c"]\n[engines]\norder = ["c:*"]\nmax_workspace = 5\n')
    config = world.load()
    assert (config.allow, config.order, config.max_workspace) == (("c",), ("c:*",), 5)


def test_an_empty_order_clears_the_order_below(world):
    world.write("system", '[engines]\norder = ["a:*"]\n')
    assert world.load(order=[]).order == ()


def test_knobs_merge_key_by_key(world):
    world.write("system", '[engine."a:x".knobs]\ntile = 64\nstages = 2\n')
    world.write("named", '[engine."a:x".knobs]\nstages = 4\n')
    config = world.load()
    assert config.knobs_for("a:x") == {"tile": (64, f"{world.system}:3"), "stages": (4, f"{world.named}:3")}
    assert config.knobs == {"a:x": {"tile": 64, "stages": 4}}
    assert config.knobs_for("a:y") == {}


def test_knobs_of_an_exact_name_beat_those_of_a_glob_in_one_layer(world):
    world.write("named", '[engine."a:x".knobs]\nstages = 1\n[engine."a:*".knobs]\nstages = 2\n')
    config = world.load()
    assert config.knobs_for("a:x")["stages"][0] == 1
    assert config.knobs_for("a:y")["stages"][0] == 2


def test_knobs_of_a_higher_layer_beat_an_exact_name_below(world):
    world.write("system", '[engine."a:x".knobs]\nstages = 1\n')
    world.write("named", '[engine."a:*".knobs]\nstages = 2\n')
    assert world.load().knobs_for("a:x")["stages"] == (2, f"{world.named}:3")


def test_among_globs_of_one_layer_the_later_line_wins(world):
    world.write("named", '[engine."a:x*".knobs]\nstages = 1\n[engine."a:*".knobs]\nstages = 2\n')
    assert world.load().knobs_for("a:xy")["stages"][0] == 2


def test_resolve_merges_plugin_by_plugin(world):
    world.write("system", '[plugins.resolve]\na = "dist-a"\nb = "dist-b"\n')
    world.write("named", '[plugins.resolve]\nb = "Other.Dist"\n')
    assert dict(world.load().resolve) == {"a": "dist-a", "b": "other-dist"}


# The merged object.


def test_a_config_is_immutable(world):
    world.write(
        "named", '[plugins.resolve]\na = "d"\n[engine."a:x".knobs]\ns = 1\n[[rule]]\nuse = "a:x"\nknobs = { t = 1 }\n'
    )
    config = world.load()
    with pytest.raises(AttributeError):
        config.strict = True
    for mapping in (config.resolve, config.knobs, config.knobs["a:x"], config.rules[0].knobs, config.rules[0].versions):
        with pytest.raises(TypeError):
            mapping["a"] = 1
    assert isinstance(hash(config.values[0].key), int)


def test_values_name_every_setting_with_its_origin(world):
    file = world.write(
        "named",
        textwrap.dedent("""\
            strict = true
            [engines]
            disable = [
                "a:x",
                "a:y",
            ]
            order = ["b:*"]
            [engine."b:z".knobs]
            stages = 3
            [[rule]]
            match = { op = "matmul", m = "..64" }
            use = "b:z"
            """),
    )
    assert world.load().values == (
        ("strict", True, f"{file}:2"),
        ("engines.disable", "a:x", f"{file}:5"),
        ("engines.disable", "a:y", f"{file}:6"),
        ("engines.order", ["b:*"], f"{file}:8"),
        ('engine."b:z".knobs.stages', 3, f"{file}:10"),
        ("rule[0]", {"match": {"op": "matmul", "m": "..64"}, "use": "b:z"}, f"{file}:11"),
    )


def test_the_digest_depends_on_what_is_said_not_on_where(world):
    text = '[engines]\ndisable = ["a:x", "a:y"]\n'
    world.write("system", text)
    first = world.load().digest
    world.system.unlink()
    world.write("named", '\n\n[engines]\ndisable = ["a:y"]\n')
    assert world.load().digest != first
    assert world.load(disable=["a:x"]).digest == first
    assert len(first) == 64


@pytest.mark.parametrize(
    "overlay",
    [
        {"strict": True},
        {"allow": []},
        {"deny": ["a"]},
        {"resolve": {"a": "b"}},
        {"enable": ["a:b"]},
        {"disable": ["a:b"]},
        {"order": ["a:b"]},
        {"require": ["deterministic"]},
        {"max_workspace": 0},
        {"rule": [{"avoid": ["a:b"]}]},
        {"knobs": {"a:b": {"c": 1}}},
    ],
)
def test_everything_that_can_change_a_decision_changes_the_digest(world, overlay):
    assert world.load(**overlay).digest != world.load().digest


def test_log_and_cache_directory_are_no_part_of_the_digest(world, tmp_path):
    assert world.load(log="info", cache_dir=str(tmp_path)).digest == world.load().digest


# Variables.


def test_plugins_variable_is_the_allow_list(world):
    world.environ["CUDNN_CORE_PLUGINS"] = "a, acme_*"
    config = world.load()
    assert config.allow == ("a", "acme_*")
    assert config.origin("plugins.allow") == "env:CUDNN_CORE_PLUGINS"


def test_an_empty_plugins_variable_allows_none(world):
    world.environ["CUDNN_CORE_PLUGINS"] = ""
    assert world.load().allow == ()
    assert [decline.code for decline in world.load().plugin_declines("a")] == ["config.not_allowed"]


def test_engines_variable_disables_with_minus_and_enables_with_plus(world):
    world.environ["CUDNN_CORE_ENGINES"] = "-frost_gemm:*,+linear_attention:kda_sm100"
    config = world.load()
    assert config.disable == (("frost_gemm:*", "env:CUDNN_CORE_ENGINES"),)
    assert config.enable == (("linear_attention:kda_sm100", "env:CUDNN_CORE_ENGINES"),)


@pytest.mark.parametrize(("text", "strict"), [("0", False), ("1", True), ("false", False), ("true", True)])
def test_strict_variable(world, text, strict):
    world.environ["CUDNN_CORE_STRICT"] = text
    assert world.load().strict is strict


def test_log_and_cache_dir_variables(world, tmp_path):
    world.environ.update(CUDNN_CORE_LOG="INFO", CUDNN_CORE_CACHE_DIR=str(tmp_path))
    assert (world.load().log, world.load().cache_dir) == ("info", str(tmp_path))


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("CUDNN_CORE_STRICT", "yes", "'yes' is not one of 0, 1, true, false"),
        ("CUDNN_CORE_STRICT", "", "is not one of"),
        ("CUDNN_CORE_ENGINES", "frost_gemm:*", "needs a sign"),
        ("CUDNN_CORE_ENGINES", "-frost_gemm", "is not an engine id"),
        ("CUDNN_CORE_ENGINES", "-a:b,,+c:d", "empty item"),
        ("CUDNN_CORE_ENGINES", "-a:b,+a:b", "contradicts engines.disable"),
        ("CUDNN_CORE_ENGINES", "-a:*,+a:b", "contradicts engines.disable, which has 'a:.*'"),
        ("CUDNN_CORE_PLUGINS", "a,", "empty item"),
        ("CUDNN_CORE_PLUGINS", "./evil.so", "never modules or paths"),
        ("CUDNN_CORE_LOG", "loud", "debug, info, warning, error, off"),
        ("CUDNN_CORE_CACHE_DIR", "relative", "not an absolute path"),
        ("CUDNN_CORE_CACHE_DIR", "", "not an absolute path"),
        ("CUDNN_CORE_CONFIG", "", "names no file"),
        ("CUDNN_CORE_CONFIG", "/nowhere/cudnn_core.toml", "/nowhere/cudnn_core.toml does not exist"),
    ],
)
def test_a_malformed_variable_is_named(world, variable, text, message):
    world.environ[variable] = text
    with pytest.raises(ConfigError, match=message) as caught:
        world.load()
    assert caught.value.origin == f"env:{variable}"


def test_a_relative_config_variable_is_relative_to_the_current_directory(world):
    (world.folder / "mine.toml").write_text("schema = 1\nstrict = true\n")
    world.environ["CUDNN_CORE_CONFIG"] = "mine.toml"
    assert world.load().origin("strict") == f"{world.folder / 'mine.toml'}:2"


def test_a_variable_that_means_nothing_is_reported_with_the_nearest(world):
    environ = {"CUDNN_CORE_PLUGIN": "a", "CUDNN_CORE_STRICT": "1", "OTHER": "x", "CUDNN_CORE_STRICTT": ""}
    assert _config.unknown_variables(environ) == [
        ("CUDNN_CORE_PLUGIN", "CUDNN_CORE_PLUGIN is not a variable of cudnn-core (did you mean 'CUDNN_CORE_PLUGINS'?)"),
        (
            "CUDNN_CORE_STRICTT",
            "CUDNN_CORE_STRICTT is not a variable of cudnn-core (did you mean 'CUDNN_CORE_STRICT'?)",
        ),
    ]
    world.environ.update(environ, CUDNN_CORE_STRICT="true")
    assert world.load().strict is True


# Cost.


def test_no_file_means_no_toml_parser_and_importing_reads_nothing(world):
    code = """
import builtins, os, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
from cudnn_core import _config
from cudnn_core._config import _sources
opened = [str(name) for name in opened if str(name).endswith(".toml")]
assert not opened, opened
_sources.SYSTEM_FILE = _sources.Path("/nowhere/config.toml")
_config.load({"HOME": "/nowhere"}, "/")
loaded = {"tomli", "packaging", "tomllib", "torch", "numpy", "importlib.metadata"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_a_pyproject_that_does_not_mention_us_is_not_parsed(world):
    world.pyproject.write_text("this is not TOML")
    assert world.load() == _config.Config()
