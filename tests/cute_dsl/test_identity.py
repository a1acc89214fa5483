"""What a compiled kernel depends on, and what the module costs: none of it needs the DSL."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from cudnn_core import BuildError, ExecutionContext, _cute_compile, cute_dsl


@pytest.fixture
def digest():
    cute_dsl.sources_digest.cache_clear()

    def again(package):
        cute_dsl.sources_digest.cache_clear()
        return cute_dsl.sources_digest(package)

    yield again
    cute_dsl.sources_digest.cache_clear()


def test_importing_it_imports_no_dsl():
    program = "import cudnn_core, json, sys; cudnn_core.cute_dsl.compiled; cudnn_core.cute_dsl.toolchain(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "cudnn_core.cute_dsl" in loaded
    assert not loaded & {"cutlass", "cuda", "tvm_ffi", "torch", "numpy", "cudnn_core._cute_host"}


@pytest.mark.parametrize("changed", ["engine.py", "kernels/epilogue.py", "kernels/new.py"])
def test_the_digest_covers_every_module_of_the_package(tmp_path, monkeypatch, digest, changed):
    package = tmp_path / "acme_digested"
    (package / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "engine.py", "kernels/epilogue.py"):
        (package / name).write_text("1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = digest("acme_digested")
    assert digest("acme_digested") == before
    assert "acme_digested" not in sys.modules
    (package / changed).write_text("2\n")
    assert digest("acme_digested") != before


def test_the_digest_of_a_namespace_package_and_of_a_module(tmp_path, monkeypatch, digest):
    (tmp_path / "acme_space").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for file, name in (("acme_space/kernel.py", "acme_space"), ("acme_module.py", "acme_module")):
        (tmp_path / file).write_text("1\n")
        before = digest(name)
        (tmp_path / file).write_text("2\n")
        assert digest(name) != before


def test_the_digest_covers_what_wraps_every_kernel(tmp_path, monkeypatch, digest):
    before = digest("cudnn_core")
    other = tmp_path / "_cute_host.py"
    other.write_text("2\n")
    monkeypatch.setattr(cute_dsl, "_OWN", (other,))
    assert digest("cudnn_core") != before


@pytest.mark.parametrize("name", ["acme_not_here", "acme_not_here.kernels", "sys", ".relative", ""])
def test_a_package_without_sources_has_no_digest(digest, name):
    with pytest.raises(BuildError, match=f"the sources of {name}"):
        digest(name)


def test_a_variable_that_steers_the_compiler_has_entries_of_its_own(monkeypatch):
    plain = cute_dsl.toolchain()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert cute_dsl.toolchain() != plain


def test_the_runtime_names_what_is_missing_too(monkeypatch):
    monkeypatch.setattr(cute_dsl, "_version", lambda dist: "")
    assert cute_dsl.runtime_versions() == {"nvidia-cutlass-dsl": "", "apache-tvm-ffi": ""}
    assert cute_dsl.toolchain().keys() <= {"environment"}


def test_the_compilers_message_is_repeated_on_one_line_without_colours():
    error = RuntimeError(
        "\x1b[91merror:\x1b[0m backend failed\n  log: bad ordering\n  \x1b[92msuggestion:\x1b[0m set a path"
    )
    assert _cute_compile._said(error) == "RuntimeError: error: backend failed log: bad ordering"


@pytest.mark.parametrize("header", [b"/tmp/dump/kernel.sm_90a.cubin" + bytes(60), b"\x7fELF", b""])
def test_what_is_no_cubin_has_no_sm(header):
    with pytest.raises(BuildError, match="no cubin"):
        cute_dsl.cubin_sm(header)


@pytest.mark.parametrize(("abi", "flags", "sm"), [(7, 0x5A055A, 0x5A), (8, 0x6006704, 0x67)])
def test_the_sm_of_a_cubin_by_its_abi(abi, flags, sm):
    header = bytearray(64)
    header[:4], header[8], header[48:52] = b"\x7fELF", abi, flags.to_bytes(4, "little")
    assert cute_dsl.cubin_sm(bytes(header)) == sm


def test_a_fork_during_a_compilation_does_not_block_the_child(monkeypatch):
    held = _cute_compile._dsl_lock
    with held:
        _cute_compile._after_fork()  # what the child runs; a real fork beside threads warns on new Pythons
        assert _cute_compile._dsl_lock is not held
        done = threading.Event()

        def load():
            with pytest.raises(BuildError):
                cute_dsl.load(cute_dsl.CompiledKernel("acme", "90a", "acme_0", b"", "", b"no object"))
            done.set()

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        assert done.wait(60)
        thread.join()


def test_a_layout_is_bound_once_and_few_are_kept():
    bound, ran = [], []

    def bind(layout):
        bound.append(layout)
        return lambda *launch: ran.append((layout, *launch))

    runs, ctx = cute_dsl.BoundRuns(bind), ExecutionContext(None, None, stream=7, workspace=9)
    for layout in (1, 2, 1, 1, 2):
        runs.execute(SimpleNamespace(operands=(layout,), pointers=(16 * layout,)), ctx)
    assert bound == [(1,), (2,)]
    assert ran[2:4] == [((1,), (16,), 9, 7)] * 2
    for layout in range(200):
        runs.execute(SimpleNamespace(operands=(layout,), pointers=()), ctx)
    assert len(runs._kept) <= 64
