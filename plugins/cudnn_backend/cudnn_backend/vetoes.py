"""Vetoes: graphs that would crash the backend's planner or kernels. The rows are data (``vetoes.toml``). Imported by ``lower``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_core import Decline, Dim

if TYPE_CHECKING:
    from cudnn_core import DeviceInfo, Extent, FrozenGraph, FrozenNode

__all__ = ["Veto", "load", "parse", "vetoed"]

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_FIELDS = frozenset({"op", "when", "versions", "sm", "effect", "code", "expected"})


class Veto(NamedTuple):
    """A row: see ``vetoes.toml``. ``finds`` gives the subject and the value that it objects to, or None."""

    ops: frozenset[str]
    finds: tuple[Callable[[FrozenNode], tuple[str, object] | None], ...]
    versions: tuple[tuple[str, int], ...]
    sm: frozenset[str]
    effect: str
    code: str
    expected: str

    def hit(self, node: FrozenNode) -> tuple[str, object] | None:
        """(subject, actual) of the first condition, if all of them hold."""
        if not self.ops & {"*", node.op}:
            return None
        found = [find(node) for find in self.finds]
        return None if None in found else found[0]

    def applies(self, device: DeviceInfo, version: int) -> bool:
        """An unknown version (0) might be one that crashes."""
        major, minor = device.compute_capability
        here = not self.sm or f"{major}{minor}" in self.sm
        return here and (version == 0 or all(_COMPARE[sign](version, bound) for sign, bound in self.versions))


def vetoed(graph: FrozenGraph, device: DeviceInfo, version: int) -> tuple[Decline, ...]:
    """The declines of the rows that hold for a graph on a device, with the backend's ``version`` (0: unknown)."""
    hits = graph.facts(_hits)
    return tuple(decline for veto, decline in hits if veto.applies(device, version)) if hits else ()


def _hits(graph: FrozenGraph) -> tuple[tuple[Veto, Decline], ...]:
    found: dict[str, tuple[Veto, Decline]] = {}
    for veto in load():
        for node in graph.nodes:
            hit = veto.hit(node)
            if hit is not None:
                decline = Decline(veto.code, hit[0], veto.expected, hit[1], f"cuDNN: {veto.effect}")
                found.setdefault(repr(decline), (veto, decline))
    return tuple(found.values())


@cache
def load() -> tuple[Veto, ...]:
    """The rows of ``vetoes.toml``."""
    import tomli

    text = files(__package__).joinpath("vetoes.toml").read_text(encoding="utf-8")
    return tuple(parse(row) for row in tomli.loads(text)["veto"])


def parse(row: Mapping[str, Any]) -> Veto:
    """A row of the file as a Veto; ValueError for a field or a condition that does not exist."""
    unknown = set(row) - _FIELDS
    if unknown:
        raise ValueError(f"veto: unknown field {', '.join(sorted(unknown))}")
    return Veto(
        frozenset(row["op"]),
        tuple(_conditions(row["when"])),
        tuple(_version(text.strip()) for text in row["versions"].split(",") if text.strip()),
        frozenset(row.get("sm", ())),
        row["effect"],
        row["code"],
        row["expected"],
    )


def _version(text: str) -> tuple[str, int]:
    """ ">=9.26" -> (">=", 92600)."""
    sign = next((sign for sign in _COMPARE if text.startswith(sign)), None)
    if sign is None:
        raise ValueError(f"veto: {text!r} is no comparison of versions")
    major, minor, patch, *_ = (*map(int, text[len(sign) :].split(".")), 0, 0)
    return sign, major * 10000 + minor * 100 + patch


# Conditions


def _conditions(when: Mapping[str, Any]) -> Iterator[Callable[[FrozenNode], tuple[str, object] | None]]:
    for kind, value in when.items():
        if kind == "extent":
            yield _extent(value)
        elif kind == "attr":
            yield from (_attr(name, *_range(text)) for name, text in value.items())
        elif kind == "is":
            yield from (_is(name, values) for name, values in value.items())
        elif kind == "size":
            yield from (_size(place, *_range(text)) for place, text in value.items())
        elif kind == "absent":
            yield _absent(value)
        else:
            raise ValueError(f"veto: unknown condition {kind!r}")


def _range(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    least = float(low) if low else float("-inf")
    return least, (float(high) if high else float("inf")) if dots else least


def _smallest(size: Extent) -> int:
    if isinstance(size, int):
        return size
    smallest = 1 if isinstance(size, Dim) else size.factor
    for dim in (size,) if isinstance(size, Dim) else size.dims:
        smallest *= dim.smallest
    return smallest


def _extent(extent: int) -> Callable[[FrozenNode], tuple[str, object] | None]:
    def find(node: FrozenNode) -> tuple[str, object] | None:
        for ports in (node.inputs, node.outputs):
            for port, value in ports.items():
                for tensor in value if isinstance(value, tuple) else (value,):
                    if any(_smallest(size) == extent for size in tensor.dim):
                        return f"{node.op}.{port}", [str(size) for size in tensor.dim]
        return None

    return find


def _attr(name: str, low: float, high: float) -> Callable[[FrozenNode], tuple[str, object] | None]:
    def find(node: FrozenNode) -> tuple[str, object] | None:
        value = node.attrs.get(name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        hit = any(low <= number <= high for number in numbers)
        return (f"{node.op}.{name}", list(numbers)) if hit else None

    return find


def _is(name: str, values: list[object]) -> Callable[[FrozenNode], tuple[str, object] | None]:
    def find(node: FrozenNode) -> tuple[str, object] | None:
        value = node.attrs.get(name)
        return (f"{node.op}.{name}", value) if value in values else None

    return find


def _size(place: str, low: float, high: float) -> Callable[[FrozenNode], tuple[str, object] | None]:
    port, _, axis = place.rstrip("]").partition("[")

    def find(node: FrozenNode) -> tuple[str, object] | None:
        size = node.inputs[port].dim[int(axis)]
        return (f"{node.op}.{place}", str(size)) if low <= _smallest(size) <= high else None

    return find


def _absent(ports: list[str]) -> Callable[[FrozenNode], tuple[str, object] | None]:
    def find(node: FrozenNode) -> tuple[str, object] | None:
        return None if any(port in node.inputs for port in ports) else (node.op, "absent")

    return find
