"""tools/dev_site.py stands in for editable installs where nothing can be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_core_and_plugins_are_visible_with_entry_points_and_requirements(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for _ in range(2):  # again over an older one
        subprocess.run([sys.executable, str(ROOT / "tools" / "dev_site.py"), str(site)], check=True, timeout=60)
    found = {dist.name: dist for dist in metadata.distributions(path=[str(site)])}
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    entries = {
        entry.name: entry.value
        for dist in found.values()
        for entry in dist.entry_points
        if entry.group == "cudnn_core.engines"
    }
    assert entries == {plugin: f"{plugin}:cudnn_plugin.toml" for plugin in plugins}
    assert all((site / plugin / "cudnn_plugin.toml").is_file() for plugin in plugins)
    assert found["cudnn-core"].version == found["cudnn-core-frost-gemm"].version == "0.1.0"
    assert "cudnn-core>=0.1,<1" in found["cudnn-core-linear-attention"].requires
    assert (site / "cudnn_core" / "_engine.py").is_file()
    code = "import cudnn_core; print([str(p) for p in cudnn_core.registry().plugins if p.state == 'quarantined'])"
    sources = [ROOT / "plugins" / plugin for plugin in plugins]
    for folder in (tmp_path, ROOT, *sources):  # -c puts the folder on the path
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.stdout, done.stderr) == ("[]\n", ""), folder
