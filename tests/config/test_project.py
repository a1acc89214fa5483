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


# Another user's files.


@pytest.fixture
def strangers(world, monkeypatch):
    """``strangers(*paths)``: those files and folders belong to somebody else, whatever the machine's user is."""
    theirs = set()
    real = {name: getattr(os, name) for name in ("stat", "lstat", "fstat")}

    def owned(status):
        if (status.st_dev, status.st_ino) not in theirs:
            return status
        return os.stat_result([*status[:4], 12345, *status[5:]])

    for name, function in real.items():
        monkeypatch.setattr(os, name, lambda *args, function=function, **kwargs: owned(function(*args, **kwargs)))

    def give(*paths):
        for path in paths:
            status = real["lstat"](path)
            theirs.add((status.st_dev, status.st_ino))

    return give


def text_of(name):
    return "schema = 1\nstrict = true\n" if name == "project" else "[tool.cudnn_core]\nschema = 1\nstrict = true\n"


@pytest.mark.parametrize("name", ["project", "pyproject"])
def test_another_users_file_does_not_count_and_is_reported(world, strangers, name):
    path = getattr(world, name)
    path.write_text(text_of(name))
    assert world.load().strict is True
    assert _config.foreign_files(world.folder) == []
    strangers(path)
    assert world.load().strict is False
    assert _config.foreign_files(world.folder) == [(str(path), "is owned by uid 12345, neither you nor root")]


@pytest.mark.parametrize("name", ["project", "pyproject"])
@pytest.mark.parametrize("what", ["nonsense", "binary", "huge", "folder", "pipe", "link to a folder", "dangling link"])
def test_whatever_another_user_puts_there_stops_nobody(world, strangers, name, what):
    path = getattr(world, name)
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif "link" in what:
        path.symlink_to(world.home if what == "link to a folder" else "nowhere")
    else:
        path.write_bytes({"nonsense": b"cudnn_core = =", "binary": b"\xff", "huge": b"# cudnn_core\n" * 100_000}[what])
    with pytest.raises(ConfigError):
        world.load()  # while it is one's own
    strangers(path)
    assert world.load() == _config.Config()
    assert [found for found, _ in _config.foreign_files(world.folder)] == [str(path)]


def test_another_users_link_to_a_file_of_ones_own_does_not_count(world, strangers):
    target = world.folder / "other.toml"
    target.write_text(text_of("project"))
    world.project.symlink_to(target)
    assert world.load().strict is True
    strangers(world.project)
    assert world.load().strict is False


def test_a_link_of_ones_own_to_another_users_file_does_not_count(world, strangers):
    target = world.folder / "other.toml"
    target.write_text(text_of("project"))
    world.project.symlink_to(target)
    strangers(target)
    assert world.load().strict is False
    assert [found for found, _ in _config.foreign_files(world.folder)] == [str(world.project)]


def test_ones_own_file_further_up_still_counts(world, strangers):
    world.write("project", "strict = true\n")
    inner = world.folder / "inner"
    inner.mkdir()
    (inner / "cudnn_core.toml").write_text("schema = 1\n")
    strangers(inner / "cudnn_core.toml")
    assert world.load(inner).strict is True


def test_the_search_ends_below_another_users_folder(world, strangers):
    world.write("project", "strict = true\n")
    (world.folder.parent / "cudnn_core.toml").write_text("schema = 1\n[engines]\norder = ['a:*']\n")
    deep = world.folder / "deep"
    deep.mkdir()
    strangers(world.folder)
    assert world.load(deep) == _config.Config()
    assert _config.foreign_files(deep) == [
        (str(world.project), "its folder is owned by uid 12345, neither you nor root")
    ]
    world.project.unlink()
    assert _config.foreign_files(deep) == []


def test_roots_files_are_trusted_by_everyone(world, monkeypatch):
    path = world.write("project", "strict = true\n")
    if path.stat().st_uid != 0:
        pytest.skip("needs files of root")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert world.load().strict is True


def test_another_users_pyproject_without_our_table_does_no_harm(world):
    world.pyproject.write_text("[project]\nname = 'cudnn_core'\n")
    world.pyproject.chmod(0o666)
    assert world.load() == _config.Config()
