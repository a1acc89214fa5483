"""The frontend's call sequence, and ours, on a Graph: plan, explain, build, execute.

``validate build_operation_graph create_execution_plans check_support build_plans`` in that order, or ``build`` for all of
them; then ``get_workspace_size`` and ``execute``. Plans are listed best first, one entry per engine and knob setting. A call
that fails leaves the graph as it was. Mixed into Graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._arguments import as_list, as_mapping, as_name
from .._enums import as_member, build_plan_policy, heur_mode
from .._errors import BuildError, ExecutionError, GraphError, NoEngineError
from .._locks import ForkLock
from ._calls import deserialize_arguments, ordered, overrides
from ._selection import PlanSelection

if TYPE_CHECKING:
    from .._decision import Decision
    from .._device import DeviceInfo
    from .._handle import Handle
    from .._plan import Plan
    from .._planner import Survey
    from ._frozen import FrozenGraph
    from ._tensor import Tensor

__all__ = ["ClassicSequence"]


class ClassicSequence(PlanSelection):
    """Planning and execution of a Graph."""

    handle: Handle | None
    device_property: object
    sm_version: int | None
    sm_count: int | None
    _bindings: dict[int, object]

    def _init_classic(self) -> None:
        self._survey: Survey | None = None
        self._plans: dict[int, Plan] = {}
        self._index: int | None = None
        self._active: Plan | None = None  # the plan at _index
        self._pinned: int | None = None
        self._first_build = ForkLock()
        self._init_selection()

    if TYPE_CHECKING:

        def validate(self) -> None: ...
        def freeze(self, device_type: str = "cpu") -> FrozenGraph: ...
        @property
        def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def is_planned(self) -> bool:
        """Whether execution plans exist: the graph can't be changed any more."""
        return self._survey is not None

    # --- ours
    def plan(self, handle: Handle | None = None, device: object = None, hint: Mapping[str, int] | None = None) -> Plan:
        """The best engine's plan, built.

        ``device`` (an ordinal, "cpu", a DeviceInfo or a preset's name) > ``handle`` > the graph's own device arguments > the
        ``build_device`` scope > the current CUDA device > the CPU. ``hint`` gives sizes of Dims that ranking assumes. Raises
        NoEngineError, which carries the Decision, if no engine can run the graph; the graph stays usable.
        """
        from .._planner import build_entry, build_in_order

        where = self._device(device, handle)
        survey = self._survey_for(where, handle or self.handle, hint, need_build=True)
        survey.require_engine()
        keys = self._operand_keys()
        return build_in_order(survey, survey.allowed(), lambda index: build_entry(survey, index, self._bindings, keys))[
            0
        ][1]

    def explain(self, device: object = None, hint: Mapping[str, int] | None = None) -> Decision:
        """Every known engine, its state, its reasons and its rank, without building anything.

        A device that is described but absent counts as present. Never raises for lack of an engine.
        """
        return self._survey_for(self._device(device, None), self.handle, hint, need_build=False).decision()

    # --- the frontend's sequence
    def build_operation_graph(self) -> None:
        """Validate; the lowering to an engine happens when its plan is built."""
        self.validate()

    def create_execution_plans(self, heuristics: Iterable[object] | None = None) -> None:
        """List the plans that can run the graph, best first. Raises NoEngineError if there is none.

        ``heuristics`` is checked and otherwise without effect: ranking goes by evidence (docs/ranking.md).
        """
        for mode in as_list(heuristics, "heuristics") if heuristics is not None else ():
            as_member(heur_mode, mode)
        if self._survey is not None:
            raise GraphError("create_execution_plans was called before on this graph")
        survey = self._survey_for(self._device(None, None), self.handle, None, need_build=True)
        survey.require_engine()
        self._survey = survey

    def check_support(self) -> None:
        """Raise NoEngineError if no plan of the list is left after the select and deselect calls, or not the pinned one."""
        survey, allowed = self._planned(), self._allowed()
        if self._pinned is not None and self._pinned not in allowed:
            raise NoEngineError(f"the pinned plan {survey.name(self._pinned)} was deselected", survey.decision())
        if not allowed:
            every = ", ".join(survey.name(index) for index in range(len(survey.entries)))
            raise NoEngineError(f"every plan of the graph was deselected: {every}", survey.decision())

    def build_plans(self, policy: object = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Build the best plan that builds, or every plan with policy ALL. Raises NoEngineError if none builds, BuildError if the
        pinned one does not."""
        from .._planner import build_in_order

        kind = as_member(build_plan_policy, policy)
        survey = self._planned()
        self.check_support()
        if self._pinned is not None:
            self._built(self._pinned)
            self._select(self._pinned)
            return
        every = kind is build_plan_policy.ALL
        self._select(build_in_order(survey, self._allowed(), self._built, every=every)[0][0])

    def build(self, heuristics: Iterable[object] | None = None) -> None:
        """The whole sequence."""
        self.validate()
        self.build_operation_graph()
        self.create_execution_plans(heuristics)
        self.check_support()
        self.build_plans()

    def get_execution_plan_count(self) -> int:
        return 0 if self._survey is None else len(self._survey.entries)

    def get_plan_name_at_index(self, index: int) -> str:
        """``engine[knob=value, ...]``."""
        return self._planned().name(self._checked_index(index))

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[str, dict[str, Any]]:
        """(engine id, knobs): what ``create_execution_plan`` takes to replay the choice."""
        from .._ranking import member_id

        config = self._planned().entries[self._checked_index(index)].config
        return member_id(config), dict(config.knobs)

    def create_execution_plan(self, engine_id: str, knobs: Mapping[str, Any] | None = None) -> Any:
        """Pin an engine and knobs: re-checked, then honoured exactly; raises NoEngineError with the reasons otherwise."""
        name = as_name(engine_id, "engine_id")
        values = None if knobs is None else as_mapping(knobs, "knobs")
        survey = self._survey or self._survey_for(self._device(None, None), self.handle, None, need_build=True)
        index = survey.pin(name, values)
        self._survey = survey
        self._pinned = index
        return self

    def select_plan(self, index: int) -> Any:
        """Pin one plan of the list; building it becomes strict."""
        self._pinned = self._checked_index(index)
        return self

    def build_plan_at_index(self, index: int) -> Any:
        self._built(self._checked_index(index))
        self._select(index)
        return self

    def get_behavior_notes(self) -> list[str]:
        return self.get_behavior_notes_for_plan_at_index(self._ready())

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[str]:
        """The notes of the plan's engine, the frontend's and the manifest's words alike."""
        return sorted(self._planned().entries[self._checked_index(index)].notes)

    @property
    def selected_plan(self) -> Plan:
        """The plan that ``execute`` runs; BuildError before ``build_plans``."""
        return self._plans[self._ready()]

    def get_workspace_size(
        self,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
    ) -> int:
        """Bytes of workspace, the maximum over all sizes that the graph admits."""
        index = self._ready()
        return self.get_workspace_size_plan_at_index(index, handle, override_uids, override_shapes, override_strides)

    def get_workspace_size_plan_at_index(
        self,
        index: int,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
    ) -> int:
        plan = self._built(self._checked_index(index))
        overrides(plan, override_uids, override_shapes, override_strides)
        return plan.workspace_size

    def execute(
        self,
        tensor_dict: Any,
        workspace: Any = None,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
        tensor_uids: Sequence[int] | None = None,
    ) -> None:
        """Run the selected plan on ``{tensor | uid | name: buffer}``, or on a sequence of buffers with ``tensor_uids``."""
        plan = self._active
        if plan is not None and override_uids is None and override_shapes is None and override_strides is None:
            plan.execute(tensor_dict if tensor_uids is None else ordered(tensor_dict, tensor_uids), workspace, handle)
            return
        if self._index is None:
            self._build_once()
        self._run(
            self._ready(), tensor_dict, workspace, handle, override_uids, override_shapes, override_strides, tensor_uids
        )

    def execute_plan_at_index(
        self,
        tensor_dict: Any,
        workspace: Any = None,
        index: int = 0,
        handle: Handle | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int] | None] | None = None,
        *,
        tensor_uids: Sequence[int] | None = None,
    ) -> None:
        """Run plan ``index`` without selecting it. The plan must have been built: execution never compiles."""
        index = self._checked_index(index)
        if index not in self._allowed():
            raise ExecutionError(f"plan {index} ({self._planned().name(index)}) was deselected")
        if index not in self._plans:
            raise ExecutionError(
                f"plan {index} ({self._planned().name(index)}) is not built: call build_plan_at_index first"
            )
        self._run(index, tensor_dict, workspace, handle, override_uids, override_shapes, override_strides, tensor_uids)

    def populate_cuda_graph(self, handle: Handle, variant_pack: Any, workspace: Any, cuda_graph: Any) -> None:
        """Native CUDA graph construction; engines are captured through ``execute`` instead, unless they offer it."""
        self._native_graph("populate_cuda_graph", handle, variant_pack, workspace, cuda_graph)

    def update_cuda_graph(self, handle: Handle, variant_pack: Any, workspace: Any, cuda_graph: Any) -> None:
        """See ``populate_cuda_graph``."""
        self._native_graph("update_cuda_graph", handle, variant_pack, workspace, cuda_graph)

    def serialize(self, *, as_bytes: bool = False, include_kernels: bool = True) -> bytes | list[int]:
        """The selected plan as bytes, or as a list of ints; ``include_kernels=False`` leaves compiled payloads out."""
        from .._planfile import to_bytes

        data = to_bytes(self.selected_plan, payloads=include_kernels)
        return data if as_bytes else list(data)

    def deserialize(self, *args: Any, **kwargs: Any) -> None:
        """``deserialize(data)``, ``(data, enforce_precompiled)``, ``(handle, data)``, ``(handle, data, enforce_precompiled)``,
        or by the keywords ``handle_`` (``handle``), ``pyobj`` (``data``), ``enforce_precompiled`` and ``trust``.

        Fills an empty graph with a saved plan; its operands are named by uid or name.
        """
        from ._graph import Graph

        handle, data, enforce, trust = deserialize_arguments(args, kwargs)
        assert isinstance(self, Graph)
        if self.nodes or self.is_planned:
            raise GraphError("deserialize needs an empty graph")
        from .._planfile import load_bytes
        from .._planner import Survey

        plan, source = load_bytes(data, handle or self.handle, trust=trust, enforce_precompiled=enforce)
        self._adopt(source)
        self._survey = Survey.loaded(plan)
        self._plans = {0: plan}
        self._select(0)

    # --- internals
    def _device(self, device: object, handle: Handle | None) -> DeviceInfo:
        from .._context import resolve_device

        return resolve_device(
            device=device,
            handle=handle if handle is not None else self.handle,
            device_property=self.device_property,
            sm_version=self.sm_version,
            sm_count=self.sm_count,
        )

    def _device_type(self) -> str:
        """The type of the graph's device; only asked where the answer changes the frozen graph."""
        if not any(tensor.by_value == "auto" for tensor in self.tensors):
            return "cpu"
        return self._device(None, None).type

    def _survey_for(
        self, device: DeviceInfo, handle: Handle | None, hint: Mapping[str, int] | None, *, need_build: bool
    ) -> Survey:
        from .._planner import survey

        return survey(self.freeze(device.type), device, handle, hint, self._filters(), need_build=need_build)

    def _operand_keys(self) -> list[Tensor]:
        return list(self.tensors)

    def _planned(self) -> Survey:
        if self._survey is None:
            raise GraphError("the graph has no plans yet: call create_execution_plans first")
        return self._survey

    def _allowed(self) -> list[int]:
        survey = self._planned()
        survey.filters = self._filters()
        return survey.allowed()

    def _build_once(self) -> None:
        """For ``execute`` on a graph without plans; of several threads the first builds."""
        with self._first_build:
            if self._index is None and self._survey is None:
                self.build()

    def _checked_index(self, index: int) -> int:
        count = len(self._planned().entries)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise IndexError(f"plan index {index!r} is outside 0..{count - 1}")
        return index

    def _built(self, index: int) -> Plan:
        if index not in self._plans:
            from .._planner import build_entry

            survey = self._planned()
            survey.filters = self._filters()
            self._plans[index] = build_entry(survey, index, self._bindings, self._operand_keys())
        return self._plans[index]

    def _select(self, index: int) -> None:
        self._index = index
        self._active = self._plans[index]

    def _ready(self) -> int:
        if self._index is None:
            raise BuildError("no plan is built: call build or build_plans first")
        return self._index

    def _run(
        self,
        index: int,
        operands: Any,
        workspace: Any,
        handle: Handle | None,
        uids: Sequence[int] | None,
        shapes: Sequence[Sequence[int]] | None,
        strides: Sequence[Sequence[int] | None] | None,
        tensor_uids: Sequence[int] | None,
    ) -> None:
        if tensor_uids is not None:
            operands = ordered(operands, tensor_uids)
        plan = self._plans[index]
        plan.execute(operands, workspace, handle, override_shapes=overrides(plan, uids, shapes, strides))

    def _native_graph(self, method: str, handle: Handle, pack: Any, workspace: Any, cuda_graph: Any) -> None:
        plan = self.selected_plan
        native = getattr(plan._compiled, method, None)
        if native is None:
            raise NoEngineError(
                f"engine {plan.engine} has no {method}: capture graph.execute in a CUDA graph instead", plan.decision
            )
        native(handle, plan.pack(pack), workspace, cuda_graph)

    def _adopt(self, source: Any) -> None:
        """Take over the content of ``source``, a graph read from JSON."""
        for name in (
            "_name",
            "_io_data_type",
            "_intermediate_data_type",
            "_compute_data_type",
            "_tensors",
            "_nodes",
            "_next_uid",
        ):
            setattr(self, name, getattr(source, name))
        import weakref

        for tensor in self.tensors:
            tensor._owner = weakref.ref(self)  # type: ignore[arg-type]
