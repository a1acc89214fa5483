"""The README's example runs, and its table of kinds is the package's."""

import os
import re
from pathlib import Path

from ptx_emulator import KINDS

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run():
    blocks = re.findall(r"<!-- run -->\n```python\n(.*?)```", README.read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_kind_of_finding_is_listed():
    text = README.read_text()
    rows = "".join(f"| `{kind}` | {meaning} |\n" for kind, meaning in KINDS.items())
    wanted = f"<!-- kinds -->\n| kind | |\n|---|---|\n{rows}<!-- /kinds -->"
    if os.environ.get("UPDATE_DOCS"):
        README.write_text(re.sub(r"<!-- kinds -->.*<!-- /kinds -->", lambda _: wanted, text, flags=re.S))
    assert wanted in README.read_text(), "UPDATE_DOCS=1 rewrites the table"
