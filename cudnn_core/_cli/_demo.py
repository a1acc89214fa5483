"""``cudnn-core demo``: the sentence search of a source checkout. An installed wheel does not carry it, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from ._output import EnvironmentProblem, emit_json, note

__all__ = ["demo"]


def demo(options: Any) -> int:
    """The example's own exit code: 0 ok, 1 its embeddings disagree, 3 a package is missing."""
    example = Path(__file__).resolve().parents[2] / "examples" / "sentence_search"
    if not (example / "__main__.py").is_file():
        raise EnvironmentProblem(
            "the demo is part of the source checkout, in examples/sentence_search: `make demo` installs what it needs and"
            " runs it"
        )
    if not options.json:
        note(f"running {example}")
    command = [sys.executable, str(example), *options.rest]
    done = subprocess.run(command, check=False, stdout=sys.stderr if options.json else None)
    if options.json:
        emit_json({"schema": 1, "example": str(example), "exit": done.returncode})
    return done.returncode if done.returncode in (0, 1, 2, 3) else 1
