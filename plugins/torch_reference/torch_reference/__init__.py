"""Reference engine of cudnn-core: every op, node by node, in PyTorch.

``evaluate(graph, inputs)`` runs a frozen graph in fp64 on torch tensors: the oracle that other engines are tested
against. The engine itself is found through the package's manifest. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._evaluate import evaluate as evaluate

__version__ = "0.1.0"
__all__ = ["evaluate"]


def __getattr__(name: str) -> object:
    if name == "evaluate":
        from ._evaluate import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
