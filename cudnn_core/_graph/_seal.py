"""The fields of a frozen graph, kept to be compared and put back: engines share one graph, and ``object.__setattr__`` is open
to each of them. Imported by the frozen graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from typing import Any

__all__ = ["Seal"]


class Seal:
    """What ``root`` and its ``parts``, objects with slots, hold, by identity. Made while nobody else has seen them.

    The root, which keeps the seal in its slot ``_seal``, is passed to ``mend`` again: held here, it would be a cycle.
    """

    __slots__ = ("_held", "_root")

    def __init__(self, root: object, parts: Iterable[object]) -> None:
        readers: dict[type, _Reader] = {}

        def held(item: Any) -> tuple[_Reader, tuple[Any, ...]]:
            kind = type(item)
            if kind not in readers:
                readers[kind] = _reader(kind)
            return readers[kind], readers[kind][1](item)

        self._root = held(root)
        self._held = tuple((item, *held(item)) for item in parts)

    def mend(self, root: object) -> str:
        """Put back every field that is another object now; says which, as ``repr.field``, of the last, or ""."""
        changed = ""
        for item, (names, read), fields in (*self._held, (root, *self._root)):
            try:
                if all(map(is_, read(item), fields)):
                    continue
            except AttributeError:  # deleted
                pass
            for name, value in zip(names, fields, strict=True):
                if getattr(item, name, _GONE) is not value:
                    object.__setattr__(item, name, value)
                    changed = f"{item!r}.{name}"
        return changed


_GONE = object()
_Reader = tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]


def _reader(kind: Any) -> _Reader:
    names = tuple(name for name in kind.__slots__ if name != "_seal")
    return names, attrgetter(*names)
