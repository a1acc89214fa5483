"""The plan of a prefill: compiled kernels, and how their arguments follow from operands. Imported by ``prefill_engine``.

Immutable but for a cache; runs from many threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, cute_dsl

from .arguments import ADDRESSES, argument_words
from .compile import TARGET, kernel_name
from .launch import Launcher
from .lowering import Binding
from .problem import Problem
from .records import record_bytes

if TYPE_CHECKING:
    from cudnn_core import Artifact, ExecutionContext, HostBlock, Operand, Runner, VariantPack

__all__ = ["PrefillPlan", "restored"]

SCHEMA = 2  # 2: words have the boundaries' area
WORD_BYTES = 8


class PrefillPlan:
    """Kernels with their launcher, for a GPU of ``sms`` SMs. ``workspace``: bytes that are enough for every size."""

    def __init__(
        self, problem: Problem, binding: Binding, kernel: cute_dsl.CompiledKernel, sms: int, workspace: int
    ) -> None:
        self.problem, self.kernel = problem, kernel
        self.workspace_size = workspace
        self.artifacts: tuple[Artifact, ...] = (kernel.artifact,)
        self._launcher = Launcher(problem, binding, sms)
        self._runs = cute_dsl.BoundRuns(self.bind)

    def function(self) -> Callable[[int, int], object]:
        """The loaded host function. Raises BuildError."""
        return cute_dsl.load(self.kernel)

    def bind(self, layout: tuple[Operand, ...]) -> Runner:
        """``run(pointers, workspace, stream)`` for operands of this layout. Loads the GPU code, launches nothing. Raises
        ExecutionError, and DriverError without a device."""
        launcher = self._launcher
        words = launcher.words(layout)
        template = array("q", words.values())
        function = cute_dsl.load_code(self.function())
        addresses = launcher.addresses
        areas = tuple((launcher.index[word], words[word]) for word in ADDRESSES)

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            block = template[:]
            misaligned = 0
            for at, slot, low_bits in addresses:
                address = pointers[slot]
                misaligned |= address & low_bits
                block[at] = address
            if misaligned:
                raise launcher.misaligned(layout, pointers)
            for at, offset in areas:
                block[at] = workspace + offset
            function(block.buffer_info()[0], stream)

        return run

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        self._runs.execute(pack, ctx)

    def host_arguments(self, artifact: Artifact, pack: VariantPack, workspace: int) -> tuple[HostBlock, None]:
        """What an executor passes to the host function: the argument words and a null stream."""
        from cudnn_core import HostBlock

        launcher = self._launcher
        block = array("q", launcher.words(pack.operands).values())
        places = []
        for at, slot, low_bits in launcher.addresses:
            if pack.pointers[slot] & low_bits:
                raise launcher.misaligned(pack.operands, pack.pointers)
            block[at] = pack.pointers[slot]
            places.append(at * WORD_BYTES)
        if self.workspace_size:
            for word in ADDRESSES:
                block[launcher.index[word]] += workspace
                places.append(launcher.index[word] * WORD_BYTES)
        return HostBlock(block.tobytes(), tuple(places), ()), None

    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        header, payloads = self.kernel.serialize()
        return {
            **header,
            "schema": SCHEMA,
            "problem": self.problem.canonical(),
            "layout": _layout(self.problem),
        }, payloads


def _layout(problem: Problem) -> dict[str, Any]:
    """What compiled kernels and their launcher have to agree on."""
    return {"words": list(argument_words(problem)), "record": record_bytes(problem)}


def restored(header: Mapping[str, Any], payloads: Mapping[str, bytes], problem: Problem) -> cute_dsl.CompiledKernel:
    """The kernels of ``PrefillPlan.serialize``, for a graph that is ``problem``.

    Raises BuildError for another format, layout, architecture, problem or runtime.
    """
    schema, stated = header.get("schema"), header.get("problem")
    if schema != SCHEMA:
        raise BuildError(f"a plan of schema {schema!r}, and this version reads {SCHEMA}")
    if stated != problem.canonical():
        raise BuildError(f"the plan is of another problem: {stated}")
    if header.get("layout") != _layout(problem):
        raise BuildError(
            "the plan's kernels have other arguments, or other records in the workspace, than those of this version: build it again"
        )
    kernel = cute_dsl.CompiledKernel.restored(header, payloads, TARGET)
    if kernel.name != kernel_name(problem):
        raise BuildError(f"the plan's kernel is {kernel.name}, not {kernel_name(problem)}")
    return kernel
