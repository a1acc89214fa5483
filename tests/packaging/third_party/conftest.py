"""A throw-away environment with the third-party example installed from its wheel, beside the packages of this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = ROOT / "examples" / "third_party_engine"


class Environment:
    """A virtual environment. What is installed in it comes before what the parent environment has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
        self.python = next(
            path for path in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if path.exists()
        )
        self.site = Path(self.script("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # addsitedir, so that the parent's own .pth files (editable installs) count.
        parents = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        lines = [f"import site; site.addsitedir({path!r})" for path in parents]
        (self.site / "parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def pip(self, *arguments: str) -> str:
        return _run(sys.executable, "-m", "pip", "--python", str(self.python), *arguments, cwd=self.folder)

    def script(self, code: str, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        """Standard output of ``python -c CODE``; warnings are errors."""
        return _run(str(self.python), "-W", "error", "-c", code, *arguments, env=env, cwd=cwd or self.folder)


def _run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=cwd, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, f"{' '.join(command[:4])}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's wheel, built from its source folder without the network."""
    target = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(PROJECT))
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed(wheel, tmp_path_factory.mktemp("env"))


@pytest.fixture
def own_environment(wheel: Path, tmp_path: Path) -> Environment:
    """One that the test may change."""
    return installed(wheel, tmp_path / "env")


def installed(wheel: Path, folder: Path) -> Environment:
    made = Environment(folder)
    made.pip("install", "--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check", str(wheel))
    return made
