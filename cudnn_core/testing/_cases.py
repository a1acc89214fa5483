"""The case library of the conformance kit: graphs of every op in several shapes, types and layouts.

A ``Case`` builds its graph with the public Graph API, only when it is needed. A plugin passes its own with ``--cudnn-cases
module:function``, where the function returns Cases (or (name, Graph) pairs). ``_library`` has the list; imported by the kit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph
    from .._graph._graph import Graph

__all__ = ["Case", "as_cases"]


class Case:
    """One graph for the kit.

    name     readable and unique: it is part of the test's id
    build    makes the Graph
    op       what it is filed under; default: the first word of ``name``
    sizes    values of the runtime sizes, one run for each entry
    values   input name -> its values as nested sequences (indices, lengths), instead of random ones
    domain   input name -> (low, high): random values are uniform in it instead of standard normal
    special  whether NaN, infinities and subnormals make sense as inputs: True, False, or the names of those inputs
    full     only at ``--cudnn-level full``
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Graph],
        *,
        op: str = "",
        sizes: Iterable[Mapping[str, int]] = ({},),
        values: Mapping[str, Any] | None = None,
        domain: Mapping[str, tuple[float, float]] | None = None,
        special: bool | Iterable[str] = False,
        full: bool = False,
    ) -> None:
        self.name = name
        self.build = build
        self.op = op or name.partition("-")[0]
        self.sizes = tuple(dict(size) for size in sizes)
        self.values = dict(values or {})
        self.domain = dict(domain or {})
        self.special = special if isinstance(special, bool) else tuple(special)
        self.full = full
        self._graph: Graph | None = None

    def __repr__(self) -> str:
        return f"<case {self.name}>"

    @property
    def graph(self) -> Graph:
        """The graph, built once."""
        if self._graph is None:
            self._graph = self.build()
        return self._graph

    def copy(self) -> Case:
        """The same case with a graph of its own: an engine that changes its graph must not change another's."""
        return Case(
            self.name,
            self.build,
            op=self.op,
            sizes=self.sizes,
            values=self.values,
            domain=self.domain,
            special=self.special,
            full=self.full,
        )

    def freeze(self, device_type: str = "cpu") -> FrozenGraph:
        return self.graph.freeze(device_type)


def as_cases(found: Iterable[Any], where: str) -> list[Case]:
    """What a ``--cudnn-cases`` function returned, as Cases. TypeError names what is none."""
    cases = []
    for item in found:
        if isinstance(item, tuple) and len(item) == 2:
            name, graph = item
            item = Case(name, partial(_again, graph))  # noqa: PLW2901
        if not isinstance(item, Case):
            raise TypeError(f"{where} gave {item!r}, which is neither a Case nor a (name, Graph) pair")
        cases.append(item)
    return cases


def _again(graph: Graph) -> Graph:
    return type(graph).from_json(graph.to_json())
