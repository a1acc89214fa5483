"""cudnn-core's conformance kit on the installed package, with cases of this package added to the kit's library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_conformance_kit(tmp_path: Path) -> None:
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cudnn_core.testing", "--cudnn-plugin", "acme_cpu"]
    command += ["--cudnn-cases", "kit_cases:cases", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
