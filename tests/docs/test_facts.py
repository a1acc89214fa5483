"""What the pages state is what the code says: example, engines, extras, formats, errors, missing builders, numbers."""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import re
from pathlib import Path

import pytest
import tomli

import cudnn_core

ROOT = Path(__file__).parents[2]
DISTS = {
    tomli.loads(path.read_text(encoding="utf-8"))["project"]["name"] for path in ROOT.glob("plugins/*/pyproject.toml")
}
NUMBERS = ROOT / "benchmarks" / "results" / "host_overhead_cpu.json"
NOT_MEASURED = (
    '*No result is committed yet: `make bench ARGS="--json benchmarks/results/host_overhead_cpu.json"` writes it.*\n'
)


# --- README
def test_the_example_is_the_file(page):
    assert (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8") == page("README.md").blocks("python")[0]


def engine_rows(page):
    table = page("README.md").text.partition("\n## Engines\n")[2].partition("\n\n`cudnn-core engines`")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {row[0].strip("`"): row for row in rows}


def test_the_engine_table_has_the_engines_of_the_tree(page):
    known = [entry for entry in cudnn_core.registry().engines if entry.dist in DISTS]
    assert set(engine_rows(page)) == {entry.spec.short_id for entry in known}
    assert {entry.dist for entry in known} == DISTS


def gdn():
    graph = cudnn_core.Graph(io_data_type="bfloat16", compute_data_type="float32")
    q, k, v = (graph.tensor(dim=[128, 2, 64]) for _ in range(3))
    g, beta = (graph.tensor(dim=[128, 2], data_type="float32") for _ in range(2))
    graph.gdn(q, k, v, g, beta, graph.tensor(dim=[3], data_type="int32"))[0].set_output(True)
    return graph


def test_the_engine_table_says_which_engines_are_written(page):
    mlp = cudnn_core.Graph.from_json((ROOT / "docs" / "mlp.json").read_text(encoding="utf-8"))
    ctx = cudnn_core.ExecutionContext(None, cudnn_core.DeviceInfo.preset("B200"))
    for name, row in engine_rows(page).items():
        entry = cudnn_core.registry().get(name)
        graph = mlp if {"matmul", "*"} & set(entry.spec.ops) else gdn()
        answer = entry.instance().check_support(graph.freeze(), ctx)
        missing = isinstance(answer, cudnn_core.Declined) and any(r.code == "not_implemented" for r in answer.reasons)
        assert missing == ("not written" in row[2]) == ("`not_implemented`" in row[2]), name


def test_the_install_table_has_every_extra(page):
    extras = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    shown = dict(
        re.findall(r"^\| `pip install cudnn-core\[([\w-]+)\]` \| (.*) \|$", page("README.md").text, re.MULTILINE)
    )
    assert set(shown) == set(extras)
    for extra, needs in extras.items():
        plugins = {re.split(r"[>=\[]", need)[0].removeprefix("cudnn-core-").replace("-", "_") for need in needs}
        plugins = {"cudnn_backend" if plugin == "backend" else plugin for plugin in plugins} - {
            "cudnn_core",
            "cuda_bindings",
        }
        assert set(re.findall(r"`(\w+)`", shown[extra])) == plugins, extra
        assert ("cuda-bindings" in shown[extra]) == any(re.match(r"cuda-bindings|cudnn-core\[cuda\]", n) for n in needs)


def test_the_builder_counts_are_counted(page):
    from cudnn_core._ops._table import all_builders

    theirs, ours = re.search(r"closed table of (\d+) builders \| (\d+) builders", page("README.md").text).groups()
    assert int(theirs) == len(recorded()["ops"])
    assert int(ours) == len(all_builders())


def test_the_numbers_are_those_of_the_committed_result(page):
    readme = page("README.md")
    rows = [json.loads(line) for line in NUMBERS.read_text(encoding="utf-8").splitlines()] if NUMBERS.exists() else []
    mark = "<!-- numbers: benchmarks/results/host_overhead_cpu.json -->\n"
    readme.expect(f"{mark}{readme.region('numbers')}", f"{mark}{numbers(rows)}")


def numbers(rows):
    if not rows:
        return NOT_MEASURED
    lines = ["| case | unit | cudnn-core | peer | ratio | peer is |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [
            row["case"],
            row["unit"],
            *(figure(row[name]) for name in ("ours", "peer", "ratio")),
            row["peer_name"] or "",
        ]
        lines.append(" ".join(f"| {cell}" if cell else "|" for cell in cells) + " |")
    versions = ", ".join(f"{name} {value}" for name, value in rows[0]["versions"].items())
    return "\n".join([*lines, "", f"{rows[0]['machine']}; {versions}.", ""])


def figure(value):
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


# --- migrating
def recorded():
    return json.loads(lzma.decompress((ROOT / "tests" / "data" / "frontend_api.json.xz").read_bytes()))


def test_the_missing_builders_are_listed(page):
    missing = {name for name in recorded()["graph_methods"] if not hasattr(cudnn_core.Graph, name)}
    listed = re.findall(r"`(\w+)`", page("docs/migrating-from-the-frontend.md").region("missing builders"))
    assert set(listed) == missing - {"backend_plan_entries"}
    assert listed == sorted(listed)


def test_what_the_page_calls_absent_is_absent(page):
    section = page("docs/migrating-from-the-frontend.md").text.partition("\n## Not here\n")[2]
    for name in re.findall(r"`(?:cudnn\.)?(\w+)`", section):
        assert not hasattr(cudnn_core, name), name
        assert not hasattr(cudnn_core.Graph, name), name


# --- errors
def test_the_error_tree_is_the_class_tree(page):
    drawn: dict[str, str | None] = {}
    parents: list[str] = []
    for line in page("docs/errors.md").blocks("text")[0].splitlines():
        name = re.search(r"\w+", line)
        depth = name.start() // 4
        parents[depth:] = [name[0]]
        drawn[name[0]] = parents[depth - 1] if depth else None
    public = [getattr(cudnn_core, name) for name in cudnn_core.__all__ if name != "cudnnGraphNotSupportedError"]
    errors = [item for item in public if isinstance(item, type) and issubclass(item, cudnn_core.CudnnCoreError)]
    assert drawn == {e.__name__: e.__base__.__name__ if e is not cudnn_core.CudnnCoreError else None for e in errors}


# --- command line
def test_the_verbs_are_those_of_the_parser(page):
    text = page("docs/command-line.md")
    mark = "<!-- verbs: UPDATE_DOCS=1 rewrites them -->\n"
    text.expect(f"{mark}{text.region('verbs')}", f"{mark}{verbs()}")


def verbs():
    from cudnn_core._cli._parser import _build_parser

    return "".join(section for parser in leaves(_build_parser()) for section in verb(parser))


def leaves(parser):
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [leaf for group in groups for below in group.choices.values() for leaf in leaves(below)] or [parser]


def verb(parser):
    """What ``--help`` says of one verb; argparse lays it out differently in each version of Python."""
    shown = [action for action in parser._actions if action.dest != "help"]
    names = [action.metavar or action.dest for action in shown if not action.option_strings]
    optional = [action.nargs == "?" for action in shown if not action.option_strings]
    words = [f"[{name}]" if maybe else name for name, maybe in zip(names, optional, strict=True)]
    words += ["[-- ARGS]"] if "rest" in parser._defaults else []
    yield f"### {' '.join([parser.prog, *words]).replace('cudnn-core ', '', 1)}\n\n{parser.description}\n\n"
    yield "| argument | |\n|---|---|\n"
    for action in shown:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        name = f"{action.option_strings[0]}{value}" if action.option_strings else action.metavar or action.dest
        yield f"| `{name}` | {action.help} |\n"
    yield "\n"


def test_the_exit_codes_are_those_of_the_command(page):
    from cudnn_core import _cli

    rows = page("docs/command-line.md").text.partition("<!-- exit codes -->\n")[2].partition("\n\n")[0]
    named = set()
    for line in rows.splitlines()[2:]:
        code, _, errors = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", errors):
            kind = getattr(cudnn_core, name)
            assert _cli.exit_code(kind.__new__(kind)) == int(code), name
            named.add(name)
    for name in cudnn_core.__all__:
        kind = getattr(cudnn_core, name)
        if isinstance(kind, type) and issubclass(kind, cudnn_core.CudnnCoreError):
            parents = {parent.__name__ for parent in kind.__mro__}
            assert parents & {*named, "EngineLookupError"} or kind is cudnn_core.CudnnCoreError, name
    kinds = {"unknown": 2, "not_installed": 3, "unavailable": 1}
    assert {kind: _cli.exit_code(cudnn_core.EngineLookupError("", kind)) for kind in kinds} == kinds


def test_the_executors_signature_is_the_one_that_run_calls(page):
    from cudnn_core._cli import _run

    (code,) = page("docs/command-line.md").blocks("python")
    (function,) = ast.parse(code).body
    names = [argument.arg for argument in function.args.args]
    options = function.args.kwarg.arg
    assert f"``{function.name}({', '.join(names)}, **{options})``" in _run.__doc__
    assert page("docs/command-line.md").first_column("<!-- executor arguments -->") == [*names, options]


# --- formats
def test_the_fields_of_the_formats_are_listed(page):
    from cudnn_core import _decision, _planfile
    from cudnn_core._graph import _json

    for name, mark, fields in (
        ("docs/graph-json.md", "graph", _json._TOP),
        ("docs/graph-json.md", "tensor", _json._TENSOR),
        ("docs/graph-json.md", "node", _json._NODE),
        ("docs/plan-files.md", "plan", _planfile._FIELDS),
        ("docs/ranking.md", "decision", (*_decision._RECORD, "digest")),
    ):
        assert page(name).first_column(f"<!-- fields: {mark} -->") == list(fields)
    text = page("docs/ranking.md").text
    for row in (_decision.EngineDecision._fields, cudnn_core.Decline._fields, _decision.ConfigSource._fields):
        assert f"`{' '.join(row)}`" in text
    assert f"States: `{' '.join(_decision.STATES)}`" in text


def test_the_data_types_and_reorderings_are_listed(page):
    text = page("docs/graph-json.md").text
    not_stored = {"NOT_SET", "FAST_FLOAT_FOR_FP8"}
    listed = re.search(r"^\| `data_type` \| `(.*)` \|$", text, re.MULTILINE)[1].split()
    assert set(listed) == {member.value for member in cudnn_core.data_type if member.name not in not_stored}
    listed = re.search(r"^\| `reordering` \| `(.*)` \|$", text, re.MULTILINE)[1].split()
    assert listed == [member.value for member in cudnn_core.tensor_reordering]


def test_the_op_table_is_the_codes(page):
    text = page("docs/graph-json.md")
    text.expect(f"<!-- ops -->\n{text.region('ops')}<!-- /ops -->", f"<!-- ops -->\n{ops()}<!-- /ops -->")


def ops():
    from cudnn_core._ops._table import in_tree

    lines = ["| op | inputs | outputs | attributes |", "|---|---|---|---|"]
    plain: dict[int, list[str]] = {}
    for row in in_tree().values():
        if row.group == "pointwise" and not row.attrs:
            plain.setdefault(len(row.inputs), []).append(row.name)
            continue
        inputs = " ".join(p.name + "?" * p.optional + "*" * p.variadic for p in row.inputs)
        outputs = " ".join(p.name + "?" * (p.optional or p.when is not None) for p in row.outputs)
        attrs = " ".join(map(attribute, row.attrs))
        lines.append(
            f"| `{row.name}` | `{inputs}` | `{outputs}` | {f'`{attrs}`' if attrs else ''} |".replace("|  |", "| |")
        )
    lines += ["", "Pointwise ops without attributes, by their number of inputs:", ""]
    lines += [f"- {count}: {' '.join(f'`{name}`' for name in names)}" for count, names in sorted(plain.items())]
    return "\n".join([*lines, ""])


def attribute(attr):
    if attr.default is cudnn_core.op_schema.REQUIRED:
        return attr.name
    return f"{attr.name}={json.dumps(attr.default)}"


# --- contributing
def test_the_test_areas_are_the_folders(page):
    listed = {
        area for area in page("CONTRIBUTING.md").first_column("<!-- test areas -->") if not area.startswith("plugins/")
    }
    folders = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= listed - {"tests/data"}
    assert all((ROOT / area).is_dir() for area in listed)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md"])
def test_the_make_targets_that_a_page_names_exist(page, name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        word for call in re.findall(r"`(?:[A-Z]\w*=\S+ )*make ([a-z -]+)", page(name).text) for word in call.split()
    }
    assert named
    assert named <= targets
