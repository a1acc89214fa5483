"""The kit's cases: matmul, pointwise, reductions, norms and structural ops here; attention and the like in ``_library_blocks``.

``library()`` is the whole list. Shapes are small (an oracle in fp64 runs each), tile-sized where engines need whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ._cases import Case

__all__ = ["library", "new_graph"]

SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
}


def library() -> list[Case]:
    """Every built-in case."""
    from ._library_blocks import block_cases

    cases = [*_matmul(), *_epilogues(), *_pointwise(), *_reduction(), *_norm(), *_structural(), *block_cases()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return cases


def new_graph(io: str, compute: str = "float32") -> Any:
    from .._graph._graph import Graph

    return Graph(io_data_type=io, intermediate_data_type=compute, compute_data_type=compute)


def _short(dtype: str) -> str:
    return SHORT.get(dtype, dtype)


def _shape(dim: Sequence[Any]) -> str:
    return "x".join(map(str, dim))


# --- matmul
def _matmul_case(
    name: str,
    a: Sequence[Any],
    b: Sequence[Any],
    io: str = "float32",
    out: str = "",
    compute: str = "",
    a_stride: Sequence[int] | None = None,
    b_stride: Sequence[int] | None = None,
    c_stride: Sequence[int] | None = None,
    **options: Any,
) -> Case:
    compute = compute or ("float64" if io == "float64" else "int32" if io == "int8" else "float32")

    def build() -> Any:
        graph = new_graph(io, compute)
        c = graph.matmul(graph.tensor(a, a_stride, name="a"), graph.tensor(b, b_stride, name="b"))
        c.set_output(True).set_name("c").set_data_type(out or io)
        if c_stride is not None:
            c.set_stride(c_stride)
        return graph

    return Case(f"matmul-{name}", build, **options)


def _matmul() -> Iterator[Case]:
    floats = ("float32", "float64", "float16", "bfloat16")
    for io in floats:
        yield _matmul_case(f"{_short(io)}-17x33x9", (1, 17, 33), (1, 33, 9), io, special=io in ("float32", "bfloat16"))
        yield _matmul_case(f"{_short(io)}-128x256x64", (1, 128, 64), (1, 64, 256), io, full=io == "float64")
    for io in ("bfloat16", "float16"):
        yield _matmul_case(f"{_short(io)}-to-f32-128x128x512", (1, 128, 512), (1, 512, 128), io, "float32")
        yield _matmul_case(
            f"{_short(io)}-k-major-128x128x128", (1, 128, 128), (1, 128, 128), io, b_stride=(128 * 128, 1, 128)
        )
    for io in ("fp8_e4m3", "fp8_e5m2"):
        yield _matmul_case(
            f"{_short(io)}-to-bf16-128x128x128", (1, 128, 128), (1, 128, 128), io, "bfloat16", b_stride=(16384, 1, 128)
        )
    yield _matmul_case("int8-to-int32-16x32x24", (1, 16, 32), (1, 32, 24), "int8", "int32")
    yield _matmul_case("f32-1x1x1", (1, 1, 1), (1, 1, 1))
    yield _matmul_case("f32-batch3-8x16x8", (3, 8, 16), (3, 16, 8))
    yield _matmul_case("f32-broadcast-2x1-by-3", (2, 1, 4, 8), (3, 8, 5))
    yield _matmul_case(
        "f32-padded-rows-6x10x7",
        (1, 6, 10),
        (1, 10, 7),
        a_stride=(96, 16, 1),
        b_stride=(90, 9, 1),
        c_stride=(66, 11, 1),
    )
    yield _matmul_case("f32-column-major-8x8x8", (1, 8, 8), (1, 8, 8), a_stride=(64, 1, 8), c_stride=(64, 1, 8))
    yield _matmul_case("f32-no-k-3x0x4", (1, 3, 0), (1, 0, 4))
    yield _matmul_case("f32-no-rows-0x5x4", (1, 0, 5), (1, 5, 4))
    yield _matmul_case("bf16-long-k-16x4096x16", (1, 16, 4096), (1, 4096, 16), "bfloat16", "float32", full=True)
    yield _runtime_rows()


def _runtime_rows() -> Case:
    def build() -> Any:
        from .._dims import Dim

        graph = new_graph("bfloat16")
        m = Dim("m", min=1, max=256)
        c = graph.matmul(graph.tensor((1, m, 64), name="a"), graph.tensor((1, 64, 32), name="b"))
        c.set_output(True).set_name("c").set_data_type("bfloat16")
        return graph

    return Case("matmul-bf16-runtime-m", build, sizes=({"m": 1}, {"m": 7}, {"m": 256}))


def _epilogue(
    name: str, io: str, steps: Callable[[Any, Any], Any], shape: tuple[int, int, int] = (24, 40, 32), **options: Any
) -> Case:
    m, n, k = shape

    def build() -> Any:
        graph = new_graph(io)
        c = graph.matmul(graph.tensor((1, m, k), name="a"), graph.tensor((1, k, n), name="b"))
        steps(graph, c)
        return graph

    return Case(f"matmul-{name}", build, **options)


def _out(tensor: Any, name: str = "y", dtype: str = "") -> Any:
    tensor.set_output(True).set_name(name)
    return tensor.set_data_type(dtype) if dtype else tensor


def _epilogues() -> Iterator[Case]:
    def bias_gelu(graph: Any, c: Any) -> None:
        bias = graph.tensor((1, 1, c.get_dim()[-1]), name="bias")
        _out(graph.gelu(graph.bias(c, bias)), dtype=str(graph.io_data_type))

    def bias_relu(graph: Any, c: Any) -> None:
        bias = graph.tensor((1, 1, c.get_dim()[-1]), name="bias")
        _out(graph.relu(graph.add(c, bias)), dtype=str(graph.io_data_type))

    def residual(graph: Any, c: Any) -> None:
        _out(graph.add(c, graph.tensor(c.get_dim(), name="residual")), dtype=str(graph.io_data_type))

    def two_outputs(graph: Any, c: Any) -> None:
        _out(c, "c", "float32")
        _out(graph.swish(c), "y", str(graph.io_data_type))

    def scaled_amax(graph: Any, c: Any) -> None:
        y = graph.mul(c, graph.tensor((1, 1, 1), data_type="float32", is_pass_by_value=True, name="alpha"))
        _out(y, "y", str(graph.io_data_type))
        _out(graph.reduction(y, mode="AMAX", out_dims=(1, 1, 1)), "amax", "float32")

    for io in ("float32", "bfloat16", "float16"):
        yield _epilogue(f"{_short(io)}-bias-gelu", io, bias_gelu)
        yield _epilogue(f"{_short(io)}-residual", io, residual, full=io == "float16")
    yield _epilogue("bf16-bias-relu-128x128x64", "bfloat16", bias_relu, (128, 128, 64))
    yield _epilogue("bf16-two-outputs", "bfloat16", two_outputs)
    yield _epilogue("f32-by-value-amax", "float32", scaled_amax, values={"alpha": [[[0.75]]]})

    def chain() -> Any:
        graph = new_graph("float32")
        x = graph.tensor((2, 6, 8), name="x")
        hidden = graph.relu(graph.matmul(x, graph.tensor((2, 8, 10), name="w1")))
        _out(graph.matmul(hidden, graph.tensor((2, 10, 4), name="w2")))
        return graph

    yield Case("matmul-f32-two-layers", chain)


# --- pointwise
_DOMAINS = {
    "log": (0.01, 8.0), "sqrt": (0.0, 9.0), "rsqrt": (0.05, 9.0), "reciprocal": (0.2, 4.0), "tan": (-1.4, 1.4),
    "exp": (-6.0, 6.0), "pow": (0.1, 4.0), "mod": (0.5, 5.0),
}  # fmt: skip
_ATTRS: dict[str, dict[str, Any]] = {"gen_index": {"axis": 1}}


def _call(op: str, graph: Any, inputs: list[Any], **attrs: Any) -> Any:
    return getattr(graph, op)(*inputs, **{**_ATTRS.get(op, {}), **attrs})


def _pointwise_case(
    op: str,
    name: str,
    io: str,
    dims: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int] | None] = (),
    out: str = "",
    **options: Any,
) -> Case:
    attrs = options.pop("attrs", {})

    def build() -> Any:
        graph = new_graph(io, "float64" if io == "float64" else "float32")
        inputs = [
            graph.tensor(dim, strides[i] if i < len(strides) else None, name=f"x{i}") for i, dim in enumerate(dims)
        ]
        _out(_call(op, graph, inputs, **attrs), dtype=out)
        return graph

    low_high = _DOMAINS.get(op)
    domain = options.pop("domain", None) or ({f"x{i}": low_high for i in range(len(dims))} if low_high else {})
    return Case(f"{op}-{name}", build, op="pointwise", domain=domain, **options)


def _pointwise() -> Iterator[Case]:
    from .._ops._table import in_tree

    for row in in_tree().values():
        if row.group != "pointwise":
            continue
        count = len(row.inputs)
        io = "boolean" if row.name.startswith("logical_") else "float32"
        if row.name == "binary_select":
            yield _select()
            continue
        dims = ((2, 3, 40), (2, 3, 40), (1, 3, 1))[:count]
        yield _pointwise_case(
            row.name, _short(io), io, dims, special=row.name not in ("pow", "tan", "sin", "cos", "mod")
        )
        if io == "float32":
            yield _pointwise_case(
                row.name, "bf16", "bfloat16", dims, full=row.name not in ("add", "gelu", "mul", "tanh")
            )
    yield _pointwise_case("add", "f32-broadcast", "float32", ((4, 1, 5), (3, 1)), special=True)
    yield _pointwise_case("add", "f32-odd-strides", "float32", ((4, 6), (4, 6)), ((1, 5), (13, 2)))
    yield _pointwise_case("mul", "f16-empty", "float16", ((3, 0, 2), (3, 1, 2)))
    yield _pointwise_case("mul", "f64", "float64", ((5, 7), (5, 7)), special=True)
    yield _pointwise_case("add", "int32", "int32", ((3, 9), (3, 9)))
    yield _pointwise_case("identity", "f32-to-e4m3", "float32", ((4, 32),), out="fp8_e4m3")
    yield _pointwise_case("identity", "f32-to-f16", "float32", ((4, 32),), out="float16", special=True)
    yield _pointwise_case("identity", "f32-to-int8", "float32", ((4, 32),), out="int8", domain={"x0": (-200.0, 200.0)})
    yield _pointwise_case("identity", "e5m2-to-f32", "fp8_e5m2", ((4, 32),), out="float32", special=True)
    yield _pointwise_case("relu", "f32-clipped", "float32", ((4, 32),), attrs={"lower_clip": 0.25, "upper_clip": 1.0})
    yield _pointwise_case("relu", "f32-leaky", "float32", ((4, 32),), attrs={"negative_slope": 0.125})
    yield _pointwise_case("swish", "f32-beta", "float32", ((4, 32),), attrs={"swish_beta": 1.702})
    yield _runtime_chain()


def _select() -> Case:
    def build() -> Any:
        graph = new_graph("float32")
        x, y = (graph.tensor((3, 17), name=name) for name in ("x0", "x1"))
        _out(graph.binary_select(x, y, graph.tensor((3, 17), data_type="boolean", name="mask")))
        return graph

    return Case("binary_select-f32", build, op="pointwise", special=("x0", "x1"))


def _runtime_chain() -> Case:
    def build() -> Any:
        from .._dims import Dim

        graph = new_graph("float32")
        n = Dim("n", min=0, max=512)
        x, y = (graph.tensor((2, n), name=name) for name in ("x0", "x1"))
        _out(graph.tanh(graph.add(graph.mul(x, y), x)))
        return graph

    return Case("add-f32-runtime-n", build, op="pointwise", sizes=({"n": 0}, {"n": 3}, {"n": 512}))


# --- reductions and norms
def _reduction_case(
    mode: str, io: str, dim: Sequence[int], out: Sequence[int], stride: Any = None, dtype: str = "", **options: Any
) -> Case:
    def build() -> Any:
        graph = new_graph(io, "int32" if io.startswith("int") else "float32")
        y = graph.reduction(graph.tensor(dim, stride, name="x"), mode=mode, out_dims=out)
        _out(y, dtype=dtype or io)
        return graph

    name = f"reduction-{mode.lower()}-{_short(io)}-{_shape(dim)}-to-{_shape(out)}"
    return Case(name, build, domain={"x": (0.5, 1.5)} if "MUL" in mode else {}, **options)


def _reduction() -> Iterator[Case]:
    for mode in ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS"):
        yield _reduction_case(mode, "float32", (3, 4, 25), (3, 4, 1), special=mode not in ("MUL", "MUL_NO_ZEROS"))
    yield _reduction_case("ADD", "bfloat16", (2, 64, 8), (1, 1, 8), dtype="float32")
    yield _reduction_case("ADD", "float16", (4, 33), (1, 1))
    yield _reduction_case("MAX", "bfloat16", (4, 33), (4, 1), (40, 1))
    yield _reduction_case("ADD", "int32", (4, 33), (4, 1))
    yield _reduction_case("ADD", "float32", (3, 0), (3, 1))
    yield _reduction_case("MAX", "float32", (0, 3), (0, 1))


def _norm_case(
    op: str,
    io: str,
    dim: Sequence[Any],
    scale: Sequence[int],
    phase: str = "INFERENCE",
    bias: bool = False,
    **options: Any,
) -> Case:
    label = options.pop("label", _shape(dim))

    def build() -> Any:
        graph = new_graph(io)
        tensors = [graph.tensor(dim, options_stride, name="x"), graph.tensor(scale, data_type="float32", name="scale")]
        shift = graph.tensor(scale, data_type="float32", name="bias") if bias else None
        epsilon = graph.tensor((1,) * len(dim), data_type="float32", is_pass_by_value=True, name="epsilon")
        found = getattr(graph, op)(*tensors, shift, epsilon=epsilon, norm_forward_phase=phase)
        names = ("y", "mean", "inv_variance") if op == "layernorm" else ("y", "inv_variance")
        for name, tensor in zip(names, found, strict=True):
            if tensor is not None:
                _out(tensor, name, io if name == "y" else "float32")
        return graph

    options_stride = options.pop("stride", None)
    tail = "-".join(word for word in (phase.lower() if phase == "TRAINING" else "", "bias" if bias else "") if word)
    name = f"{op}-{_short(io)}-{label}" + (f"-{tail}" if tail else "")
    return Case(name, build, values={"epsilon": [[1e-5]]}, special=("x",), **options)


def _norm() -> Iterator[Case]:
    for op in ("layernorm", "rmsnorm"):
        for io in ("float32", "bfloat16"):
            yield _norm_case(op, io, (6, 48), (1, 48), bias=op == "layernorm")
            yield _norm_case(op, io, (2, 5, 64), (1, 1, 64), "TRAINING", bias=True)
        yield _norm_case(op, "float16", (8, 128), (1, 128))
        # A variance near epsilon: an engine that leaves it out, or adds it elsewhere, shows.
        yield _norm_case(op, "float32", (6, 48), (1, 48), domain={"x": (-0.01, 0.01)}, label="small-6x48")
        yield _norm_case(op, "float32", (4, 20), (1, 20), stride=(32, 1), label="padded-4x20")
        yield _norm_case(op, "float32", (0, 16), (1, 16))
    yield _norm_case("layernorm", "float32", (3, 4, 5), (1, 4, 5), bias=True)


# --- structural
def _structural_case(
    name: str, io: str, dim: Sequence[int], make: Callable[[Any, Any], Any], stride: Any = None, **options: Any
) -> Case:
    def build() -> Any:
        graph = new_graph(io)
        _out(make(graph, graph.tensor(dim, stride, name="x")), dtype=io)
        return graph

    return Case(name, build, special=True, **options)


def _structural() -> Iterator[Case]:
    for io in ("float32", "bfloat16", "fp8_e4m3", "int8", "int64", "boolean"):
        light = io in ("float32", "bfloat16", "int8")
        yield _structural_case(
            f"transpose-{_short(io)}-021",
            io,
            (2, 3, 8),
            lambda g, x: g.transpose(x, permutation=(0, 2, 1)),
            full=not light,
        )
        yield _structural_case(
            f"slice-{_short(io)}-steps",
            io,
            (4, 9, 5),
            lambda g, x: g.slice(x, [slice(1, 4), slice(0, 9, 2)]),
            full=not light,
        )
        yield _structural_case(
            f"reshape-{_short(io)}-logical",
            io,
            (4, 6),
            lambda g, x: g.reshape(x, reshape_mode="LOGICAL", out_dims=(2, 3, 4)),
            (1, 4),
            full=not light,
        )
        yield _concatenate(io, full=not light)

    def packed_transpose(graph: Any, x: Any) -> Any:
        return graph.transpose(x, permutation=(2, 0, 1)).set_stride((6, 3, 1))

    yield _structural_case("transpose-f32-moved", "float32", (2, 3, 5), packed_transpose)
    yield _structural_case(
        "reshape-f32-view", "float32", (4, 6), lambda g, x: g.reshape(x, reshape_mode="VIEW_ONLY", out_dims=(3, 8))
    )
    yield _structural_case("slice-f32-empty", "float32", (4, 6), lambda g, x: g.slice(x, [slice(2, 2)]))


def _concatenate(io: str, **options: Any) -> Case:
    def build() -> Any:
        graph = new_graph(io)
        parts = [graph.tensor((2, size, 3), name=f"x{i}") for i, size in enumerate((1, 4, 2))]
        _out(graph.concatenate(inputs=parts, axis=1), dtype=io)
        return graph

    return Case(f"concatenate-{_short(io)}-3-parts", build, special=True, **options)
