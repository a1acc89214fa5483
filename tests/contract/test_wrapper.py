"""The wrapper form binds the data that a call brings, and only that."""

from __future__ import annotations

import numpy as np
import pytest

import cudnn_core as cudnn
from cudnn_core import Dim, ExecutionError, GraphError

torch = pytest.importorskip("torch")
F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}
ONE, TEN = torch.full((4,), 1.0), torch.full((4,), 10.0)


def test_two_nodes_of_one_name_are_refused():
    def build():
        with cudnn.Graph(**F32) as g:
            g.relu(ONE, name="n").set_output(True)
            g.neg(TEN, name="n").set_output(True)

    with pytest.raises(GraphError, match="two nodes are named 'n': n::0 would name two tensors"):
        build()


def test_outside_the_block_names_may_repeat():
    g = cudnn.Graph(**F32)
    a, b = g.relu(ONE, name="n"), g.neg(TEN, name="n")
    y, out = g.add(a, b).set_output(True), torch.zeros(4)
    g.build()
    g.execute({y: out})
    assert (out == -9).all()


def test_an_input_that_the_call_leaves_out_is_missing():
    with cudnn.Graph(**F32) as g:
        g.add(ONE, TEN, name="a").set_output(True).set_name("y")
    assert (g({"a::0": TEN, "a::1": TEN})["y"] == 20).all()
    for buffers in ({"a::0": TEN}, {}):
        with pytest.raises(ExecutionError, match=r"input a::[01] is missing"):
            g(buffers)
    with pytest.raises(ExecutionError, match="is given twice"):
        g({"a::0": TEN, "a::1": TEN, next(iter(g.get_inputs())): ONE})


def test_a_default_of_the_graph_may_be_left_out():
    with cudnn.Graph(**F32) as g:
        g.mul(ONE, g.tensor_scalar(3.0, "RUNTIME_PARAM", name="s"), name="m").set_output(True).set_name("y")
    assert (g({"m::0": TEN})["y"] == 30).all()
    assert (g({"m::0": TEN, "s": 2.0})["y"] == 20).all()


def test_an_output_never_takes_the_place_of_an_input_of_its_name():
    with cudnn.Graph(**F32) as g:
        x = g.tensor(dim=(4,), name="t")
        y = g.neg(x).set_output(True).set_name("t")
    buffers = {x: ONE}
    assert (g(buffers)[y.uid] == -1).all()
    assert set(buffers) == {x, y.uid}


def test_the_overrides_of_execute_are_keywords_of_the_call():
    m = Dim("m", max=8)
    with cudnn.Graph(**F32) as g:
        x = g.tensor(dim=(m, 4), name="x")
        g.relu(x).set_output(True).set_name("y")
    given, out = torch.ones(2, 4), torch.zeros(2, 4)
    g({"x": given.data_ptr(), "y": out.data_ptr()}, override_uids=[x.uid], override_shapes=[(2, 4)])
    assert (out == 1).all()
    with pytest.raises(cudnn.GraphTypeError, match="no keyword 'override_shape'"):
        g({"x": given, "y": out}, override_shape=[(2, 4)])


def numpy_has(name):
    """ml_dtypes, once imported by anyone, teaches numpy the name."""
    try:
        return bool(np.dtype(name))
    except TypeError:
        return False


@pytest.mark.parametrize("dtype", ["fp4_e2m1", "int4", "fp8_e4m3", "fp8_e5m3", "int8x4", "boolean", "bfloat16"])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_outputs_of_every_type_are_allocated_so_that_the_plan_takes_them(framework, dtype):
    from cudnn_core.testing import temporary_plugin

    class Nothing:
        workspace_size = 100

        def check_support(self, graph, ctx):
            return cudnn.Support((cudnn.PlanConfig("", {}),))

        def build_plan(self, graph, config, ctx):
            return self

        def execute(self, pack, ctx):
            assert ctx.workspace % 256 == 0

    manifest = {"plugin": "n", "engine": [{"name": "n", "ops": ["*"], "anchors": ["*"], "devices": ["cpu"]}]}
    value = torch.ones(4, 64) if framework == "torch" else np.ones((4, 64), np.float32)
    with temporary_plugin(manifest, {"n": Nothing}, isolated=True):
        with cudnn.Graph(**F32) as g:
            g.identity(value, name="i").set_output(True).set_name("y").set_data_type(dtype)
        if (framework, dtype) == ("numpy", "bfloat16") and not numpy_has(dtype):
            with pytest.raises(ExecutionError, match="numpy has no bfloat16"):
                g({"i::0": value})
            return
        out = g({"i::0": value})["y"]
    width = {"fp4_e2m1": 32, "int4": 32, "int8x4": 256}.get(dtype, 64)
    assert tuple(out.shape) == (4, width)


def test_an_empty_numpy_output_is_allocated():
    for shape in ((0, 8), (3, 0)):
        value = np.ones(shape, np.float32)
        with cudnn.Graph(**F32) as g:
            g.relu(value, name="r").set_output(True).set_name("y")
        assert g({"r::0": value})["y"].shape == shape
