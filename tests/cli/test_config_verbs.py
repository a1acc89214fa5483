"""``cudnn-core config check`` and ``show``."""

from __future__ import annotations

import pytest


def test_a_sound_configuration_is_ok(cli, configure, engines):
    configure('[engines]\ndisable = ["one:add"]\n')
    with engines(one={}):
        assert cli("config", "check") == (0, "ok\n", "")


def test_an_unknown_engine_is_an_error_with_file_and_line(cli, cli_json, configure, engines):
    with engines(one={}):
        file = configure('[engines]\ndisable = ["one:ad"]\n')
        code, out, _ = cli("config", "check")
        _, document = cli_json("config", "check")
    assert code == 1
    assert out.startswith(f"{file}:3: error: engines.disable: ")
    assert "did you mean 'one:add'" in out
    assert document["errors"] == 1
    assert document["findings"][0]["origin"] == f"{file}:3"


def test_a_glob_that_covers_nothing_only_warns(cli, configure, engines):
    configure('[engines]\ndisable = ["elsewhere:*"]\n')
    with engines(one={}):
        code, out, _ = cli("config", "check")
    assert code == 0
    assert "0 errors, 1 warnings" in out


def test_a_knob_outside_its_domain_is_found_through_the_manifest(cli, configure, engines):
    with engines(one={"knobs": {"tile": {"type": "int", "choices": [1, 2]}}}):
        configure('[engine."one:add".knobs]\ntile = 3\n')
        code, out, _ = cli("config", "check")
    assert code == 1
    assert "knob.domain" in out


def test_a_malformed_file_is_a_finding_of_check(cli, configure):
    file = configure("strict = 3\n")
    code, out, _ = cli("config", "check")
    assert code == 1
    assert out.startswith(f"{file}:2: error: strict: ")


def test_check_takes_a_file_that_is_not_in_force(cli, machine, engines):
    (machine / "work" / "next.toml").write_text("schema = 1\nbogus = 1\n")
    with engines(one={}):
        code, out, _ = cli("config", "check", "next.toml")
        assert code == 1
        assert "next.toml:2" in out
        assert cli("config", "check")[0] == 0
        assert cli("config", "check", "absent.toml")[0] == 2


def test_a_misspelt_variable_is_reported(cli, monkeypatch, engines):
    monkeypatch.setenv("CUDNN_CORE_STRIKT", "1")
    with engines(one={}):
        _, out, _ = cli("config", "check")
    assert "CUDNN_CORE_STRIKT is not a variable of cudnn-core (did you mean 'CUDNN_CORE_STRICT'?)" in out


def test_show_prints_every_value_with_its_origin(cli, cli_json, configure, monkeypatch):
    monkeypatch.setenv("CUDNN_CORE_STRICT", "1")
    file = configure('[engines]\nmax_workspace = "1 MiB"\n')
    code, out, _ = cli("config", "show")
    rows = {line.split()[0]: line for line in out.splitlines()}
    _, document = cli_json("config", "show")
    assert code == 0
    assert rows["strict"].split() == ["strict", "true", "env:CUDNN_CORE_STRICT"]
    assert rows["engines.max_workspace"].split() == ["engines.max_workspace", "1048576", f"{file}:3"]
    assert rows["engines.order"].endswith("built-in")
    assert {"key": "strict", "value": True, "origin": "env:CUDNN_CORE_STRICT"} in document["values"]


@pytest.mark.parametrize("settings", ["[plugins]\nallow = 1\n", '[plugins]\nallow = ["A"]\n', "strict = 1\n"])
def test_a_finding_names_its_key_once(cli, configure, settings):
    configure(settings)
    code, out, _ = cli("config", "check")
    assert code == 1
    key = "strict" if "strict" in settings else "plugins.allow"
    assert out.count(f"{key}:") == 1


def test_a_finding_without_a_key_has_no_empty_one(cli, configure):
    file = configure("")
    file.write_text("")
    assert f"{file}: error: schema = 1 is missing" in cli("config", "check", file)[1]
