"""``cudnn-core explain``: the decision for a graph, without building anything; saved, and compared with a saved one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._load import device_named, load_graph, read_text, sizes_named, write_text
from ._output import UsageProblem, emit, emit_json

if TYPE_CHECKING:
    from .._decision import Decision
    from .._device import DeviceInfo

__all__ = ["explain"]


def explain(options: Any) -> int:
    from .._decision import same_device

    graph = load_graph(options.graph)
    saved = _saved(options.replay) if options.replay else None
    device = device_named(options.device)
    if saved is not None and options.device is None and not same_device(saved.device, device.to_dict()):
        device = _recorded(saved)
    decision = graph.explain(device=device, hint=sizes_named(graph, device, options.size))
    if options.save:
        write_text(options.save, decision.to_json() + "\n")
    if saved is not None:
        return _compare(saved, decision, options)
    if options.json:
        emit(decision.to_json())
    else:
        print(decision.table(options.verbose))
        if decision.selected is None:
            from .._decision import nearest_miss

            print(f"\n{nearest_miss(decision, options.verbose)}")
    return 0 if decision.selected is not None else 1


def _saved(name: str) -> Decision:
    from .._decision import Decision, DecisionError

    try:
        return Decision.from_json(read_text(name, "decision"))
    except DecisionError as error:
        raise UsageProblem(f"decision {name}: {error}") from None


def _recorded(saved: Decision) -> DeviceInfo:
    """The device that a saved decision was made for."""
    from .._device import DeviceInfo
    from .._errors import ConfigError

    try:
        return DeviceInfo.from_json(saved.device)
    except ConfigError as error:
        raise UsageProblem(f"the saved decision's device: {error}") from None


def _compare(saved: Decision, now: Decision, options: Any) -> int:
    differences = saved.replay(now)
    if options.json:
        emit_json(
            {
                "schema": 1,
                "same": not differences,
                "differences": [difference._asdict() for difference in differences],
                "saved_digest": saved.digest,
                "decision": {**now.to_dict(), "digest": now.digest},
            }
        )
    else:
        print(now.table(options.verbose))
        print()
        if not differences:
            print(f"the same as the saved decision ({saved.digest[:12]})")
        for difference in differences:
            print(f"differs: {difference}")
    return 1 if differences else 0
