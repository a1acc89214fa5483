"""The compile cache: named bytes of compiled kernels, kept between processes.

``CompileCache(plugin).get(key, build)`` returns what was stored for the key, or stores what ``build`` returns. A plugin sees
its own namespace only. Anything doubtful is a miss; a folder that can't be had means that entries live in memory. Exported as
``cudnn_core.CompileCache``; used by plugins inside build_plan.

Layout: ``<cache root>/compile/v1/<plugin>/<sha256 of the key>/``, with payloads ``0``, ``1``, ... and ``commit.json``, which
is written last and holds the whole key and the size and sha256 of each payload. An entry appears by renaming its folder. The
digests detect damage; what keeps other users out is that the folders belong to this one alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ._canonical import ANY, COUNT, LIST, TEXT, Field, FormatError, dumps, loads, take
from ._errors import BuildError
from ._store import DoubtfulError, UnusableError, cache_root, make_private, read_private, temporary, write_atomic

__all__ = ["CacheKey", "CompileCache", "cache_root"]

_SCHEMA = 1
_COMMIT = "commit.json"
_COMMIT_LIMIT = 16 << 20
_ABANDONED = 3600.0  # seconds after which a writer's temporary folder counts as a crashed writer's


class CacheKey(NamedTuple):
    """What a compiled result depends on. Every field is JSON; what is left out can serve a stale kernel.

    program    the canonical program: whatever the engine generates the kernel from
    engine     "plugin:engine@revision"
    arch       like "90a"
    toolchain  versions by name, e.g. of the DSL and of ptxas
    """

    program: Any
    engine: str
    arch: str
    toolchain: Mapping[str, str]


class CompileCache:
    """A plugin's compile cache.

    ``max_bytes`` bounds the payloads on disk (and in memory, where the disk can't be used); the least recently used entries
    go first. ``root`` is for tests.
    """

    def __init__(self, plugin: str, *, root: Path | None = None, max_bytes: int = 2 << 30) -> None:
        if not _PLUGIN.fullmatch(plugin):
            raise BuildError(f"{plugin!r} is not a plugin id")
        self.plugin = plugin
        self.max_bytes = max_bytes
        self._root = root

    def __repr__(self) -> str:
        return f"CompileCache({self.plugin!r})"

    def get(self, key: CacheKey | Mapping[str, Any], build: Callable[[], Mapping[str, bytes]]) -> dict[str, bytes]:
        """The payloads of ``key``; ``build()`` makes them if they are not there.

        Threads that ask for one key at a time build it once; an exception of ``build`` reaches its caller, and the next
        thread tries for itself. Processes may build one key twice; the first to finish is kept. Raises BuildError for a key
        or payloads of the wrong form.
        """
        text = _key_text(key)
        name = hashlib.sha256(text.encode()).hexdigest()
        root = self._root or cache_root()
        with _one_at_a_time((str(root), self.plugin, name)):
            folder, reason = self._folder(root)
            found = _read_entry(folder / name, text) if folder else None
            if found is None:
                found = self._recall(str(root), name)
            if found is not None:
                return found
            payloads = _payloads(build())
            if folder:
                try:
                    self._write(folder, name, text, payloads)
                except OSError as error:
                    reason = f"{error.filename or folder}: {error.strerror or error}"
            if reason:
                _log().warning("compile cache of %s keeps an entry in memory: %s", self.plugin, reason)
                self._remember(str(root), name, payloads)
            return payloads

    def _folder(self, root: Path | None) -> tuple[Path | None, str]:
        """The namespace's folder, or None and the reason why there is none."""
        if root is None:
            return None, "there is no home folder"
        try:
            return make_private(root, "compile", f"v{_SCHEMA}", self.plugin), ""
        except UnusableError as error:
            return None, str(error)

    def _recall(self, root: str, name: str) -> dict[str, bytes] | None:
        with _guard:
            entries = _memory.get((root, self.plugin), {})
            if name not in entries:
                return None
            entries[name] = found = entries.pop(name)  # now the most recently used
            return dict(found)

    def _remember(self, root: str, name: str, payloads: Mapping[str, bytes]) -> None:
        with _guard:
            entries = _memory.setdefault((root, self.plugin), {})
            entries[name] = dict(payloads)
            while entries and sum(map(_total, entries.values())) > self.max_bytes:
                del entries[next(iter(entries))]

    def _write(self, folder: Path, name: str, text: str, payloads: Mapping[str, bytes]) -> None:
        if _total(payloads) > self.max_bytes:
            _log().info("compile cache of %s: an entry is larger than the whole cache", self.plugin)
            return
        scratch = temporary(folder)
        scratch.mkdir(mode=0o700)
        try:
            files = []
            for index, (label, data) in enumerate(payloads.items()):
                write_atomic(scratch / str(index), data)
                files.append({"name": label, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
            marker = {"schema": _SCHEMA, "key": loads(text), "files": files}
            write_atomic(scratch / _COMMIT, dumps(marker).encode())
            _publish(scratch, folder / name, text)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._prune(folder, keep=name)

    def _prune(self, folder: Path, keep: str) -> None:
        """Delete the least recently used entries beyond the bound, and what crashed writers have left."""
        entries = []
        for item in os.scandir(folder):
            with contextlib.suppress(OSError):  # another process prunes too
                if item.name.startswith("."):
                    if time.time() - item.stat(follow_symlinks=False).st_mtime > _ABANDONED:
                        shutil.rmtree(item.path, ignore_errors=True)
                    continue
                size = sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(item.path))
                entries.append((_last_used(Path(item.path)), item.name, size))
        total = sum(size for _, _, size in entries)
        for _, name, size in sorted(entries):
            if total <= self.max_bytes:
                break
            if name != keep:
                _discard(folder / name)
                total -= size


# Entries of processes whose disk can't be used: (root, plugin) -> least recently used first.
_memory: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
# One lock per key that is being looked up, with the number of threads that hold or await it.
_flights: dict[tuple[str, str, str], tuple[threading.RLock, int]] = {}
_guard = threading.Lock()


@contextlib.contextmanager
def _one_at_a_time(key: tuple[str, str, str]) -> Iterator[None]:
    with _guard:
        lock, users = _flights.get(key) or (threading.RLock(), 0)
        _flights[key] = (lock, users + 1)
    try:
        with lock:
            yield
    finally:
        with _guard:
            _, users = _flights.pop(key, (lock, 1))  # gone if build() has forked and this is the child
            if users > 1:
                _flights[key] = (lock, users - 1)


def _after_fork() -> None:
    """A child has none of its parent's other threads, so nobody would release the locks that they held."""
    global _guard
    _guard = threading.Lock()
    _flights.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_PLUGIN = re.compile(r"[a-z][a-z0-9_]{0,47}")
_STRINGS = Field(
    "an object of strings",
    lambda value: isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair),
)
_KEY = {"program": ANY, "engine": TEXT, "arch": TEXT, "toolchain": _STRINGS}
_MARKER = {"schema": COUNT, "key": ANY, "files": LIST}
_FILE = {"name": TEXT, "size": COUNT, "sha256": TEXT}


def _key_text(key: CacheKey | Mapping[str, Any]) -> str:
    """The canonical text of a key. Fails closed: what JSON can't say can't be compared."""
    fields = key._asdict() if isinstance(key, CacheKey) else key
    try:
        if not isinstance(fields, Mapping):
            raise FormatError(f"expected a CacheKey or a mapping, got {type(key).__name__}")
        table = dict(fields)
        if isinstance(table.get("toolchain"), Mapping):
            table["toolchain"] = dict(table["toolchain"])
        return dumps(take(table, _KEY, "key"))
    except FormatError as error:
        raise BuildError(f"compile cache: {error}") from None


def _payloads(built: object) -> dict[str, bytes]:
    if not isinstance(built, Mapping):
        raise BuildError(f"compile cache: build() returned {type(built).__name__}, not a mapping of names to bytes")
    for name, data in built.items():
        if not isinstance(name, str) or not name or not isinstance(data, bytes):
            raise BuildError(f"compile cache: build() returned {name!r}: {type(data).__name__}, not a name with bytes")
    return dict(built)


def _read_entry(entry: Path, text: str) -> dict[str, bytes] | None:
    """The payloads, or None for whatever is not certainly this key's complete entry."""
    try:
        if entry.is_symlink():
            raise DoubtfulError("a symbolic link")
        marker = take(loads(read_private(entry / _COMMIT, _COMMIT_LIMIT), _COMMIT_LIMIT), _MARKER, _COMMIT)
        if marker["schema"] != _SCHEMA or dumps(marker["key"]) != text:
            raise FormatError("of another schema or key")
        found = {}
        for index, item in enumerate(marker["files"]):
            row = take(item, _FILE, f"files[{index}]")
            data = read_private(entry / str(index), row["size"])
            if len(data) != row["size"] or hashlib.sha256(data).hexdigest() != row["sha256"] or row["name"] in found:
                raise FormatError(f"payload {row['name']!r} is damaged")
            found[row["name"]] = data
    except FileNotFoundError:
        if entry.is_dir():
            _log().warning("compile cache entry ignored: %s: incomplete", entry)
        return None
    except (DoubtfulError, FormatError, OSError) as error:
        _log().warning("compile cache entry ignored: %s: %s", entry, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(entry / _COMMIT)  # the time of last use, for pruning
    return found


def _publish(scratch: Path, entry: Path, text: str) -> None:
    """Rename the finished folder into place. A sound entry that is there already stays; anything else makes room."""
    try:
        scratch.rename(entry)
    except OSError:
        if not os.path.lexists(entry):
            raise
        if _read_entry(entry, text) is None:
            _discard(entry)
            scratch.rename(entry)


def _discard(entry: Path) -> None:
    """Delete an entry such that no reader sees half of it."""
    trash = temporary(entry.parent)
    with contextlib.suppress(OSError):
        entry.rename(trash)
        if trash.is_dir() and not trash.is_symlink():
            shutil.rmtree(trash, ignore_errors=True)
        else:
            trash.unlink()


def _last_used(entry: Path) -> float:
    try:
        return (entry / _COMMIT).stat().st_mtime
    except OSError:
        return 0.0


def _total(payloads: Mapping[str, bytes]) -> int:
    return sum(map(len, payloads.values()))


def _log() -> logging.Logger:
    return logging.getLogger("cudnn_core")
