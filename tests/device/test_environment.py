"""Versions: cached, process-global, 0 when absent; what only a backend knows comes from a provider."""

from __future__ import annotations

import platform
import sys
import types

import pytest

import cudnn_core
from cudnn_core import _driver, _env
from cudnn_core._errors import DriverError, HandleError
from cudnn_core.testing._temporary import temporary_plugin


def test_cuda_versions_are_asked_once(two_gpus):
    assert [_env.driver_version(), _env.driver_version()] == [13040, 13040]
    assert [_env.runtime_version(), _env.runtime_version()] == [13050, 13050]
    assert two_gpus.calls == [("driver_version",), ("runtime_version",)]


def test_cuda_versions_are_0_without_a_driver(no_gpu):
    assert _env.driver_version() == 0
    assert _env.runtime_version() == 0


def test_a_failing_version_query_raises(fake_driver, h200):
    with _driver.use_driver(fake_driver(h200, errors={"driver_version": 1})), pytest.raises(DriverError):
        _env.driver_version()


def test_the_environment_of_a_tuning_record_is_text(two_gpus):
    assert _env.environment_key() == {
        "python": platform.python_version(),
        "cudnn_core": cudnn_core.__version__,
        "driver": "13040",
        "runtime": "13050",
    }


def test_backend_facts_come_from_the_provider(backend, monkeypatch):
    monkeypatch.setattr(_env, "backend", lambda: backend)
    assert _env.backend_version() == 92700
    assert _env.backend_version_string() == "9.27.0"
    assert _env.get_last_error_string() == "a fake error"


def test_without_a_provider_the_version_is_0_and_the_rest_name_the_package(monkeypatch):
    monkeypatch.setattr(_env, "backend", lambda: None)
    assert _env.backend_version() == 0
    for call in (_env.backend_version_string, _env.get_last_error_string):
        with pytest.raises(HandleError, match=rf"{call.__name__}.*pip install \"cudnn-core\[backend\]\""):
            call()


def test_the_provider_is_the_module_that_a_manifest_names(monkeypatch):
    module = types.ModuleType("fake_cudnn_for_tests")
    module.backend_version = lambda: 91000
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with temporary_plugin({"plugin": "fake_cudnn", "provides": {"backend": module.__name__}}, isolated=True):
        assert _env.backend() is module
        assert _env.backend_version() == 91000


def test_a_provider_that_fails_to_import_is_named_instead_of_the_package_to_install():
    manifest = {"plugin": "fake_cudnn", "provides": {"backend": "no_such_module_for_tests"}}
    with temporary_plugin(manifest, isolated=True):
        assert _env.backend_version() == 0
        with pytest.raises(HandleError, match="no_such_module_for_tests"):
            _env.backend_version_string()


def test_no_plugin_no_backend():
    with temporary_plugin({"plugin": "other"}, isolated=True):
        assert _env.backend_version() == 0
        with pytest.raises(HandleError, match=r"cudnn-core\[backend\]"):
            _env.get_last_error_string()
