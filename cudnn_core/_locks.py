"""Locks that survive a fork. Imported by the registry's records, the building of plans and the graph."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from weakref import WeakSet

__all__ = ["ForkLock"]


class ForkLock:
    """A re-entrant lock for ``with``. A forked child finds it free: the thread that held it exists in the parent only. A copy
    of an object that has one gets a lock of its own."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _live.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        with suppress(RuntimeError):  # acquired before a fork inside the block, which made a new lock
            self._lock.release()

    def __reduce__(self) -> tuple[type[ForkLock], tuple[()]]:
        return ForkLock, ()


_live: WeakSet[ForkLock] = WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_live):
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
