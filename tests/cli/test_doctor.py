"""``cudnn-core doctor``: what is broken is found and named, what is fine costs exit code 0, and nothing is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from cudnn_core import _driver
from cudnn_core._cli import _probes
from cudnn_core._cli._child import examine
from cudnn_core._cli._doctor import Line, _guarded
from tests.zoo._make import ENGINE, GROUP, manifest, write_dist, write_plugin


class Options:
    time_limit = 20.0
    verbose = False


@pytest.fixture
def site(machine, monkeypatch):
    folder = machine / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def doctor(site):
    """``doctor()`` -> (exit code, lines) of a child process that sees ``site`` too."""

    def run(*arguments, **environment):
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
        done = subprocess.run(
            [sys.executable, "-m", "cudnn_core", "doctor", "--json", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        assert done.stdout, done.stderr
        return done.returncode, [Line(**line) for line in json.loads(done.stdout)["lines"]]

    return run


def problems(lines):
    return [line for line in lines if line.level == "problem"]


def test_a_sound_installation_has_no_problem(doctor, site):
    write_plugin(site, "sound")
    code, lines = doctor()
    assert (code, problems(lines)) == (0, [])
    assert {line.probe for line in lines} == {probe.__name__ for probe in _probes.PROBES}
    assert any(line.probe == "imports" and line.subject.startswith("engine main of sound") for line in lines)


def test_broken_plugins_and_metadata_are_named(doctor, site):
    write_plugin(site, "too_new", manifest("too_new", api="1.99"))
    write_plugin(site, "twin", dist="twin-one")
    write_plugin(site, "twin", dist="twin-two", package="twin_two")
    write_plugin(site, "raises", code="raise ValueError('at import')\n")
    write_plugin(site, "exits", code="import os\nos._exit(7)\n")
    write_dist(site, "nameless", metadata="Metadata-Version: 2.1\n")
    code, lines = doctor(CUDNN_CORE_BOGUS="1")
    found = {line.subject: line.detail for line in problems(lines)}
    text = json.dumps(found)
    assert code == 1
    assert "api.too_new" in text
    assert text.count("plugin.conflict") >= 2
    assert "ValueError: at import" in found["engine main of raises (acme-raises 1.0)"]
    assert "during engine main, with code 7" in found["exits (acme-exits 1.0) ended its process"]
    assert any("nameless" in subject for subject in found)
    assert any("CUDNN_CORE_BOGUS" in subject for subject in found)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("METADATA", b""),
        ("METADATA", None),
        ("METADATA", b"\xff\xfe\x00Name"),
        ("entry_points.txt", b"[[["),
        ("entry_points.txt", b"[a]\nno value\n"),
        ("entry_points.txt", b"\xff"),
    ],
)
def test_a_distribution_with_unusable_metadata_is_named_and_stops_no_probe(doctor, site, name, data):
    write_plugin(site, "sound")
    write_dist(site, "odd")
    (info,) = site.glob("odd*.dist-info")
    (info / name).unlink(missing_ok=True)
    if data is not None:
        (info / name).write_bytes(data)
    code, lines = doctor()
    assert code == 1
    assert {line.subject for line in problems(lines)} == {str(info)}
    assert all(line.probe == "metadata" for line in problems(lines))


@pytest.mark.parametrize("name", ["METADATA", "entry_points.txt"])
def test_a_fifo_among_the_metadata_holds_nobody_up(doctor, site, name):
    write_dist(site, "odd")
    (info,) = site.glob("odd*.dist-info")
    (info / name).unlink(missing_ok=True)
    os.mkfifo(info / name)
    code, lines = doctor()
    assert code == 1
    assert {line.subject for line in problems(lines)} == {str(info)}


def test_a_plugin_that_hangs_is_named_within_the_limit(site):
    write_plugin(site, "hangs", code="import time\ntime.sleep(600)\n")
    start = time.perf_counter()
    found = examine("hangs", 2.0)
    assert time.perf_counter() - start < 15
    assert found.hung == "engine main"
    assert not found.died
    (line,) = [item for item in _imports("hangs", found) if item.level == "problem"]
    assert line.subject == "engine main of hangs (acme-hangs 1.0) hangs"


def _imports(name, found):
    from types import SimpleNamespace

    plugin = SimpleNamespace(plugin=name, dist=f"acme-{name}", version="1.0")
    return list(_probes._imports_of(plugin, found))


def test_a_plugin_whose_child_process_lingers_does_not_hold_the_doctor(site):
    code = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'], close_fds=False)\n"
    write_plugin(site, "forks", code=code + ENGINE.format(plugin="forks"))
    start = time.perf_counter()
    found = examine("forks", 10.0)
    assert time.perf_counter() - start < 8
    assert not found.hung
    assert "engine main" in [step.what for step in found.steps]


def test_printing_plugins_do_not_disturb_the_report(site):
    write_plugin(site, "chatty", code="print('{\"done\": true}')\n" + ENGINE.format(plugin="chatty"))
    found = examine("chatty", 20.0)
    assert [step.error for step in found.steps] == [""] * len(found.steps)
    assert "engine main" in [step.what for step in found.steps]


def test_hooks_of_plugins_add_checks(site):
    hooks = (
        "from cudnn_core._hooks import Check\n"
        "def cudnn_core_doctor(env):\n"
        "    return [Check('licence', False, 'expired with ' + env['cudnn_core']), Check('disk', True)]\n"
    )
    files = {"__init__.py": ENGINE.format(plugin="hooked"), "hooks.py": hooks}
    write_plugin(site, "hooked", manifest("hooked", hooks=["hooked.hooks"]), files)
    lines = _imports("hooked", examine("hooked", 20.0))
    assert [line.subject for line in lines if line.level == "problem"] == ["hooked: licence"]
    assert Line("imports", "ok", "hooked: disk", "") in lines


def test_a_denied_plugin_is_not_run(doctor, site, machine):
    write_plugin(site, "denied", code=f"open({str(machine / 'ran')!r}, 'w')\n")
    code, lines = doctor(CUDNN_CORE_PLUGINS="torch_reference")
    assert code == 0
    assert Line("imports", "info", "denied", "not run: it is disabled") in lines
    assert not (machine / "ran").exists()


def test_a_dist_info_in_the_current_directory_is_mentioned_and_ignored(doctor, machine):
    write_plugin(machine / "work", "local")
    code, lines = doctor()
    assert code == 0
    assert any(line.probe == "metadata" and "acme-local 1.0" in line.subject and line.level == "info" for line in lines)
    assert not any(line.probe == "plugins" and "local" in line.subject.split() for line in lines)


def test_a_hidden_distribution_is_mentioned(doctor, site, machine, monkeypatch):
    write_plugin(site, "double", version="2.0")
    older = machine / "older"
    older.mkdir()
    write_dist(older, "acme-double", "1.0", entry_points=f"[{GROUP}]\ndouble = double:cudnn_plugin.toml\n")
    monkeypatch.setenv("PYTHONPATH", str(older))
    code, lines = doctor()
    assert code == 0
    assert any("acme-double 1.0" in line.subject and "hidden by" in line.detail for line in lines)


def test_a_cache_that_others_may_write_is_a_problem(machine):
    root = machine / "cache" / "cudnn_core"
    assert [line.level for line in _probes.cache(Options)] == ["ok"]
    assert not root.exists()
    root.mkdir()
    root.chmod(0o777)
    (line,) = _probes.cache(Options)
    assert line.level == "problem"
    assert "others may write it" in line.detail
    root.rmdir()
    root.symlink_to(machine)
    (line,) = _probes.cache(Options)
    assert "symbolic link" in line.detail


def test_the_driver_is_probed_and_its_errors_are_problems():
    class Failing(_driver.PoisonedDriver):
        def device_count(self):
            raise _driver.DriverError("cuDeviceGetCount: the CUDA driver answered CUDA_ERROR_UNKNOWN")

        def driver_version(self):
            return 13000

        runtime_version = driver_version

    with _driver.use_driver(None):
        assert [(line.level, line.subject) for line in _probes.cuda(Options)] == [("info", "no GPU")]
    with _driver.use_driver(Failing()):
        lines = _guarded(_probes.cuda, Options)
    assert lines[0] == Line("cuda", "ok", "driver 13000", "runtime 13000")
    assert (lines[1].probe, lines[1].level) == ("cuda", "problem")
    assert "CUDA_ERROR_UNKNOWN" in lines[1].detail


def test_a_wrong_configuration_is_a_problem(configure):
    configure("strict = 3\n")
    (line,) = _probes.configuration(Options)
    assert (line.level, line.detail.startswith("must be") or "strict" in line.subject) == ("problem", True)


def test_what_is_wrong_is_shown_and_what_is_fine_is_counted(cli, monkeypatch):
    def fine(options):
        yield Line("fine", "ok", "all is well")

    def bad(options):
        yield Line("bad", "problem", "something", "is wrong")
        raise RuntimeError("and more")

    monkeypatch.setattr(_probes, "PROBES", (fine, bad))
    code, out, _ = cli("doctor")
    assert code == 1
    assert "something" in out
    assert "all is well" not in out
    assert "RuntimeError: and more" in out
    assert "2 problems; 1 more checks are fine" in out
    assert "all is well" in cli("doctor", "--verbose")[1]


def test_a_project_file_of_another_user_is_mentioned(machine, monkeypatch):
    from cudnn_core._config import _sources

    file = machine / "work" / "cudnn_core.toml"
    file.write_text("nonsense = =\n")
    mine = _sources._foreign_owner
    inode = file.stat().st_ino
    monkeypatch.setattr(
        _sources, "_foreign_owner", lambda status: "owned by uid 7" if status.st_ino == inode else mine(status)
    )
    lines = list(_probes.configuration(Options))
    assert lines[0] == Line(
        "configuration", "info", str(file), "does not count as a project configuration: is owned by uid 7"
    )
    assert not [line for line in lines if line.level == "problem"]
