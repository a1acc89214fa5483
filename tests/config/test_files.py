"""Fail closed: a file that exists and can't be honoured is an error that says where."""

from __future__ import annotations

import os

import pytest

from cudnn_core import _config
from cudnn_core._config import _sources
from cudnn_core._errors import ConfigError

EVERY_FILE = pytest.mark.parametrize("layer", ["system", "user", "project", "named"])


def fails(world, *words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        world.load()
    for word in words:
        assert word in str(caught.value)
    return caught.value


@EVERY_FILE
def test_invalid_toml_is_reported_with_its_line(world, layer):
    path = world.write(layer, "strict = = true\n")
    assert fails(world, "invalid TOML").origin == f"{path}:2"


@EVERY_FILE
def test_invalid_utf8_is_reported_with_its_line(world, layer):
    path = world.write(layer, "strict = true\n")
    path.write_bytes(path.read_bytes() + b"# \xff\n")
    assert fails(world, "not UTF-8").origin == f"{path}:3"


@EVERY_FILE
def test_a_directory_in_the_place_of_the_file(world, layer):
    path = world.write(layer, "")
    path.unlink()
    path.mkdir()
    assert fails(world, "not a regular file").origin == str(path)


@EVERY_FILE
def test_an_unreadable_file(world, layer, monkeypatch):
    """Root reads everything, so the refusal is simulated where the file is opened."""
    path = world.write(layer, "strict = true\n")
    real = os.open

    def refuse(name, *args, **kwargs):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(_sources.os, "open", refuse)
    assert fails(world, "can't be read: Permission denied").origin == str(path)


@EVERY_FILE
def test_a_dangling_link(world, layer):
    path = world.write(layer, "")
    path.unlink()
    path.symlink_to(path.parent / "nowhere")
    fails(world, "can't be read", str(path))


@EVERY_FILE
def test_a_pipe_is_refused_without_waiting_for_it(world, layer):
    path = world.write(layer, "")
    path.unlink()
    os.mkfifo(path)
    fails(world, "not a regular file", str(path))


@EVERY_FILE
def test_a_file_that_is_too_large(world, layer):
    path = world.write(layer, "#" * (1 << 20))
    assert fails(world, "larger than").origin == str(path)


@EVERY_FILE
def test_the_schema_is_required(world, layer):
    path = world.write(layer, "")
    path.write_text("strict = true\n")
    assert fails(world, "schema = 1 is missing").origin == str(path)


@pytest.mark.parametrize("schema", ["2", "0", '"1"', "1.0", "true"])
def test_another_schema_is_refused(world, schema):
    path = world.write("named", "")
    path.write_text(f"\nschema = {schema}\n")
    error = fails(world, "this version reads schema 1")
    assert (error.origin, error.key) == (f"{path}:2", "schema")


def test_numbers_and_nesting_that_the_parser_refuses(world):
    world.write("named", "strict = " + "9" * 5000)
    fails(world, "invalid TOML", str(world.named))
    world.write("named", "strict = " + "[" * 5000)
    fails(world, "invalid TOML", str(world.named))


def test_a_missing_named_file_is_an_error_and_other_missing_files_are_not(world):
    assert world.load() == _config.Config()
    world.environ["CUDNN_CORE_CONFIG"] = str(world.named)
    assert fails(world, "does not exist", str(world.named)).origin == "env:CUDNN_CORE_CONFIG"


def test_a_plain_file_where_a_directory_of_ours_would_be_is_no_configuration(world):
    world.environ["XDG_CONFIG_HOME"] = "/dev/null"
    assert world.load() == _config.Config()


# Keys.


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("strikt = true", 2, "strikt", "did you mean 'strict'?"),
        ("[engines]\ndisabled = []", 3, "engines.disabled", "did you mean 'disable'?"),
        ("[engine]\ndisable = []", 3, "engine.disable", "is not an engine id"),
        ("disable = []", 2, "disable", "did you mean 'engines.disable'?"),
        ("[engines]\nallow = []", 3, "engines.allow", "did you mean 'plugins.allow'?"),
        ("[plugins]\nzzz = 1", 3, "plugins.zzz", "known keys: allow, deny, resolve"),
        ("[engins]\ndisable = []", 2, "engins", "did you mean 'engines'?"),
        ('[[rule]]\navoid = ["a:b"]\nresaon = "x"', 4, "rule[0].resaon", "did you mean 'reason'?"),
        ('[[rule]]\navoid = ["a:b"]\nop = "matmul"', 4, "rule[0].op", "match ="),
        ('[engine."a:b"]\nknob = 1', 3, 'engine."a:b".knob', "did you mean 'knobs'?"),
        ('[[rule]]\nmatch = { devise = "cpu" }\navoid = ["a:b"]', 3, "rule[0].match.devise", "did you mean 'device'?"),
    ],
)
def test_an_unknown_key_is_an_error_with_place_and_nearest_name(world, text, line, key, message):
    path = world.write("named", text + "\n")
    error = fails(world, message)
    assert (error.origin, error.key) == (f"{path}:{line}", key)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('strict = "true"', 2, "must be true or false, got a string"),
        ("strict = 1", 2, "must be true or false"),
        ("plugins = []", 2, "must be a table"),
        ('[plugins]\nallow = "a"', 3, "must be a list"),
        ("[plugins]\nallow = [1]", 3, "must be a string"),
        ("[plugins]\nallow = ['acme.plugin']", 3, "never modules or paths"),
        ("[plugins.resolve]\n'a*' = 'd'", 3, "exact id of one plugin"),
        ("[plugins.resolve]\na = '../d.whl'", 3, "is not the name of a distribution"),
        ("[plugins.resolve]\na = 1", 3, "must be a string"),
        ("[engines]\ndisable = ['frost_gemm']", 3, "like 'frost_gemm:sm90_wgmma'"),
        ("[engines]\ndisable = [\n'a:b',\n'frost_gemm.engines:Sm90']", 5, "never modules or paths"),
        ("[engines]\nrequire = ['Deterministic!']", 3, "is not a behaviour note"),
        ("[engines]\nmax_workspace = '256'", 3, "is not a size"),
        ("[engines]\nmax_workspace = -1", 3, "is negative"),
        ("log = 'loud'", 2, "is not one of"),
        ("cache_dir = '/tmp/x'", 2, "names no paths"),
        ("rule = 1", 2, "must be a list"),
        ("rule = [1]", 2, "must be a table"),
        ("[[rule]]\nname = 'x'", 2, "the rule does nothing"),
        ("[[rule]]\nname = 1\navoid = ['a:b']", 3, "must be a string"),
        ("[[rule]]\nuse = 'a:b.C'", 3, "is not an engine id"),
        ("[[rule]]\nuse = ['a:b']", 3, "must be a string"),
        ("[[rule]]\navoid = 'a:b'", 3, "must be a list"),
        ("[[rule]]\nuse = 'a:b'\nmatch = 'x'", 4, "must be a table"),
        ("[[rule]]\nuse = 'a:b'\nstrict = 1", 4, "must be true or false"),
        ("[[rule]]\nuse = 'a:*'\nknobs = { t = 1 }", 4, "exact name"),
        ("[[rule]]\navoid = ['a:b']\nknobs = { t = 1 }", 4, "exact name"),
        ("[[rule]]\nuse = 'a:b'\nknobs = { t = [1] }", 4, "a knob is an int"),
        ("[[rule]]\nuse = 'a:b'\nknobs = { 'a b' = 1 }", 4, "is not a knob's name"),
        ("[engine.'a:b'.knobs]\nx = nan", 3, "finite"),
        ("[engine.'a:b'.knobs]\nx = 1979-05-27", 3, "a knob is an int"),
        ("[engine.'a.b:C'.knobs]\nx = 1", 2, "never modules or paths"),
        ("[[rule]]\nuse = 'a:b'\nversions = { dist = 'newest' }", 4, "version condition"),
        ("[[rule]]\nuse = 'a:b'\nversions = { dist = 1 }", 4, "must be a string"),
        ("[[rule]]\nuse = 'a:b'\nversions = { '../x' = '<1' }", 4, "is not a distribution's name"),
        ("[[rule]]\nuse = 'a:b'\nversions = { a_b = '<1', a-b = '<2' }", 4, "given twice"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { op = 'os.system' }", 4, "is not an op's name"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { op = [] }", 4, "empty list"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { sm = 'sm_90' }", 4, "is not an architecture"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { sm = true }", 4, "is not an architecture"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { device = 0 }", 4, "is not a device's name"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { dtype = 'float32' }", 4, "must be a table"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { dtype = { A = 'fp8_e4m' } }", 4, "did you mean 'fp8_e4m3'?"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { dtype = { A = 'not_set' } }", 4, "is not a data type"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { dtype = { A = [] } }", 4, "empty list"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { m = '64..1' }", 4, "is empty"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { m = -1 }", 4, "leave the key out"),
        ("[[rule]]\nuse = 'a:b'\nmatch = { 'm n' = 1 }", 4, "unknown key"),
    ],
)
def test_a_malformed_value_is_an_error_with_its_line(world, text, line, message):
    path = world.write("named", text + "\n")
    assert fails(world, message).origin == f"{path}:{line}"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[engines]\nenable = ['a:b']\ndisable = ['a:b']", 3, "contradicts engines.disable"),
        ("[engines]\nenable = ['a:b']\ndisable = ['a:*']", 3, "which has 'a:*'"),
        ("[engines]\nenable = ['a:*']\ndisable = ['a:*']", 3, "contradicts engines.disable"),
        ("[plugins]\nallow = ['a', 'b']\ndeny = ['b']", 3, "'b' is in both"),
        ("[[rule]]\nuse = 'a:b'\navoid = ['a:b']", 4, "contradicts use"),
        ("[[rule]]\nuse = 'a:b'\navoid = ['c:d', 'a:*']", 4, "'a:*' avoids it"),
        ("[[rule]]\nuse = 'a:b'\n[engines]\ndisable = ['a:*']", 3, "contradicts engines.disable"),
        ("[[rule]]\nuse = 'a:b'\n[plugins]\ndeny = ['a']", 3, "contradicts plugins.deny"),
    ],
)
def test_a_contradiction_within_a_layer_is_an_error(world, text, line, message):
    path = world.write("named", text + "\n")
    assert fails(world, message).origin == f"{path}:{line}"


def test_what_is_no_contradiction(world):
    world.write(
        "named",
        "[engines]\nenable = ['a:*']\ndisable = ['a:b']\n[plugins]\nallow = ['a*']\ndeny = ['ab']\n"
        "[[rule]]\nuse = 'a:*'\navoid = ['a:b']\n",
    )
    assert world.load().rules[0].pins("a:c")


def test_an_error_reads_like_a_compiler_message(world):
    path = world.write("named", "[engines]\ndisabel = []\n")
    assert str(fails(world)) == f"{path}:3: engines.disabel: unknown key (did you mean 'disable'?)"


def test_a_key_that_the_scan_cannot_place_names_the_file_alone(world):
    path = world.write("named", '"strik\\u0074x" = true\n')
    assert fails(world, "strikt").origin == str(path)
