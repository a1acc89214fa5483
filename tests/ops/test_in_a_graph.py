"""Every op goes through the Graph's own builder, inference, validation and freezing."""

import pytest

from cudnn_core._dtypes import data_type
from cudnn_core._errors import GraphError
from cudnn_core._graph._graph import Graph
from cudnn_core._ops._table import in_tree


class Sketch:
    """A graph and short ways to make its tensors."""

    def __init__(self):
        self.graph = Graph(io_data_type="float32", intermediate_data_type="float32", compute_data_type="float32")

    def __call__(self, *dim, dtype="float32"):
        return self.graph.tensor(dim=list(dim), data_type=dtype)

    def finish(self, result):
        outputs = [tensor for tensor in (result if isinstance(result, list) else [result]) if tensor is not None]
        for tensor in outputs:
            tensor.set_output(True)
        self.graph.validate()
        self.graph.freeze()
        return outputs


def pointwise(row):
    def build(s):
        dtype = "boolean" if row.name.startswith("logical_") else "float32"
        inputs = [s(2, 3, dtype=dtype) for _ in row.inputs]
        if row.name == "binary_select":
            inputs[2] = s(2, 3, dtype="boolean")
        extra = {"axis": 1} if row.name == "gen_index" else {}
        return getattr(s.graph, row.name)(*inputs, **extra)

    return build


def quantize(s):
    y, scale = s.graph.block_scale_quantize(s(4, 64), block_size=32)
    y.set_data_type("fp8_e4m3")
    scale.set_data_type("fp8_e8m0")
    return [y, scale]


def attention(s):
    lengths = {"seq_len_q": s(2, 1, 1, 1, dtype="int32"), "seq_len_kv": s(2, 1, 1, 1, dtype="int32")}
    return s.graph.sdpa(
        s(2, 4, 8, 16),
        s(2, 2, 8, 16),
        s(2, 2, 8, 16),
        use_padding_mask=True,
        use_causal_mask=True,
        is_inference=False,
        attn_scale=0.25,
        **lengths,
    )


def linear_attention(op):
    def build(s):
        q, gate = s(9, 2, 16), s(9, 2, 16) if op == "kda" else s(9, 2)
        bounds = s(4, dtype="int64")
        return getattr(s.graph, op)(
            q, q, q, gate, s(9, 2), bounds, output_final_state=True, checkpoint_every_n_tokens=4
        )

    return build


OPS = {
    **{name: pointwise(row) for name, row in in_tree().items() if row.group == "pointwise"},
    "matmul": lambda s: s.graph.matmul(s(5, 2, 3), s(5, 3, 4)),
    "reduction": lambda s: s.graph.reduction(s(4, 6), mode="AVG", out_dims=[4, 1]),
    "reshape": lambda s: s.graph.reshape(s(4, 6), out_dims=[24]),
    "transpose": lambda s: s.graph.transpose(s(4, 6), permutation=[1, 0]),
    "slice": lambda s: s.graph.slice(s(4, 6), slices=[slice(1, None), slice(0, 6, 2)]),
    "concatenate": lambda s: s.graph.concatenate(axis=1, inputs=[s(4, 6), s(4, 1)]),
    "layernorm": lambda s: s.graph.layernorm(s(4, 6), s(1, 6), s(1, 6), 1e-5, norm_forward_phase="TRAINING"),
    "rmsnorm": lambda s: s.graph.rmsnorm(s(4, 6), s(1, 6), epsilon=1e-5, norm_forward_phase="INFERENCE"),
    "sdpa": attention,
    "conv_fprop": lambda s: s.graph.conv_fprop(s(2, 4, 9, 8), s(6, 4, 3, 3), padding=[1, 1]),
    "block_scale_dequantize": lambda s: s.graph.block_scale_dequantize(
        s(4, 64, dtype="fp8_e4m3"), s(4, 2, dtype="fp8_e8m0"), block_size=[1, 32]
    ),
    "block_scale_quantize": quantize,
    "moe_grouped_matmul": lambda s: s.graph.moe_grouped_matmul(
        s(1, 12, 16), s(4, 16, 24), s(5, 1, 1, dtype="int32"), mode="NONE"
    ),
    "gdn": linear_attention("gdn"),
    "kda": linear_attention("kda"),
}


def test_no_op_is_left_out():
    assert set(OPS) == set(in_tree())


@pytest.mark.parametrize("op", OPS)
def test_op_in_a_graph(op):
    sketch = Sketch()
    outputs = sketch.finish(OPS[op](sketch))
    assert all(tensor.dim is not None and tensor.dtype is not data_type.NOT_SET for tensor in outputs)


def test_a_finding_becomes_an_error_that_names_node_and_port():
    sketch = Sketch()
    result = sketch.graph.matmul(sketch(2, 3), sketch(4, 5), name="proj")
    with pytest.raises(GraphError, match=r"proj.B: .*expected 3, got 4") as caught:
        sketch.finish(result)
    assert (caught.value.node, caught.value.port) == ("proj", "B")


def test_channels_last_runs_through_a_chain():
    sketch = Sketch()
    image = sketch.graph.tensor(dim=[2, 4, 9, 8], stride=[288, 1, 32, 4])
    convolved = sketch.graph.conv_fprop(image, sketch(6, 4, 3, 3), padding=[1, 1])
    (out,) = sketch.finish(sketch.graph.relu(sketch.graph.bias(convolved, sketch(1, 6, 1, 1))))
    assert out.stride == (9 * 8 * 6, 1, 8 * 6, 6)
