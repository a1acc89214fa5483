"""The real planner without a GPU: every family of operations gets a plan, and the vetoed shapes are what they are said to be.

libcudnn, cublasLt and nvrtc are those of the installed wheels, or lie in the folders of ``CUDNN_TEST_LIBRARIES``; the driver is
``fake_cuda``. Whatever crashes does so in a child process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from backend_cases import CASES
from real_plans import CRASHES

pytestmark = pytest.mark.L2

HERE = Path(__file__).parent
LIBRARIES = "CUDNN_TEST_LIBRARIES"
NEEDED = ("libcudnn.so.9", "libcublasLt.so.*", "libnvrtc.so.*")
GROUPS = sorted({case.name.partition("-")[0] for case in CASES})


def folders():
    """Where the libraries are, in the order in which the loader is to look."""
    named = os.environ.get(LIBRARIES)
    if named:
        return [Path(path) for path in named.split(os.pathsep)]
    spec = find_spec("nvidia")
    found = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return [folder for place in found for folder in sorted(place.glob("*/lib"))]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    places = folders()
    missing = [name for name in NEEDED if not any(any(place.glob(name)) for place in places)]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed, nor in the folders of {LIBRARIES}")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for the driver without a device")
    driver = tmp_path_factory.mktemp("driver")
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(driver / "libcuda.so.1")]
    subprocess.run([*command, str(HERE / "fake_cuda" / "cuda.c"), "-ldl"], check=True, capture_output=True)
    path = os.pathsep.join(map(str, [driver, *places]))
    return {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": str(HERE)}


def run(environment, *arguments):
    return subprocess.run(
        [sys.executable, str(HERE / "real_plans.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def plans(environment):
    """Answers by case, one process for each family."""
    known = {}

    def answer(group):
        if group not in known:
            names = [case.name for case in CASES if case.name.partition("-")[0] == group]
            done = run(environment, "plans", *names)
            assert done.returncode == 0, done.stderr
            known[group] = json.loads(done.stdout.splitlines()[-1])
        return known[group]

    return answer


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(plans, case):
    """A plan on its device; where there is no engine, cuDNN's own reason; the plugin's where it does not ask."""
    answer = plans(case.name.partition("-")[0])[case.name]
    if case.declined:
        assert answer.startswith(f"declined: {case.declined}"), answer
        return
    assert answer.startswith("plan" if case.hopper == "plan" or case.sm >= 100 else "none"), answer


@pytest.mark.parametrize("name", CRASHES)
def test_a_vetoed_graph_dies_or_gets_no_plan_of_use(environment, name):
    """What the row is for. A plan for no elements is no use either; a version that answers with a reason needs the row no more."""
    done = run(environment, "crash", name)
    assert "nothing keeps" not in done.stderr
    died = done.returncode in (-signal.SIGFPE, -signal.SIGSEGV, -signal.SIGABRT)
    assert died or done.stdout.startswith("survived"), (done.returncode, done.stdout, done.stderr[-2000:])
    if name == "convolution that does not move":
        assert died
