"""The host function around a kernel's own: address 0 stands for "load the GPU code, launch nothing".

A compiled host function loads its GPU code when it is first called. That must not happen inside a stream capture, so plans call
it with address 0 when they are bound. Imports the DSL. Imported by ``cute_dsl``, when it compiles.
"""

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int64

__all__ = ["Host"]


class Host:
    """``kernel.host(words, stream)``, unless ``words`` is 0."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    @cute.jit
    def host(self, words: Int64, stream: CUstream) -> None:
        if words != 0:
            self.kernel.host(words, stream)
