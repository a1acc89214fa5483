"""cuDNN's errors: one line of its own words, and a decline code that follows from its status."""

from __future__ import annotations

import pytest
from cudnn_backend import errors

from cudnn_core import BuildError

# As the binding raises it, by cuDNN 9.19: each engine that was tried, then every check that failed.
ENGINES = """No valid engine configs for _
{"engineId":1,"smVersion":900,"knobChoices":{"CUDNN_KNOB_TYPE_SPLIT_K_SLC":-1,"CUDNN_KNOB_TYPE_KERNEL_CFG":37}}
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()
Warning: CUDNN_STATUS_NOT_SUPPORTED_LAYOUT; Reason: !is_NHWC
Warning: CUDNN_STATUS_NOT_SUPPORTED_LAYOUT; Reason: check_for_support()

{"engineId":7,"smVersion":900,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN; Reason: Unsupported node in the graph.
"""


class cudnnGraphNotSupportedError(Exception):  # the binding's name
    pass


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (cudnnGraphNotSupportedError(ENGINES), "layout.stride", "CUDNN_STATUS_NOT_SUPPORTED_LAYOUT: !is_NHWC"),
        (
            cudnnGraphNotSupportedError("No valid engine configs for \n\n"),
            "x.cudnn_backend.unsupported",
            "cuDNN has no engine for the graph",
        ),
        (
            cudnnGraphNotSupportedError("Transpose requires cuDNN v9.22.0"),
            "dep.too_old",
            "Transpose requires cuDNN v9.22.0",
        ),
        (
            cudnnGraphNotSupportedError(
                "CUDNN_BACKEND_OPERATION_ROPE_FWD_DESCRIPTOR is only available starting cuDNN 9.24."
            ),
            "dep.too_old",
            "CUDNN_BACKEND_OPERATION_ROPE_FWD_DESCRIPTOR is only available starting cuDNN 9.24.",
        ),
        (
            RuntimeError(
                "detail::finalize(desc) failed with message: bad strides,\n of X, and code: CUDNN_STATUS_BAD_PARAM"
            ),
            "x.cudnn_backend.refused",
            "CUDNN_STATUS_BAD_PARAM: bad strides, of X",
        ),
        (
            RuntimeError(
                "[cudnn_frontend] Error: execute() failed with message: , and code: CUDNN_STATUS_EXECUTION_FAILED"
            ),
            "x.cudnn_backend.refused",
            "CUDNN_STATUS_EXECUTION_FAILED",
        ),
        (
            RuntimeError("x failed with message: m, and code: CUDNN_STATUS_NOT_SUPPORTED_SHAPE"),
            "shape.range",
            "CUDNN_STATUS_NOT_SUPPORTED_SHAPE: m",
        ),
        (
            cudnnGraphNotSupportedError("Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: needs SM100"),
            "device.sm_variant",
            "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH: needs SM100",
        ),
        (
            cudnnGraphNotSupportedError(
                "Warning: CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING; Reason: this->libcuda == nullptr"
            ),
            "dep.driver",
            "CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING: this->libcuda == nullptr",
        ),
        (
            cudnnGraphNotSupportedError("Warning: CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE; Reason: fp64"),
            "dtype.unsupported",
            "CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE: fp64",
        ),
        (RuntimeError("Invalid engine id."), "x.cudnn_backend.refused", "Invalid engine id."),
        (ValueError(""), "x.cudnn_backend.refused", "ValueError"),
        (OverflowError("Python int too large"), "x.cudnn_backend.refused", "Python int too large"),
        (
            TypeError("f(): incompatible function arguments. The following"),
            "x.cudnn_backend.refused",
            "f(): incompatible function arguments. The following",
        ),
    ],
)
def test_what_cudnn_says_becomes_a_decline(error, code, text):
    assert errors.reason(error) == text
    found = errors.decline(error)
    assert (found.code, found.actual) == (code, text)
    with pytest.raises(BuildError) as caught, errors.translated():
        raise error
    assert caught.value.decline == found
    assert errors.last() == str(error)


def test_the_version_that_is_needed_is_in_the_decline():
    assert errors.decline(cudnnGraphNotSupportedError("Transpose requires cuDNN v9.22.0")).expected == ">=9.22.0"


@pytest.mark.parametrize("error", [TypeError("a bug"), KeyError("x"), AttributeError("y"), NotImplementedError("z")])
def test_errors_of_others_are_left_as_they_are(error):
    with pytest.raises(type(error)) as caught, errors.translated():
        raise error
    assert caught.value is error


def test_a_reason_is_a_line():
    text = errors.reason(RuntimeError("a\nb  c" + "d" * 1000))
    assert text.startswith("a b c")
    assert len(text) == 300
