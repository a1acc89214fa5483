"""Fixtures of the registry tests: a site directory of their own, and a configuration that no machine influences."""

from __future__ import annotations

import sys

import pytest

from cudnn_core import _registry
from cudnn_core._config import Config


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty site directory, first on ``sys.path``; the modules that a test imports from it are forgotten afterwards."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def config(monkeypatch):
    """The configuration in force, set by ``config(Config(...))``; at first the built-in one."""
    now = [Config()]
    monkeypatch.setattr(_registry, "_current_config", lambda: now[0])

    def use(value):
        now[0] = value
        return value

    return use


@pytest.fixture
def registry_of(site):
    """``registry_of()`` is a registry of what ``site`` holds and nothing else."""
    entered = []

    def make():
        context = _registry.installed_on([str(site)])
        entered.append(context)
        return context.__enter__()

    yield make
    for context in reversed(entered):
        context.__exit__(None, None, None)
