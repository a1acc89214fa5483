"""The line of a key: against documents whose lines are known, and against text that tries to mislead the scan."""

from __future__ import annotations

import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_core._config._locate import Lines

MISLEADING = '''# [engines]
title = """
[engines]
disable = 1
""" # closing
single = \'\'\'
[[rule]]
use = "no"\'\'\'
quoted = "[engines] # not" # [engines]
[engines]  # the real one
disable = [
    "a:b",   # "c:d" in a comment
    # ]
    'c:d',
    "e]f:g",
]
order = [ [1, 2], {x = "}"}, ]

[[rule]]
match = { op = "matmul", m = "..64" }
use = "a:b"

[[ rule ]]
name = "second"
[rule.match]
op = "gdn"
[rule.versions]
"cudnn-core.x" = "<1"
[engine."a:b".knobs]
tile_m = 64
'lit' = 1
a.b = 2
'''


def test_every_kind_of_key_is_placed():
    tomli.loads(MISLEADING)
    lines = Lines(MISLEADING)
    at = {text: number for number, text in enumerate(MISLEADING.split("\n"), 1)}
    assert lines.of(("title",)) == 2
    assert lines.of(("single",)) == at["single = '''"]
    assert lines.of(("engines",)) == at["[engines]  # the real one"]
    assert lines.of(("engines", "disable")) == at["disable = ["]
    assert lines.of(("engines", "order")) == at['order = [ [1, 2], {x = "}"}, ]']
    assert lines.of(("rule", 0)) == at["[[rule]]"]  # the real one: later lines win in `at`
    assert lines.of(("rule", 0, "use")) == at['use = "a:b"']
    assert lines.of(("rule", 1)) == at["[[ rule ]]"]
    assert lines.of(("rule", 1, "name")) == at['name = "second"']
    assert lines.of(("rule", 1, "match", "op")) == at['op = "gdn"']
    assert lines.of(("rule", 1, "versions", "cudnn-core.x")) == at['"cudnn-core.x" = "<1"']
    assert lines.of(("engine", "a:b", "knobs")) == at['[engine."a:b".knobs]']
    assert lines.of(("engine", "a:b", "knobs", "tile_m")) == at["tile_m = 64"]
    assert lines.of(("engine", "a:b", "knobs", "lit")) == at["'lit' = 1"]
    assert lines.of(("engine", "a:b", "knobs", "a", "b")) == at["a.b = 2"]


def test_a_key_inside_an_inline_table_is_placed_at_the_table():
    assert Lines(MISLEADING).of(("rule", 0, "match", "m")) == 20


def test_an_item_of_a_list_is_placed_at_its_own_line():
    lines = Lines(MISLEADING)
    assert lines.of(("engines", "disable"), "a:b") == 12
    assert lines.of(("engines", "disable"), "e]f:g") == 15


def test_an_item_that_stands_twice_is_placed_at_the_key():
    lines = Lines('order = [\n"a:b",\n"a:b"]\n')
    assert lines.of(("order",), "a:b") == 1


def test_what_is_not_there_has_no_line():
    assert Lines("a = 1\n").of(("b",)) is None
    assert Lines("").of(()) is None


def test_an_inline_table_over_several_lines():
    """TOML 1.1, which newer parsers read."""
    lines = Lines("[t]\na = {\n  b = 1,\n  c = 2,\n}\nd = 1\n")
    assert lines.of(("t", "d")) == 6
    assert lines.of(("t", "a", "c")) == 2
    assert lines.of(("t", "c")) == 1


def test_windows_line_ends():
    assert Lines("a = 1\r\n\r\n[t]\r\nb = 2\r\n").of(("t", "b")) == 4


def test_a_key_with_escapes_ends_the_scan_and_misplaces_nothing():
    lines = Lines('a = 1\n"b\\u0020" = 2\nc = 3\n')
    assert lines.of(("a",)) == 1
    assert lines.of(("c",)) is None


KEYS = st.text("abcxyz-_ .:", min_size=1, max_size=6)
VALUES = st.one_of(
    st.integers(0, 9).map(str),
    st.sampled_from(
        [
            '"x"',
            "'[t]'",
            '"""\nfake = 1\n[fake]\n"""',
            "'''\n# \"\n'''",
            "[1,\n 2,\n]",
            '[ # ]\n"a = 1"]',
            "{ a = 1, b = [2] }",
            '""',
        ]
    ),
)


@settings(max_examples=200)
@given(
    st.dictionaries(
        KEYS,
        st.dictionaries(KEYS, st.tuples(VALUES, st.sampled_from(["", " # [x]", "\n", "\n# y = 1"])), max_size=4),
        max_size=4,
    )
)
def test_generated_documents(document):
    text, expected = "", {}
    for table, keys in document.items():
        expected[(table,)] = text.count("\n") + 1
        text += f'["{table}"]\n'
        for key, (value, tail) in keys.items():
            expected[(table, key)] = text.count("\n") + 1
            text += f'  "{key}" = {value}{tail}\n'
    parsed = tomli.loads(text)
    assert {table: set(keys) for table, keys in parsed.items()} == {
        table: set(keys) for table, keys in document.items()
    }
    lines = Lines(text)
    assert {path: lines.of(path) for path in expected} == expected
