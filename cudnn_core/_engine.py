"""The engine protocol: what a plugin implements. The one file that a plugin author reads.

An engine decides (``check_support``), optionally predicts (``estimate``) and builds (``build_plan``); the plan that it
returns runs. Selection happens once, at plan time: a running plan knows nothing of registries.

Rules, each checked by the conformance kit (``pytest -p cudnn_core.testing --cudnn-plugin NAME``):

- An engine is constructed without arguments, once per registry snapshot, and touches no device.
- ``check_support`` and ``build_plan`` take the device from ``ctx.device`` (it may describe a GPU that is not here) and
  never ask the driver. ``check_support`` imports no DSL and compiles nothing; all compilation is in ``build_plan``.
- A decline is a return value and lists every reason at once. An exception is a bug: the engine is quarantined.
- Operands, pointers and buffers follow ``graph.operands``: the canonical order of ``graph.key``, never uid order.
- A running plan allocates nothing, syncs nothing, uses the given stream and workspace, and is safe to capture.
- Knobs change performance only. What changes numerics is a graph attribute or a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ._declines import Decline

if TYPE_CHECKING:
    from ._device import DeviceInfo
    from ._dims import Extent
    from ._graph._frozen import FrozenGraph
    from ._handle import Handle

__all__ = [
    "API",
    "Artifact",
    "Buffers",
    "CompiledPlan",
    "Decline",
    "Declined",
    "Engine",
    "Estimate",
    "ExecutionContext",
    "HostBlock",
    "Operand",
    "PlanConfig",
    "Runner",
    "Support",
    "VariantPack",
]

# Engine API version. A manifest's `api` must have this major and at most this minor.
API = (1, 0)

# What `bind` returns is called with these: pointers in operand order (a by-value slot holds a host address), the
# workspace's address and the stream's.
Buffers = Sequence[int]
Runner = Callable[[Buffers, int, int], None]


class ExecutionContext(NamedTuple):
    """One type for every call. Read it by name: it only grows.

    handle     the caller's Handle, or None without one; always None in build_plan and load_plan, whose result serves every
               handle of the device
    device     a DeviceInfo, possibly of a device that is not here
    stream     the stream's address; 0 is the legacy default stream
    workspace  the workspace's address; 0 while planning and when the plan needs none
    """

    handle: Handle | None
    device: DeviceInfo
    stream: int = 0
    workspace: int = 0


class PlanConfig(NamedTuple):
    """An engine with its knobs: ``"plugin:engine@revision"``, a complete knob mapping, and the variant or ``""``."""

    engine: str
    knobs: Mapping[str, Any]
    variant: str = ""


class Support(NamedTuple):
    """The engine can run the graph.

    configs    1 to 8 knob settings, best first; the first one competes. Knobs left out get the manifest's defaults.
    workspace  upper bound in bytes over all sizes, or None if only build_plan knows
    notes      behaviour notes of this graph, or None for the manifest's
    """

    configs: tuple[PlanConfig, ...]
    workspace: int | None = None
    notes: frozenset[str] | None = None

    def __bool__(self) -> bool:
        return True


class Declined(NamedTuple):
    """The engine can't run the graph, and why: one reason or more."""

    reasons: tuple[Decline, ...]

    def __bool__(self) -> bool:
        return False


class Estimate(NamedTuple):
    """Predicted time in microseconds; ``basis`` is "model" or "prior".

    "model" counts only if ``calibration`` names a file of the plugin's package that covers the device's architecture.
    """

    us: float
    basis: str = "prior"
    calibration: str = ""


class Operand(NamedTuple):
    """One slot of a plan. In ``FrozenGraph.operands`` sizes may be Dims; in a pack they are the actual ints.

    role       "input", "output" or "inout"
    by_value   the slot holds the address of one host element, read before the run returns
    alignment  bytes that the address is a multiple of (0: unknown)
    """

    uid: int
    name: str
    dtype: str
    dim: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    role: str
    by_value: bool = False
    alignment: int = 0


class VariantPack:
    """The actual operands of one run: dims, strides and addresses. Holds no framework object that an engine may use.

    ``owners`` keeps the objects that own the memory alive for as long as the pack lives; ``placed``, ``runner`` and
    ``signature`` are the core's.
    """

    __slots__ = ("operands", "owners", "placed", "pointers", "runner", "signature")

    placed: Any
    runner: Runner

    def __init__(
        self,
        operands: tuple[Operand, ...],
        pointers: tuple[int, ...],
        owners: tuple[object, ...] = (),
    ) -> None:
        self.operands = operands
        self.pointers = pointers
        self.owners = owners
        self.signature: object = None

    def __repr__(self) -> str:
        return f"VariantPack({', '.join(operand.name or str(operand.uid) for operand in self.operands)})"


class Artifact(NamedTuple):
    """What a kernel was compiled to.

    arch    like "90a"
    entry   the kernel's symbol
    object  host code, loadable by more than one runtime
    """

    name: str
    arch: str
    entry: str
    cubin: bytes = b""
    ptx: str = ""
    object: bytes = b""


class HostBlock(NamedTuple):
    """Host memory that a host function gets the address of, and reads: an argument for an executor.

    data       its bytes, with the addresses of a pack
    addresses  byte offsets of the 8-byte words in it that are addresses of operands or lie in the workspace; an executor
               puts those of its own memory in their place. 0, for what is not there, stays 0
    values     (byte offset, bytes): the 8-byte word at the offset gets the address of a copy of the bytes in host memory,
               for a by-value operand its element
    """

    data: bytes
    addresses: tuple[int, ...] = ()
    values: tuple[tuple[int, bytes], ...] = ()


class CompiledPlan(Protocol):
    """A built plan: immutable, and run from many threads and streams.

    workspace_size  bytes that the caller must give, aligned to 256; the maximum over all sizes
    artifacts       of engines that compile kernels; may be left out
    variant         of engines whose manifest has ``variants``, where the config left the member open: the one that the plan is, or
                    "" if it is not one alone; may be left out

    Optional methods: ``bind(layout)`` returns a callable ``(pointers, workspace, stream)`` for operands of exactly this
    layout, the fast path (without it the core wraps ``execute``); ``serialize()`` returns a JSON-able header and named
    payloads (without it a saved plan is rebuilt when it is loaded); ``host_arguments(artifact, pack, workspace)`` returns
    what an executor passes to the host function of an artifact, a sequence of HostBlock, bytes (beginning with the address,
    if they hold one), ctypes and numpy scalars, int (int32), float, bool and None (a null stream). Without it: a pointer for
    each operand in order (by-value operands: the value), the workspace's if there is one, a null stream.
    """

    workspace_size: int

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """What a manifest's ``factory`` makes.

    Optional methods: ``estimate(graph, config, ctx) -> Estimate | None``,
    ``load_plan(header, payloads, graph, ctx) -> CompiledPlan`` and, of an engine whose manifest has ``variants``,
    ``members(graph, ctx, limit=8) -> tuple[PlanConfig, ...]``: up to ``limit`` configs with a variant, best first, that
    ``check_support`` does not list because that takes more than tables. Whoever times engines asks, and only then
    (``cudnn-core bench``); sizes are fixed to the hint, as in ``estimate``. It may import, open libraries and ask the driver.
    BuildError says why there are none; any other exception costs the members and not the engine. A variant may reach
    ``build_plan`` and ``estimate`` without having been listed: a configuration or a call can name any that the manifest
    admits.
    """

    def check_support(self, graph: FrozenGraph, ctx: ExecutionContext) -> Support | Declined: ...

    def build_plan(self, graph: FrozenGraph, config: PlanConfig, ctx: ExecutionContext) -> CompiledPlan: ...
