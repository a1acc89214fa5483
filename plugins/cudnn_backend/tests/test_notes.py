"""The notes of a graph are exactly those of its operations, and filters on them bar the engine."""

from __future__ import annotations

import pytest
from backend_cases import Build, channels_last
from cudnn_backend.notes import ALWAYS, notes

import cudnn_core
from cudnn_core import DeviceInfo

H200 = DeviceInfo.preset("H200")
ENGINE = "cudnn_backend:graph@1"


def product(io="float32"):
    b = Build()
    b.graph(io)
    b.g.matmul(b.input((1, 64, 32)), b.input((1, 32, 16))).set_output(True)
    return b.g


def convolution(io):
    b = Build()
    b.graph(io)
    image, weight = (2, 16, 16, 16), (32, 16, 3, 3)
    x, w = (b.input(dim, stride=channels_last(dim)) for dim in (image, weight))
    b.g.conv_fprop(x, w, padding=[1, 1]).set_output(True)
    return b.g


def two_products():
    """Of bfloat16, with a float32 result of the first between them."""
    b = Build()
    b.graph("bfloat16")
    b.g.matmul(b.g.matmul(b.input((1, 64, 32)), b.input((1, 32, 64))), b.input((1, 64, 16))).set_output(True)
    return b.g


def pointwise(op, count=1):
    b = Build()
    b.graph("float32")
    getattr(b.g, op)(*(b.input((2, 32, 64)) for _ in range(count))).set_output(True)
    return b.g


def reduction(mode):
    b = Build()
    b.graph("float32")
    b.g.reduction(b.input((2, 32, 64)), mode=mode, out_dims=(2, 32, 1)).set_output(True).set_data_type("float32")
    return b.g


APPROXIMATE = (
    *(
        "cos",
        "elu",
        "erf",
        "exp",
        "gelu",
        "gelu_approx_tanh",
        "log",
        "sigmoid",
        "sin",
        "softplus",
        "swish",
        "tan",
        "tanh",
    ),
)
BACKWARD = ("elu", "gelu", "gelu_approx_tanh", "sigmoid", "softplus", "swish", "tanh")
GRAPHS = {
    **{op: (pointwise(op), {"approximate_math"}) for op in APPROXIMATE},
    **{f"{op}_backward": (pointwise(f"{op}_backward", 2), {"approximate_math"}) for op in BACKWARD},
    **{op: (pointwise(op, 2), {"nan_not_propagated"}) for op in ("max", "min", "relu_backward")},
    **{mode: (reduction(mode), {"nan_not_propagated"}) for mode in ("MAX", "MIN", "AMAX")},
    **{mode: (reduction(mode), set()) for mode in ("ADD", "MUL")},
    **{op: (pointwise(op), set()) for op in ("relu", "sqrt", "neg", "identity", "reciprocal")},
    **{op: (pointwise(op, 2), set()) for op in ("add", "mul", "div")},
    "matmul float32": (product(), {"down_convert_inputs"}),
    "matmul bfloat16": (product("bfloat16"), set()),
    "two products": (two_products(), {"down_convert_inputs"}),
    "convolution float32": (convolution("float32"), {"down_convert_inputs"}),
    "convolution float16": (convolution("float16"), set()),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_notes_of_a_graph(name):
    graph, expected = GRAPHS[name]
    assert notes(graph.freeze("cuda"), H200) == ALWAYS | expected


def test_the_engine_states_them_with_its_support(fake):
    fake.run(
        """
        from cudnn_backend.engines import BackendGraph
        from programs import CTX, matmul
        verdict = BackendGraph().check_support(matmul(dtype="float32").freeze("cuda"), CTX)
        assert verdict.notes == {"cuda_graph", "declines_at_build", "down_convert_inputs"}, verdict
        """
    )


def test_the_manifest_says_what_always_holds():
    (spec,) = [entry.spec for entry in cudnn_core.registry().engines if entry.id == ENGINE]
    assert spec.notes == ALWAYS


def test_a_graph_that_deselects_tf32_is_not_served_in_float32(fake):
    fake.run(
        """
        import cudnn_core
        from programs import DEVICE, matmul
        note = cudnn_core.numerical_note.DOWN_CONVERT_INPUTS
        for dtype, barred in (("float32", True), ("float16", False)):
            graph = matmul(dtype=dtype).deselect_numeric_notes([note])
            row = next(row for row in graph.explain(device=DEVICE).engines if row.id == "cudnn_backend:graph@1")
            assert ("policy.note_barred" in [reason.code for reason in row.reasons]) == barred, row
            with cudnn_core.configure(plugins={"allow": ["cudnn_backend"]}):
                try:
                    graph.plan(device=DEVICE)
                except cudnn_core.NoEngineError as error:
                    assert barred and "DOWN_CONVERT_INPUTS" in str(error), error
                else:
                    assert not barred
        """
    )
