"""libcudnn is found, checked and loaded once; what is wrong with it is a decline with a hint."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

START = "from programs import *\nfrom cudnn_backend import library\n"
# No copy but those of the test: neither the machine's wheels nor its torch.
ALONE = START + "library._wheels = lambda: {}\nlibrary._package_folders = lambda name: []\n"
CUDNN = ("libcudnn.so.9", "libcudnn_graph.so.9")
TELL = """
found = library.problem()
assert found is not None and library.problem() is found
cudnn_core_explained = matmul().explain(device=DEVICE)
row = next(row for row in cudnn_core_explained.engines if row.id == "cudnn_backend:graph@1")
assert (row.state, row.reasons[0].code) == ("declined", found.code), row
try:
    library.load()
except cudnn_core.BuildError as error:
    assert error.decline is found
else:
    raise AssertionError
assert cudnn_core.backend_version() == 0
try:
    cudnn_core.backend_version_string()
except cudnn_core.HandleError as error:
    assert found.code in str(error), error
else:
    raise AssertionError
print(found.code, found.subject, found.hint, sep="|")
"""


def need_none(*names: str) -> None:
    """Skip where the machine's loader knows one of the libraries; asked in a child, so that nothing is loaded here."""
    probe = "import ctypes, sys\nfor name in sys.argv[1:]:\n    try: ctypes.CDLL(name)\n    except OSError: continue\n    print(name)"
    found = subprocess.run(
        [sys.executable, "-c", probe, *names], capture_output=True, text=True, check=True
    ).stdout.split()
    if found:
        pytest.skip(f"the machine has {', '.join(found)}")


def wheel(folder, name: str, version: str, cudnn=None):
    """An installed distribution in ``folder``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if cudnn is not None:
        lib = folder / "nvidia" / "cudnn" / "lib"
        lib.mkdir(parents=True, exist_ok=True)
        for name in CUDNN:
            shutil.copy(cudnn.parent / name, lib / name)
    return folder


def test_it_is_loaded_once_and_says_its_version(fake):
    fake.run(
        START
        + f"""
assert library.problem() is None
first = library.load()
assert library.load() is first and library.version() == first.version == 91900
assert first.path == {str(fake.folder / "libcudnn.so.9")!r}
assert cudnn_core.backend_version() == 91900
assert cudnn_core.backend_version_string() == "9.19.0"
assert cudnn_core.get_last_error_string() == ""
assert type(cudnn_core.create_kernel_cache()).__name__ == "kernel_cache"
handle = first.module.create_handle()
from cudnn_backend import api
api.set_stream(handle, 77)
assert api.get_stream(handle) == 77
for call in (lambda: api.get_stream(0), lambda: api.set_stream(0, 77), lambda: api.set_stream(handle, 10**22)):
    try:
        call()
    except cudnn_core.HandleError:
        pass
    else:
        raise AssertionError("no HandleError")
assert api.get_stream(handle) == 77
"""
    )


def test_no_libcudnn(fake, tmp_path):
    need_none("libcudnn.so.9")
    said = fake.run(ALONE + TELL, tmp_path)
    assert said.startswith("dep.missing|libcudnn|pip install nvidia-cudnn-cu13")


def test_no_binding(fake):
    said = fake.run(ALONE + "library._binding_file = lambda: None\n" + TELL)
    assert said.strip() == 'dep.missing|nvidia-cudnn-frontend|pip install "cudnn-core[backend]"'


def test_a_binding_that_can_not_be_imported(fake, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"nothing that a loader likes")
    program = START + f"library._binding_file = lambda: {str(broken)!r}\n" + "assert library.problem() is None\n"
    said = fake.run(
        program
        + """
import sys
for _ in range(2):
    try:
        library.load()
    except cudnn_core.BuildError as error:
        print(error.decline.code, error.decline.subject)
assert library.problem().code == "dep.import_failed" and "cudnn._compiled_module" not in sys.modules
"""
    )
    assert said.splitlines() == ["dep.import_failed nvidia-cudnn-frontend"] * 2


def test_no_graph_library_which_would_abort_the_process(fake, tmp_path):
    need_none("libcudnn_graph.so.9")
    folder = fake.build(tmp_path / "lib", "libcudnn.so.9", "libcublasLt.so.13", "libcuda.so.1", "libcudart.so.13")
    links = fake.build(tmp_path / "links", "libcublasLt.so.13", "libcuda.so.1", "libcudart.so.13")
    (links / "libcudnn.so.9").symlink_to(
        fake.folder / "libcudnn.so.9"
    )  # whose folder has it, and the loader looks beside the link
    for place in (folder, links):
        said = fake.run(ALONE + TELL + "print(found.expected)", place)
        assert said.startswith("dep.missing|libcudnn|pip install nvidia-cudnn-cu13")
        assert "libcudnn_graph.so.9" in said


def test_no_libcublaslt_which_would_abort_the_process(fake, tmp_path):
    need_none("libcublasLt.so.13", "libcublasLt.so.12")
    folder = fake.build(tmp_path / "lib", *CUDNN, "libcuda.so.1", "libcudart.so.13")
    assert fake.run(ALONE + TELL, folder).startswith("dep.missing|libcublasLt|pip install nvidia-cublas")


def test_no_driver(fake, tmp_path):
    need_none("libcuda.so.1")
    folder = fake.build(tmp_path / "lib", *CUDNN, "libcublasLt.so.13", "libcudart.so.13")
    assert fake.run(ALONE + TELL, folder).strip() == "dep.driver|libcuda|install the NVIDIA driver"


def test_no_libcudart(fake, tmp_path):
    need_none("libcudart.so.13", "libcudart.so.12")
    folder = fake.build(tmp_path / "lib", *CUDNN, "libcublasLt.so.13", "libcuda.so.1")
    load = "\ntry:\n    library.load()\nexcept cudnn_core.BuildError as error:\n    print(error.decline.code, error.decline.subject)"
    assert fake.run(ALONE + load, folder).strip() == "dep.missing libcudart"


def test_a_version_below_the_floor_that_the_file_name_tells(fake, tmp_path):
    folder = fake.build(tmp_path / "lib")
    (folder / "libcudnn.so.9").rename(folder / "libcudnn.so.9.12.0")
    (folder / "libcudnn.so.9").symlink_to("libcudnn.so.9.12.0")
    assert fake.run(ALONE + TELL, folder).strip() == "dep.too_old|libcudnn|pip install -U nvidia-cudnn-cu13"


def test_a_version_below_the_floor_that_only_the_library_tells(fake, tmp_path):
    folder = fake.build(tmp_path / "lib", defines=("FAKE_VERSION=91201",))
    said = fake.run(
        ALONE
        + """
assert library.problem() is None and library.version() == 0
try:
    build(matmul())
except cudnn_core.BuildError as error:
    print(error.decline)
assert library.problem().code == "dep.too_old"
assert library.load.__module__ == "cudnn_backend.library"
""",
        folder,
    )
    assert said.strip() == "dep.too_old libcudnn: needs >=9.13.0, got 9.12.1 (pip install -U nvidia-cudnn-cu13)"


def test_the_wheels_copy_and_its_version_without_loading_it(fake, tmp_path):
    site = wheel(tmp_path / "site", "nvidia-cudnn-cu13", "9.28.1.4", fake.folder / "libcudnn.so.9")
    toolkit = fake.build(tmp_path / "site" / "nvidia" / "cu13" / "lib", "libcublasLt.so.13", "libcudart.so.13")
    driver = fake.build(tmp_path / "driver", "libcuda.so.1")
    fake.run(
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        + START
        + f"""
assert library.problem() is None, library.problem()
assert library.version() == 92801
assert "cudnn" not in open("/proc/self/maps").read()
assert library.load().path == {str(site / "nvidia/cudnn/lib/libcudnn.so.9")!r}
maps = open("/proc/self/maps").read()
assert {str(toolkit / "libcublasLt.so.13")!r} in maps and "libcudart.so.1" in maps
assert library.version() == 91900  # what it says itself
""",
        driver,
    )


def test_two_wheels_overwrite_each_other(fake, tmp_path):
    site = wheel(tmp_path / "site", "nvidia-cudnn-cu13", "9.28.1.4", fake.folder / "libcudnn.so.9")
    wheel(site, "nvidia-cudnn-cu12", "9.19.0.56")
    said = fake.run(f"import sys; sys.path.insert(0, {str(site)!r})\n" + START + TELL)
    assert said.strip() == "x.cudnn_backend.two_copies|libcudnn|uninstall both, then install one"


def test_two_copies_in_the_process(fake, tmp_path):
    other = fake.build(tmp_path / "other")
    said = fake.run(
        f"""
import ctypes
ctypes.CDLL({str(other / "libcudnn.so.9")!r})
ctypes.CDLL({str(fake.folder / "libcudnn.so.9")!r})
"""
        + ALONE
        + TELL
    )
    assert said.startswith("x.cudnn_backend.two_copies|libcudnn|load one copy only")


def test_a_copy_that_comes_after_the_first_look_is_the_one_that_is_used(fake, tmp_path):
    """Say, torch is imported between planning and building."""
    other = fake.build(tmp_path / "other", defines=("FAKE_VERSION=92000",))
    fake.run(
        ALONE
        + f"""
assert library.problem() is None
ctypes.CDLL({str(other / "libcudnn.so.9")!r})
assert library.load()[1:] == (92000, {str(other / "libcudnn.so.9")!r}), library.load()
"""
    )


def test_the_copy_that_the_process_has_is_used(fake, tmp_path):
    other = fake.build(tmp_path / "other", defines=("FAKE_VERSION=92000",))
    fake.run(
        f"import ctypes; ctypes.CDLL({str(other / 'libcudnn.so.9')!r})\n"
        + START
        + f"assert library.load()[1:] == (92000, {str(other / 'libcudnn.so.9')!r}), library.load()"
    )


@pytest.mark.parametrize("first", ["frontend", "plugin"])
def test_the_frontends_package_and_the_plugin_share_the_binding(fake, first):
    steps = {"frontend": "import cudnn", "plugin": "library.load()"}
    order = [first, *(step for step in steps if step != first)]
    fake.run(
        START
        + "\n".join(steps[step] for step in order)
        + """
import sys
assert cudnn._pybind_module is library.load().module is sys.modules["cudnn._compiled_module"]
assert cudnn.backend_version() == library.load().version == 91900
run = build(matmul()).bind(layout(matmul()))
run((256, 512, 768), 4096, 0)
assert Fake().get("executions") == 1
"""
    )


def test_threads_that_ask_at_once_load_it_once(fake):
    fake.run(
        START
        + """
import threading
gate, found = threading.Barrier(4), []
def work():
    gate.wait()
    found.append(library.load())
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len({id(item) for item in found}) == 1
"""
    )
