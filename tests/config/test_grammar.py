"""Ranges, sizes, booleans, ids and globs, each against a reference that is written another way."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_core._config._grammar import (
    check_engine,
    check_plugin,
    engine_matches,
    is_exact,
    parse_bool,
    parse_extent,
    parse_size,
)

SIZES = st.integers(0, 200)
SPANS = st.one_of(
    SIZES.map(lambda n: (n, {n})),
    st.tuples(SIZES, SIZES).map(sorted).map(lambda ends: (f"{ends[0]}..{ends[1]}", set(range(ends[0], ends[1] + 1)))),
    SIZES.map(lambda n: (f"..{n}", set(range(n + 1)))),
    SIZES.map(lambda n: (f"{n}..", set(range(n, 300)))),
)
NAMES = st.text("ab_1", min_size=1, max_size=6)
GLOBS = st.text("ab_1*?", min_size=1, max_size=6)


def admits(spans, size):
    return any(span.admits(size) for span in spans)


@given(SPANS, st.integers(0, 299))
def test_a_range_admits_exactly_its_sizes_with_both_ends(span, size):
    text, members = span
    assert admits(parse_extent(text), size) == (size in members)


@given(st.lists(SPANS, min_size=1, max_size=4), st.integers(0, 299))
def test_a_list_admits_the_union_of_its_items(spans, size):
    assert admits(parse_extent([text for text, _ in spans]), size) == any(size in members for _, members in spans)


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_range_whose_ends_are_reversed_is_refused(a, b):
    if a > b:
        with pytest.raises(ValueError, match="empty"):
            parse_extent(f"{a}..{b}")


@given(st.text(string.printable, max_size=8))
def test_anything_else_is_refused(text):
    low, separator, high = text.partition("..")
    ends = [low.strip(), high.strip()]
    good = bool(separator) and any(ends) and all(end == "" or (end.isascii() and end.isdigit()) for end in ends)
    if not good:
        with pytest.raises(ValueError):
            parse_extent(text)


@pytest.mark.parametrize(
    "value", ["..", "", "64", "-1..2", "1...2", "1..2..3", "a..b", "٣..٤", -1, True, 1.0, None, [], {}]
)
def test_what_is_no_range(value):
    with pytest.raises(ValueError):
        parse_extent(value)


@given(st.integers(0, 5000), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_is_a_number_times_its_unit(number, unit):
    base = 1024 if unit.endswith("iB") else 1000
    power = "BKMGT".index(unit[0].upper())
    assert parse_size(f"{number} {unit}") == parse_size(f"{number}{unit}") == number * base**power


def test_a_size_may_have_a_fraction_that_comes_to_whole_bytes():
    assert parse_size("1.5 GiB") == 3 * 2**29
    assert parse_size("0.001 kB") == 1
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_size("0.0001 kB")


@pytest.mark.parametrize(
    "value", ["256", "256 mib", "MiB", "-1 MiB", "1 KB", "1e3 MiB", "1 MiB extra", -1, True, 1.5, None]
)
def test_what_is_no_size(value):
    with pytest.raises(ValueError):
        parse_size(value)


def test_an_integer_counts_bytes():
    assert parse_size(0) == 0
    assert parse_size(4096) == 4096


def test_booleans_of_variables_are_four_words_and_nothing_else():
    assert [parse_bool(text) for text in ("0", "1", "false", "true")] == [False, True, False, True]
    for text in ("", "yes", "on", "True", "FALSE", "2", " 1"):
        with pytest.raises(ValueError, match="0, 1, true, false"):
            parse_bool(text)


def glob_reference(pattern: str, name: str) -> bool:
    """By recursion on the pattern's first character."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(glob_reference(pattern[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and glob_reference(pattern[1:], name[1:])


@given(GLOBS, GLOBS, NAMES, NAMES)
def test_a_glob_matches_segment_by_segment_and_whole(plugin_glob, engine_glob, plugin, engine):
    expected = glob_reference(plugin_glob, plugin) and glob_reference(engine_glob, engine)
    assert engine_matches(f"{plugin_glob}:{engine_glob}", f"{plugin}:{engine}") == expected


@given(NAMES, NAMES, NAMES, NAMES)
def test_an_exact_name_matches_itself_only_and_never_a_part(plugin, engine, other_plugin, other_engine):
    pattern = f"{plugin}:{engine}"
    assert is_exact(pattern)
    assert engine_matches(pattern, f"{other_plugin}:{other_engine}") == (pattern == f"{other_plugin}:{other_engine}")


def test_character_sets():
    assert engine_matches("frost_gemm:sm[19]0*", "frost_gemm:sm90_wgmma")
    assert not engine_matches("frost_gemm:sm[!9]*", "frost_gemm:sm90_wgmma")


def test_a_star_does_not_cross_the_colon_or_the_slash():
    assert not engine_matches("*:b", "a:x/b")
    assert not engine_matches("a*:c", "ab:bc")


def test_a_pattern_without_a_variant_covers_every_variant():
    assert engine_matches("cudnn_backend:graph", "cudnn_backend:graph/eng7")
    assert engine_matches("cudnn_backend:*", "cudnn_backend:graph@2/eng7")


def test_a_pattern_with_a_variant_covers_that_variant_only():
    assert engine_matches("cudnn_backend:graph/eng7", "cudnn_backend:graph/eng7")
    assert engine_matches("cudnn_backend:graph/eng*", "cudnn_backend:graph/eng70")
    assert not engine_matches("cudnn_backend:graph/eng7", "cudnn_backend:graph/eng70")
    assert not engine_matches("cudnn_backend:graph/eng7", "cudnn_backend:graph")


@pytest.mark.parametrize(
    "text",
    [
        "frost_gemm",
        "frost_gemm.engines:Sm90",
        "a:b:c",
        "/lib/x.so:y",
        "../x:y",
        "a:",
        ":b",
        "",
        "A:b",
        "a b:c",
        "a:b\n",
        "a:[",
        "a:b/",
    ],
)
def test_what_is_no_engine(text):
    with pytest.raises(ValueError):
        check_engine(text)


@pytest.mark.parametrize("text", ["a:b", "a.b", "./a", "A", "", "a b", "a\n"])
def test_what_is_no_plugin(text):
    with pytest.raises(ValueError):
        check_plugin(text)


def test_modules_and_paths_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="never modules or paths"):
        check_engine("frost_gemm.engines:Sm90Wgmma")
    with pytest.raises(ValueError, match="never modules or paths"):
        check_plugin("/opt/plugins/acme.so")


def test_a_revision_is_refused_with_the_name_to_write():
    with pytest.raises(ValueError, match="leave the revision out: 'frost_gemm:sm90_wgmma'"):
        check_engine("frost_gemm:sm90_wgmma@1")
