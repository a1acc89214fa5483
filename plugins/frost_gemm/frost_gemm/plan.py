"""The plan that the engines build: a compiled kernel, and how its arguments follow from operands. Imported by ``engines``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cudnn_core import BuildError
from cudnn_core.cute_dsl import BoundRuns, CompiledKernel, Function, load

from .compile import kernel_name
from .config import TileConfig
from .ir import Program
from .launch import Launcher

if TYPE_CHECKING:
    from cudnn_core import Artifact, ExecutionContext, HostBlock, Operand, Runner, VariantPack

    from .binding import Binding
    from .facts import ArchFacts

__all__ = ["GemmPlan", "restored"]

SCHEMA = 1


class GemmPlan:
    """A compiled kernel with its launcher. Immutable but for caches; runs from many threads.

    program, binding   as the kernel sees them: with ``config.swap_ab``, both swapped
    """

    workspace_size = 0  # split-K adds up through distributed shared memory

    def __init__(self, program: Program, binding: Binding, config: TileConfig, kernel: CompiledKernel) -> None:
        self.program, self.config, self.kernel = program, config, kernel
        self.artifacts: tuple[Artifact, ...] = (kernel.artifact,)
        self._launcher = Launcher(program, binding, self.function)
        self._runs = BoundRuns(self.bind)

    def function(self) -> Function:
        """The loaded host function. Raises BuildError."""
        return load(self.kernel)

    def bind(self, layout: tuple[Operand, ...]) -> Runner:
        return self._launcher.bind(layout)

    def execute(self, pack: VariantPack, ctx: ExecutionContext) -> None:
        self._runs.execute(pack, ctx)

    def host_arguments(self, artifact: Artifact, pack: VariantPack, workspace: int) -> tuple[HostBlock, None]:
        """What an executor passes to the host function: the argument words and a null stream."""
        given = workspace if self.workspace_size else 0
        return self._launcher.host_block(pack.operands, pack.pointers, given), None

    def serialize(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        header, payloads = self.kernel.serialize()
        own = {"schema": SCHEMA, "program": self.program.canonical(), "config": asdict(self.config)}
        return {**own, **header}, payloads


def restored(
    header: Mapping[str, Any],
    payloads: Mapping[str, bytes],
    facts: ArchFacts,
    program_of: Callable[[TileConfig], tuple[Program, Binding]],
) -> GemmPlan:
    """The plan of ``GemmPlan.serialize``; ``program_of`` says what the graph is under a configuration.

    Raises BuildError for another format, architecture, program, configuration or runtime.
    """
    try:
        if header["schema"] != SCHEMA:
            raise BuildError(f"a plan of schema {header['schema']!r}, and this version reads {SCHEMA}")
        config = TileConfig(**header["config"])
        stated = header["program"]
    except (KeyError, TypeError) as error:
        raise BuildError(f"not a plan of this plugin: {type(error).__name__}: {error}") from error
    kernel = CompiledKernel.restored(header, payloads, facts.target)
    program, binding = program_of(config)
    for what, have, want in (
        ("program", stated, program.canonical()),
        ("configuration", kernel.name, _name(program, config, facts)),
    ):
        if have != want:
            raise BuildError(f"the plan's kernel is of another {what}: {have}, not {want}")
    return GemmPlan(program, binding, config, kernel)


def _name(program: Program, config: TileConfig, facts: ArchFacts) -> str:
    """The kernel's name; "" for values that no configuration has."""
    try:
        return kernel_name(program, config, facts)
    except (TypeError, ValueError):
        return ""
