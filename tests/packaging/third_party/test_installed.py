"""The third-party example, built as a wheel and installed where only its wheel is."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import cudnn_core

HERE = Path(__file__).parent
PROJECT = HERE.parents[2] / "examples" / "third_party_engine"
CHECKS = [
    node.name
    for node in ast.parse((HERE / "inside.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]

LISTING = """
import sys, cudnn_core
assert any(str(entry) == "acme_cpu:fused_matmul@1" for entry in cudnn_core.registry().engines)
graph = cudnn_core.Graph(io_data_type="float32")
graph.matmul(graph.tensor((8, 8)), graph.tensor((8, 8))).set_output(True)
before = {name for name in sys.modules if name.split(".")[0] == "acme_cpu"}
assert graph.explain(device="cpu").selected == "acme_cpu:fused_matmul@1"
assert not {"numpy", "torch", "acme_cpu._matmul", "acme_cpu.reference", "acme_cpu.ops"} & set(sys.modules)
print(sorted(before))
"""

UNINSTALL = """
import json, subprocess, sys, cudnn_core
command, saved = json.loads(sys.argv[1]), sys.argv[2]
def engines(): return [str(entry) for entry in cudnn_core.registry().engines if entry.plugin == "acme_cpu"]
def graph():
    made = cudnn_core.Graph(io_data_type="float32")
    made.matmul(made.tensor((8, 8), name="a"), made.tensor((8, 8), name="b")).set_output(True).set_name("c")
    return made
own = cudnn_core.Graph(io_data_type="float32")
own.acme_rmsnorm_gated(own.tensor((4, 8)), own.tensor((4, 8)), own.tensor((1, 8)))[0].set_output(True)
text = own.to_json()
plan = graph().plan(device="cpu")
plan.save(saved)
assert plan.engine == "acme_cpu:fused_matmul@1" and len(engines()) == 2
subprocess.run(command, check=True, capture_output=True)
assert len(engines()) == 2, "a snapshot stays until it is refreshed"
cudnn_core.refresh()
assert engines() == []
assert graph().explain(device="cpu").selected == "torch_reference:eager@1"
said = []
for attempt in (
    lambda: cudnn_core.Graph.from_json(text),
    lambda: cudnn_core.Plan.load(saved),
    lambda: cudnn_core.Graph().acme_rmsnorm_gated,
):
    try:
        attempt()
    except (cudnn_core.CudnnCoreError, AttributeError) as error:
        said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def outcomes(environment: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Check of inside.py -> "" if it passed there, else what pytest said."""
    folder = tmp_path_factory.mktemp("inside")
    shutil.copy(HERE / "inside.py", folder)
    report = folder / "report.xml"
    command = [str(environment.python), "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), f"--junitxml={report}", "inside.py"]
    env = {**os.environ, "ACME_SITE": str(environment.site)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [
            child.get("message", "") + (child.text or "") for child in case if child.tag in ("failure", "error")
        ]
        found[case.get("name", "")] = "\n".join(problems)
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_inside(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == ""


def test_wheel_carries_the_package_and_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        points = archive.read("acme_cpu_engines-0.1.0.dist-info/entry_points.txt").decode()
    assert {f"acme_cpu/{name}" for name in ("py.typed", "cudnn_plugin.toml", "calibration.json", "engines.py")} <= names
    assert {name.split("/")[0] for name in names} == {"acme_cpu", "acme_cpu_engines-0.1.0.dist-info"}
    assert points == "[cudnn_core.engines]\nacme_cpu = acme_cpu:cudnn_plugin.toml\n"


def test_explaining_loads_neither_numpy_nor_a_plan(environment: Any) -> None:
    # The hook module is all that listing imports, because the manifest names one.
    assert environment.script(LISTING).strip() == str(["acme_cpu", "acme_cpu.telemetry"])


def test_it_vanishes_when_it_is_uninstalled(own_environment: Any, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(own_environment.python),
        "uninstall",
        "-y",
        "acme-cpu-engines",
    ]
    said = json.loads(own_environment.script(UNINSTALL, json.dumps(command), str(tmp_path / "a.plan")))
    assert [kind for kind, _ in said] == ["GraphError", "BuildError", "AttributeError"]
    assert all("acme_rmsnorm_gated" in text for _, text in (said[0], said[2]))
    assert "pip install acme-cpu-engines" in said[1][1]


def test_its_own_tests_and_the_conformance_kit_pass(environment: Any, tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    command = [str(environment.python), "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    command += ["--rootdir", str(tmp_path), "--import-mode=importlib"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readmes_example_runs(environment: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    environment.script(code + 'assert plan.engine == "acme_cpu:row_norm@1"')


def test_it_uses_public_names_only() -> None:
    for path in PROJECT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cudnn_core":
                assert node.module in ("cudnn_core", "cudnn_core.testing"), f"{path}: {node.module}"
                if node.module == "cudnn_core":
                    assert {alias.name for alias in node.names} <= set(cudnn_core.__all__), path
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names if alias.name.split(".")[0] == "cudnn_core"]
                assert set(modules) <= {"cudnn_core", "cudnn_core.testing"}, path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cudnn_core":
                assert node.attr in (*cudnn_core.__all__, "testing"), f"{path}: cudnn_core.{node.attr}"
