"""What an op row is. Imported by the op table, the graph and the plugins that add ops.

A row is data plus four small functions of a *node*: anything with ``inputs`` and ``outputs`` (port -> tensor, a tuple of
tensors for a variadic port; absent optional ports are absent keys) and ``attrs`` (complete after defaults). Tensors have
``dim``, ``stride``, ``dtype`` (a member of data_type) and ``name``; while a graph is being built ``dim`` and ``stride``
may be None and ``dtype`` NOT_SET. A row that is malformed raises ManifestError when it is made; functions that raise, or
answer something else than they should, come out as GraphErrors that name the op (see ``_guard``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from .._dims import Extent
from .._errors import GraphError, ManifestError
from ._attrs import canonical
from ._guard import call, check_row, dims_answer, guarded, in_place_answer, infer_answer, problems_answer

__all__ = ["REQUIRED", "Attr", "Cost", "Node", "Op", "Param", "Port", "Problem", "Tensor", "TensorSpec"]


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


class Tensor(Protocol):
    """What op functions may read of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def dim(self) -> tuple[Extent, ...] | None: ...
    @property
    def stride(self) -> tuple[Extent, ...] | None: ...


class Node(Protocol):
    """What op functions may read of a node."""

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def outputs(self) -> Mapping[str, Any]: ...
    @property
    def attrs(self) -> Mapping[str, Any]: ...


class Port(NamedTuple):
    """An input or output of an op.

    optional  the port may be absent
    variadic  the port takes a tuple of tensors
    data      its data type counts for a manifest's ``dtypes`` (not: indices, lengths, statistics)
    when      outputs: whether the port exists, from the attributes (None: always)
    """

    name: str
    optional: bool = False
    variadic: bool = False
    data: bool = True
    when: Callable[[Mapping[str, Any]], bool] | None = None


class Attr(NamedTuple):
    """An attribute. ``type`` is one of int float bool str ints floats dtype enum json; ``choices`` for enum.

    ``default`` REQUIRED means that there is none. Floats may be any Python number. None is admissible iff it is the
    default.
    """

    name: str
    type: str
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()


class Param(NamedTuple):
    """A parameter of the builder method: by default it fills the port or attribute of its own name.

    to           another port or attribute ("" is the same name; "-" is left to the row's ``prepare``)
    keyword_only the frontend takes it by keyword only
    """

    name: str
    default: Any = REQUIRED
    to: str = ""
    keyword_only: bool = False


class TensorSpec(NamedTuple):
    """What inference says of an output; None leaves the field to the user or to the default rule.

    Default rules: strides are packed row-major; the data type is the graph's io or intermediate type.
    """

    dim: tuple[Extent, ...] | None = None
    stride: tuple[Extent, ...] | None = None
    dtype: str | None = None


class Problem(NamedTuple):
    """One finding of a row's ``validate``."""

    port: str
    message: str
    expected: object = None
    actual: object = None


class Cost(NamedTuple):
    """Work of one node at fixed sizes: floating-point operations, and bytes read and written once each.

    ``tensor`` says whether the operations can run on tensor cores, at the rate of ``dtype``.
    """

    flops: float
    bytes: float
    tensor: bool = False
    dtype: str = "float32"


def _nothing(node: Node) -> Iterable[Problem]:
    return ()


def _no_dims(node: Node) -> Mapping[str, Extent]:
    return {}


class Op:
    """One row of the op table.

    name       the op's name in graphs, manifests and configuration
    group      ``pointwise``, ``norm``, ``conv``, ``sdpa``, ... ("" for none); manifests may name it instead of the op
    inputs     input ports in canonical order; outputs likewise
    attrs      attributes
    infer      node -> {output port: TensorSpec}: what follows from the inputs. Values that the user has set are checked
               against it, not overwritten
    validate   node -> problems; called when every dim, stride and dtype is known
    dims       node -> {name: size}: names for configuration rules (``m n k batch``)
    operands   rule name -> port (``A B C``)
    cost       frozen node with int sizes -> Cost; None: bytes of the operands, no flops
    builders   method name -> (params, prepare). ``prepare(graph, arguments) -> {port or attr: value}`` rewrites the
               bound arguments where a name alone can't say it; None: by the params' names
    reference  "module:function" of a PyTorch reference for a plugin's own op (see docs/writing-an-engine.md)
    alias      (output port, input port) pairs that may share memory exactly, if layouts and types are equal
    updates    boolean attribute -> one of these pairs: if it is set, the output is the input, updated. What the op does not
               write keeps the input's values
    in_place   frozen node with int sizes -> (output port, input port, position in a variadic port, offset in elements):
               inputs that may lie inside an output's memory, at this offset
    doc        one sentence, then shapes; shown as the builder's docstring
    """

    __slots__ = (
        "alias",
        "attrs",
        "builders",
        "cost",
        "dims",
        "doc",
        "group",
        "in_place",
        "infer",
        "inputs",
        "name",
        "operands",
        "outputs",
        "reference",
        "updates",
        "validate",
    )

    def __init__(
        self,
        name: str,
        *,
        inputs: tuple[Port, ...],
        outputs: tuple[Port, ...],
        infer: Callable[[Node], Mapping[str, TensorSpec]],
        attrs: tuple[Attr, ...] = (),
        group: str = "",
        validate: Callable[[Node], Iterable[Problem]] = _nothing,
        dims: Callable[[Node], Mapping[str, Extent]] = _no_dims,
        operands: Mapping[str, str] | None = None,
        cost: Callable[[Node], Cost] | None = None,
        builders: Mapping[str, tuple[tuple[Param, ...], Callable[..., dict[str, Any]] | None]] | None = None,
        reference: str = "",
        alias: tuple[tuple[str, str], ...] = (),
        updates: Mapping[str, tuple[str, str]] | None = None,
        in_place: Callable[[Any], Iterable[tuple[str, str, int, int]]] | None = None,
        doc: str = "",
    ) -> None:
        self.name = name
        self.group = group
        self.inputs = inputs
        self.outputs = outputs
        self.attrs = attrs
        self.operands = operands or {}
        self.cost = cost
        self.builders = builders or {}
        self.reference = reference
        self.alias = alias
        self.updates = updates or {}
        self.doc = doc
        check_row(self)
        try:
            self.attrs = tuple(
                attr
                if attr.default is REQUIRED or attr.default is None
                else attr._replace(default=canonical(attr, attr.default, name))
                for attr in attrs
            )
        except GraphError as error:
            raise ManifestError(f"default of {error}", subject=f"op.{name}") from None
        ports = frozenset(port.name for port in outputs)
        self.infer = guarded(name, "infer", infer, infer_answer(ports))
        self.validate = guarded(name, "validate", validate, problems_answer)
        # Configuration rules and shared memory can do without an answer.
        self.dims = guarded(name, "dims", dims, dims_answer, instead={})
        self.in_place = None if in_place is None else guarded(name, "in_place", in_place, in_place_answer, instead=())

    def __repr__(self) -> str:
        return f"Op({self.name!r})"

    def has_output(self, port: Port, attrs: Mapping[str, Any]) -> bool:
        """Whether an output exists unless the caller supplies it: from the attributes."""
        if port.optional or port.when is None:
            return not port.optional
        return bool(call(self.name, f"when of {port.name}", port.when, lambda answer, _: answer, attrs))
