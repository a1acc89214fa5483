"""The kit as its user runs it: pytest in a child process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

REFERENCE = ("--cudnn-plugin", "torch_reference")


def run(folder, *arguments, **environment):
    """(exit status, output) of ``pytest -p cudnn_core.testing ...`` in ``folder``."""
    command = [sys.executable, "-m", "pytest", "-p", "cudnn_core.testing", "-p", "no:cacheprovider", *arguments]
    if "--rootdir" not in arguments:
        command += ["--rootdir", str(folder)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def test_torch_reference_passes(tmp_path):
    status, output = run(tmp_path, "-q", "-rs", *REFERENCE)
    assert status == 0, output
    passed = int(re.search(r"(\d+) passed", output)[1])
    assert passed > 250
    assert "failed" not in output
    accepted = re.search(r"check_support accepts (\d+) of (\d+)", output)
    assert accepted[1] == accepted[2]
    skipped = re.search(r"(\d+) skipped", output)
    reasons = [line for line in output.splitlines() if line.startswith("SKIPPED")]
    assert (int(skipped[1]) if skipped else 0) == len(reasons) <= 1
    assert all("no cuda device to run on" in line for line in reasons)


@pytest.mark.L2
def test_torch_reference_passes_at_level_full(tmp_path):
    status, output = run(tmp_path, "-q", "--cudnn-level", "full", *REFERENCE)
    assert status == 0, output
    assert int(re.search(r"(\d+) passed", output)[1]) > 1000


def test_a_plugin_that_is_not_installed_fails_and_the_nearest_name_is_given(tmp_path):
    status, output = run(tmp_path, "-q", "--cudnn-plugin", "torch_referense")
    assert status == 1
    assert "plugin 'torch_referense' is not installed (did you mean 'torch_reference'?)" in output
    assert "1 failed" in output


def test_several_plugins_are_told_apart_by_id(tmp_path):
    status, output = run(tmp_path, "--collect-only", "-q", *REFERENCE, "--cudnn-plugin", "frost_gemm")
    assert status == 0
    ids = output.splitlines()
    for expected in (
        "torch_reference::installed",
        "torch_reference:eager::manifest",
        "torch_reference:eager::import",
        "torch_reference:eager::check_support",
        "torch_reference:eager::filter",
        "torch_reference:eager::numerics[cpu-matmul-f32-17x33x9]",
        "torch_reference:eager::contract[cpu-sdpa]",
        "torch_reference:eager::threads[cpu-pointwise]",
        "frost_gemm:sm90_wgmma::filter",
    ):
        assert expected in ids


def test_the_kit_runs_alone_unless_test_files_are_named(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    _, output = run(tmp_path, "-v", *REFERENCE, "-k", "installed or mine")
    assert "torch_reference::installed PASSED" in output
    assert "test_mine" not in output
    collected = re.search(r"collected (\d+) items / (\d+) deselected / (\d+) selected", output)
    assert int(collected[1]) - int(collected[2]) == int(collected[3]) == 1
    status, output = run(tmp_path, "-v", *REFERENCE, "-k", "installed or mine", "test_mine.py")
    assert status == 0
    assert "torch_reference::installed PASSED" in output
    assert "test_mine.py::test_mine PASSED" in output


def test_without_a_plugin_named_nothing_changes(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    status, output = run(tmp_path, "-v")
    assert status == 0
    assert "test_mine.py::test_mine PASSED" in output
    assert "1 passed" in output


CASES = """
    import cudnn_core
    from cudnn_core.testing import Case

    def graph(size=3):
        g = cudnn_core.Graph(io_data_type="float32", compute_data_type="float32")
        g.relu(g.tensor((2, size), name="x")).set_output(True).set_name("y")
        return g

    def cases():
        yield "relu-mine", graph()
        yield Case("relu-other", lambda: graph(5), special=True)

    def broken():
        yield 42
"""


def test_cases_of_the_user_join_the_library(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(CASES))
    (tmp_path / "pytest.ini").write_text("[pytest]\ncudnn_cases = mine:cases\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    status, output = run(tmp_path, "-v", *REFERENCE, "-k", "relu-mine or relu-other", **environment)
    assert status == 0, output
    assert "torch_reference:eager::numerics[cpu-relu-mine] PASSED" in output
    assert "torch_reference:eager::numerics[cpu-relu-other] PASSED" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine:absent", "--cudnn-cases mine:absent"),
        ("nowhere:cases", "No module named 'nowhere'"),
        ("mine:broken", "mine:broken gave 42"),
    ],
)
def test_unusable_cases_end_the_run_with_their_name(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(textwrap.dedent(CASES))
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    status, output = run(tmp_path, "-q", *REFERENCE, "--cudnn-cases", text, **environment)
    assert status == 4
    assert message in output
    assert "INTERNALERROR" not in output


def test_the_users_configuration_does_not_count(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('schema = 1\n[engines]\ndisable = ["torch_reference:*"]\nmax_workspace = "1 KiB"\n')
    status, output = run(tmp_path, "-q", *REFERENCE, "-k", "f32-1x1x1 or installed", CUDNN_CORE_CONFIG=str(config))
    assert status == 0, output
    assert "2 passed" in output


def test_a_device_that_is_not_there_ends_the_run(tmp_path):
    status, output = run(tmp_path, "-q", *REFERENCE, "--cudnn-device", "cuda:99")
    assert status == 4
    assert "cuda:99" in output or "CUDA device 99" in output
    assert "INTERNALERROR" not in output


def test_only_the_device_that_is_named_is_used(tmp_path):
    status, output = run(tmp_path, "--collect-only", "-q", *REFERENCE, "--cudnn-device", "cpu")
    assert status == 0
    assert "numerics[cpu-" in output
    assert "stream[" not in output


def test_the_same_tests_run_in_parallel(tmp_path):
    pytest.importorskip("xdist")
    status, output = run(tmp_path, "-q", "-n", "2", *REFERENCE, "-k", "conv or manifest")
    assert status == 0, output
    assert re.search(r"\d+ passed", output)


def test_loading_the_pytest_plugin_loads_nothing_heavy():
    code = """
        import sys
        import cudnn_core.testing
        assert "pytest" not in sys.modules
        import cudnn_core.testing._plugin
        heavy = {"numpy", "torch", "cuda", "cutlass", "cudnn_core._graph._graph", "cudnn_core._registry", "tomli"} & set(sys.modules)
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_device_that_is_only_described_can_run_nothing(tmp_path):
    status, output = run(tmp_path, "-q", *REFERENCE, "--cudnn-device", "H200")
    assert status == 4
    assert "NVIDIA H200 is only described" in output


@pytest.mark.gpu
def test_torch_reference_passes_on_a_gpu(tmp_path):
    status, output = run(tmp_path, "-q", "-rs", "--cudnn-device", "cuda:0", *REFERENCE)
    assert status == 0, output
    assert "does not claim cuda_graph" in output
