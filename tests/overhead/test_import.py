"""``import cudnn_core``: what it loads, what it reads, what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

import cudnn_core
from benchmarks._harness import child

PACKAGE = Path(cudnn_core.__file__).resolve().parent
# What planning and the frameworks bring, and an import must not.
HEAVY = ("torch", "numpy", "cuda", "pluggy", "tomli", "importlib.metadata", "packaging", "dataclasses", "inspect")


def test_the_import_loads_one_module():
    gained = child(
        """
import sys
before = set(sys.modules)
import cudnn_core
gained = sorted(set(sys.modules) - before)
import json
print(json.dumps(gained))
""",
        site=False,
    )
    assert gained == ["cudnn_core"]


def test_the_import_reads_its_own_file_and_opens_no_library():
    opened = child(
        """
import sys
seen = []
sys.addaudithook(lambda event, arguments: seen.append([event, str(arguments[0])])
    if event in ("open", "ctypes.dlopen", "os.listdir", "os.scandir", "socket.connect", "subprocess.Popen") else None)
import cudnn_core
opened = list(seen)
import json
print(json.dumps(opened))
""",
        site=False,
    )
    files = [Path(name) for event, name in opened if event == "open"]
    assert files, "the hook has seen nothing"
    assert all(file.is_relative_to(PACKAGE) and file.name.startswith("__init__.") for file in files), files
    # The import system lists the directories of sys.path while it looks for the package.
    assert {event for event, _ in opened} <= {"open", "os.listdir"}


def test_every_public_name_resolves_without_a_framework():
    loaded = child(
        f"""
import json, sys
import cudnn_core
before = set(sys.modules)
for name in cudnn_core.__all__:
    assert getattr(cudnn_core, name) is not None, name
print(json.dumps([name for name in {[name for name in HEAVY if name not in ("dataclasses", "inspect")]}
    if name in sys.modules]))
"""
    )
    assert loaded == []


def test_a_heavy_module_would_be_noticed():
    code = "import json, sys\nimport numpy\nprint(json.dumps([name for name in {} if name in sys.modules]))"
    assert "numpy" in child(code.format(list(HEAVY)))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_import_takes_at_most_5_mib():
    code = """
{}
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))
"""
    bare, ours = (min(child(code.format(line), site=False) for _ in range(3)) for line in ("", "import cudnn_core"))
    assert ours - bare <= 5


def test_the_import_takes_a_few_milliseconds():
    code = """
import time
start = time.perf_counter()
import cudnn_core
print((time.perf_counter() - start) * 1e3)
"""
    child(code, site=False)  # writes the bytecode
    assert min(child(code, site=False) for _ in range(5)) <= 10


def test_listing_engines_runs_no_plugin_code(tmp_path):
    from tests.zoo._make import write_plugin

    write_plugin(tmp_path, "bomb", code="raise SystemExit('imported')")
    listed = child(
        f"""
import json, sys
import cudnn_core
listed = [str(engine) for engine in cudnn_core.registry().engines]
print(json.dumps(["bomb:main@1" in listed, [name for name in {list(HEAVY[:4])} if name in sys.modules]]))
""",
        path=[tmp_path],
    )
    assert listed == [True, []]
