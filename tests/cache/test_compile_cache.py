"""The compile cache: hits, misses for whatever is doubtful, privacy, bounds, threads and processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path

import pytest

import cudnn_core._cache as cache_module
from cudnn_core._cache import CacheKey, CompileCache
from cudnn_core._errors import BuildError

KEY = CacheKey({"m": 64, "tiles": [64, 128]}, "frost_gemm:sm90_wgmma@1", "90a", {"cutlass": "4.7.0", "ptxas": "13.0"})
DATA = {"kernel.cubin": b"\x00cubin" * 50, "host.o": b"", "../odd name": b"x"}


class Build:
    """A build function that counts its calls."""

    def __init__(self, data=DATA):
        self.data = data
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.data


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cudnn_core"


@pytest.fixture
def cache(root):
    return CompileCache("frost_gemm", root=root)


@pytest.fixture
def entry(cache, root):
    """The folder of a stored entry."""
    cache.get(KEY, Build())
    (found,) = [path for path in (root / "compile" / "v1" / "frost_gemm").iterdir() if not path.name.startswith(".")]
    return found


def rebuilds(cache, key=KEY):
    build = Build()
    assert cache.get(key, build) == DATA
    return build.calls == 1


# --- hits and keys


def test_the_second_get_does_not_build(cache, root):
    assert rebuilds(cache)
    assert not rebuilds(cache)
    assert not rebuilds(CompileCache("frost_gemm", root=root))


@pytest.mark.parametrize(
    "change",
    [
        {"program": {"m": 65, "tiles": [64, 128]}},
        {"engine": "frost_gemm:sm90_wgmma@2"},
        {"arch": "100a"},
        {"toolchain": {"cutlass": "4.7.1", "ptxas": "13.0"}},
        {"toolchain": {"cutlass": "4.7.0"}},
    ],
    ids=["program", "revision", "arch", "toolchain version", "toolchain set"],
)
def test_each_part_of_the_key_tells_entries_apart(cache, change):
    cache.get(KEY, Build())
    assert rebuilds(cache, KEY._replace(**change))
    assert not rebuilds(cache)


def test_a_mapping_is_a_key_and_its_order_does_not_matter(cache):
    cache.get(KEY, Build())
    assert not rebuilds(cache, dict(reversed(KEY._asdict().items())))


def test_plugins_do_not_see_each_others_entries(cache, root):
    cache.get(KEY, Build())
    assert rebuilds(CompileCache("acme", root=root))


@pytest.mark.parametrize(
    "key",
    [
        KEY._replace(program=object()),
        KEY._replace(program=float("nan")),
        KEY._replace(toolchain={"ptxas": (13, 0)}),
        KEY._replace(engine=""),
        {"program": 1, "engine": "p:e@1", "arch": "90a"},
        {**KEY._asdict(), "driver": "1"},
        "a string",
    ],
)
def test_a_key_that_cannot_be_compared_is_an_error_not_a_guess(cache, key):
    with pytest.raises(BuildError, match="compile cache: "):
        cache.get(key, Build())


@pytest.mark.parametrize("plugin", ["", "../x", "a/b", "A", "."])
def test_a_namespace_is_a_plugin_id(plugin):
    with pytest.raises(BuildError, match="not a plugin id"):
        CompileCache(plugin)


@pytest.mark.parametrize("built", [None, b"x", {"a": "text"}, {1: b"x"}, {"": b"x"}, {"a": bytearray(b"x")}])
def test_payloads_must_be_named_bytes(cache, root, built):
    with pytest.raises(BuildError, match=r"build\(\) returned"):
        cache.get(KEY, lambda: built)
    assert rebuilds(cache)


def test_what_a_caller_does_to_its_payloads_stays_its_own(cache):
    cache.get(KEY, Build()).clear()
    assert cache.get(KEY, Build()) == DATA


def test_a_failed_build_stores_nothing_and_reaches_the_caller(cache):
    with pytest.raises(ZeroDivisionError):
        cache.get(KEY, lambda: 1 / 0)
    assert rebuilds(cache)


# --- layout on disk


def test_folders_and_files_are_private(entry, root):
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_the_commit_marker_is_written_last(cache, monkeypatch):
    order = []
    write = cache_module.write_atomic
    monkeypatch.setattr(cache_module, "write_atomic", lambda path, data: (order.append(path.name), write(path, data)))
    cache.get(KEY, Build())
    assert order == ["0", "1", "2", "commit.json"]


def test_no_payload_name_becomes_a_path(entry):
    assert sorted(path.name for path in entry.iterdir()) == ["0", "1", "2", "commit.json"]
    assert [item["name"] for item in json.loads((entry / "commit.json").read_text())["files"]] == list(DATA)


def test_nothing_is_pickled(entry):
    assert (entry / "0").read_bytes() == DATA["kernel.cubin"]


# --- doubtful entries are misses, and are replaced


def _truncate(entry):
    (entry / "0").write_bytes(b"\x00cubin")


def _tamper(entry):
    (entry / "0").write_bytes(b"\x01" + DATA["kernel.cubin"][1:])


def _longer(entry):
    (entry / "1").write_bytes(b"appended")


def _lost(entry):
    (entry / "2").unlink()


def _uncommitted(entry):
    (entry / "commit.json").unlink()


def _garbage(entry):
    (entry / "commit.json").write_bytes(b"\xff{")


def _marker(**changes):
    def change(entry):
        marker = json.loads((entry / "commit.json").read_text())
        (entry / "commit.json").write_text(json.dumps({**marker, **changes}))

    return change


def _linked_file(entry):
    (entry / "0").rename(entry.parent.parent / "stolen")
    (entry / "0").symlink_to(entry.parent.parent / "stolen")


def _linked_entry(entry):
    entry.rename(entry.parent.parent / "moved")
    entry.symlink_to(entry.parent.parent / "moved")


def _writable(entry):
    (entry / "0").chmod(0o666)


def _a_file(entry):
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    entry.write_text("not a folder")


def _fifo(entry):
    (entry / "0").unlink()
    os.mkfifo(entry / "0")


DOUBTS = [
    _truncate, _tamper, _longer, _lost, _uncommitted, _garbage, _linked_file, _linked_entry, _writable, _a_file, _fifo,
    _marker(schema=2), _marker(key={"program": 1}), _marker(extra=1), _marker(files=[{"name": "a"}]),
]  # fmt: skip


@pytest.mark.parametrize("damage", DOUBTS)
def test_a_doubtful_entry_is_a_logged_miss_and_is_replaced(cache, entry, caplog, damage):
    damage(entry)
    assert rebuilds(cache)
    assert "compile cache entry ignored" in caplog.text
    assert not rebuilds(cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_payload_of_another_user_is_a_miss(cache, entry):
    os.chown(entry / "0", 12345, -1)
    assert rebuilds(cache)


# --- a folder that can't be had: memory, never /tmp


def unusable_file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cudnn_core"


def unusable_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    return tmp_path / "link"


def unusable_writable(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    return tmp_path / "open"


@pytest.mark.parametrize("make", [unusable_file, unusable_link, unusable_writable])
def test_an_unusable_folder_means_memory_and_a_log_line(tmp_path, caplog, make, monkeypatch):
    root = make(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    cache = CompileCache("frost_gemm", root=root)
    assert rebuilds(cache)
    assert not rebuilds(CompileCache("frost_gemm", root=root))
    assert "keeps an entry in memory" in caplog.text
    assert not list(tmp_path.rglob("commit.json"))
    assert not (tmp_path / "tmp").exists()


def test_a_relative_root_is_unusable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rebuilds(CompileCache("relative", root=Path("cudnn_core")))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_means_memory(cache, root, caplog, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert rebuilds(cache)
    assert "No space left" in caplog.text
    assert not rebuilds(cache)
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_memory_is_bounded_too(tmp_path):
    cache = CompileCache("bounded", root=unusable_file(tmp_path), max_bytes=250)
    for index in range(3):
        cache.get(KEY._replace(program=index), Build({"a": bytes(100)}))
    built = [Build({"a": bytes(100)}) for _ in range(3)]
    for index in (2, 1, 0):
        cache.get(KEY._replace(program=index), built[index])
    assert [build.calls for build in built] == [1, 0, 0]


def test_an_owned_folder_that_others_may_only_read_becomes_private(tmp_path):
    (tmp_path / "cudnn_core").mkdir(mode=0o755)
    assert rebuilds(CompileCache("frost_gemm", root=tmp_path / "cudnn_core"))
    assert stat.S_IMODE((tmp_path / "cudnn_core").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(tmp_path, caplog):
    root = tmp_path / "cudnn_core"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)
    assert rebuilds(CompileCache("frost_gemm", root=root))
    assert "belongs to user 12345" in caplog.text
    assert not list(root.iterdir())


# --- bound


def entries(root):
    return sorted(path.name for path in (root / "compile" / "v1" / "frost_gemm").iterdir())


def test_the_least_recently_used_entries_go_first(root):
    cache = CompileCache("frost_gemm", root=root, max_bytes=3500)
    kilobyte = Build({"a": bytes(1000)})
    for index in range(2):
        cache.get(KEY._replace(program=index), kilobyte)
        time.sleep(0.02)
    cache.get(KEY._replace(program=0), kilobyte)  # used again: 1 is the oldest now
    time.sleep(0.02)
    cache.get(KEY._replace(program=2), kilobyte)
    assert len(entries(root)) == 2
    again = Build({"a": bytes(1000)})
    cache.get(KEY._replace(program=0), again)
    cache.get(KEY._replace(program=2), again)
    assert again.calls == 0


def test_an_entry_larger_than_the_cache_evicts_nothing(root):
    cache = CompileCache("frost_gemm", root=root, max_bytes=3500)
    cache.get(KEY, Build())
    before = entries(root)
    assert cache.get(KEY._replace(program=1), Build({"a": bytes(4000)})) == {"a": bytes(4000)}
    assert entries(root) == before


def test_what_a_crashed_writer_left_is_removed_later(cache, entry, root):
    fresh, old = entry.parent / ".tmp-1-fresh", entry.parent / ".tmp-1-old"
    for folder in (fresh, old):
        folder.mkdir()
        (folder / "0").write_bytes(b"half")
    os.utime(old, (0, 0))
    cache.get(KEY._replace(program=1), Build())
    assert fresh.exists()
    assert not old.exists()


# --- threads and processes


def test_threads_that_want_one_key_build_it_once(root):
    calls = []
    start = threading.Barrier(8)

    def build():
        calls.append(threading.get_ident())
        time.sleep(0.05)
        return DATA

    results = []

    def work():
        start.wait()
        results.append(CompileCache("frost_gemm", root=root).get(KEY, build))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == [DATA] * 8
    assert not cache_module._flights


def test_different_keys_build_at_the_same_time(cache):
    both = threading.Barrier(2, timeout=5)

    def work(program):
        cache.get(KEY._replace(program=program), lambda: DATA if both.wait() >= 0 else {})

    threads = [threading.Thread(target=work, args=(program,)) for program in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken


def test_after_a_failed_build_the_next_thread_tries_for_itself(cache):
    entered = threading.Event()

    def fail():
        entered.set()
        time.sleep(0.05)
        raise ValueError("no compiler")

    def first():
        with pytest.raises(ValueError, match="no compiler"):
            cache.get(KEY, fail)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    assert rebuilds(cache)
    thread.join()


def _process(root, start, results, index):
    start.wait()
    made = []
    for program in range(12):
        data = {"a": bytes([program]) * 4000}
        made.append(CompileCache("frost_gemm", root=root).get(KEY._replace(program=program), Build(data)) == data)
    results.put(all(made))


def test_processes_may_share_a_cache(root):
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_process, args=(root, start, results, index)) for index in range(3)]
    for worker in workers:
        worker.start()
    assert all(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    build = Build()
    for program in range(12):
        assert CompileCache("frost_gemm", root=root).get(KEY._replace(program=program), build)["a"][0] == program
    assert build.calls == 0
    assert not [name for name in entries(root) if name.startswith(".")]


def test_another_process_that_was_faster_is_kept(cache, root):
    def slow():
        CompileCache("frost_gemm", root=root).get(KEY, Build())  # the lock is re-entrant, so this stands for a process
        return DATA

    assert cache.get(KEY, slow) == DATA
    assert len(entries(root)) == 1


def test_a_fork_during_a_build_does_not_block_the_child(root):
    building, done = threading.Event(), threading.Event()

    def slow():
        building.set()
        done.wait(10)
        return DATA

    thread = threading.Thread(target=lambda: CompileCache("frost_gemm", root=root).get(KEY, slow))
    thread.start()
    building.wait()
    with cache_module._guard:
        assert cache_module._flights
    cache_module._after_fork()  # what the child runs; a real fork beside threads warns on new Pythons
    assert rebuilds(CompileCache("frost_gemm", root=root))
    done.set()
    thread.join()
    assert not cache_module._flights


def test_the_log_goes_to_the_cores_logger(cache, entry, caplog):
    _tamper(entry)
    cache.get(KEY, Build())
    assert {record.name for record in caplog.records if record.levelno >= logging.WARNING} == {"cudnn_core"}
