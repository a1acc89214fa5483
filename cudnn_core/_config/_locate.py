"""Finds the line of a key in TOML text: a scan of headers and keys, because the parser keeps no positions.

``Lines(text).of(path)`` is a line number or None. The text has passed the parser already, so the scan checks nothing;
where it loses its way it stops, and what it has not placed is reported by the file's name alone.
Imported by the layer reader.
"""

from __future__ import annotations

import re

__all__ = ["Lines", "Path"]

# Keys from the root; an int is the position in an array of tables.
Path = tuple["str | int", ...]

_KEY = re.compile(r"""[ \t]*(?:([A-Za-z0-9_-]+)|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')[ \t]*""")
# What a value is made of: whole strings (so that their content is never taken for syntax), comments, brackets, the rest.
_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}\n]"
    r"""|[^\[\]{}\n"'#]+""",
    re.DOTALL,
)


class Lines:
    """Where the keys of one TOML document stand."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        # path -> (line of the key, where its value starts and ends)
        self._keys: dict[Path, tuple[int, int, int]] = {}
        self._scan()

    def of(self, path: Path, value: object = None) -> int | None:
        """The line of ``path``, or of the nearest table or key above it that has one; None if there is none.

        With a string ``value``, the line inside the key's value on which that string stands, if it is there once.
        """
        while path and path not in self._keys:
            path = path[:-1]
        if not path:
            return None
        line, start, end = self._keys[path]
        if isinstance(value, str):
            span = self._text[start:end]
            places = [span.find(quoted) for quoted in (f'"{value}"', f"'{value}'") if span.count(quoted) == 1]
            if len(places) == 1:
                return line + span.count("\n", 0, places[0])
        return line

    def _scan(self) -> None:
        text, offset, line = self._text, 0, 1
        table: Path = ()
        arrays: dict[Path, int] = {}
        while offset < len(text):
            start = offset
            while offset < len(text) and text[offset] in " \t":
                offset += 1
            if offset < len(text) and text[offset] in "#\n":
                offset = _line_end(text, offset)
            elif text.startswith("[", offset):
                double = text.startswith("[[", offset)
                keys, offset = _keys(text, offset + 1 + double)
                if not keys or not text.startswith("]", offset):
                    return
                table = _resolve(keys, arrays)
                if double:
                    arrays[table] = arrays.get(table, -1) + 1
                    table = (*table, arrays[table])
                offset = _line_end(text, offset)
                for depth in range(1, len(table) + 1):
                    self._keys.setdefault(table[:depth], (line, start, start))
            elif offset < len(text):
                keys, offset = _keys(text, offset)
                if not keys or not text.startswith("=", offset):
                    return
                end = _value_end(text, offset + 1)
                if end is None:
                    return
                for depth in range(1, len(keys) + 1):
                    self._keys.setdefault((*table, *keys[:depth]), (line, offset, end))
                offset = end
            line += text.count("\n", start, offset)


def _keys(text: str, offset: int) -> tuple[Path, int]:
    """A dotted key at ``offset``, and where it ends; () if it can't be read."""
    keys: list[str] = []
    while (matched := _KEY.match(text, offset)) is not None:
        bare, basic, literal = matched.groups()
        if basic is not None and "\\" in basic:
            return (), offset
        keys.append(bare if bare is not None else basic if basic is not None else literal)
        offset = matched.end()
        if not text.startswith(".", offset):
            return tuple(keys), offset
        offset += 1
    return (), offset


def _resolve(keys: Path, arrays: dict[Path, int]) -> Path:
    """``keys`` with the current index behind every array of tables that they pass through."""
    path: Path = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if position < len(keys) - 1 and path in arrays:
            path = (*path, arrays[path])
    return path


def _line_end(text: str, offset: int) -> int:
    end = text.find("\n", offset)
    return len(text) if end < 0 else end + 1


def _value_end(text: str, offset: int) -> int | None:
    """Where the line after the value at ``offset`` starts, or None if the scan is lost."""
    depth = 0
    while offset < len(text):
        matched = _PIECE.match(text, offset)
        if matched is None:
            return None
        piece, offset = matched[0], matched.end()
        if piece in ("[", "{"):
            depth += 1
        elif piece in ("]", "}"):
            depth -= 1
        elif piece == "\n" and depth <= 0:
            return offset
    return offset
