"""A machine of one's own: system file, home, project folder and environment in a temporary directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cudnn_core import _config
from cudnn_core._config import _sources


class World:
    """Files of every layer, and the environment that ``load`` sees."""

    def __init__(self, root: Path) -> None:
        self.system = root / "etc" / "config.toml"
        self.home = root / "home"
        self.user = self.home / ".config" / "cudnn_core" / "config.toml"
        self.folder = root / "work" / "project"
        self.project = self.folder / "cudnn_core.toml"
        self.pyproject = self.folder / "pyproject.toml"
        self.named = root / "named.toml"
        self.environ = {"HOME": str(self.home)}
        for path in (self.system, self.user, self.project):
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, layer: str, text: str) -> Path:
        """Write a layer's file; ``schema = 1`` is line 1."""
        path: Path = getattr(self, layer)
        path.write_text("schema = 1\n" + text, encoding="utf-8")
        if layer == "named":
            self.environ["CUDNN_CORE_CONFIG"] = str(path)
        return path

    def load(self, cwd: Path | None = None, **overlay: object) -> _config.Config:
        return _config.load(self.environ, cwd or self.folder, overlay)


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    monkeypatch.setattr(_sources, "SYSTEM_FILE", made.system)
    return made


@pytest.fixture
def process(world, monkeypatch):
    """The same machine as the process's own: ``current`` and ``configure`` see it, and nothing of it stays."""
    import os

    for name in [name for name in os.environ if name.startswith("CUDNN_CORE_") or name == "XDG_CONFIG_HOME"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(world.home))
    monkeypatch.chdir(world.folder)
    _config.configure()
    yield world
    monkeypatch.undo()
    _config.configure()


def device(name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), type: str = "cuda") -> SimpleNamespace:
    return SimpleNamespace(type=type, compute_capability=capability, device_name=name)


@pytest.fixture
def subject():
    """``subject(op, m=1, device=..., dtypes=..., dists=...)`` -> RuleSubject."""

    def make(op="matmul", *, dtypes=None, dists=None, name="NVIDIA H200", capability=(9, 0), type="cuda", **dims):
        return _config.RuleSubject(op, dims, dtypes or {}, device(name, capability, type), dists or {})

    return make
