"""Broken plugins as installed distributions, each a variation of one sound engine (a float32 matmul on the CPU, in numpy).

``BEASTS`` lists them: what the planner makes of each one, and which check of the conformance kit fails with which words.
``SOUND`` is the engine that lives beside them and must be none the worse. (``_make.ANIMALS`` are the smaller ones of the
registry's own tests.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ._make import manifest, to_toml, write_dist, write_plugin

__all__ = ["BEASTS", "Beast", "metadata_of", "write_beast", "write_ghosts", "write_sound"]

SOUND = """
import ctypes

from cudnn_core import BuildError, Decline, Declined, PlanConfig, Support, checks


def view(operand):
    import numpy as np

    step = 4
    dim, stride = operand.dim, [step * s for s in operand.stride]
    extent = 0 if 0 in dim else step + sum((n - 1) * s for n, s in zip(dim, stride))
    return lambda address: np.ndarray(dim, np.float32, (ctypes.c_char * extent).from_address(address), strides=stride)


class Plan:
    workspace_size = 256

    def __init__(self, graph):
        node = graph.nodes[0]
        slots = [tensor.index for tensor in graph.operand_tensors()]
        self.a, self.b, self.c = (slots.index(t.index) for t in (node.inputs["A"], node.inputs["B"], node.outputs["C"]))

    def execute(self, pack, ctx):
        self.bind(pack.operands)(pack.pointers, ctx.workspace, ctx.stream)

    def bind(self, layout):
        views = [view(operand) for operand in layout]
        return lambda pointers, workspace, stream: self.run(
            *(views[i](pointers[i]) for i in (self.a, self.b, self.c)), workspace
        )

    def run(self, a, b, c, workspace):
        import numpy as np

        ctypes.memset(workspace, 0, self.workspace_size)
        with np.errstate(all="ignore"):
            np.matmul(a, b, out=c)


class Engine:
    def check_support(self, graph, ctx):
        c = checks(graph, ctx)
        c.device("cpu")
        c.ops("matmul")
        c.no_dynamic()
        if c.require(len(graph.nodes) == 1, "op.count", "graph", 1, len(graph.nodes)):
            for tensor in graph.tensors:
                c.dtype(tensor.name, tensor, "float32")
                c.require(not tensor.by_value and tensor.ragged_offset is None, "op.pattern", tensor.name)
            compute = graph.nodes[0].compute_dtype
            c.require(compute == "float32", "dtype.compute", "matmul", "float32", str(compute))
        return c.result(Support((PlanConfig("", {}),), workspace=256))

    def build_plan(self, graph, config, ctx):
        return Plan(graph)
"""
_OVER = "\n\nSoundPlan, SoundEngine = Plan, Engine\n\n\n"


class Beast(NamedTuple):
    """A broken plugin.

    write   installs it into a site directory
    state   of its engine's row in the decision of a matmul; code: of a reason there ("" for none)
    check   the kit's test that fails: "installed", "manifest", "import", "check_support", "filter", "numerics", ...
            ("": the kit has nothing to say, the planner has)
    says    a regular expression that the failure matches
    """

    name: str
    write: Callable[[Path], None]
    state: str
    code: str
    check: str
    says: str


def metadata_of(dist: str, requires: str = "cudnn-core>=0.1,<1") -> str:
    text = f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n"
    return text + (f"Requires-Dist: {requires}\n" if requires else "")


def write_sound(site: Path, name: str = "sound") -> None:
    """The healthy neighbour."""
    document = manifest(name, engine={"efficiency": 0.5, "dtypes": ["float32"]})
    write_plugin(site, name, document, SOUND, metadata=metadata_of(f"acme-{name}"))


def write_beast(
    site: Path,
    name: str,
    code: str | Mapping[str, str],
    *,
    engine: Mapping[str, Any] | None = None,
    document: Any = None,
    requires: str = "cudnn-core>=0.1,<1",
    dist: str = "",
    package: str | None = None,
    **top: Any,
) -> None:
    """A plugin that ranks before the sound one."""
    dist = dist or f"acme-{name.replace('_', '-')}"
    fields = {"efficiency": 0.75, "dtypes": ["float32"], "factory": f"{package or name}:Engine", **(engine or {})}
    document = manifest(name, engine=fields, **top) if document is None else document
    write_plugin(site, name, document, code, dist=dist, package=package, metadata=metadata_of(dist, requires))


def _beast(name: str, state: str, code: str, check: str, says: str, source: Any, **options: Any) -> Beast:
    return Beast(name, lambda site: write_beast(site, name, source, **options), state, code, check, says)


def engine(body: str, extra: str = "") -> str:
    """The sound module with another Engine; ``body`` is indented by four."""
    return f"{SOUND}{_OVER}{extra}\nclass Engine(SoundEngine):\n{body}\n"


def plan(body: str, extra: str = "") -> str:
    """The sound module with another Plan."""
    made = "class Engine(SoundEngine):\n    def build_plan(self, graph, config, ctx):\n        return Plan(graph)\n"
    return f"{SOUND}{_OVER}{extra}\nclass Plan(SoundPlan):\n{body}\n\n\n{made}"


def returns(expression: str) -> str:
    return engine(f"    def check_support(self, graph, ctx):\n        return {expression}\n")


def builds(expression: str) -> str:
    return engine(f"    def build_plan(self, graph, config, ctx):\n        return {expression}\n")


def _twins(site: Path) -> None:
    write_beast(site, "twin", SOUND, dist="twin-one")
    write_beast(site, "twin", SOUND, dist="twin-two", package="twin_two")


def write_ghosts(site: Path) -> None:
    """Broken metadata: a nameless distribution, a half-removed one, undecodable entry points, an entry point to nothing.

    (Not for a site that pytest starts with: it reads every entry_points.txt itself, and stops at the third.)
    """
    points = "[cudnn_core.engines]\nghost = ghost:cudnn_plugin.toml\n"
    write_dist(site, "", metadata="Metadata-Version: 2.1\n", entry_points=points)
    write_dist(site, "~alf-removed", metadata="", entry_points=points)
    write_dist(site, "undecodable", metadata="", entry_points=b"\xff\xfe[cudnn_core.engines]")
    write_dist(site, "pointless", entry_points=points)


def _hook(name: str, code: str, says: str, body: str) -> Beast:
    source = {"__init__.py": SOUND, "hooks.py": body}
    return _beast(name, "quarantined", code, "installed", says, source, hooks=[f"{name}.hooks"])


SUPPORT = 'Support((PlanConfig("", {}),), workspace=256)'

BEASTS: tuple[Beast, ...] = (
    # --- code that fails
    _beast("raises_at_import", "quarantined", "plugin.broken", "import", "ValueError: at import", "raise ValueError('at import')\n"),
    _beast("misses_module", "quarantined", "dep.import_failed", "import", "a_module_that_nobody_has", "import a_module_that_nobody_has\n"),
    _beast("exits_at_import", "quarantined", "plugin.broken", "import", "SystemExit", "import sys\nsys.exit(3)\n"),
    _beast("no_such_factory", "quarantined", "plugin.broken", "manifest", "has no attribute 'Engine'", "# nothing\n"),
    _beast(
        "raises_in_constructor", "quarantined", "plugin.broken", "manifest", "RuntimeError: no GPU",
        engine("    def __init__(self):\n        raise RuntimeError('no GPU')\n"),
    ),
    _beast(
        "raises_in_check", "quarantined", "plugin.broken", "check_support", r"raised KeyError.*\(a decline is a return value\)",
        engine("    def check_support(self, graph, ctx):\n        raise KeyError('A')\n"),
    ),
    _beast(
        "raises_in_build", "build_failed", "plugin.broken", "numerics", "build_plan fails.*RuntimeError: in build",
        engine("    def build_plan(self, graph, config, ctx):\n        raise RuntimeError('in build')\n"),
    ),
    _beast(
        "claims_what_it_cannot", "build_failed", "build.failed", "numerics", "accepts the graph, build_plan fails: no kernel",
        engine("    def build_plan(self, graph, config, ctx):\n        raise BuildError('no kernel')\n"),
    ),
    _beast(
        "raises_when_run", "selected", "", "numerics", "the plan raised ZeroDivisionError",
        plan("    def run(self, a, b, c, workspace):\n        1 / 0\n"),
    ),
    # --- garbage
    _beast("returns_none", "quarantined", "plugin.broken", "check_support", "returned None", returns("None")),
    _beast("returns_a_list", "quarantined", "plugin.broken", "check_support", r"returned \[\]", returns("[]")),
    _beast("declines_without_reason", "quarantined", "plugin.broken", "check_support", "Declined without", returns("Declined(())")),
    _beast("nine_configs", "quarantined", "plugin.broken", "check_support", "1 to 8 configs", returns('Support((PlanConfig("", {}),) * 9, 256)')),
    _beast("speaks_for_others", "quarantined", "plugin.broken", "check_support", "a config of another engine", returns('Support((PlanConfig("sound:main@1", {}),), 256)')),
    _beast("unknown_code", "declined", "plugin.broken", "check_support", "unknown decline code 'no.such_code'", returns("Declined((Decline('no.such_code'),))")),
    _beast("code_of_another", "declined", "x.sound.busy", "check_support", "belongs to another plugin", returns("Declined((Decline('x.sound.busy'),))")),
    _beast("unprintable_decline", "declined", "shape.range", "check_support", "not JSON-able", returns("Declined((Decline('shape.range', 'A', {1, 2}),))")),
    _beast("no_execute", "build_failed", "build.failed", "numerics", "it has no execute", builds("object()")),
    _beast("negative_workspace", "build_failed", "build.failed", "numerics", "workspace_size -1", plan("    workspace_size = -1\n")),
    _beast("plan_is_text", "build_failed", "build.failed", "numerics", "'a plan'", builds("'a plan'")),
    _beast(
        "knob_out_of_domain", "declined", "knob.domain", "check_support", r"knob\.domain knob:tile: needs 8 \| 16, got 12",
        returns('Support((PlanConfig("", {"tile": 12}),), 256)'),
        engine={"knobs": {"tile": {"type": "int", "choices": [8, 16]}}},
    ),
    _beast(
        "offers_what_fails", "selected", "", "knobs", "check_support offers tile=16, and it does not build",
        engine(
            '    def check_support(self, graph, ctx):\n        found = super().check_support(graph, ctx)\n'
            '        return found._replace(configs=tuple(PlanConfig("", {"tile": n}) for n in (8, 16))) if found else found\n\n'
            "    def build_plan(self, graph, config, ctx):\n        if config.knobs['tile'] == 16:\n"
            "            raise BuildError('too many registers')\n        return Plan(graph)\n"
        ),
        engine={"knobs": {"tile": {"type": "int", "choices": [8, 16]}}},
    ),
    # --- manifest and metadata
    _beast(
        "filters_what_it_accepts", "filtered", "dtype.unsupported", "filter", "the manifest rules out a graph that check_support accepts",
        SOUND, engine={"dtypes": ["float16"]},
    ),
    Beast("twin", _twins, "quarantined", "plugin.conflict", "installed", "twin-one.*twin-two"),
    _beast("too_new", "quarantined", "api.too_new", "installed", r"api\.too_new", SOUND, api="1.99"),
    _beast("too_old", "quarantined", "api.too_old", "installed", r"api\.too_old", SOUND, api="0.9"),
    _beast("not_toml", "quarantined", "plugin.bad_manifest", "installed", "not TOML", SOUND, document="schema = = 1"),
    _beast(
        "unknown_field", "quarantined", "plugin.bad_manifest", "installed", "unknown field",
        SOUND, document=to_toml(manifest("unknown_field", nots=["x"])),
    ),
    _beast("unbounded", "selected", "", "manifest", "without an upper bound", SOUND, requires="cudnn-core>=0.1"),
    _beast("requires_nothing", "selected", "", "manifest", "does not require cudnn-core", SOUND, requires=""),
    # --- hooks
    _hook("misspelt_hook", "plugin.unknown_hook", "unknown_hook.*cudnn_core_registr", "def cudnn_core_registr(registrar):\n    pass\n"),
    _hook("raising_hook", "plugin.broken", "ValueError: hook", "def cudnn_core_register(registrar):\n    raise ValueError('hook')\n"),
    _hook("garbage_hook", "plugin.broken", "neither 'module:Name' nor callable", "def cudnn_core_register(registrar):\n    registrar.engine('extra', 42)\n"),
    # --- what only the kit can find
    _beast(
        "sets_attributes", "quarantined", "plugin.broken", "check_support", "raised TypeError",
        engine("    def check_support(self, graph, ctx):\n        graph.nodes[0].attrs['padding'] = 1.0\n"),
    ),
    _beast(
        "mutates_graph", "quarantined", "plugin.broken", "check_support", "changed the graph|changes the graph",
        engine(
            "    def check_support(self, graph, ctx):\n        object.__setattr__(graph.tensors[-1], 'name', 'mine')\n"
            "        return super().check_support(graph, ctx)\n"
        ),
    ),
    _beast(
        "changes_its_mind", "selected", "", "check_support", "not pure",
        engine(
            "    turn = 0\n\n    def check_support(self, graph, ctx):\n        self.turn += 1\n"
            "        found = super().check_support(graph, ctx)\n"
            "        return found._replace(workspace=256 + self.turn) if found else found\n"
        ),
    ),
    _beast(
        "dawdles", "selected", "", "check_support", "takes .* us in the median; the budget is 20 us",
        engine("    def check_support(self, graph, ctx):\n        time.sleep(0.0004)\n        return super().check_support(graph, ctx)\n", "import time\n"),
    ),
    _beast(
        "asks_the_driver", "selected", "", "check_support", r"asks the CUDA driver: \w+\(\) \(use ctx.device\)",
        engine(
            "    def check_support(self, graph, ctx):\n        import cudnn_core\n\n        try:\n            cudnn_core.device_info(0)\n"
            "        except Exception:\n            pass\n        return super().check_support(graph, ctx)\n"
        ),
    ),
    _beast(
        "asks_the_driver_on_import", "selected", "", "import", "asks the CUDA driver",
        SOUND + "\nimport cudnn_core\n\ntry:\n    cudnn_core.device_info(0)\nexcept BaseException:\n    pass\n",
    ),
    _beast(
        "imports_torch", "selected", "", "import", "its check_support loads .*torch",
        engine("    def check_support(self, graph, ctx):\n        import torch\n\n        return super().check_support(graph, ctx)\n"),
    ),
    _beast("imports_numpy", "selected", "", "import", "importing it loads numpy", f"import numpy\n{SOUND}"),
    _beast(
        "starts_a_thread", "selected", "", "import", "starts 1 thread",
        SOUND + "\nimport threading, time\n\nthreading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n",
    ),
    _beast(
        "wrong_numerics", "selected", "", "numerics", r"output c\[.*expected .* within .*, got ",
        plan("    def run(self, a, b, c, workspace):\n        super().run(a, b, c, workspace)\n        c *= 1.001\n"),
    ),
    _beast(
        "drops_nan", "selected", "", "numerics", "NaN, infinities and subnormals.*expected nan",
        plan(
            "    def run(self, a, b, c, workspace):\n        import numpy as np\n\n        super().run(np.nan_to_num(a, nan=0.0, posinf=np.inf, neginf=-np.inf), b, c, workspace)\n"
        ),
    ),
    _beast(
        "ignores_strides", "selected", "", "numerics", "(padded-rows|column-major).*output c",
        SOUND.replace("for s in operand.stride]", "for s in _packed(operand.dim)]")
        + "\n\ndef _packed(dim):\n    from cudnn_core._dims import packed_strides\n\n    return packed_strides(dim)\n",
    ),
    _beast(
        "writes_past_workspace", "selected", "", "numerics", "workspace: the engine wrote byte 1 past the 256 bytes",
        plan("    def run(self, a, b, c, workspace):\n        super().run(a, b, c, workspace)\n        ctypes.memset(workspace, 7, 257)\n"),
    ),
    _beast(
        "believes_the_workspace", "selected", "", "contract", "buffers and workspace filled with 0x5a: output c",
        plan(
            "    def run(self, a, b, c, workspace):\n        import numpy as np\n\n        dirty = ctypes.c_ubyte.from_address(workspace + 8).value == 0x5A\n"
            "        with np.errstate(all='ignore'):\n            np.matmul(a, b, out=c)\n        c += dirty\n"
        ),
    ),
    _beast(
        "writes_beside_output", "selected", "", "numerics", "output c: the engine wrote byte 1 past",
        plan(
            "    def run(self, a, b, c, workspace):\n        super().run(a, b, c, workspace)\n        if c.size:\n"
            "            end = c.ctypes.data + sum((n - 1) * s for n, s in zip(c.shape, c.strides)) + 4\n            ctypes.memset(end, 7, 1)\n"
        ),
    ),
    _beast(
        "writes_between_elements", "selected", "", "numerics", "wrote between the elements of an output",
        plan(
            "    def run(self, a, b, c, workspace):\n        super().run(a, b, c, workspace)\n        if c.size and c.strides[-2] > 4 * c.shape[-1]:\n"
            "            ctypes.memset(c.ctypes.data + 4 * c.shape[-1], 7, 1)\n"
        ),
    ),
    _beast(
        "leaves_output_unwritten", "selected", "", "numerics", r"output c\[.*never written",
        plan("    def run(self, a, b, c, workspace):\n        if c.size > 1:\n            super().run(a[..., 1:, :], b, c[..., 1:, :], workspace)\n        else:\n            super().run(a, b, c, workspace)\n"),
    ),
    _beast(
        "changes_an_input", "selected", "", "numerics", "the engine changed an input",
        plan("    def run(self, a, b, c, workspace):\n        super().run(a, b, c, workspace)\n        a *= 2\n"),
    ),
    _beast(
        "remembers_its_first_run", "selected", "", "contract", "other data: output c",
        plan(
            "    seen = None\n\n    def run(self, a, b, c, workspace):\n        if self.seen is None or self.seen[0].shape != a.shape:\n"
            "            self.seen = a.copy(), b.copy()\n        super().run(*self.seen, c, workspace)\n"
        ),
    ),
    _beast(
        "binds_something_else", "selected", "", "contract", "the plan's execute: output c",
        plan("    def execute(self, pack, ctx):\n        SoundPlan.execute(self, pack, ctx)\n        view(pack.operands[self.c])(pack.pointers[self.c])[...] = 0\n"),
    ),
    _beast(
        "reads_names", "selected", "", "contract", "the same graph with other names and uids",
        engine(
            "    def build_plan(self, graph, config, ctx):\n        if any(t.name.startswith('other') for t in graph.tensors):\n"
            "            raise BuildError('who is that')\n        return Plan(graph)\n"
        ),
    ),
    _beast(
        "shares_scratch", "selected", "", "threads", "8 threads on one plan",
        plan(
            "    scratch = None\n\n    def run(self, a, b, c, workspace):\n        self.scratch = a.copy()\n        time.sleep(0.001)\n"
            "        super().run(self.scratch, b, c, workspace)\n",
            "import time\n",
        ),
    ),
    _beast(
        "cannot_serialize", "selected", "", "serialization", "could not serialize",
        plan("    def serialize(self):\n        raise RuntimeError('no')\n"),
    ),
    _beast(
        "loads_another_plan", "selected", "", "serialization", r"after save and load \(trust=True\): output c",
        plan("    def serialize(self):\n        return {'format': 1}, {}\n")
        + "\n    def load_plan(self, header, payloads, graph, ctx):\n        made = Plan(graph)\n        made.run = lambda a, b, c, workspace: c.fill(0)\n        return made\n",
    ),
)  # fmt: skip
