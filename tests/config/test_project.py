"""The project layer: found from the current directory upwards, may only restrict, must be one's own."""

from __future__ import annotations

import os

import pytest

from cudnn_core import _config
from cudnn_core._errors import ConfigError

RESTRICTING = """
strict = true
[engines]
disable = ["a:x"]
order = ["b:*"]
require = ["deterministic"]
[engine."b:y".knobs]
stages = 2
[[rule]]
match = { op = "matmul" }
use = "b:y"
knobs = { tile = 64 }
strict = true
[[rule]]
avoid = ["a:z"]
"""


def check_restricting(config, origin):
    assert config.strict is True
    assert [item.pattern for item in config.disable] == ["a:x"]
    assert (config.order, config.require) == (("b:*",), ("deterministic",))
    assert config.knobs_for("b:y")["stages"][0] == 2
    assert [(rule.use, rule.avoid) for rule in config.rules] == [("b:y", ()), ("", ("a:z",))]
    assert all(value.origin.startswith(f"{origin}:") for value in config.values)


def test_everything_that_a_project_file_may_say(world):
    check_restricting(world.load(world.write("project", RESTRICTING).parent), world.project)


def test_the_same_in_pyproject(world):
    text = RESTRICTING.replace("[[", "[[tool.cudnn_core.").replace("\n[e", "\n[tool.cudnn_core.e")
    world.pyproject.write_text(f"[project]\nname = 'x'\n[tool.cudnn_core]\nschema = 1\n{text}")
    config = world.load()
    check_restricting(config, world.pyproject)
    assert config.origin("strict") == f"{world.pyproject}:6"


def test_it_is_found_from_the_current_directory_upwards(world):
    world.write("project", "strict = true\n")
    deep = world.folder / "src" / "package"
    deep.mkdir(parents=True)
    assert world.load(deep).origin("strict") == f"{world.project}:2"


def test_the_nearest_one_wins_alone(world):
    world.write("project", '[engines]\ndisable = ["a:x"]\n')
    inner = world.folder / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text('[tool.cudnn_core]\nschema = 1\nengines.disable = ["a:y"]\n')
    assert [item.pattern for item in world.load(inner).disable] == ["a:y"]


def test_a_pyproject_without_our_table_does_not_end_the_search(world):
    world.write("project", "strict = true\n")
    inner = world.folder / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text('[project]\nname = "cudnn_core_user"\n[tool.other]\ncudnn_core = 1\n')
    assert world.load(inner).strict is True


def test_the_current_directory_is_the_default(world, monkeypatch):
    world.write("project", "strict = true\n")
    monkeypatch.chdir(world.folder)
    assert _config.load(world.environ).strict is True


def test_a_removed_current_directory_has_no_project(world, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert _config.load(world.environ) == _config.Config()


def test_two_project_configurations_in_one_directory_are_ambiguous(world):
    world.write("project", "strict = true\n")
    world.pyproject.write_text("[tool.cudnn_core]\nschema = 1\n")
    with pytest.raises(ConfigError, match="keep one of them") as caught:
        world.load()
    assert str(world.project) in str(caught.value)
    assert str(world.pyproject) in str(caught.value)


def test_the_file_that_the_variable_names_is_not_a_project_file_too(world):
    world.write("project", '[engines]\nenable = ["a:x"]\n')
    with pytest.raises(ConfigError, match="may only restrict"):
        world.load()
    world.environ["CUDNN_CORE_CONFIG"] = str(world.project)
    assert [item.pattern for item in world.load().enable] == ["a:x"]


def test_a_broken_pyproject_that_mentions_us_is_an_error(world):
    world.pyproject.write_text("[tool.cudnn_core]\nschema = = 1\n")
    with pytest.raises(ConfigError, match="invalid TOML") as caught:
        world.load()
    assert caught.value.origin == f"{world.pyproject}:2"


def test_our_table_must_be_a_table(world):
    world.pyproject.write_text("[tool]\ncudnn_core = 1\n")
    with pytest.raises(ConfigError, match="must be a table"):
        world.load()


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ('[plugins]\nallow = ["a"]', 3, "plugins.allow"),
        ('[plugins]\ndeny = ["a"]', 3, "plugins.deny"),
        ('[plugins.resolve]\na = "d"', 2, "plugins.resolve"),
        ('[engines]\nenable = ["a:b"]', 3, "engines.enable"),
        ("[engines]\nmax_workspace = 1", 3, "engines.max_workspace"),
        ('log = "info"', 2, "log"),
        ('cache_dir = "/tmp/x"', 2, "cache_dir"),
        ("strict = false", 2, "strict"),
        ("[[rule]]\nuse = 'a:b'\nstrict = false", 4, "rule[0].strict"),
    ],
)
def test_whatever_does_not_restrict_is_an_error_with_its_line(world, text, line, key):
    path = world.write("project", text + "\n")
    with pytest.raises(ConfigError, match="may only restrict") as caught:
        world.load()
    assert (caught.value.origin, caught.value.key) == (f"{path}:{line}", key)


@pytest.mark.parametrize("name", ["project", "pyproject"])
def test_it_must_not_be_writable_by_everyone(world, name):
    path = getattr(world, name)
    path.write_text("schema = 1\n" if name == "project" else "[tool.cudnn_core]\nschema = 1\n")
    path.chmod(0o646)
    with pytest.raises(ConfigError, match="writable by everyone") as caught:
        world.load()
    assert caught.value.origin == str(path)
    path.chmod(0o664)
    world.load()


@pytest.mark.parametrize("name", ["project", "pyproject"])
def test_it_must_belong_to_the_user_or_to_root(world, name, monkeypatch):
    path = getattr(world, name)
    path.write_text("schema = 1\n" if name == "project" else "[tool.cudnn_core]\nschema = 1\n")
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    world.load()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        world.load()  # root's files are trusted by everyone
        os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="neither you nor root"):
        world.load()


def test_another_users_pyproject_without_our_table_does_no_harm(world):
    world.pyproject.write_text("[project]\nname = 'cudnn_core'\n")
    world.pyproject.chmod(0o666)
    assert world.load() == _config.Config()
