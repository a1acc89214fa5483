"""The conformance kit on the zoo: one run over every beast, and each fault is found by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.zoo._animals import BEASTS, write_beast, write_sound

FOUND_BY_KIT = [beast for beast in BEASTS if beast.check]


def run_kit(site, *arguments, folder):
    """(test name -> "" or its failure, exit status, output) of one run of the kit on what ``site`` holds."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "cudnn_core.testing", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), f"--junitxml={report}", "--cudnn-oracle", "kit", *arguments]
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = next((child for child in case if child.tag in ("failure", "error")), None)
        results[f"{case.get('classname')}::{case.get('name')}"] = (
            "" if failure is None else f"{failure.get('message')}\n{failure.text}"
        )
    return results, done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    site = folder / "site-packages"
    site.mkdir()
    write_sound(site)
    names = ["sound"]
    for beast in FOUND_BY_KIT:
        beast.write(site)
        names.append(beast.name)
    arguments = [word for name in names for word in ("--cudnn-plugin", name)]
    found, status, output = run_kit(site, *arguments, folder=folder)
    assert status == 1, output
    return found


@pytest.mark.parametrize("beast", FOUND_BY_KIT, ids=lambda beast: beast.name)
def test_the_kit_names_the_fault(results, beast):
    prefix = f"{beast.name}::installed" if beast.check == "installed" else f"{beast.name}:main::{beast.check}"
    failures = [text for name, text in results.items() if name.startswith(prefix) and text]
    assert failures, [name for name, text in results.items() if name.startswith(beast.name) and text]
    assert any(re.search(beast.says, text, re.DOTALL) for text in failures), failures[0]


def test_a_failure_names_engine_case_and_graph(results):
    text = next(text for name, text in results.items() if name.startswith("wrong_numerics:main::numerics") and text)
    assert "engine wrong_numerics:main@1 on CPU, case matmul-f32-" in text
    assert 'graph {"tensors":[{"uid":' in text
    assert '"op":"matmul"' in text


def test_the_sound_plugin_passes_among_them(results):
    mine = {name: text for name, text in results.items() if name.startswith("sound")}
    assert not any(mine.values()), "\n".join(mine.values())
    checks = {re.split(r"::|\[", name)[1] for name in mine}
    assert checks >= {"installed", "manifest", "import", "check_support", "filter", "numerics", "contract", "knobs"}
    assert checks >= {"threads", "serialization", "overhead"}


def test_an_engine_that_hangs_at_import_is_found(tmp_path):
    site = tmp_path / "site-packages"
    site.mkdir()
    write_beast(site, "hangs", "import time\n\ntime.sleep(600)\n")
    write_beast(site, "vanishes", "import os\n\nos._exit(7)\n")
    arguments = ["--cudnn-plugin", "hangs", "--cudnn-plugin", "vanishes", "--cudnn-timeout", "3"]
    found, status, _ = run_kit(site, *arguments, "-k", "import or manifest or f32-1x1x1", folder=tmp_path)
    assert status == 1
    for check in ("import", "manifest", "numerics[cpu-matmul-f32-1x1x1]"):
        assert "its import did not end within 3 s" in found[f"hangs:main::{check}"]
        assert "its import ended the process (exit status 7)" in found[f"vanishes:main::{check}"]
