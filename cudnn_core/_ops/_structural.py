"""Rows of the ops that move data without computing: reshape, transpose, slice, concatenate. Imported by the op table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._dims import Extent, same
from .._errors import GraphError
from ._common import (
    TAIL_OUT_DIMS,
    Checks,
    certainly_multiple,
    dim_of,
    elements,
    exact_div,
    is_dense,
    like_strides,
    node_bytes,
    packed_like,
    shape_text,
)
from ._schema import Attr, Cost, Node, Op, Param, Port, Problem, TensorSpec

__all__ = ["ROWS"]


def _dims(node: Node) -> Mapping[str, Extent]:
    return {"elements": elements(node.outputs["Y"])}


def _cost(node: Node) -> Cost:
    return Cost(0.0, node_bytes(node))


def _known(dtype: str) -> str | None:
    return None if dtype == "not_set" else dtype


def _keeps_dtype(check: Checks, port: str = "input") -> None:
    out = check.get("Y")
    tensors = check.get(port)
    for tensor in tensors if isinstance(tensors, tuple | list) else (tensors,):
        check.require(
            tensor.dtype == out.dtype, "Y", f"does not convert: data type differs from {port}", tensor.dtype, out.dtype
        )


# reshape


def _infer_reshape(node: Node) -> Mapping[str, TensorSpec]:
    return {"Y": TensorSpec(dtype=_known(node.inputs["input"].dtype))}


def _validate_reshape(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    _keeps_dtype(check)
    before, after = elements(node.inputs["input"]), elements(node.outputs["Y"])
    check.require(same(before, after), "Y", "number of elements differs from the input", before, after)
    if node.attrs["reshape_mode"] == "VIEW_ONLY":
        for port in ("input", "Y"):
            tensor = check.get(port)
            check.require(
                is_dense(tensor.dim, tensor.stride),
                port,
                "VIEW_ONLY needs a dense tensor (use LOGICAL)",
                "strides without gaps or overlap",
                shape_text(tensor.stride),
            )
    return check.problems


# transpose


def _is_permutation(permutation: Iterable[int], rank: int) -> bool:
    return sorted(permutation) == list(range(rank))


def _infer_transpose(node: Node) -> Mapping[str, TensorSpec]:
    source, dim, permutation = node.inputs["input"], dim_of(node, "input"), node.attrs["permutation"]
    dtype = _known(source.dtype)
    if dim is None or not _is_permutation(permutation, len(dim)):
        return {"Y": TensorSpec(dim, dtype=dtype)}
    moved = tuple(dim[axis] for axis in permutation)
    stride = None if source.stride is None else tuple(source.stride[axis] for axis in permutation)
    if stride is not None and any(
        same(step, 0) and not same(size, 1) for size, step in zip(moved, stride, strict=True)
    ):
        stride = packed_like(moved, stride, moved)  # a broadcast input has no memory of its own to stay in
    return {"Y": TensorSpec(moved, stride, dtype)}


def _validate_transpose(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    _keeps_dtype(check)
    permutation, rank = tuple(node.attrs["permutation"]), len(node.inputs["input"].dim)
    if check.require(
        _is_permutation(permutation, rank),
        "permutation",
        "is not a permutation of the input's axes",
        f"each of 0 to {rank - 1} once",
        permutation,
    ):
        check.inferred(_infer_transpose(node))
    return check.problems


# slice


def _resolve(entry: slice, size: Extent | None) -> list[int | None]:
    """A slice as [start, stop, step]; negative bounds count from the end where the size is known."""
    start, stop, step = entry.start, entry.stop, entry.step
    bounds: list[int | None] = []
    for bound, default in ((start, 0), (stop, size if isinstance(size, int) else None)):
        value = default if bound is None else int(bound)
        if value is not None and value < 0:
            if not isinstance(size, int):
                raise GraphError(
                    "a negative bound needs a size that is known when the slice is built",
                    port="slices",
                    expected="0 or more",
                    actual=value,
                )
            value += size
        bounds.append(value)
    return [*bounds, 1 if step is None else int(step)]


def _prepare_slice(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Python slices -> [[start, stop, step], ...], one for each axis; the stop of a runtime size may be None."""
    source = arguments["input"]
    dim = getattr(source, "dim", None)
    if not isinstance(dim, tuple | list):
        dim = getattr(source, "shape", None)
    entries: list[slice] = []
    for entry in arguments.get("slices") or ():
        if isinstance(entry, slice):
            entries.append(entry)
        elif isinstance(entry, tuple | list) and len(entry) in (2, 3):
            entries.append(slice(*entry))
        else:
            raise GraphError(f"{entry!r} is not a slice", port="slices")
    if dim is not None:
        entries += [slice(None)] * (len(dim) - len(entries))
    sizes: Any = dim if dim is not None and len(dim) == len(entries) else [None] * len(entries)
    resolved = [_resolve(entry, size) for entry, size in zip(entries, sizes, strict=True)]
    return {"input": source, "slices": resolved}


def _bounds(entry: list[Any], size: Extent) -> tuple[int, Extent, int]:
    start, stop, step = entry
    return start or 0, size if stop is None else stop, 1 if step is None else step


def _extent(entry: list[Any], size: Extent) -> Extent | None:
    """Elements that one slice keeps; None where a runtime size makes it inexpressible."""
    start, stop, step = _bounds(entry, size)
    if step < 1:
        return size
    if isinstance(stop, int):
        return max(0, -(-(stop - start) // step))
    return exact_div(stop, step) if start == 0 and certainly_multiple(stop, step) else None


def _infer_slice(node: Node) -> Mapping[str, TensorSpec]:
    source, dim, slices = node.inputs["input"], dim_of(node, "input"), node.attrs["slices"]
    dtype = _known(source.dtype)
    if dim is None or len(slices) != len(dim):
        return {"Y": TensorSpec(dim, dtype=dtype)}
    extents = [_extent(entry, size) for entry, size in zip(slices, dim, strict=True)]
    known = tuple(size for size in extents if size is not None)
    if len(known) < len(extents):
        return {"Y": TensorSpec(dtype=dtype)}
    return {"Y": TensorSpec(known, like_strides(source, known), dtype)}


def _validate_slice(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    _keeps_dtype(check)
    dim, slices = node.inputs["input"].dim, node.attrs["slices"]
    if not check.require(len(slices) == len(dim), "slices", "needs one slice an axis", len(dim), len(slices)):
        return check.problems
    for axis, (entry, size) in enumerate(zip(slices, dim, strict=True)):
        start, stop, step = _bounds(entry, size)
        check.require(step >= 1, "slices", f"axis {axis}: step is not positive", ">= 1", step)
        # A runtime size is in bounds only if its smallest value is.
        limit = size if isinstance(size, int) else getattr(size, "smallest", 1)
        bounded = start <= limit if stop is size else isinstance(stop, int) and start <= stop <= limit
        check.require(
            start >= 0 and bounded, "slices", f"axis {axis}: out of bounds", f"0 <= start <= stop <= {size}", entry
        )
    if not check.problems:
        check.inferred(_infer_slice(node))
    return check.problems


# concatenate


def _infer_concatenate(node: Node) -> Mapping[str, TensorSpec]:
    tensors, axis = node.inputs["inputs"], node.attrs["axis"]
    if not tensors:
        return {"Y": TensorSpec()}
    first = tensors[0]
    dtype = _known(first.dtype)
    dims = [tensor.dim for tensor in tensors]
    if any(dim is None for dim in dims):
        return {"Y": TensorSpec(dtype=dtype)}
    if any(len(dim) != len(dims[0]) for dim in dims) or not 0 <= axis < len(dims[0]):
        return {"Y": TensorSpec(dims[0], dtype=dtype)}
    parts = [dim[axis] for dim in dims]
    if len(parts) > 1 and not all(isinstance(part, int) for part in parts):
        return {"Y": TensorSpec(dtype=dtype)}
    dim = (*dims[0][:axis], sum(parts) if len(parts) > 1 else parts[0], *dims[0][axis + 1 :])
    return {"Y": TensorSpec(dim, like_strides(first, dim), dtype)}


def _validate_concatenate(node: Node) -> Iterable[Problem]:
    check = Checks(node)
    tensors, axis, place = node.inputs["inputs"], node.attrs["axis"], node.attrs["in_place_index"]
    if not check.require(len(tensors) > 0, "inputs", "is empty", "at least one tensor", 0):
        return check.problems
    _keeps_dtype(check, "inputs")
    first = tensors[0].dim
    check.require(0 <= axis < len(first), "axis", "is not an axis of the inputs", f"0 to {len(first) - 1}", axis)
    for index, tensor in enumerate(tensors[1:], 1):
        fits = len(tensor.dim) == len(first) and all(
            at == axis or same(a, b) for at, (a, b) in enumerate(zip(tensor.dim, first, strict=True))
        )
        check.require(
            fits,
            "inputs",
            f"input {index} differs from input 0 on another axis than {axis}",
            shape_text(first),
            shape_text(tensor.dim),
        )
    check.require(
        place is None or 0 <= place < len(tensors),
        "in_place_index",
        "names no input",
        f"0 to {len(tensors) - 1}",
        place,
    )
    if not check.problems:
        check.inferred(_infer_concatenate(node))
    return check.problems


def _in_place(node: Node) -> Iterable[tuple[str, str, int, int]]:
    """The input that already lies in Y: it has Y's strides and starts where the inputs before it end."""
    place, axis = node.attrs["in_place_index"], node.attrs["axis"]
    if place is None or node.inputs["inputs"][place].stride != node.outputs["Y"].stride:
        return ()
    before = sum(tensor.dim[axis] for tensor in node.inputs["inputs"][:place])
    return (("Y", "inputs", place, before * node.outputs["Y"].stride[axis]),)


ROWS: tuple[Op, ...] = (
    Op(
        "reshape",
        inputs=(Port("input"),),
        outputs=(Port("Y"),),
        attrs=(Attr("reshape_mode", "enum", "VIEW_ONLY", ("VIEW_ONLY", "LOGICAL")),),
        infer=_infer_reshape,
        validate=_validate_reshape,
        dims=_dims,
        operands={"A": "input", "C": "Y"},
        cost=_cost,
        builders={"reshape": ((Param("input"), Param("reshape_mode", None), *TAIL_OUT_DIMS), None)},
        doc="Y has the input's elements under another shape, which the caller sets (out_dims or set_dim). VIEW_ONLY "
        "keeps the order in memory: both tensors are dense, and Y's element at memory offset i is the input's at i. "
        "LOGICAL keeps the row-major order of indices, whatever the strides.",
    ),
    Op(
        "transpose",
        inputs=(Port("input"),),
        outputs=(Port("Y"),),
        attrs=(Attr("permutation", "ints"),),
        infer=_infer_transpose,
        validate=_validate_transpose,
        dims=_dims,
        operands={"A": "input", "C": "Y"},
        cost=_cost,
        builders={"transpose": ((Param("input"), Param("permutation"), *TAIL_OUT_DIMS), None)},
        doc="Axis i of Y is axis permutation[i] of the input. Strides are permuted too by default, so that nothing "
        "moves in memory; set Y's stride for another layout.",
    ),
    Op(
        "slice",
        inputs=(Port("input"),),
        outputs=(Port("Y"),),
        attrs=(Attr("slices", "json"),),
        infer=_infer_slice,
        validate=_validate_slice,
        dims=_dims,
        operands={"A": "input", "C": "Y"},
        cost=_cost,
        builders={"slice": ((Param("input"), Param("slices", None), *TAIL_OUT_DIMS), _prepare_slice)},
        doc="Y = input[slices], with Python's slices of positive step; axes that are left out are kept whole. The "
        "attribute is [[start, stop, step], ...], one entry an axis; stop None means the end of a runtime size.",
    ),
    Op(
        "concatenate",
        inputs=(Port("inputs", variadic=True),),
        outputs=(Port("Y"),),
        attrs=(Attr("axis", "int"), Attr("in_place_index", "int", None)),
        infer=_infer_concatenate,
        validate=_validate_concatenate,
        dims=_dims,
        operands={"A": "inputs", "C": "Y"},
        cost=_cost,
        builders={
            "concatenate": (
                (
                    Param("axis"),
                    Param("in_place_index", None),
                    Param("inputs", keyword_only=True),
                    *TAIL_OUT_DIMS,
                ),
                None,
            )
        },
        in_place=_in_place,
        doc="Y = the inputs one after the other along ``axis``; every other axis agrees. ``in_place_index`` says that "
        "this input already lies in its place in Y's memory.",
    ),
)
