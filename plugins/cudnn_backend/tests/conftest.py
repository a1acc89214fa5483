"""A libcudnn that is not there: built from ``fake/`` by the C compiler, and child processes that load it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAKES = {
    "libcudnn.so.9": "fake_cudnn.c",
    "libcudnn_graph.so.9": "empty.c",
    "libcuda.so.1": "fake_cuda.c",
    "libcudart.so.13": "fake_cuda.c",
    "libcublasLt.so.13": "empty.c",
}


class FakeBackend:
    """``folder`` holds the fake libraries. ``run`` executes a program that finds them, and returns what it prints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def build(self, folder: Path, *names: str, defines: tuple[str, ...] = ()) -> Path:
        """Some of the fake libraries in a folder of their own."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or FAKES:
            command = ["cc", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name)]
            command += [*(f"-D{define}" for define in defines), str(HERE / "fake" / FAKES[name]), "-ldl"]
            subprocess.run(command, check=True, capture_output=True)
        return folder

    def run(self, program: str, *folders: Path, **variables: str) -> str:
        """Whatever is loaded into a process stays there: each program gets a process of its own."""
        path = os.pathsep.join(map(str, folders or (self.folder,)))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDNN_")}
        cache = str(self.folder / "cache")
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=inherited | {"LD_LIBRARY_PATH": path, "PYTHONPATH": paths, "CUDNN_CORE_CACHE_DIR": cache} | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"rc {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeBackend:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the fake libcudnn can't be built")
    made = FakeBackend(tmp_path_factory.mktemp("fake_cudnn"))
    made.build(made.folder)
    return made


sys.path.insert(0, str(HERE))  # makes `programs` importable under importlib mode
