"""The plan that the decode engines build: a compiled kernel, and how its arguments follow from operands. Imported by
``decode_engine``. Runs from many threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError, ExecutionError, cute_dsl

from .decode_compile import kernel_name
from .decode_lowering import STRIDE_LIMIT, Binding
from .decode_problem import MOST_ROWS, DecodeConfig, DecodeProblem, argument_words, ctas
from .limits import GRID_LIMIT

if TYPE_CHECKING:
    from cudnn_core import Artifact, ExecutionContext, HostBlock, Operand, Runner, VariantPack

__all__ = ["DecodePlan", "restored"]

SCHEMA = 1
WORD_BYTES = 8


class DecodePlan:
    """A compiled kernel with its launcher. Immutable but for a cache."""

    workspace_size = 0

    def __init__(
        self, problem: DecodeProblem, binding: Binding, config: DecodeConfig, kernel: cute_dsl.CompiledKernel
    ) -> None:
        self.problem, self.binding, self.config, self.kernel = problem, binding, config, kernel
        self.artifacts: tuple[Artifact, ...] = (kernel.artifact,)
        self._index = argument_words(problem)
        self._runs = cute_dsl.BoundRuns(self.bind)

    def function(self) -> Callable[[int, int], object]:
        """The loaded host function. Raises BuildError."""
        return cute_dsl.load(self.kernel)

    def words(self, operands: Sequence[Operand]) -> dict[str, int]:
        """The words of actual operands, checked; addresses are 0. Raises ExecutionError."""
        problem, places = self.problem, self.binding.places
        dims: dict[str, Any] = {port: operands[place.operand].dim for port, place in places.items()}
        tokens = dims["q"][0]
        sequences = dims["cu_seqlens"][0] - 1 if problem.index_dtype else tokens // problem.most
        states = dims.get("initial_state") or dims.get("final_state") or (0,)
        self._check_rows(operands, dims, max(sequences, 0), states[0])
        self._check_limits(operands, dims, max(sequences, 0))
        found = {"tokens": tokens, "sequences": max(sequences, 0), "pool": states[0]}
        for port, place in places.items():
            for word, axis in place.axes.items():
                found[f"{port}.{word}"] = self._stride(port, word, operands[place.operand], axis)
        return {word: found.get(word, 0) for word in self._index}

    def _check_rows(self, operands: Sequence[Operand], dims: Mapping[str, Any], sequences: int, pool: int) -> None:
        """What has a row for every sequence, or for every row of the pool, has as many."""
        states = pool if self.problem.slot_dtype else sequences
        wanted = {"initial_state": states, "final_state": states}
        wanted |= dict.fromkeys(("state_indices", "num_accepted_tokens"), sequences)
        if not self.problem.index_dtype:
            wanted["q"] = sequences * self.problem.most
        for port, rows in wanted.items():
            if port in dims and dims[port][0] != rows:
                operand = operands[self.binding.places[port].operand]
                raise _refused(operand, f"the size of axis 0 is {dims[port][0]}", f"{rows}")

    def _check_limits(self, operands: Sequence[Operand], dims: Mapping[str, Any], sequences: int) -> None:
        """What the lowering declines where the graph states the sizes."""
        places = self.binding.places
        for port in ("q", "initial_state", "final_state"):
            if port in dims and dims[port][0] > MOST_ROWS:
                rows = dims[port][0]
                raise _refused(operands[places[port].operand], f"the size of axis 0 is {rows}", f"at most {MOST_ROWS}")
        needs = ctas(self.problem, self.config, sequences)
        if needs > GRID_LIMIT:
            what = f"{sequences} sequences need {needs} CTAs"
            raise _refused(operands[places["q"].operand], what, f"at most {GRID_LIMIT}")

    def _stride(self, port: str, word: str, operand: Any, axis: int) -> int:
        """In bytes; of an axis of one element 0."""
        size, rule = self.binding.places[port].size, self.binding.rules[port]
        stride: int = 0 if operand.dim[axis] == 1 else operand.stride[axis] * size
        needs = ""
        if word == "line" and rule.dense and stride not in (0, rule.dense):
            needs = f"{rule.dense}"
        elif stride % rule.multiple:
            needs = f"a multiple of {rule.multiple}"
        elif not 0 <= stride < STRIDE_LIMIT:
            needs = f"at least 0 and below {STRIDE_LIMIT}"
        if needs:
            raise _refused(operand, f"the stride of axis {axis} is {stride} bytes", needs)
        return stride

    def bind(self, layout: tuple[Operand, ...]) -> Runner:
        """``run(pointers, workspace, stream)`` for operands of this layout. Loads the GPU code, launches nothing. Raises
        ExecutionError, and DriverError without a device."""
        words = self.words(layout)
        if not words["sequences"]:
            return _nothing
        template = array("q", words.values())
        function = cute_dsl.load_code(self.function())
        # (index in the block, operand, bits of the address that must be 0)
        addresses = tuple(
            (self._index[f"{port}.address"], place.operand, self.binding.rules[port].multiple - 1)
            for port, place in self.binding.places.items()
        )

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            block = template[:]
            misaligned = 0
            for at, slot, low_bits in addresses:
                address = pointers[slot]
                misaligned |= address & low_bits
                block[at] = address
            if misaligned:
                self._misaligned(layout, pointers)
            function(block.buffer_info()[0], stream)

        return run

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        self._runs.execute(pack, ctx)

    def host_arguments(self, artifact: Artifact, pack: VariantPack, workspace: int) -> tuple[HostBlock, None]:
        """What an executor passes to the host function: the argument words and a null stream. Raises ExecutionError."""
        from cudnn_core import HostBlock

        words, addresses = self.words(pack.operands), []
        if not words["sequences"]:  # a grid has a CTA or more
            operand = pack.operands[self.binding.places["q"].operand]
            raise _refused(operand, "there is no sequence", "one or more")
        for port, place in self.binding.places.items():
            word = f"{port}.address"
            words[word] = pack.pointers[place.operand]
            addresses.append(self._index[word] * WORD_BYTES)
        return HostBlock(array("q", words.values()).tobytes(), tuple(addresses), ()), None

    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        header, payloads = self.kernel.serialize()
        own = {"schema": SCHEMA, "problem": self.problem.canonical(), "config": asdict(self.config)}
        return {**header, **own}, payloads

    def _misaligned(self, operands: Sequence[Operand], pointers: Sequence[int]) -> None:
        for port, place in self.binding.places.items():
            multiple, address = self.binding.rules[port].multiple, pointers[place.operand]
            if address % multiple:
                raise _refused(operands[place.operand], f"the address is {address:#x}", f"a multiple of {multiple}")


def restored(
    header: Mapping[str, Any], payloads: Mapping[str, bytes], problem: DecodeProblem, binding: Binding, target: str
) -> DecodePlan:
    """The plan of ``DecodePlan.serialize``, for a graph that is ``problem``.

    Raises BuildError for another format, architecture, problem or runtime.
    """
    try:
        if header["schema"] != SCHEMA:
            raise BuildError(f"a plan of schema {header['schema']!r}, and this version reads {SCHEMA}")
        config, stated = DecodeConfig(**header["config"]), header["problem"]
    except (KeyError, TypeError) as error:
        raise BuildError(f"not a plan of this plugin: {type(error).__name__}: {error}") from error
    if stated != problem.canonical():
        raise BuildError(f"the plan is of another problem: {stated}")
    kernel = cute_dsl.CompiledKernel.restored(header, payloads, target)
    name = kernel_name(problem, config, target)
    if kernel.name != name:
        raise BuildError(f"the plan's kernel is {kernel.name}, not {name}")
    return DecodePlan(problem, binding, config, kernel)


def _refused(operand: Operand, what: str, needs: str) -> ExecutionError:
    label = operand.name or f"uid {operand.uid}"
    return ExecutionError(f"operand {label}: {what}, and the kernel needs {needs}", operand=label)


def _nothing(pointers: Sequence[int], workspace: int, stream: int) -> None:
    """There is no sequence: nothing to do."""
