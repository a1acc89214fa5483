"""Work in a process of its own, whose steps have a limit of time: what hangs in a compiler or on a GPU ends with that process.

``watched(work, arguments, seconds)`` gives what the generator ``work(*arguments, step)`` gives. ``work`` calls ``step(name)`` where a
part begins that may hang, and ``step("")`` where one begins that may not: the limit is each part's own. Used by linear_attention.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

__all__ = ["Stopped", "watched"]

Step = Callable[[str], None]
_STEP, _FOUND, _RAISED, _DONE = "step", "found", "raised", "done"


class Stopped(NamedTuple):
    """In which step the process was stopped, ended by itself or raised, and why."""

    step: str
    reason: str


def watched(work: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], seconds: float) -> Iterator[Any]:
    """``work`` is a function of a module, and what goes in and out can be pickled. The last thing given is ``Stopped`` where not all was.

    With ``seconds`` of 0, ``work`` runs in this process, without a limit, and raises what it raises.
    """
    if not seconds:
        yield from work(*arguments, lambda name: None)
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield from _told(ours, process, seconds)
    finally:
        process.kill()
        process.join()
        ours.close()


def _told(connection: Connection, process: Any, seconds: float) -> Iterator[Any]:
    name, end = "", None
    while True:
        if not connection.poll(None if end is None else max(0.0, end - time.monotonic())):
            _ask_where(process)
            yield Stopped(name, f"took longer than {seconds:g} s")
            return
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            process.join()
            yield Stopped(name, f"its process ended with status {process.exitcode}")
            return
        if kind == _DONE:
            return
        if kind == _STEP:
            name, end = value, time.monotonic() + seconds if value else None
        elif kind == _RAISED:
            yield Stopped(name, value)
            return
        else:
            yield value


def _ask_where(process: Any) -> None:
    """The process prints on stderr what its threads are at, which says more than that it hangs."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
            process.join(0.5)


def _run(connection: Connection, work: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]) -> None:
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    try:
        for found in work(*arguments, lambda name: connection.send((_STEP, name))):
            connection.send((_FOUND, found))
        connection.send((_DONE, None))
    except Exception as error:  # the process that waits tells it
        traceback.print_exc()
        connection.send((_RAISED, f"{type(error).__name__}: {error}"[:300]))
    finally:
        connection.close()
