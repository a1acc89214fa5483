"""A plan on operands whose every byte is watched. Imported by the kit's run phase.

``Rig`` knows the operands of one plan at one choice of runtime sizes; ``Rig.stage`` lays out inputs and poisoned outputs,
``Rig.run`` executes, ``Run.problems`` says what the engine did to memory that it had no business with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .._engine import ExecutionContext, VariantPack
from ._codec import decode
from ._compare import mismatch, moves_only
from ._inputs import make_inputs
from ._kit import KitFailure
from ._memory import Block, Layout, first_change
from ._oracle import Val, evaluate

if TYPE_CHECKING:
    from .._plan import Plan
    from ._cases import Case

__all__ = ["POISON", "Rig", "Run", "expected_by", "unwritten"]

Array = Any  # of numpy
POISON = (0xA5, 0x5A)
Oracle = Callable[[Any, Mapping[int, Array]], dict[int, Val]]


def expected_by(name: str, notes: Iterable[str] = ()) -> Oracle:
    """The oracle "kit", or "torch_reference": its values with the kit's bounds, and its values alone for ops of plugins.

    notes  what the engine states of its plans of the graph: bounds follow from them
    """
    return partial(evaluate if name == "kit" else _by_torch_reference, notes=tuple(notes))


def _by_torch_reference(graph: Any, inputs: Mapping[int, Array], notes: Iterable[str]) -> dict[int, Val]:
    import torch
    from torch_reference import evaluate as reference

    from ._codec import FORMATS, half_spacing

    feed = {}
    for tensor in graph.operand_tensors():
        if tensor.role == "input":
            values = decode(inputs[tensor.index], tensor.dtype)
            feed[tensor.uid] = torch.from_numpy(
                np.array(values if tensor.dtype in FORMATS else values.astype(np.int64))
            )
    found = reference(graph, feed, precision="float64", round_virtual=False, round_outputs=False)
    try:
        bounds = evaluate(graph, inputs, notes)
    except KeyError:  # an op that the kit does not model: a plugin's own
        bounds = {}
    result = {}
    for tensor in graph.tensors:
        if tensor.uid in found:
            value = np.asarray(found[tensor.uid].double().numpy())
            bound = bounds[tensor.index].e if tensor.index in bounds else _generic_bound(tensor, value, half_spacing)
            result[tensor.index] = Val(value, bound)
    return result


def _generic_bound(tensor: Any, value: Array, half_spacing: Any) -> Array:
    """For an op without a rule: 64 roundings of its result to float32, relative to the largest element."""
    largest = float(np.max(np.abs(value[np.isfinite(value)]), initial=0.0))
    return np.full_like(value, 64 * 2.0**-24 * largest) + half_spacing(str(tensor.dtype), np.abs(value))


class Rig:
    """The operands of ``plan`` for ``case`` at ``sizes``."""

    def __init__(self, plan: Plan, case: Case, sizes: Mapping[str, int], oracle: Oracle) -> None:
        self.plan = plan
        self.case = case
        self.sizes = dict(sizes)
        self.graph = plan.graph.at(sizes)
        self.tensors = self.graph.operand_tensors()
        self.layouts = tuple(Layout(t.dtype, t.dim, t.stride) for t in self.tensors)  # type: ignore[arg-type]
        self.bitwise = moves_only(self.graph)
        self.oracle = oracle
        self._expected: dict[tuple[str, int], dict[int, Val]] = {}

    def inputs(self, variant: str = "random", seed: int = 0) -> dict[int, Array]:
        return make_inputs(self.case, self.graph, variant, seed)

    def expected(self, variant: str = "random", seed: int = 0) -> dict[int, Val]:
        """Of what the memory really holds: elements that share memory have one value."""
        key = (variant, seed)
        if key not in self._expected:
            stored = {}
            for tensor, layout in zip(self.tensors, self.layouts, strict=True):
                if tensor.role == "input":
                    image: Any = np.zeros(layout.nbytes, dtype=np.uint8)
                    layout.write(image, 0, self.inputs(variant, seed)[tensor.index])
                    stored[tensor.index] = layout.read(image, 0)
            try:
                self._expected[key] = self.oracle(self.graph, stored)
            except KeyError as error:
                hint = "install cudnn-core-torch-reference, and give the op's row a reference"
                raise KitFailure(f"case {self.case.name} can't be judged: {error.args[0]} ({hint})") from error
        return self._expected[key]

    def stage(
        self,
        variant: str = "random",
        seed: int = 0,
        *,
        fill: int = POISON[0],
        shifted: bool = False,
        plan: Plan | None = None,
    ) -> Run:
        """Blocks with the inputs in place and the outputs poisoned; ``shifted`` moves each by one element."""
        plan = plan or self.plan
        inputs = self.inputs(variant, seed)
        blocks: list[Block | None] = []
        values: list[Any] = []
        for tensor, layout in zip(self.tensors, self.layouts, strict=True):
            if tensor.by_value:
                number = decode(inputs[tensor.index], tensor.dtype).reshape(-1)[0]
                whole = str(tensor.dtype).startswith(("int", "uint", "bool"))
                blocks.append(None)
                values.append(int(number) if whole else float(number))
                continue
            block = Block(plan.device, layout.nbytes, fill=fill, shift=layout.size if shifted else 0)
            if tensor.role == "input":
                layout.write(block.image, block.start, inputs[tensor.index])
            block.store()
            blocks.append(block)
            values.append(block.address)
        # The canary follows what the engine asked for: on a CPU the plan's own size has room to align it.
        workspace = Block(plan.device, plan._compiled.workspace_size, fill=fill)
        workspace.store()
        return Run(self, plan, blocks, values, workspace, (variant, seed))


class Run:
    """One execution in the making: blocks by operand (None: passed by value) and the workspace."""

    def __init__(
        self,
        rig: Rig,
        plan: Plan,
        blocks: list[Block | None],
        values: list[Any],
        workspace: Block,
        data: tuple[str, int],
    ) -> None:
        self.rig = rig
        self.plan = plan
        self.blocks = blocks
        self.values = values
        self.workspace = workspace
        self.data = data
        uids = [operand.uid for operand in plan.operands]
        shapes = {uid: tensor.dim for uid, tensor in zip(uids, rig.tensors, strict=True)} if plan.graph.dims else None
        self.pack = plan.pack(dict(zip(uids, values, strict=True)), shapes)  # type: ignore[arg-type]

    @property
    def workspace_address(self) -> int:
        return self.workspace.address if self.workspace.nbytes else 0

    def execute(self, handle: Any = None) -> None:
        self.plan.execute(self.pack, self.workspace_address or None, handle)

    def bound(self, stream: int = 0) -> None:
        self.plan.bind(self.pack)(self.pack.pointers, self.workspace_address, stream)

    def unbound(self, stream: int = 0) -> None:
        """The engine's ``execute``, which ``bind`` stands beside."""
        ctx = ExecutionContext(None, self.plan.device, stream, self.workspace_address)
        self.plan._compiled.execute(VariantPack(self.pack.operands, self.pack.pointers), ctx)

    def outputs(self) -> dict[int, Array]:
        """Codes of every output by tensor index."""
        return {
            tensor.index: layout.read(block.fetch(), block.start)
            for tensor, layout, block in zip(self.rig.tensors, self.rig.layouts, self.blocks, strict=True)
            if block is not None and tensor.role != "input"
        }

    def wrong(self) -> str:
        """The first output that differs from the oracle, or ""."""
        expected = self.rig.expected(*self.data)
        outputs = self.outputs()
        for tensor, layout, block in zip(self.rig.tensors, self.rig.layouts, self.blocks, strict=True):
            if block is None or tensor.role == "input":
                continue
            codes = outputs[tensor.index]
            found = mismatch(codes, str(tensor.dtype), expected[tensor.index], bitwise=self.rig.bitwise)
            if found:
                kept = int((codes == layout.read(block.image, block.start)).sum())
                hint = f"; {kept} still hold the bytes from before the run: never written?" if kept else ""
                return f"output {tensor.name}{found}{hint}"
        return ""

    def trespasses(self) -> str:
        """The first byte that changed and should not have, or "": inputs, gaps between elements, guards, beyond the workspace."""
        for tensor, layout, block in zip(self.rig.tensors, self.rig.layouts, self.blocks, strict=True):
            if block is None:
                continue
            after = block.fetch()
            stray = block.stray(after)
            if stray:
                return f"{tensor.role} {tensor.name}: the engine wrote {stray} of the buffer"
            untouched = block.image.copy()
            if tensor.role != "input":
                layout.write(untouched, block.start, layout.read(after, block.start))
            at = first_change(untouched, after)
            if at is not None:
                what = "changed an input" if tensor.role == "input" else "wrote between the elements of an output"
                return f"{tensor.role} {tensor.name}: the engine {what}, at byte {at - block.start}"
        stray = self.workspace.stray(self.workspace.fetch())
        return f"workspace: the engine wrote {stray} that it asked for" if stray else ""


def unwritten(first: Run, second: Run) -> str:
    """The first output element that kept the poison in both runs (filled differently), or ""."""
    for tensor, layout, a, b in zip(first.rig.tensors, first.rig.layouts, first.blocks, second.blocks, strict=True):
        if a is None or b is None or tensor.role == "input" or not layout.offsets.size:
            continue
        kept: Any = np.ones(layout.offsets.shape, dtype=bool)
        for block in (a, b):
            kept &= layout.read(block.fetch(), block.start) == layout.read(block.image, block.start)
        if kept.any():
            where = ", ".join(map(str, np.unravel_index(int(kept.argmax()), kept.shape)))
            return f"output {tensor.name}[{where}] was never written ({int(kept.sum())} of {kept.size} elements)"
    return ""
