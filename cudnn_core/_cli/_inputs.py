"""Input values for a graph: random ones that its ops can take, or arrays from an .npz file. Imported by run and bench.

Everything is the bytes of an operand's storage (numpy uint8), so that strides, packed types and reordered layouts need no
case of their own: two engines that read the same bytes are given the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._dtypes import bits, is_float
from .._errors import ExecutionError
from .._ops._table import lookup
from .._slot import extent_bytes
from ..testing._codec import code_dtype, decode, encode
from ._output import EnvironmentProblem, UsageProblem, note

if TYPE_CHECKING:
    from .._graph._frozen import FrozenGraph, FrozenNode, FrozenTensor

__all__ = ["blank", "load_arrays", "make_inputs", "need_numpy", "restrided", "sizes_from_arrays", "values_of"]

Array = Any  # a numpy array; numpy is imported when a verb needs it

# Vectors of bytes are bytes here: int8x4 is four int8 elements.
_VECTORS = {"int8x4": ("int8", 4), "uint8x4": ("uint8", 4), "int8x32": ("int8", 32)}


def need_numpy() -> None:
    """EnvironmentProblem unless numpy is installed; the core itself works without it."""
    from importlib.util import find_spec

    if find_spec("numpy") is None:
        raise EnvironmentProblem("this verb needs numpy: pip install numpy")


def blank(tensor: FrozenTensor) -> Array:
    """Storage of a tensor with fixed sizes, all bits set (NaN for a float): what was never written shows."""
    import numpy as np

    return np.full(_extent(tensor), 0xFF, dtype=np.uint8)


def restrided(storage: Array, source: FrozenTensor, target: FrozenTensor) -> Array:
    """Storage of ``target``, which has the sizes and the type of ``source``, with its values."""
    from ..testing._memory import Layout

    dim: Any = source.dim
    stride: Any = source.stride
    return _place(target, Layout(str(source.dtype), dim, stride).read(storage, 0))


def values_of(storage: Array, dtype: str) -> Array:
    """The fp64 value of every element in ``storage``, gaps included, in memory order."""
    import numpy as np

    dtype, _ = _VECTORS.get(dtype, (dtype, 1))
    if bits(dtype) == 4:
        return decode(np.stack([storage & 15, storage >> 4], axis=1).reshape(-1), dtype)
    return decode(storage.view(code_dtype(dtype)), dtype)


def make_inputs(graph: FrozenGraph, seed: int, arrays: Mapping[str, Any] | None = None) -> dict[int, Array]:
    """uid -> storage of every input of ``graph``, whose sizes are fixed; random without ``arrays``."""
    import numpy as np

    if arrays is not None:
        return _from_arrays(graph, arrays)
    ragged = {tensor.ragged_offset.uid: tensor for tensor in graph.tensors if tensor.ragged_offset is not None}
    made = {}
    for index, tensor in enumerate(graph.operand_tensors()):
        if tensor.role == "input":
            generator = np.random.default_rng([seed, index])
            values = _values(graph, tensor, _elements(tensor), ragged.get(tensor.uid), generator)
            made[tensor.uid] = _storage(tensor, values)
    return made


def load_arrays(name: str) -> dict[str, Any]:
    """The arrays of an .npz file; pickled objects are refused."""
    import zipfile

    import numpy as np

    try:
        with Path(name).open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise UsageProblem(f"inputs {name}: not an .npz file (numpy.savez writes one)")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {key: _without_objects(name, key, archive) for key in archive.files}
    except UsageProblem:
        raise
    except OSError as error:
        raise UsageProblem(f"inputs {name}: {error.strerror or error}") from None
    except Exception as error:  # zipfile.BadZipFile, zlib.error: whatever a damaged archive raises
        raise UsageProblem(f"inputs {name}: a damaged archive: {type(error).__name__}: {error}") from None


def _without_objects(name: str, key: str, archive: Any) -> Array:
    """One array of an archive. numpy's own advice for one of Python objects is to unpickle it, which runs code."""
    try:
        found = archive[key]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise UsageProblem(f"inputs {name}: {key} holds Python objects, which are never loaded") from None
        raise
    if not hasattr(found, "dtype"):
        raise UsageProblem(f"inputs {name}: {key} is not an array")
    return found


def sizes_from_arrays(graph: FrozenGraph, arrays: Mapping[str, Any]) -> dict[str, int]:
    """The runtime sizes that the arrays' shapes have."""
    from .._dims import match_sizes

    sizes: dict[str, int] = {}
    for tensor in graph.operand_tensors():
        array = _array_for(tensor, arrays)
        if array is not None and graph.dims:
            try:
                match_sizes(tensor.dim, tuple(array.shape), sizes, tensor.name or str(tensor.uid))
            except ExecutionError as error:
                raise UsageProblem(f"inputs: {error}") from None
    return sizes


# --- given arrays
def _from_arrays(graph: FrozenGraph, arrays: Mapping[str, Any]) -> dict[int, Array]:
    made, used = {}, set()
    inputs = [tensor for tensor in graph.operand_tensors() if tensor.role == "input"]
    for tensor in inputs:
        label = tensor.name or str(tensor.uid)
        array = _array_for(tensor, arrays)
        if array is None:
            have = ", ".join(arrays) or "none"
            raise UsageProblem(f"inputs: no array for {label} (uid {tensor.uid}); the file has {have}")
        used |= {label, str(tensor.uid)}
        if tuple(array.shape) != tensor.dim:
            raise UsageProblem(f"inputs: {label} has shape {tuple(array.shape)}, the graph says {tensor.dim}")
        made[tensor.uid] = _place(tensor, _codes(tensor, array, label))
    extra = [key for key in arrays if key not in used]
    if extra:
        names = ", ".join(tensor.name or str(tensor.uid) for tensor in inputs)
        raise UsageProblem(f"inputs: the graph has no input {extra[0]!r} (it has: {names})")
    return made


def _array_for(tensor: FrozenTensor, arrays: Mapping[str, Any]) -> Any:
    for key in (tensor.name, str(tensor.uid)):
        if key and key in arrays:
            return arrays[key]
    return None


def _codes(tensor: FrozenTensor, array: Array, label: str) -> Array:
    """The codes of a given array: of its own bits where it has the type or an opaque one of its width, else rounded."""
    import numpy as np

    dtype = str(tensor.dtype)
    if dtype in _VECTORS or tensor.reordering != "NONE":
        raise UsageProblem(
            f"inputs: {label} is {dtype} with reordering {tensor.reordering}: only random values serve it"
        )
    width = code_dtype(dtype)
    if str(array.dtype) in (dtype, "bool") or (array.dtype.kind == "V" and array.dtype.itemsize == width.itemsize):
        return np.ascontiguousarray(array).view(width)
    if array.dtype.kind not in "fiub":
        raise UsageProblem(f"inputs: {label} has the type {array.dtype}, the graph says {dtype}")
    if array.dtype == width and is_float(dtype) and dtype not in ("float64", "float32", "float16"):
        return np.ascontiguousarray(array)  # bfloat16 as uint16, fp8 as uint8: numpy has no other way to say it
    if is_float(dtype) == (array.dtype.kind == "f"):
        codes = encode(array, dtype)
        if array.dtype.kind == "f" and not _same_values(array, decode(codes, dtype)):
            note(f"inputs: {label} is {array.dtype} and was rounded to {dtype}")
        return codes
    raise UsageProblem(f"inputs: {label} has the type {array.dtype}, the graph says {dtype}")


def _same_values(given: Array, kept: Array) -> bool:
    import numpy as np

    return bool(np.array_equal(given.astype("float64").ravel(), kept.astype("float64").ravel(), equal_nan=True))


def _place(tensor: FrozenTensor, codes: Array) -> Array:
    """Storage with the codes at the tensor's strides."""
    import numpy as np

    from ..testing._memory import Layout

    dim: Any = tensor.dim
    stride: Any = tensor.stride
    storage: Array = np.zeros(_extent(tensor), dtype=np.uint8)
    if storage.size:
        Layout(str(tensor.dtype), dim, stride).write(storage, 0, codes.reshape(dim))
    return storage


# --- random values
def _values(graph: FrozenGraph, tensor: FrozenTensor, count: int, ragged: FrozenTensor | None, generator: Any) -> Array:
    """``count`` values that suit every op that reads the tensor."""
    import numpy as np

    if ragged is not None:  # every batch entry at its dense place
        step: Any = ragged.stride[0]
        return np.arange(count) * (step // max(ragged.ragged_offset_multiplier, 1))
    for node_index, port in tensor.consumers:
        node = graph.nodes[node_index]
        if port in _INDICES:
            return _INDICES[port](node, tensor, count)
        if port in _CONSTANTS:
            return np.full(count, _CONSTANTS[port])
        special = _OF_GROUP.get(lookup(node.op).group, {}).get(port)
        if special is not None:
            return special(node, tensor, count, generator)
        if port in _POSITIVE or (node.op, port) in _POSITIVE_OF:
            return generator.uniform(0.5, 1.5, count)
    dtype = _VECTORS.get(str(tensor.dtype), (str(tensor.dtype), 1))[0]
    if is_float(dtype):
        return generator.standard_normal(count)
    return generator.integers(0 if dtype in ("uint8", "boolean") else -4, 2 if dtype == "boolean" else 5, count)


# What a port that takes no data can't do without. Scalars first.
_CONSTANTS = {"epsilon": 1e-5, "attn_scale": 0.125, "dropout_scale": 1.0, "seed": 1, "offset": 0, "block_mask": 255}
_POSITIVE = ("descale", "inv_variance", "beta", "dropout_mask", "top_k_scores")
_POSITIVE_OF = {
    ("div", "in1"),
    ("log", "in0"),
    ("mod", "in1"),
    ("pow", "in0"),
    ("reciprocal", "in0"),
    ("rsqrt", "in0"),
    ("sqrt", "in0"),
}


def _gates(node: FrozenNode, tensor: FrozenTensor, count: int, generator: Any) -> Array:
    """Of linear attention: logarithms of decays, decays, or logits."""
    if node.attrs.get("safe_gate"):
        return generator.standard_normal(count)
    linear = node.attrs.get("gate_domain") == "linear"
    return generator.uniform(0.5, 1.0, count) if linear else -generator.uniform(0.0, 1.0, count)


def _weights(node: FrozenNode, tensor: FrozenTensor, count: int, generator: Any) -> Array:
    """Of linear attention's updates: from 0 to 1, or logits."""
    return (
        generator.standard_normal(count) if node.attrs.get("use_beta_sigmoid") else generator.uniform(0.0, 1.0, count)
    )


def _keys(node: FrozenNode, tensor: FrozenTensor, count: int, generator: Any) -> Array:
    """Of linear attention, of length 1: an update with a longer one makes states grow with every token."""
    import numpy as np

    from ..testing._memory import Layout

    values = generator.standard_normal(count)
    if not node.attrs.get("use_qk_l2norm"):
        dim: Any = tensor.dim
        stride: Any = tensor.stride
        offsets = Layout(str(tensor.dtype), dim, stride).offsets
        values[offsets] /= np.linalg.norm(values[offsets], axis=-1, keepdims=True)
    return values


# By the group of the op, then by port: what an op takes of its own.
_OF_GROUP: dict[str, dict[str, Any]] = {"linear_attention": {"g": _gates, "beta": _weights, "k": _keys}}


def _lengths(node: FrozenNode, tensor: FrozenTensor, count: int) -> Array:
    """Full sequences of an attention."""
    import numpy as np

    length = node.attrs.get("paged_attention_max_seq_len_kv")
    if tensor.uid == getattr(node.inputs.get("seq_len_q"), "uid", None) or not length:
        length = node.inputs["q" if tensor.uid == getattr(node.inputs.get("seq_len_q"), "uid", None) else "k"].dim[2]
    return np.full(count, length)


def _bounds(total_of: Any) -> Any:
    """Offsets that cut ``total_of(node)`` into equal parts."""

    def make(node: FrozenNode, tensor: FrozenTensor, count: int) -> Array:
        import numpy as np

        total, parts = total_of(node, count)
        return np.minimum(np.arange(count) * total // max(parts, 1), total)

    return make


def _experts(node: FrozenNode, count: int) -> tuple[int, int]:
    rows = node.inputs["token_index"].dim[1] if node.attrs["mode"] == "GATHER" else node.inputs["token"].dim[1]
    experts = node.inputs["weight"].dim[0]
    return rows, count if count % experts == 0 and count > 1 and experts > 1 else count - 1


def _routes(node: FrozenNode, tensor: FrozenTensor, count: int) -> Array:
    """Token indices: in order, each token top_k times where results are scattered."""
    import numpy as np

    if node.attrs["mode"] == "GATHER":
        return np.arange(count) % max(node.inputs["token"].dim[1], 1)
    return np.arange(count) // (node.attrs.get("top_k") or 1)


def _slots(node: FrozenNode, tensor: FrozenTensor, count: int) -> Array:
    import numpy as np

    return np.arange(count) % (node.attrs.get("top_k") or 1)


def _rows(port: str) -> Any:
    """Indices of the rows of another port's tensor, in order."""

    def make(node: FrozenNode, tensor: FrozenTensor, count: int) -> Array:
        import numpy as np

        return np.arange(count) % max(node.inputs[port].dim[0], 1)

    return make


def _groups(node: FrozenNode, count: int) -> tuple[int, int]:
    rows = node.inputs["input"].dim[1]
    groups = node.outputs["Y"].dim[0] if node.op == "reduction" else count - 1
    return rows, groups


_INDICES: dict[str, Any] = {
    "seq_len_q": _lengths,
    "seq_len_kv": _lengths,
    "cu_seq_len_q": _bounds(lambda node, count: (node.inputs["q"].dim[2] * (count - 1), count - 1)),
    "cu_seq_len_kv": _bounds(lambda node, count: (node.inputs["k"].dim[2] * (count - 1), count - 1)),
    "cu_seqlens": _bounds(lambda node, count: (node.inputs["q"].dim[0], count - 1)),
    "first_token_offset": _bounds(_experts),
    "group_offset": _bounds(_groups),
    "token_index": _routes,
    "token_ks": _slots,
    "paged_attention_k_table": _rows("k"),
    "paged_attention_v_table": _rows("v"),
    "state_indices": _rows("initial_state"),
}


def _storage(tensor: FrozenTensor, values: Array) -> Array:
    import numpy as np

    dtype = _VECTORS.get(str(tensor.dtype), (str(tensor.dtype), 1))[0]
    codes = encode(values, dtype)
    if bits(dtype) == 4:
        codes = np.append(codes, np.zeros(len(codes) % 2, codes.dtype)).astype(np.uint8)
        return codes[::2] | (codes[1::2] << 4)
    return np.ascontiguousarray(codes).view(np.uint8)


def _elements(tensor: FrozenTensor) -> int:
    """Elements of the storage, those of a vector type counted singly."""
    dtype, many = _VECTORS.get(str(tensor.dtype), (str(tensor.dtype), 1))
    return 8 * _extent(tensor) // bits(dtype) if many > 1 or bits(dtype) >= 8 else 2 * _extent(tensor)


def _extent(tensor: FrozenTensor) -> int:
    dim: Any = tensor.dim
    stride: Any = tensor.stride
    return extent_bytes(tensor.dtype, dim, stride)
