"""Private directories and atomic files: what keeps a cache from reading another user's bytes.

A store is a folder of mode 0700 that belongs to this user, with no symbolic link at or below its root. There is no fallback
to /tmp: a folder that can't be had is ``UnusableError``, and the caller goes without. Imported by the compile cache and the
tuning records.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "DoubtfulError",
    "UnusableError",
    "cache_root",
    "locked",
    "make_private",
    "read_private",
    "temporary",
    "write_atomic",
]

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class UnusableError(Exception):
    """A folder can't be made, or is not this user's alone; the message says which and why."""


class DoubtfulError(Exception):
    """A file is there, and is not to be trusted; the message says why."""


def cache_root() -> Path | None:
    """The folder of all caches: ``cudnn_core`` in the configured folder, in $XDG_CACHE_HOME or in ~/.cache.

    The configuration's ``cache_dir`` includes CUDNN_CORE_CACHE_DIR. A relative $XDG_CACHE_HOME is ignored, as its
    specification demands. None if there is no home folder either.
    """
    from ._config import current

    configured = current().cache_dir
    home = "~/.cache" if os.environ.get("HOME") != "" else None  # an empty HOME would make it /.cache
    candidates = [configured, _absolute(os.environ.get("XDG_CACHE_HOME")), _absolute(home)]
    base = next((candidate for candidate in candidates if candidate), None)
    return Path(base).expanduser() / "cudnn_core" if base else None


def make_private(root: Path, *parts: str) -> Path:
    """The folder ``root/parts``, made if need be, each level below ``root``'s parent private. Raises UnusableError.

    ``root``'s parent may be reached through symbolic links (a ~/.cache on another disk); nothing from ``root`` down may.
    """
    if not root.is_absolute():
        raise UnusableError(f"{root} is a relative path")
    try:
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = root.parent.resolve(strict=True) / root.name
        _private(folder)
        for part in parts:
            folder = folder / part
            _private(folder)
    except OSError as error:
        raise UnusableError(f"{error.filename or root}: {error.strerror or error}") from None
    return folder


def read_private(path: Path, limit: int) -> bytes:
    """The bytes of ``path``. Raises FileNotFoundError, or DoubtfulError for a link, a foreign, a writable or a large file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DoubtfulError(f"{path}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DoubtfulError(f"{path}: not a regular file")
        _own(path, status, DoubtfulError)
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise DoubtfulError(f"{path}: {error.strerror}") from None
    if len(data) > limit:
        raise DoubtfulError(f"{path}: larger than {limit} bytes")
    return data


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``path`` so that a reader sees the old file or the new one, whole. Raises OSError."""
    scratch = temporary(path.parent)
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def temporary(folder: Path) -> Path:
    """A name in ``folder`` that no one else uses; names with this prefix are never read as entries."""
    return folder / f".tmp-{os.getpid()}-{uuid.uuid4().hex}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the advisory lock file ``path`` against other processes, where the platform has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _absolute(text: str | None) -> str | None:
    path = os.path.expanduser(text) if text else ""  # noqa: PTH111 (Path.expanduser raises without a home)
    return path if os.path.isabs(path) else None  # noqa: PTH117


def _private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UnusableError(f"{folder}: a symbolic link")
    if not stat.S_ISDIR(status.st_mode):
        raise UnusableError(f"{folder}: not a folder")
    _own(folder, status, UnusableError)
    if stat.S_IMODE(status.st_mode) & 0o077 and hasattr(os, "geteuid"):
        folder.chmod(0o700)  # ours and writable by us alone, so nobody can have put anything into it


def _own(path: Path, status: os.stat_result, error: type[Exception]) -> None:
    """Raises ``error`` unless the file belongs to this user and nobody else may write it."""
    if not hasattr(os, "geteuid"):
        return  # no owners and modes on this platform
    if status.st_uid != os.geteuid():
        raise error(f"{path}: belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o022:
        raise error(f"{path}: others may write it (mode {stat.S_IMODE(status.st_mode):04o})")
