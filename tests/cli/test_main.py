"""The command as a whole: exit codes, one JSON document, usage errors, what a cold start imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import cudnn_core
from cudnn_core import _cli, _errors
from cudnn_core._cli._output import EnvironmentProblem, Failure, UsageProblem
from cudnn_core._decision import DecisionError
from cudnn_core._registry import EngineLookupError

VERBS = (
    "engines", "explain", "run", "bench", "config check", "config show", "doctor", "plugin new", "plugin lint",
    "plugin test", "demo",
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(cli, verb):
    code, out, _ = cli(*verb.split(), "--help")
    assert code == 0
    assert "--json" in out
    assert "exit codes:" in out


def test_version(cli):
    assert cli("--version") == (0, f"cudnn-core {cudnn_core.__version__}\n", "")


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("bogus",),
        ("explain",),
        ("engines", "--bogus"),
        ("engines", "--", "x"),
        ("bench", "g.json", "--repeats", "0"),
    ],
)
def test_wrong_arguments_are_usage_errors(cli, argv):
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("cudnn-core: error: ")


def test_an_error_is_a_json_document_too(cli_json):
    code, document = cli_json("explain", "missing.json")
    assert code == 2
    assert document["error"]["exit"] == 2
    assert document["error"]["type"] == "usage"
    assert "missing.json" in document["error"]["message"]
    code, document = cli_json("engines", "--bogus")
    assert (code, document["error"]["type"]) == (2, "usage")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (_errors.GraphError("x"), 2),
        (DecisionError("x"), 2),
        (UsageProblem("x"), 2),
        (EngineLookupError("x", "unknown"), 2),
        (_errors.NoEngineError("x"), 1),
        (_errors.BuildError("x"), 1),
        (_errors.ManifestError("x"), 1),
        (_errors.ExecutionError("x"), 1),
        (EngineLookupError("x", "unavailable"), 1),
        (Failure("x"), 1),
        (_errors.ConfigError("x"), 3),
        (_errors.DriverError("x"), 3),
        (_errors.HandleError("x"), 3),
        (EnvironmentProblem("x"), 3),
        (EngineLookupError("x", "not_installed"), 3),
        (PermissionError("x"), 3),
        (ZeroDivisionError("x"), None),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert _cli.exit_code(error) == code


def test_an_internal_error_shows_its_traceback(cli, monkeypatch):
    from cudnn_core._cli import _engines

    def broken(options):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(_engines, "engines", broken)
    code, out, err = cli("engines")
    assert (code, out) == (3, "")
    assert "Traceback" in err
    assert "oops" in err


def test_an_unusable_configuration_is_the_environments_fault(cli, configure):
    configure("bogus = 1\n")
    code, out, err = cli("engines")
    assert (code, out) == (3, "")
    assert "config.toml:2" in err
    assert "bogus" in err


def test_a_warning_is_one_line_on_stderr(cli, configure, engines):
    with engines(one={}):
        configure('[engines]\ndisable = ["one:ad"]\n')
        code, out, err = cli("engines")
    assert code == 0
    assert "one:add" in out
    assert err.startswith("cudnn-core: warning: ")
    assert "one:ad" in err


def test_engines_lists_states_and_reasons(cli, cli_json, configure, engines):
    configure('[engines]\ndisable = ["two:*"]\n')
    with engines(
        one={"knobs": {"tile": {"type": "int", "choices": [1, 2]}}}, two={}, three={"maturity": "experimental"}
    ):
        code, out, _ = cli("engines")
        lines = {line.split()[0]: line for line in out.splitlines()}
        _, document = cli_json("engines")
        _, verbose, _ = cli("engines", "one:*", "--verbose")
        assert cli("engines", "four:*")[0] == 1
    assert code == 0
    assert " eligible " in lines["one:add@1"]
    assert "config.disabled" in lines["two:add@1"]
    assert "config.maturity" in lines["three:add@1"]
    assert [row["state"] for row in document["engines"]] == ["eligible", "disabled", "disabled"]
    assert document["engines"][1]["reasons"][0]["origin"].endswith("config.toml:3")
    assert document["engines"][0]["manifest"]["knobs"]["tile"]["choices"] == [1, 2]
    assert "knobs: tile = 1" in verbose
    assert "two:" not in verbose


def test_a_plugins_name_alone_is_met_with_its_glob(cli, engines):
    with engines(one={}):
        assert '"one:*"' in cli("engines", "one")[1]
        assert "one:add" in cli("engines", "one:ad")[1]


def test_engines_shows_what_is_declared_and_not_written(cli, engines):
    with engines(one={"notes": ["not_implemented"]}):
        header, row = cli("engines")[1].splitlines()
        assert row[header.index("notes") :].startswith("not_implemented")


def test_plugins_that_print_do_not_disturb_a_document(machine, graph_file):
    from tests.zoo._make import ENGINE, manifest, write_plugin

    code = "import os\nprint('from python')\nos.system('echo from a child')\nos.write(1, b'from C\\n')\n"
    write_plugin(
        machine / "site",
        "chatty",
        manifest("chatty", engine={"ops": ["add"]}),
        code=code + ENGINE.format(plugin="chatty"),
    )
    path = os.pathsep.join([str(machine / "site"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_core", "explain", str(graph_file()), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "chatty" in done.stdout, done.stderr
    assert json.loads(done.stdout)["engines"]
    assert all(f"from {who}" in done.stderr for who in ("python", "a child", "C"))


def test_a_cold_engines_imports_no_framework(machine):
    # packaging is there: a manifest states the version of a requirement
    code = (
        "import sys; from cudnn_core._cli import main; status = main(['engines']);"
        "heavy = {'torch', 'numpy', 'pluggy', 'cuda', 'importlib.metadata', 'asyncio'} & set(sys.modules);"
        "print(sorted(heavy)); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_is_the_command(machine):
    done = subprocess.run([sys.executable, "-m", "cudnn_core", "engines", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {row["plugin"] for row in json.loads(done.stdout)["engines"]} >= {"torch_reference"}
