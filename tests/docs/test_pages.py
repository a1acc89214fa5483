"""The pages hold: their programs run, their commands print what is shown, their links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "plugins/*/README.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)
GUIDE = (
    "docs/writing-an-engine.md"  # its programs need the plugin that it writes: tests/packaging/third_party runs them
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def with_blocks(fence):
    return [name for name in PAGES if re.search(fence, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("name", sorted({*with_blocks("^<!-- run -->")} - {GUIDE}))
def test_the_programs_of_a_page_run(name, page, shell):
    blocks = page(name).blocks("python", marked=True)
    assert blocks
    (shell.folder / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    output = shell.call(["-W", "error", "page.py"])
    assert not re.search(r"Error|Warning", output) or "mm.B" in output, output  # errors.md prints the one it caught


@pytest.mark.parametrize("name", with_blocks("^```console"))
def test_the_commands_of_a_page_print_what_it_shows(name, page, shell):
    text = page(name)
    shell.files(text)
    for body in text.blocks("console"):
        for step in re.split(r"^(?=\$ )", body, flags=re.MULTILINE)[1:]:
            command = step.partition("\n")[0].removeprefix("$ ")
            text.expect(step, f"$ {command}\n{shell.run(command)}")


@pytest.mark.parametrize("name", with_blocks("^```python"))
def test_every_python_block_parses(name, page):
    for body in page(name).blocks("python"):
        ast.parse(body)


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings_of_the_repository(name, page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page(name).text, flags=re.DOTALL)
    broken = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.resolve().is_relative_to(ROOT) or not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


def test_the_index_names_every_page(page):
    linked = {Path(target).name for target in _LINK.findall(page("docs/index.md").text)}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


def test_no_page_holds_a_path_of_somebodys_machine():
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"/(?:work|root)/|/tmp/(?!`)\w", text), name
