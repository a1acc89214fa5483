"""A kernel with the host method ``host(words, stream)`` in the emulator, on a block of argument words made by hand."""

from __future__ import annotations

import numpy as np
from linear_attention.arguments import argument_words, tensor_words
from ptx_emulator import launch

from cudnn_core import Artifact, HostBlock
from cudnn_core._cute_compile import compile_class

__all__ = ["Compiled"]


class Compiled:
    """``kernel.host`` compiled for sm_90a, once; ``run`` may be called often."""

    def __init__(self, kernel, problem):
        self.kernel, self.problem, self.index = kernel, problem, argument_words(problem)
        made = compile_class(lambda: kernel, "kernel", "sm_90a")
        self.artifact = Artifact("kernel", "90a", made.entry, made.cubin, made.ptx, made.object)

    def run(self, values, arrays, outputs, **options):
        """``values`` by word; ``arrays`` by port, or by the name of an address word: their addresses, and of tensors of more than one
        axis the strides. Words that are not given are distinct numbers. Returns (report, words by name)."""
        words = np.arange(1000, 1000 + 8 * len(self.index), 8)
        ports = tensor_words(self.problem)
        for name, array in arrays.items():
            words[self.index[f"{name}.address" if name in ports else name]] = array.ctypes.data
            strides = [
                0 if size == 1 else stride // array.itemsize
                for size, stride in zip(array.shape, array.strides, strict=True)
            ]
            for word, stride in zip(ports.get(name, ())[1:], strides, strict=False):
                words[self.index[f"{name}.{word}"]] = stride
        for name, value in values.items():
            words[self.index[name]] = value
        places = tuple(8 * self.index[f"{name}.address" if name in ports else name] for name in arrays)
        report = launch(
            self.artifact, HostBlock(words.astype(np.int64).tobytes(), places), None, buffers=list(arrays.values()),
            outputs=outputs, **{"check": "raise", **options},
        )  # fmt: skip
        return report, {name: int(words[place]) for name, place in self.index.items()}
