"""Every animal of the zoo earns its decline, and the sound plugin beside it is none the worse."""

from __future__ import annotations

import sys

import pytest

from cudnn_core import _registry
from cudnn_core._config import Config
from tests.zoo._make import ANIMALS, write_plugin


@pytest.fixture
def registry_with(tmp_path, monkeypatch):
    """``registry_with(animal)`` is a registry of a sound plugin and the animal."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(_registry, "_current_config", Config)
    before = set(sys.modules)
    entered = []

    def make(animal):
        write_plugin(site, "aardvark")
        animal.write(site)
        write_plugin(site, "zebra")
        context = _registry.installed_on([str(site)])
        entered.append(context)
        return context.__enter__()

    yield make
    for context in entered:
        context.__exit__(None, None, None)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("animal", ANIMALS, ids=lambda animal: animal.name)
def test_a_broken_plugin_costs_only_itself(registry_with, animal):
    registry = registry_with(animal)
    for sound in ("aardvark:main", "zebra:main"):
        assert registry.get(sound).instance().check_support(None, None)
    broken = [entry for entry in registry.engines if entry.plugin not in ("aardvark", "zebra")]
    assert broken
    for entry in broken:
        if animal.when == "used":
            assert entry.state == "eligible"
            with pytest.raises(_registry.EngineBroken):
                entry.instance()
        if animal.when == "planned":
            assert entry.state == "eligible"
            entry.instance()
        else:
            assert entry.state in ("quarantined", "filtered")
            assert animal.code in [reason.code for reason in entry.reasons]


def test_the_zoo_is_large_enough():
    assert len({animal.name for animal in ANIMALS}) >= 12
