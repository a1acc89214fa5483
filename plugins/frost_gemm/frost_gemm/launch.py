"""The launch of a compiled kernel: from operands to the block of argument words, with the conditions on them.

``Launcher.bind(operands)`` checks sizes and strides once and prepares the block; its ``run(pointers, workspace, stream)`` copies
the block, fills in the addresses and calls the host function: no allocation on the device, no synchronisation, any number of threads.

The conditions are one ordered list of ``Rule``s made from the program. ``Launcher`` makes the guard of each call from it, the
messages of a refused one, and ``broken`` what ``check_support`` declines, so that the three can't differ. Imported by ``engines``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_core import ExecutionError, nbytes
from cudnn_core.cute_dsl import Function, load_code

from .ir import Program, argument_words
from .layout import BITS, LARGEST_BLOCKS, LARGEST_EXTENT, TMA_ALIGNMENT

if TYPE_CHECKING:
    from cudnn_core import Buffers, HostBlock, Operand, Runner

    from .binding import Binding

__all__ = ["Launcher", "Rule", "broken", "layout_words", "rules"]

INT32_MAX = 2**31 - 1
TMA_STRIDE_LIMIT = 2**40  # bytes; CUDA driver API, cuTensorMapEncodeTiled: globalStrides
WORD_BYTES = 8
BLOCKS = "number of blocks of 64 x 8 elements"  # not a word of the kernel: it is checked


class Rule(NamedTuple):
    """``low <= value <= high`` and ``value % multiple == 0`` of one argument word.

    subject   what a decline names: "m", "a0", "store0"
    """

    word: str
    subject: str
    code: str
    what: str
    low: int = 0
    high: int = 2**63 - 1
    multiple: int = 1

    def holds(self, value: int) -> bool:
        return self.low <= value <= self.high and value % self.multiple == 0

    @property
    def expected(self) -> dict[str, int]:
        bounds = {"min": self.low, "max": self.high, "multiple_of": self.multiple}
        silent = Rule("", "", "", "")
        plain = {"min": silent.low, "max": silent.high, "multiple_of": silent.multiple}
        return {name: value for name, value in bounds.items() if value != plain[name]}


def rules(program: Program) -> tuple[Rule, ...]:
    """What a kernel of ``program`` needs of its arguments: sizes first, then each tensor's address and strides."""
    # A reduction of nothing would have to be written by somebody; without reductions there is nothing to do.
    least = 1 if program.reductions else 0
    found = [Rule(size, size, "shape.range", "size", least, LARGEST_EXTENT) for size in ("m", "n")]
    found.append(Rule("l", "l", "shape.range", "size", least, INT32_MAX))
    found.append(Rule("k", "k", "shape.range", "size", 1, LARGEST_EXTENT))
    found.append(Rule(BLOCKS, BLOCKS, "shape.range", "number", 0, LARGEST_BLOCKS))
    for group, members in (("a", program.a), ("b", program.b)):
        for i, matrix in enumerate(members):
            unit = {"k": "col", "mn": "row"}[matrix.major]
            found += _tensor_rules(f"{group}{i}", matrix.dtype, matrix.alignment, unit, TMA_STRIDE_LIMIT)
    for i, aux in enumerate(program.aux):
        if not aux.by_value:
            # Without a unit stride it is accessed element by element.
            found += _tensor_rules(f"aux{i}", aux.dtype, aux.alignment if aux.major else 0, _UNITS[aux.major])
    for i, store in enumerate(program.stores):
        aligned = store.alignment if store.major else 0
        limit = TMA_STRIDE_LIMIT if aligned >= TMA_ALIGNMENT else 0
        found += _tensor_rules(f"store{i}", store.dtype, aligned, _UNITS[store.major], limit)
    for i, reduction in enumerate(program.reductions):
        found += _tensor_rules(f"reduction{i}", reduction.dtype, 0, "")
    return tuple(found)


_UNITS = {"n": "col", "m": "row", "": ""}


def _tensor_rules(name: str, dtype: str, alignment: int, unit: str, limit: int = 0) -> list[Rule]:
    size = max(1, BITS[dtype] // 8)
    aligned = max(alignment, size)
    found = [Rule(f"{name}.address", name, "layout.alignment", "address", multiple=aligned)]
    for axis in ("row", "col", "batch"):
        word = f"{name}.{axis}"
        if axis == unit:  # 1 by the program's major, and not read
            continue
        found.append(Rule(word, name, "layout.alignment", f"stride of its {_AXES[axis]}", multiple=aligned // size))
        if limit:
            found.append(Rule(word, name, "layout.stride", f"stride of its {_AXES[axis]}", 0, limit // size - 1))
    return found


_AXES = {"row": "rows", "col": "columns", "batch": "batches"}


def layout_words(binding: Binding, operands: Sequence[Any]) -> dict[str, Any]:
    """The words of sizes and strides by name, and ``BLOCKS`` where the sizes are known. ``operands`` have ``dim`` and ``stride``, in elements; they may be runtime sizes.

    An axis of size 1 is never stepped along: whatever stride a caller has there becomes 0, which is aligned. A batch of several
    axes is stepped along the innermost one of more elements than one: which that is may be known now alone.
    """
    words = binding.sizes([operand.dim for operand in operands])
    m, n, batches = words["m"], words["n"], words["l"]
    if isinstance(m, int) and isinstance(n, int) and isinstance(batches, int):
        words[BLOCKS] = -(-m // 64) * -(-n // 8) * batches
    for place in binding.places:
        dim, stride = operands[place.operand].dim, operands[place.operand].stride
        batch = place.batch
        while batch and dim[batch] == 1:
            batch -= 1
        for axis, at in (("row", place.rows), ("col", place.cols), ("batch", batch)):
            words[f"{place.word}.{axis}"] = 0 if at is None or dim[at] == 1 else stride[at]
    return words


def broken(checks: Sequence[Rule], words: Mapping[str, object]) -> list[tuple[Rule, int]]:
    """The rules that known words break, with the values. Words that are not there, or no ints (runtime sizes), are not judged."""
    known = ((rule, words.get(rule.word)) for rule in checks)
    return [(rule, value) for rule, value in known if isinstance(value, int) and not rule.holds(value)]


class Launcher:
    """Makes the callables of one compiled kernel.

    program, binding  as the kernel sees them: with ``swap_ab``, both swapped
    function          gives the loaded host function, ``(address of the words, stream)``; called when a layout is bound
    """

    def __init__(self, program: Program, binding: Binding, function: Callable[[], Function]) -> None:
        self.binding = binding
        self.index = argument_words(program)
        self.rules = rules(program)
        self._function = function

    def words(self, operands: Sequence[Operand]) -> dict[str, int]:
        """The words of actual operands, checked; addresses are 0. Raises ExecutionError.

        ``Operand.alignment`` is not judged: it may be that of the least aligned operand, and each call sees the addresses.
        """
        found = layout_words(self.binding, operands)
        self._check(found, str, operands)
        return {word: found.get(word, 0) for word in self.index}

    def bind(self, operands: Sequence[Operand]) -> Runner:
        """``run(pointers, workspace, stream)`` for operands of this layout. Loads the GPU code, launches nothing. Raises
        ExecutionError, and DriverError without a device."""
        words = self.words(operands)
        if 0 in (words["m"], words["n"], words["l"]):
            return _nothing
        template = array("q", words.values())
        function = load_code(self._function())
        multiples = {rule.word: rule.multiple for rule in self.rules if rule.what == "address"}
        # (index in the block, operand, bits of the address that must be 0)
        addresses = tuple(
            (self.index[word], place.operand, multiples.get(word, 1) - 1)
            for place in self.binding.places
            for word in [f"{place.word}.address"]
        )
        workspace_at = self.index["workspace"]

        def run(pointers: Buffers, workspace: int, stream: int) -> None:
            block = template[:]
            misaligned = 0
            for at, slot, low_bits in addresses:
                address = pointers[slot]
                misaligned |= address & low_bits
                block[at] = address
            if misaligned:
                given = {f"{place.word}.address": pointers[place.operand] for place in self.binding.places}
                self._check(given, hex, operands)
            block[workspace_at] = workspace
            function(block.buffer_info()[0], stream)

        return run

    def host_block(self, operands: Sequence[Operand], pointers: Sequence[int], workspace: int) -> HostBlock:
        """The argument words for an executor that has host addresses. Raises ExecutionError."""
        from cudnn_core import HostBlock

        words = self.words(operands) | {"workspace": workspace}
        for size in ("m", "n", "l"):
            if not words[size]:  # a grid has a CTA or more
                raise ExecutionError(f"{size} is 0: there is nothing to launch")
        addresses, values = [self.index["workspace"] * WORD_BYTES], []
        for place in self.binding.places:
            word, operand, pointer = f"{place.word}.address", operands[place.operand], pointers[place.operand]
            if operand.by_value:
                values.append((self.index[word] * WORD_BYTES, ctypes.string_at(pointer, nbytes(operand.dtype, 1))))
            else:
                words[word] = pointer
                addresses.append(self.index[word] * WORD_BYTES)
        return HostBlock(array("q", words.values()).tobytes(), tuple(addresses), tuple(values))

    def _check(self, words: Mapping[str, int], shown: Callable[[int], str], operands: Sequence[Operand]) -> None:
        for rule, value in broken(self.rules, words):
            needs = " and ".join(f"{_WORDS[name]} {bound}" for name, bound in rule.expected.items())
            place = next((place for place in self.binding.places if place.word == rule.subject), None)
            if place is None:
                raise ExecutionError(f"{rule.subject} is {value}, and the kernel needs {needs}")
            operand = operands[place.operand]
            label = operand.name or f"uid {operand.uid}"
            raise ExecutionError(
                f"operand {label}: the {rule.what} is {shown(value)}, and the kernel needs {needs}", operand=label
            )


_WORDS = {"min": "at least", "max": "at most", "multiple_of": "a multiple of"}


def _nothing(pointers: Buffers, workspace: int, stream: int) -> None:
    """An output without elements: there is nothing to do."""
