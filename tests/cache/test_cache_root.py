"""Where the caches live: the configuration, then CUDNN_CORE_CACHE_DIR through it, then XDG, then the home folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import cudnn_core._config as config
from cudnn_core._store import cache_root


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """A function that sets the configured folder; nothing else is set, and home is tmp_path."""
    state = SimpleNamespace(cache_dir=None)
    monkeypatch.setattr(config, "current", lambda: state, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda folder: setattr(state, "cache_dir", folder)


def test_the_default_is_the_home_folders_cache(configured, tmp_path):
    assert cache_root() == tmp_path / ".cache" / "cudnn_core"


def test_xdg_cache_home_comes_before_the_home_folder(configured, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/cudnn_core")


def test_a_relative_xdg_cache_home_is_ignored(configured, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "cudnn_core"


def test_the_configured_folder_comes_first(configured, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    configured("/data/cache")
    assert cache_root() == Path("/data/cache/cudnn_core")


def test_without_any_home_there_is_no_root_and_no_tmp(configured, monkeypatch):
    monkeypatch.setenv("HOME", "")
    assert cache_root() is None
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an account
    assert cache_root() is None


def test_the_environment_variable_reaches_the_root_through_the_configuration(monkeypatch, tmp_path):
    pytest.importorskip("cudnn_core._config._state")
    if not hasattr(config, "reload"):
        pytest.skip("the configuration's front door is not there yet")
    monkeypatch.setenv("CUDNN_CORE_CACHE_DIR", str(tmp_path))
    config.reload()
    try:
        assert cache_root() == tmp_path / "cudnn_core"
    finally:
        monkeypatch.undo()
        config.reload()
