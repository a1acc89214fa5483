"""The machine and the public entry `run_ptx`: arguments, parameters, clusters one after the other.

Contract: clusters run one at a time in launch order (or in the order that cluster launch control hands them out), each
to its end; a cluster that spins on memory lets the next one run to its end meanwhile. `run_ptx` never touches a GPU, mutates the argument tensors in place and returns a `Report`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ._clocks import Agents, Events
from ._cluster import Cluster
from ._cta import RESERVED
from ._findings import EmulationError, Findings, Limits, Report
from ._memory import GlobalMemory, Outputs, Region, host_buffer
from ._overlap import Overlap
from ._ptx import WIDTHS, Entry, Module, Param, parse
from ._schedule import AsyncQueue, run_cluster
from ._translate import translate

__all__ = ["run_ptx"]

_FORMATS = {"f32": "<f", "f64": "<d", "f16": "<e"}
RESIDENT = 64  # clusters that can be started while another one waits for them
CONSTANT_BASE = 1 << 50  # module-scope variables lie above every host buffer


def _dims(value: Any, what: str) -> tuple[int, int, int]:
    dims = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(dims) <= 3 or any(d < 1 for d in dims):
        raise EmulationError(f"{what} must have one to three positive extents, not {value!r}")
    return (*dims, 1, 1)[:3]  # type: ignore[return-value]


class Work:
    """The origins of the clusters that have not begun, x fastest; a grid of 2^31 is not written down."""

    def __init__(self, steps: Sequence[range]) -> None:
        self._steps, self._next = steps, 0
        self._count = len(steps[0]) * len(steps[1]) * len(steps[2])

    def __len__(self) -> int:
        return self._count - self._next

    def popleft(self) -> tuple[int, int, int]:
        rest, x = divmod(self._next, len(self._steps[0]))
        z, y = divmod(rest, len(self._steps[1]))
        self._next += 1
        return self._steps[0][x], self._steps[1][y], self._steps[2][z]


class Machine:
    """State that outlives a cluster: code, global memory, parameters, findings."""

    def __init__(self, module: Module, entry: Entry, grid: Any, block: Any, cluster: Any, seed: int, check: str,
                 dynamic_smem: int, limits: Limits | Mapping[str, Any] | None, schedule: str,
                 strict: bool, overlap: Overlap) -> None:  # fmt: skip
        self.module, self.entry = module, entry
        self.grid, self.block, self.cluster = _dims(grid, "grid"), _dims(block, "block"), _dims(cluster, "cluster")
        self.findings = Findings(seed, check, strict)
        self.limits = Limits.of(module.target, limits)
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.seed, self.schedule, self.strict = seed, schedule, strict
        self.dynamic_smem = dynamic_smem
        self.aborted = self.refused = False
        self.depth = 0
        self.events = Events()
        clusters = self.cluster[0] * self.cluster[1] * self.cluster[2]
        self.agents = Agents(clusters, -(-self.threads // 32))
        self.queue = AsyncQueue(seed, schedule)
        self.overlap = overlap
        self.memory = GlobalMemory(self.findings, self.events, self.agents, overlap)
        self.params = Region("parameters", np.zeros(-(-max(entry.param_bytes, 1) // 16) * 16, np.uint8), self.findings,
                             self.events, self.agents, True)  # fmt: skip
        self.constants: dict[str, int] = {}
        base = CONSTANT_BASE
        for name, raw in module.constants.items():
            self.constants[name] = base
            self.memory.register(base, np.frombuffer(raw, np.uint8).copy(), name, module=True)
            base += -(-len(raw) // 4096) * 4096 + 4096
        align = entry.shared_align if entry.shared_align > 16 else 16
        dynamic = -(-(RESERVED + entry.static_shared) // max(align, 16)) * max(align, 16)
        self.dynamic_base = dynamic if any(offset < 0 for offset, _ in entry.shared.values()) else RESERVED
        self.shared_bytes = -(-(max(dynamic, self.dynamic_base) + dynamic_smem) // 16) * 16
        self.hits = [0] * (len(entry.instructions) + 1)
        self.work = Work((range(0), range(0), range(0)))
        self.sync: dict[int, Any] = {}  # address -> (cluster, clocks) of the last release
        self._check_launch()
        self.code, self._template, self._specials = translate(self)

    def _check_launch(self) -> None:
        limits, add = self.limits, self.findings.add
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        problems = [
            (self.threads > limits.threads_per_block, f"block of {self.threads} threads, at most {limits.threads_per_block}"),
            (self.block[0] > 1024 or self.block[1] > 1024 or self.block[2] > 64, f"block {self.block}, at most (1024, 1024, 64)"),
            (size > limits.cluster_size, f"cluster of {size} CTAs, at most {limits.cluster_size}"),
            (any(g % c for g, c in zip(self.grid, self.cluster, strict=True)), f"grid {self.grid} is not a multiple of the cluster {self.cluster}"),
            (self.grid[0] > limits.grid_x or max(self.grid[1:]) > limits.grid_yz, f"grid {self.grid} beyond the device"),
            (self.entry.static_shared > limits.static_shared, f"{self.entry.static_shared} bytes of static shared memory"),
            (self.entry.static_shared + self.dynamic_smem > limits.shared_per_block,
             f"{self.entry.static_shared + self.dynamic_smem} bytes of shared memory, at most {limits.shared_per_block}"),
        ]  # fmt: skip
        required = self.entry.directives.get("reqntid")
        if required:
            problems.append(((*required, 1, 1)[:3] != self.block, f"block {self.block}, but .reqntid {required}"))
        largest = self.entry.directives.get("maxntid")
        if largest:
            problems.append((int(np.prod(largest)) < self.threads, f"block {self.block}, but .maxntid {largest}"))
        needed = self.entry.directives.get("reqnctapercluster")
        if needed:
            problems.append(
                ((*needed, 1, 1)[:3] != self.cluster, f"cluster {self.cluster}, but .reqnctapercluster {needed}")
            )
        for wrong, message in problems:
            if wrong:
                self.refused = True  # as the driver would
                add("limits", message, None, (), key=message)

    def registers(self, cta: Any, warp: int) -> list[Any]:
        """A fresh register file: constants are shared arrays, special registers are filled in."""
        regs = list(self._template)
        for slot, make in self._specials:
            regs[slot] = make(cta, warp)
        return regs

    def _run_cluster(self, queue: AsyncQueue) -> None:
        origin = self.work.popleft()
        clusters = self.cluster[0] * self.cluster[1] * self.cluster[2]
        self.agents = Agents(clusters, -(-self.threads // 32))
        self.memory.renew(self.agents)
        self.params.order.renew(self.agents)
        run_cluster(Cluster(self, origin, self.agents, queue))

    def run_next(self) -> bool:
        """Run the next cluster to its end while the current one is stuck (at most `RESIDENT` deep)."""
        if not self.work or self.aborted or self.depth >= RESIDENT:
            return False
        orders = [region.order for _, region in self.memory.regions] + [self.params.order]
        agents, events, reads = self.agents, self.events.suspend(), [order.suspend() for order in orders]
        self.depth += 1
        self._run_cluster(AsyncQueue(self.seed, self.schedule))
        self.depth -= 1
        self.events.resume(events)
        self.agents = self.memory.agents = agents
        for order, saved in zip(orders, reads, strict=True):
            order.resume(agents, saved)
        return not self.aborted

    def run(self) -> None:
        if self.refused:
            return
        steps = [range(0, g - c + 1, c) for g, c in zip(self.grid, self.cluster, strict=True)]
        self.work = Work(steps)
        with np.errstate(all="ignore"):
            while self.work and not self.aborted:
                self._run_cluster(self.queue)
                self.events.retire()
        for hits, instr in zip(self.hits, self.entry.instructions, strict=False):
            if hits:
                self.findings.count("instructions." + instr.opcode, hits)
                self.findings.count("instructions", hits)


def _pack(param: Param, value: Any, machine: Machine, initialised: bool) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        if len(raw) != param.size:
            raise EmulationError(f"parameter {param.name}: {len(raw)} bytes given, {param.size} expected")
        return raw
    if isinstance(value, (bool, int, float, np.integer, np.floating)):
        if param.type in _FORMATS or isinstance(value, (float, np.floating)):
            if param.type in _FORMATS:
                return struct.pack(_FORMATS[param.type], float(value))
            raise EmulationError(f"parameter {param.name} is .{param.type}: pass an integer or bytes")
        width = WIDTHS[param.type] if param.size == WIDTHS[param.type] else param.size
        return (int(value) % (1 << 8 * width)).to_bytes(width, "little")
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise EmulationError(
            f"parameter {param.name}: a read-only array, what the kernel writes would be lost; pass a copy"
        )
    address, data = host_buffer(value)
    if param.size != 8:
        raise EmulationError(f"parameter {param.name} has {param.size} bytes: a tensor is an 8-byte address")
    machine.memory.register(address, data, f"argument {param.name}", initialised, value)
    return address.to_bytes(8, "little")


def run_ptx(
    text: str,
    entry: str | None,
    grid: Any,
    block: Any,
    cluster: Any = (1, 1, 1),
    args: Sequence[Any] = (),
    seed: int = 0,
    check: str = "report",
    dynamic_smem: int = 0,
    limits: Limits | Mapping[str, Any] | None = None,
    *,
    schedule: str = "late",
    strict: bool = False,
    programmatic: bool = False,
    overlap: Overlap | None = None,
    buffers: Sequence[Any] | Mapping[int, Any] = (),
    outputs: Sequence[Any] = (),
    observe: Callable[[Machine], None] | None = None,
) -> Report:
    """Execute one launch of a PTX kernel on the CPU.

    Args:
        text: PTX module. entry: kernel name, or None for the only one.
        grid, block, cluster: extents as in a launch (grid in CTAs).
        args: one value per parameter: a numpy array or CPU torch tensor (its address is passed and its extent
            registered), a number (packed by the parameter's type) or bytes (a raw parameter such as a tensor map).
        seed, schedule: see `_schedule`; check="raise" raises `FindingError` at the first finding.
        strict: also report what the ISA asks for but known-good kernels leave to the compiler: tcgen05.wait::ld before
            registers are used, tcgen05.wait::st, wgmma.fence after every use of its registers; and unordered stores of
            the same value.
        programmatic: the launch has programmatic stream serialization, so that launches before it may still run: global
            memory accessed in no order after a griddepcontrol.wait is a finding.
        overlap: of one of several launches, in place of `programmatic`: what may run beside it (see `_overlap`).
        dynamic_smem: bytes of dynamic shared memory.
        limits: `Limits`, or a mapping that overrides those of the module's target.
        buffers: further tensors that raw parameters point to, or a mapping address -> uint8 array.
        outputs: those of the tensors above whose contents count as uninitialised at launch.
        observe: called with the machine before it runs (progress reports).

    Returns: `Report(findings, counts)`. Raises `EmulationError` for what cannot be executed.
    """
    if seed < 0 or dynamic_smem < 0:
        raise EmulationError(f"seed and dynamic_smem are not negative: {seed}, {dynamic_smem}")
    module = parse(text)
    if entry is None and len(module.entries) == 1:
        entry = next(iter(module.entries))
    if entry not in module.entries:
        raise EmulationError(f"no entry {entry!r}; the module has {', '.join(module.entries)}")
    kernel = module.entries[entry]
    if len(args) != len(kernel.params):
        raise EmulationError(f"{entry} has {len(kernel.params)} parameters, {len(args)} arguments given")
    machine = Machine(module, kernel, grid, block, cluster, seed, check, dynamic_smem, limits, schedule, strict,
                      overlap or Overlap().follow(entry, programmatic))  # fmt: skip
    fresh = Outputs(outputs)
    if isinstance(buffers, Mapping):
        for address, data in buffers.items():
            machine.memory.register(int(address), data, f"buffer {int(address):#x}", id(data) not in fresh, data)
    else:
        for number, value in enumerate(buffers):
            address, data = host_buffer(value)
            machine.memory.register(address, data, f"buffer {number}", id(value) not in fresh, value)
    for param, value in zip(kernel.params, args, strict=True):
        raw = _pack(param, value, machine, id(value) not in fresh)
        machine.params.data[param.offset : param.offset + len(raw)] = np.frombuffer(raw, np.uint8)
    fresh.check()
    if observe is not None:
        observe(machine)
    machine.run()
    return machine.findings.report()
