"""Reading the pages: their code blocks, marked regions and links.

A ``python`` block after the line ``<!-- run -->`` is executed; those of one page are one program. A ``console`` block has
commands after ``$ `` and what they print. A ``toml`` block that starts with ``# NAME.toml`` is a file of that name. All of it
happens in a folder with ``docs/mlp.json`` and ``examples/quickstart.py``, called ``/srv`` on the pages.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UPDATE = os.environ.get("UPDATE_DOCS") == "1"
_BLOCK = re.compile(r"(?P<mark><!-- run -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_NOISE = re.compile(r"\b\d\.\de-\d\d\b")  # rounding errors of random inputs


class Page:
    """A Markdown page."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = ROOT / name
        self.text = self.path.read_text(encoding="utf-8")

    def blocks(self, kind: str, *, marked: bool = False) -> list[str]:
        found = _BLOCK.finditer(self.text)
        return [match["body"] for match in found if match["kind"] == kind and (match["mark"] or not marked)]

    def region(self, name: str) -> str:
        """What stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
        return re.search(rf"<!-- {name}[^\n]*-->\n(.*?)<!-- /{name} -->", self.text, re.DOTALL)[1]

    def first_column(self, after: str) -> list[str]:
        """The code names in the first column of the table that follows the line ``after``."""
        table = self.text.partition(f"{after}\n")[2].lstrip().partition("\n\n")[0]
        return [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]

    def replace(self, old: str, new: str) -> None:
        assert self.text.count(old) == 1
        self.text = self.text.replace(old, new)
        self.path.write_text(self.text, encoding="utf-8")

    def expect(self, shown: str, actual: str) -> None:
        """``shown`` stands on the page and must be ``actual``; UPDATE_DOCS=1 makes it so."""
        if UPDATE and _NOISE.sub("", shown) != _NOISE.sub("", actual):
            self.replace(shown, actual)
        else:
            assert _NOISE.sub("#", shown) == _NOISE.sub("#", actual), f"{self.name}: UPDATE_DOCS=1 rewrites it"


class Shell:
    """Runs the commands of a page as a user without a GPU and without any configuration would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("docs/mlp.json", "examples/quickstart.py"):
            (folder / Path(name).name).write_bytes((ROOT / name).read_bytes())
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDNN_CORE_")}
        self.environ |= {
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def files(self, page: Page) -> None:
        for body in page.blocks("toml"):
            name = re.match(r"# (\w+\.toml)\n", body)
            if name:
                (self.folder / name[1]).write_text(body, encoding="utf-8")

    def run(self, command: str) -> str:
        """What ``command`` prints."""
        words = shlex.split(command)
        environ = dict(self.environ)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environ[name] = value
        program = {"cudnn-core": ["-m", "cudnn_core"], "python": []}[words.pop(0)]
        return self.call([*program, *words], environ)

    def call(self, arguments: list[str], environ: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environ or self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout.replace(str(self.folder), "/srv")


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path.resolve())


@pytest.fixture
def page():
    return Page
