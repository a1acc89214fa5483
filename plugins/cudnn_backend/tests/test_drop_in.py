"""On a GPU: programs for the frontend run with only the import changed, and give the frontend's numbers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cudnn_backend")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the reference engine:RuntimeWarning"),  # the autotuned program may list it
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend"),
]

from frontend_programs import FRONTEND, OURS, PROGRAMS, run  # noqa: E402

import cudnn_core  # noqa: E402


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_only_the_import_changed(name):
    """Whatever engine the ranking takes: within the rounding of the output's type."""
    expected, actual = run(name, FRONTEND), run(name, OURS)
    for key in expected.keys() & actual.keys() if name == "autotuned" else expected:
        tolerance = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}[expected[key].dtype]
        torch.testing.assert_close(actual[key], expected[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "autotuned"])
def test_the_backend_gives_the_frontends_numbers_to_the_bit(name):
    """The same engine of the same library, as both take the first that its heuristics propose."""
    expected = run(name, FRONTEND)
    with cudnn_core.configure(strict=True, rule=[{"match": {}, "use": "cudnn_backend:graph"}]):
        actual = run(name, OURS)
    for key, want in expected.items():
        assert torch.equal(actual[key], want), (key, float((actual[key].float() - want.float()).abs().max()))
