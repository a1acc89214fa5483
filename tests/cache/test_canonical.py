"""Canonical JSON has one spelling per value; the strict reader refuses what parsers usually forgive."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_core._canonical import COUNT, TEXT, FormatError, digest, dumps, loads, plain, take
from cudnn_core._dtypes import data_type

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(_VALUES)
def test_values_survive_the_round_trip_and_have_one_spelling(value):
    assert loads(dumps(value)) == value
    assert dumps(loads(json.dumps(value, indent=2))) == dumps(value)


@given(st.dictionaries(st.text(), st.integers(), min_size=2), st.randoms())
def test_the_order_of_keys_does_not_matter(table, random):
    items = list(table.items())
    random.shuffle(items)
    assert digest(dict(items)) == digest(table)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object(), b"x"])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(FormatError, match="not JSON"):
        dumps(value)


@pytest.mark.parametrize(
    "text", ["", "{", '{"a":1,"a":1}', "NaN", "-Infinity", "1e999", "[" * 100_000, b"\xff", "1 2"], ids=range(9)
)
def test_the_reader_is_strict(text):
    with pytest.raises(FormatError):
        loads(text)


def test_the_reader_has_a_size_limit():
    with pytest.raises(FormatError, match="larger than 3 bytes"):
        loads("1234", limit=3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2,)), [1, [2]]),
        ({"b", "a"}, ["a", "b"]),
        ({1: data_type.HALF}, {"1": "float16"}),
        (float("inf"), "inf"),
        (int, "<class 'int'>"),
        (True, True),
    ],
)
def test_facts_of_plugins_become_json(value, expected):
    assert plain(value) == expected
    dumps(plain(value))


def test_facts_of_plugins_may_be_anything():
    class Hostile:
        def __str__(self):
            raise RuntimeError

    loop = []
    loop.append(loop)
    dumps(plain([Hostile(), loop]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "record: expected an object"),
        ({"n": 1}, "record: the field 'name' is missing"),
        ({"n": 1, "name": "x", "nme": 1}, r"record: unknown field 'nme' .did you mean 'name'"),
        ({"n": True, "name": "x"}, "record.n: expected an integer >= 0, got True"),
        ({"n": 1, "name": ""}, "record.name: expected a non-empty string, got ''"),
    ],
)
def test_fields_are_exactly_the_declared_ones(value, message):
    with pytest.raises(FormatError, match=message):
        take(value, {"n": COUNT, "name": TEXT}, "record")
