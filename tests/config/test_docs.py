"""docs/configuration.md says what the code does: its example loads, its keys are all the keys, its errors are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudnn_core._config._layer import KEYS
from cudnn_core._config._rules import _FIXED, _RULE_KEYS
from cudnn_core._config._sources import VARIABLES
from cudnn_core._errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]


def test_the_example_is_a_valid_file(world):
    world.named.write_text(EXAMPLE, encoding="utf-8")
    world.environ["CUDNN_CORE_CONFIG"] = str(world.named)
    config = world.load()
    assert config.max_workspace == 256 * 2**20
    assert [rule.use or rule.avoid for rule in config.rules] == [
        "frost_gemm:sm90_wgmma",
        ("linear_attention:gdn_cutile",),
    ]


@pytest.mark.parametrize("path", [*KEYS, ("rule",)], ids=".".join)
def test_every_key_has_a_row(path):
    name = {"engine": '[engine."ID".knobs]', "rule": "[[rule]]"}.get(".".join(path), ".".join(path))
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}`")]
    assert rows
    key = KEYS.get(path)
    if key is not None:
        assert rows[0].endswith(
            "| yes |" if key.project and path != ("strict",) else "| only `true` |" if key.project else "| no |"
        )
        assert ("adds up" in rows[0]) == key.union


@pytest.mark.parametrize("name", [*_RULE_KEYS, *_FIXED, *VARIABLES])
def test_every_rule_key_condition_and_variable_has_a_row(name):
    assert f"\n| `{name}` |" in PAGE


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ("named", "[engines]\ndisabel = []"),
        ("named", "disable = []"),
        ("named", "[[rule]]\navoid = ['a:b']\nmatch = { m = '64..1' }"),
        ("named", "[engines]\ndisable = ['frost_gemm.engines:Sm90']"),
        ("project", "[engines]\nenable = ['a:b']"),
    ],
)
def test_the_errors_of_files_read_as_printed(world, layer, text):
    path = world.write(layer, text + "\n")
    with pytest.raises(ConfigError) as caught:
        world.load()
    message = str(caught.value).removeprefix(str(path))
    assert re.search(rf"\n/\S*{re.escape(message)}\n", PAGE), message


@pytest.mark.parametrize(
    ("environ", "overlay"),
    [
        ({"CUDNN_CORE_STRICT": "yes"}, {}),
        ({"CUDNN_CORE_CONFIG": "/etc/fleet/gpu.toml"}, {}),
        ({}, {"max_workspace": "1 mib"}),
    ],
)
def test_the_other_errors_read_as_printed(world, environ, overlay):
    world.environ.update(environ)
    with pytest.raises(ConfigError) as caught:
        world.load(**overlay)
    assert f"\n{caught.value}\n" in PAGE
