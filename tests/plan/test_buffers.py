"""What a buffer may be: its memory is read as it is and lives long enough, or it is refused by name."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

import numpy as np
import pytest

import cudnn_core
from cudnn_core import ExecutionError, Graph, GraphTypeError
from cudnn_core._buffers import describe, encode_scalar

torch = pytest.importorskip("torch")
F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}
OTHER = ">" if sys.byteorder == "little" else "<"


def graph(dim=(4, 8), stride=None, **types):
    g = Graph(**{**F32, **types})
    x = g.tensor(dim=dim, stride=stride, name="x")
    y = g.neg(x).set_output(True).set_name("y").set_data_type("float32")
    if stride is not None:
        y.set_stride([int(np.prod(dim[i + 1 :])) for i in range(len(dim))])
    return g.plan(device="cpu")


# --- memory that only an export keeps alive
class Exports:
    """A DLPack producer that exports a fresh copy each time: the capsule alone owns it."""

    def __init__(self, tensor, versioned):
        self.tensor, self.versioned = tensor, versioned

    def __dlpack__(self, **kwargs):
        if kwargs and not self.versioned:
            raise TypeError("unexpected keyword")
        return self.tensor.clone().__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return (1, 0)


class Shows:
    """An array interface of a temporary that the interface itself owns."""

    def __init__(self, array):
        self.array = array

    @property
    def __array_interface__(self):
        copy = self.array.copy()
        return Interface(copy.__array_interface__, copy)


class Interface(dict):
    def __init__(self, content, owner):
        super().__init__(content)
        self.owner = owner


def exporters(tensor):
    return [Exports(tensor, True), Exports(tensor, False), Shows(tensor.numpy())]


@pytest.mark.parametrize("kind", range(3), ids=["versioned", "unversioned", "array interface"])
def test_exported_memory_lives_as_long_as_it_is_used(kind):
    plan = graph((1024,))
    for i in range(20):
        out = torch.zeros(1024)
        made = plan.pack({"x": exporters(torch.full((1024,), float(i)))[kind], "y": out})
        junk = [torch.full((1024,), -5.0) for _ in range(8)]
        plan.execute(made)
        assert (out == -i).all(), junk[0]
    g = Graph(**F32)
    a, b = g.tensor(dim=(1024,)), g.tensor(dim=(1024,))
    y = g.add(a, b).set_output(True)
    plan, out = g.plan(device="cpu"), torch.zeros(1024)
    for i in range(20):
        values = (torch.full((1024,), float(i)), torch.full((1024,), 1000.0))
        plan.execute({a: exporters(values[0])[kind], b: exporters(values[1])[kind], y: out})
        assert (out == i + 1000).all()


def test_a_mapping_that_makes_its_buffers_keeps_them():
    class Lazy(Mapping):
        def __getitem__(self, key):
            return torch.full((1024,), float(key == "x"))

        def __iter__(self):
            return iter("xy")

        def __len__(self):
            return 2

    plan = graph((1024,))
    plan.execute({"x": torch.ones(1024), "y": torch.zeros(1024)})
    for _ in range(10):
        made = plan.pack(Lazy())
        junk = [torch.full((1024,), -5.0) for _ in range(8)]
        x = made.pointers[[o.name for o in made.operands].index("x")]
        assert ((ctypes.c_float * 1024).from_address(x)[0], len(junk)) == (1.0, 8)
        plan.execute(Lazy())


def test_numpy_scalars_are_numbers_in_a_pack_a_call_and_a_builder():
    g = Graph(**F32)
    x, s = g.tensor(dim=(4,), name="x"), g.tensor(dim=(1,), is_pass_by_value=True, name="s")
    g.mul(g.mul(x, s), np.float32(2)).set_output(True).set_name("y")
    plan = g.plan(device="cpu")
    for i in range(50):
        out = torch.zeros(4)
        made = plan.pack({"x": torch.ones(4), "s": np.float32(i), "y": out})
        junk = [np.array(9.0, np.float32) for _ in range(50)] + [np.float32(7 * k) + np.zeros(()) for k in range(20)]
        plan.execute(made)
        assert (out == 2 * i).all(), junk
    view = describe(np.float32(3), "x")
    junk = [np.array(9.0, np.float32) for _ in range(50)]
    assert (ctypes.c_float.from_address(view.address).value, view.readonly, len(junk)) == (3.0, True, 50)


def test_a_numpy_integer_is_an_address_where_an_int_is():
    plan, out = graph(), torch.zeros(4, 8)
    ones = torch.ones(4, 8)
    plan.execute({"x": np.int64(ones.data_ptr()), "y": out})
    assert (out == -1).all()


# --- layouts that are not what the memory says
def test_another_byte_order_is_refused_everywhere():
    array = np.ones((4, 8), OTHER + "f4")

    class Wrapped:
        __array_interface__ = array.__array_interface__

    for value in (array, Wrapped()):
        with pytest.raises(ExecutionError, match=r"operand x.*byte order"):
            graph().execute({"x": value, "y": torch.zeros(4, 8)})
        with pytest.raises(GraphTypeError, match="byte order"):
            Graph().tensor_like(value)
    with pytest.raises(cudnn_core.GraphError, match="byte order"):
        Graph(io_data_type=array.dtype)


def lazy(shape=(4, 8)):
    return (torch.ones(shape, dtype=torch.complex64) * 1j).conj().imag


def test_a_lazily_negated_tensor_is_refused_cold_and_warm():
    value = lazy()
    plan = graph(stride=tuple(value.stride()))
    out = torch.zeros(4, 8)
    plain = torch.ones(4, 8, dtype=torch.complex64).imag
    for warm in (False, True):
        if warm:
            plan.execute({"x": plain, "y": out})
            plan.execute({"x": plain, "y": out})
        with pytest.raises(ExecutionError, match=r"operand x.*resolve_neg"):
            plan.execute({"x": value, "y": out})
    with pytest.raises(ExecutionError, match="resolve_neg"):  # the memory of a tensor that was accepted
        plan.execute({"x": torch._neg_view(plain), "y": out})
    one = torch.ones(1, dtype=torch.complex64)
    plan, out = graph((1,)), torch.zeros(1)
    plan.execute({"x": one.imag, "y": out})
    plan.execute({"x": one.imag, "y": out})
    with pytest.raises(ExecutionError, match="resolve_neg"):
        plan.execute({"x": one.conj().imag, "y": out})


def odd_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4, 8)
    one = torch.ones(4, 8)
    return {
        "fake": fake,
        "meta": one.to("meta"),
        "coo": one.to_sparse(),
        "csr": _csr(one),
        "complex": one.to(torch.complex64),
    }


def _csr(tensor):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.to_sparse_csr()


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize("kind", ["fake", "meta", "coo", "csr", "complex"])
def test_a_tensor_without_plain_memory_is_named(kind, warm):
    plan, out = graph(), torch.zeros(4, 8)
    if warm:
        plan.execute({"x": torch.ones(4, 8), "y": out})
    with pytest.raises(ExecutionError, match="operand x"):
        plan.execute({"x": odd_tensors()[kind], "y": out})


def test_a_functorch_tensor_is_named_on_the_fast_road():
    plan, out = graph(), torch.zeros(4, 8)
    plan.execute({"x": torch.ones(4, 8), "y": out})

    def call(t):
        with pytest.raises(ExecutionError, match="operand x"):
            plan.execute({"x": t, "y": out})
        return t

    torch.vmap(call)(torch.ones(2, 4, 8))


def interface(**fields):
    content = {"shape": (4, 8), "typestr": "<f4", "version": 3, "data": (4096, False), **fields}
    return type("Odd", (), {"__array_interface__": {k: v for k, v in content.items() if v is not Ellipsis}})()


class Raises:
    def __init__(self, answer=None):
        self.answer = answer

    def __dlpack__(self, **kwargs):
        if self.answer is None:
            raise BufferError("nope")
        return self.answer

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize(
    "value",
    [
        interface(data=b"\0" * 128),
        interface(data=...),
        interface(data=None),
        interface(typestr=...),
        interface(typestr="V"),
        interface(typestr="<f5"),
        interface(typestr="<c8"),
        interface(shape=None),
        interface(shape=(4, "8")),
        interface(mask=np.ones((4, 8), bool)),
        interface(strides=(33, 4)),
        Raises(),
        Raises(object()),
        type("NoDevice", (Raises,), {"__dlpack_device__": lambda self: None})(),
        type("Five", (), {"__array_interface__": 5})(),
        np.zeros((4, 8), [("a", "f4")]),
        np.zeros((4, 8), object),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_malformed_exporter_is_named(value):
    with pytest.raises(ExecutionError, match="operand x"):
        graph().execute({"x": value, "y": torch.zeros(4, 8)})
    with pytest.raises(GraphTypeError):
        Graph().tensor_like(value)


class NumpyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_a_read_only_export_is_an_input_and_no_output():
    array = np.ones((4, 8), np.float32)
    array.setflags(write=False)
    plan, out = graph(), torch.zeros(4, 8)
    plan.execute({"x": NumpyDLPack(array), "y": out})
    assert (out == -1).all()
    with pytest.raises(ExecutionError, match="operand y is an output in a read-only buffer"):
        plan.execute({"x": torch.zeros(4, 8), "y": NumpyDLPack(array)})
    assert (array == 1).all()


# --- numbers
def test_a_number_must_be_exact_in_an_integer_type():
    for value, dtype in (
        (2.7, "int32"), (float("nan"), "int32"), (float("inf"), "int8"), (2**40, "int32"), (-1, "uint8"), (0.5, "boolean"),
        (2, "boolean"), (1e39, "float32"), (2**2000, "float64"), (3.4e38, "bfloat16"), (1.0, "fp8_e4m3"),
    ):  # fmt: skip
        with pytest.raises(ExecutionError, match="operand s") as caught:
            encode_scalar(value, dtype, "s")
        assert caught.value.operand == "s"
    assert encode_scalar(2.0, "int32", "s") == (2).to_bytes(4, "little")
    assert encode_scalar(True, "int8", "s") == b"\1"
    assert encode_scalar(float("-inf"), "bfloat16", "s") == b"\x80\xff"


def test_bfloat16_rounds_once():
    values = [1.0, -3.14159, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, 9.2e-41, 3.3895e38, 65504.0, 2.0**-133, -(2.0**-134)]
    for value in values:
        want = torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).view(torch.int16).item() & 0xFFFF
        assert encode_scalar(value, "bfloat16", "s") == want.to_bytes(2, "little"), value
    assert encode_scalar(1 + 2**-8 + 2**-40, "bfloat16", "s") == b"\x81\x3f"  # not through float32, where it is a tie


def auto():
    g = Graph(**F32)
    x, s = g.tensor(dim=(4, 8), name="x"), g.tensor_like(torch.tensor([2.0]), name="s")
    g.mul(x, s).set_output(True).set_name("y")
    return g


@pytest.mark.parametrize(
    "value", [3, 3.0, np.float32(3), torch.tensor([3.0]), torch.tensor(3.0), np.full((1, 1), 3, "f4")]
)
def test_a_one_element_tensor_of_the_cpu_may_be_given_as_a_number_and_never_as_an_address(value):
    plan, out = auto().plan(device="cpu"), torch.zeros(4, 8)
    for _ in range(3):
        out.zero_()
        plan.execute({"x": torch.ones(4, 8), "s": value, "y": out})
        assert (out == 3).all()


def test_a_loaded_plan_takes_numbers_too(tmp_path):
    auto().plan(device="cpu").save(tmp_path / "p")
    out = torch.zeros(4, 8)
    cudnn_core.Plan.load(tmp_path / "p").execute({"x": torch.ones(4, 8), "s": 4, "y": out})
    assert (out == 4).all()


# --- 4-bit elements
needs_fp4 = pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no fp4")


def fp4(*shape):
    return torch.full(shape, 0x22, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # two ones a byte


@needs_fp4
def test_torchs_pairs_of_fp4_count_as_elements():
    t = fp4(4, 32)
    g = Graph(**F32)
    x = g.tensor_like(t, name="x")
    assert (x.dim, x.stride, x.dtype) == ((4, 64), (64, 1), "fp4_e2m1")
    g.neg(x).set_output(True).set_name("y")
    plan, out = g.plan(device="cpu"), torch.zeros(4, 64)
    for value in (t, t.view(torch.uint8), t, t.view(torch.int8)):
        out.zero_()
        plan.execute({"x": value, "y": out})
        assert (out == -1).all()
    column = describe(fp4(32, 4).t(), "x")
    assert (column.shape, column.stride) == ((8, 32), (1, 8))
    with pytest.raises(ExecutionError, match=r"operand x has shape \(4, 62\)"):
        plan.execute({"x": fp4(4, 31), "y": out})


def test_the_packed_axis_is_one_that_has_elements():
    for dim, stride, shape in (((1, 64), (1, 1), (1, 32)), ((64, 1), (1, 1), (32, 1)), ((64, 1), (1, 64), (32, 1))):
        g = Graph(**{**F32, "io_data_type": "fp4_e2m1"})
        x = g.tensor(dim=dim, stride=stride, name="x")
        g.neg(x).set_output(True).set_name("y").set_data_type("float32").set_stride(stride)
        g.plan(device="cpu").execute(
            {"x": torch.zeros(shape, dtype=torch.uint8), "y": torch.empty(64).as_strided(dim, stride)}
        )


def test_one_byte_an_element_is_not_packed():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(GraphTypeError, match="bits"):
        describe(np.zeros((4, 8), ml_dtypes.int4), "x")


# --- arrays that were seen before
@pytest.mark.parametrize("size", [4, cudnn_core.Dim("m", max=16)], ids=["fixed", "runtime"])
def test_an_array_is_described_once_and_checked_every_time(size, monkeypatch):
    plan = graph((size, 8))
    x, y = np.arange(32, dtype=np.float32).reshape(4, 8), np.empty((4, 8), np.float32)
    plan.execute({"x": x, "y": y})
    monkeypatch.setattr("cudnn_core._pack.describe", None)
    again = np.zeros((4, 8), np.float32)
    plan.execute({"x": x * 2, "y": again})  # other memory of the same layout
    assert (again == -2 * x).all()
    monkeypatch.undo()
    frozen = np.empty((4, 8), np.float32)
    frozen.setflags(write=False)
    for operands, match in (
        ({"x": x, "y": frozen}, "read-only"),
        ({"x": x.astype(np.int32), "y": y}, "data type"),
        ({"x": x.reshape(8, 4).T, "y": y}, "strides"),
        ({"x": np.zeros((4, 9), np.float32), "y": y}, "shape"),
        ({"x": x.astype(f"{OTHER}f4"), "y": y}, "byte order"),
        ({"x": x, "y": x[:, ::-1]}, "strides"),
    ):
        with pytest.raises((ExecutionError, GraphTypeError), match=match):
            plan.execute(operands)
    plan.execute({"x": frozen, "y": y})
