"""From the operands of a call to the block of argument words, with the conditions on them. Imported by ``plan`` and the engines.

Conditions on sizes and strides that a graph states are declines in ``lowering``; here are those on what a run brings: sizes that must
agree, runtime sizes and strides, addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cudnn_core import ExecutionError

from .arguments import argument_words
from .limits import GRID_LIMIT, MOST_TOKENS, STRIDE_LIMIT, ctas
from .lowering import ALIGNED, BYTES, Binding
from .problem import Problem
from .segments import choose_segments, workspace_offsets

if TYPE_CHECKING:
    from cudnn_core import Operand

__all__ = ["Launcher"]


class Launcher:
    """Of a problem whose tensors lie at ``binding`` among the operands, on a GPU of ``sms`` SMs.

    ``index`` says where each word is, ``addresses`` (index, operand, bits that must be 0) of those that are operands' addresses.
    """

    def __init__(self, problem: Problem, binding: Binding, sms: int) -> None:
        self.problem, self.binding, self.sms = problem, binding, sms
        self.index = argument_words(problem)
        self.addresses = tuple(
            (self.index[f"{port}.address"], place.operand, ALIGNED - 1 if port in binding.aligned else 0)
            for port, place in binding.places.items()
        )

    def words(self, operands: Sequence[Operand]) -> dict[str, int]:
        """The words of actual operands, checked. Addresses are 0, those of areas of the workspace are offsets in it. Raises ExecutionError."""
        problem, places = self.problem, self.binding.places
        dims = {port: operands[place.operand].dim for port, place in places.items()}
        tokens = self._int(dims["q"][0])
        rows = 0
        sequences = self._int(dims["cu_seqlens"][0]) - 1 if "cu_seqlens" in dims else 1
        if not 1 <= tokens <= MOST_TOKENS:
            raise self._refused(operands, "q", f"there are {tokens} tokens", f"1 to {MOST_TOKENS}")
        if sequences < 1:
            raise self._refused(operands, "cu_seqlens", "there is no sequence", "two boundaries or more")
        for port in ("initial_state", "final_state"):
            if port in dims:
                have = self._int(dims[port][0])
                want: int = rows or (have if problem.pooled else sequences)
                if have != want:
                    raise self._refused(operands, port, f"there are {have} states", f"{want}")
                rows = have
        slots = self._int(dims["state_indices"][0]) if problem.pooled else sequences
        if slots != sequences:
            needs = f"one for each of {sequences} sequences"
            raise self._refused(operands, "state_indices", f"there are {slots} slots", needs)
        segments = choose_segments(problem, tokens, sequences, self.sms)
        self._check_grid(operands, tokens, sequences, segments)
        found = {"tokens": tokens, "sequences": sequences, "pool": rows, "segments": segments, "sms": self.sms}
        found |= workspace_offsets(problem, tokens, sequences)
        for port, place in places.items():
            found |= self._strides(operands, port, operands[place.operand])
        return {word: found.get(word, 0) for word in self.index}

    def misaligned(self, operands: Sequence[Operand], pointers: Sequence[int]) -> ExecutionError:
        """Which address is not a multiple of 16 bytes."""
        for port in self.binding.aligned:
            address = pointers[self.binding.places[port].operand]
            if address % ALIGNED:
                return self._refused(operands, port, f"the address is {address:#x}", f"a multiple of {ALIGNED}")
        raise AssertionError("all addresses are aligned")

    def _strides(self, operands: Sequence[Operand], port: str, operand: Operand) -> dict[str, int]:
        found, size = {}, BYTES[operand.dtype]
        wide = port in self.binding.aligned
        for word, axis in self.binding.places[port].axes.items():
            # An axis of one element is never stepped along.
            stride = 0 if operand.dim[axis] == 1 else self._int(operand.stride[axis])
            unit = wide and stride == 1 and word in self._units(port)
            if wide and not unit and stride * size % ALIGNED:
                multiple = ALIGNED // size
                raise self._refused(
                    operands, port, f"the stride of axis {axis} is {stride}", f"a multiple of {multiple}"
                )
            if not 0 <= stride * size < STRIDE_LIMIT:
                limit = STRIDE_LIMIT // size
                raise self._refused(
                    operands, port, f"the stride of axis {axis} is {stride}", f"at least 0 and below {limit}"
                )
            found[f"{port}.{word}"] = stride
        return found

    def _units(self, port: str) -> tuple[str, ...]:
        """The words of the axis whose stride is 1 by the problem."""
        if port.endswith("_state"):
            return ("col",) if self.problem.state_layout == "v_major" else ("row",)
        return ("channel",)

    def _check_grid(self, operands: Sequence[Operand], tokens: int, sequences: int, segments: int) -> None:
        needs = ctas(self.problem, tokens, sequences, segments)
        if needs > GRID_LIMIT:
            raise self._refused(
                operands, "q", f"{tokens} tokens of {sequences} sequences need {needs} CTAs", f"at most {GRID_LIMIT}"
            )

    def _refused(self, operands: Sequence[Operand], port: str, what: str, needs: str) -> ExecutionError:
        operand = operands[self.binding.places[port].operand]
        label = operand.name or f"uid {operand.uid}"
        return ExecutionError(f"operand {label}: {what}, and the kernel needs {needs}", operand=label)

    @staticmethod
    def _int(size: object) -> int:
        """An actual operand's sizes and strides are ints."""
        assert isinstance(size, int)
        return size
