"""Writes installed plugins, sound and broken, as plain dist-info and package directories.

``write_plugin`` is the builder; ``ANIMALS`` is the zoo: each one writes a plugin that is broken in one way into a site
directory, and says which decline it must earn. Imported by the tests of the registry, the planner, the CLI and the kit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

GROUP = "cudnn_core.engines"

# An engine that claims every graph and does nothing: what the broken ones are variations of.
ENGINE = """
from cudnn_core._engine import PlanConfig, Support


class Plan:
    workspace_size = 0

    def execute(self, pack, ctx):
        pass


class Engine:
    def check_support(self, graph, ctx):
        return Support((PlanConfig("{plugin}:main@1", {{}}),), workspace=0)

    def build_plan(self, graph, config, ctx):
        return Plan()
"""


def manifest(plugin: str, *, engine: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """A valid manifest with one engine ``main``, a CPU matmul; ``engine`` and ``top`` add or replace fields."""
    row = {"name": "main", "factory": f"{plugin}:Engine", "ops": ["matmul"], "devices": ["cpu"], **(engine or {})}
    return {"schema": 1, "plugin": plugin, "api": "1.0", "engine": [row], **top}


def to_toml(document: Mapping[str, Any]) -> str:
    """``document`` as TOML: tables and arrays of tables as headers, the rest inline."""
    lines: list[str] = []

    def table(value: Mapping[str, Any], path: tuple[str, ...]) -> None:
        deep = {}
        for key, item in value.items():
            if isinstance(item, Mapping) or (isinstance(item, list) and item and isinstance(item[0], Mapping)):
                deep[key] = item
            else:
                lines.append(f"{key} = {json.dumps(item)}")
        for key, item in deep.items():
            name = ".".join((*path, key))
            for element in item if isinstance(item, list) else [item]:
                lines.append(f"[[{name}]]" if isinstance(item, list) else f"[{name}]")
                table(element, (*path, key))

    table(document, ())
    return "\n".join(lines) + "\n"


def write_plugin(
    site: Path,
    name: str,
    document: Mapping[str, Any] | str | bytes | None = None,
    code: str | Mapping[str, str] | None = None,
    *,
    dist: str | None = None,
    version: str = "1.0",
    package: str | None = None,
    fmt: str = "toml",
    entry_points: str | bytes | None = None,
    metadata: str | None = None,
) -> Path:
    """Install plugin ``name`` into ``site``; returns its dist-info directory.

    document      the manifest: a mapping (written in ``fmt``), or its text as it is; default: a sound one
    code          the package's ``__init__.py``, or its files by relative name; default: a sound engine
    package       the top-level package, default ``name``
    entry_points  the whole entry_points.txt, default the one line that a sound plugin has
    metadata      the whole METADATA file, "" for none
    """
    package = package or name
    dist = dist or f"acme-{name.replace('_', '-')}"
    document = manifest(name, engine={"factory": f"{package}:Engine"}) if document is None else document
    code = ENGINE.format(plugin=name) if code is None else code
    folder = site / package
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in ({"__init__.py": code} if isinstance(code, str) else code).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    if isinstance(document, Mapping):
        document = json.dumps(document) if fmt == "json" else to_toml(document)
    (folder / f"cudnn_plugin.{fmt}").write_bytes(document.encode() if isinstance(document, str) else document)
    if entry_points is None:
        entry_points = f"[{GROUP}]\n{name} = {package}:cudnn_plugin.{fmt}\n"
    return write_dist(site, dist, version, entry_points=entry_points, metadata=metadata)


def write_dist(
    site: Path, dist: str, version: str = "1.0", *, entry_points: str | bytes = "", metadata: str | None = None
) -> Path:
    """Only the metadata of a distribution; returns its dist-info directory."""
    folder = site / f"{dist.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    if metadata is None:
        metadata = f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n"
    if metadata:
        (folder / "METADATA").write_text(metadata)
    if entry_points:
        data = entry_points.encode() if isinstance(entry_points, str) else entry_points
        (folder / "entry_points.txt").write_bytes(data)
    (folder / "RECORD").write_text("")
    return folder


def write_many(site: Path, plugins: int = 100, others: int = 900, engines: int = 3) -> None:
    """A site directory of ``plugins`` sound plugins, each with ``engines`` engines and a 1 kB manifest, among ``others``."""
    for index in range(others):
        write_dist(
            site,
            f"other-{index}",
            entry_points=f"[console_scripts]\nother{index} = other{index}:main\n" * (index % 3 == 0),
        )
    for index in range(plugins):
        name = f"plugin_{index}"
        rows = [
            {
                **manifest(name)["engine"][0],
                "name": f"engine_{number}",
                "devices": ["cuda"],
                "sm": ["90a", "100f"],
                "dtypes": ["bfloat16", "float16", "fp8_e4m3"],
                "notes": ["deterministic", "cuda_graph"],
                "efficiency": 0.7,
                "knobs": {
                    "tile_m": {"type": "int", "choices": [64, 128, 256]},
                    "split_k": {"type": "int", "min": 1, "max": 16},
                },
            }
            for number in range(engines)
        ]
        write_plugin(site, name, {**manifest(name), "engine": rows})


class Animal(NamedTuple):
    """One way to be broken.

    write  installs it into a site directory
    code   the decline that its entry earns
    when   "listed": as soon as the registry is asked; "used": when its engine is asked for; "planned": when a planner
           calls the engine
    """

    name: str
    write: Callable[[Path], None]
    code: str
    when: str


def _simple(name: str, decline: str, when: str, **options: Any) -> Animal:
    def write(site: Path) -> None:
        write_plugin(site, name, **options)

    return Animal(name, write, decline, when)


def _engine(body: str) -> str:
    """A module whose Engine has ``body`` (methods, indented by four) over the sound one."""
    return ENGINE.format(plugin="zoo") + "\n\nSound = Engine\n\n\nclass Engine(Sound):\n" + body


def _twins(site: Path) -> None:
    write_plugin(site, "twin", dist="twin-one")
    write_plugin(site, "twin", dist="twin-two", package="twin_two")


def _no_manifest(site: Path, name: str = "no_manifest") -> None:
    write_plugin(site, name)
    (site / name / "cudnn_plugin.toml").unlink()


def _fifo_manifest(site: Path) -> None:
    _no_manifest(site, "fifo_manifest")
    os.mkfifo(site / "fifo_manifest" / "cudnn_plugin.toml")


def _no_package(site: Path) -> None:
    write_dist(site, "acme-no-package", entry_points=f"[{GROUP}]\nno_package = no_package:cudnn_plugin.toml\n")


ANIMALS: tuple[Animal, ...] = (
    _simple("too_new", "api.too_new", "listed", document=manifest("too_new", api="1.99")),
    _simple("next_major", "api.too_new", "listed", document=manifest("next_major", api="2.0", novelty=True)),
    _simple("too_old", "api.too_old", "listed", document=manifest("too_old", api="0.9")),
    _simple("not_toml", "plugin.bad_manifest", "listed", document="schema = = 1"),
    _simple("not_text", "plugin.bad_manifest", "listed", document=b"\xff\xfe\x00"),
    _simple("unknown_field", "plugin.bad_manifest", "listed", document=manifest("unknown_field", hoks=[])),
    _simple("wrong_name", "plugin.bad_manifest", "listed", document=manifest("other_name")),
    Animal("twin", _twins, "plugin.conflict", "listed"),
    Animal("no_manifest", _no_manifest, "plugin.bad_manifest", "listed"),
    Animal("fifo_manifest", _fifo_manifest, "plugin.bad_manifest", "listed"),
    Animal("no_package", _no_package, "plugin.bad_manifest", "listed"),
    _simple(
        "misspelt_hook",
        "plugin.unknown_hook",
        "listed",
        document=manifest("misspelt_hook", hooks=["misspelt_hook.hooks"]),
        code={
            "__init__.py": ENGINE.format(plugin="misspelt_hook"),
            "hooks.py": "def cudnn_core_registr(registrar):\n    pass\n",
        },
    ),
    _simple(
        "raising_hook",
        "plugin.broken",
        "listed",
        document=manifest("raising_hook", hooks=["raising_hook.hooks"]),
        code={
            "__init__.py": ENGINE.format(plugin="raising_hook"),
            "hooks.py": "def cudnn_core_register(registrar):\n    raise ValueError('hook')\n",
        },
    ),
    _simple("raises_at_import", "plugin.broken", "used", code="raise ValueError('at import')\n"),
    _simple("exits_at_import", "plugin.broken", "used", code="import sys\nsys.exit(3)\n"),
    _simple("misses_import", "dep.import_failed", "used", code="import a_module_that_nobody_has\n"),
    _simple("no_factory", "plugin.broken", "used", code="# there is no Engine\n"),
    _simple(
        "no_module",
        "plugin.broken",
        "used",
        document=manifest("no_module", engine={"factory": "no_module.absent:Engine"}),
    ),
    _simple("no_protocol", "plugin.broken", "used", code="class Engine:\n    pass\n"),
    _simple(
        "raises_at_construction",
        "plugin.broken",
        "used",
        code=_engine("    def __init__(self):\n        raise RuntimeError('no GPU')\n"),
    ),
    _simple(
        "misses_dist",
        "dep.missing",
        "listed",
        document=manifest("misses_dist", requires=[{"dist": "a-dist-that-nobody-has", "version": ">=2"}]),
    ),
    _simple(
        "raises_in_check",
        "plugin.broken",
        "planned",
        code=_engine("    def check_support(self, graph, ctx):\n        raise RuntimeError('in check_support')\n"),
    ),
    _simple(
        "garbage_support",
        "plugin.broken",
        "planned",
        code=_engine("    def check_support(self, graph, ctx):\n        return 42\n"),
    ),
    _simple(
        "garbage_plan",
        "build.failed",
        "planned",
        code=_engine("    def build_plan(self, graph, config, ctx):\n        return 42\n"),
    ),
    _simple(
        "mutates_graph",
        "plugin.broken",
        "planned",
        code=_engine("    def check_support(self, graph, ctx):\n        graph.nodes[0].attrs['padding'] = 1.0\n"),
    ),
    _simple(
        "raises_in_build",
        "build.failed",
        "planned",
        code=_engine("    def build_plan(self, graph, config, ctx):\n        raise RuntimeError('in build_plan')\n"),
    ),
)
