"""Architecture patterns and version conditions."""

from __future__ import annotations

import pytest

from cudnn_core._errors import CudnnCoreError, ManifestError
from cudnn_core._sm import parse_sm, sm_decline
from cudnn_core._versions import Requirement, check_specifier, normalise, requirement_decline, satisfies

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)]

# NVIDIA's compatibility tables of family-specific targets (CUDA programming guide, PTX ISA): 10.1 was renamed to 11.0.
MATCHES = {
    "90a": {(9, 0)},
    "90": {(9, 0)},
    "100a": {(10, 0)},
    "103a": {(10, 3)},
    "107a": {(10, 7)},
    "100f": {(10, 0), (10, 3), (10, 7)},
    "103f": {(10, 3), (10, 7)},
    "101f": {(10, 1)},
    "110f": {(11, 0)},
    "120f": {(12, 0), (12, 1)},
    "121f": {(12, 1)},
    "80+": set(CAPABILITIES),
    "90+": {item for item in CAPABILITIES if item >= (9, 0)},
    "120+": {(12, 0), (12, 1)},
}


@pytest.mark.parametrize("text", MATCHES)
def test_a_pattern_matches_exactly_these_capabilities(text):
    assert {item for item in CAPABILITIES if parse_sm(text).matches(item)} == MATCHES[text]


@pytest.mark.parametrize("text", ["", "9", "sm_90", "90A", "90x", "90a+", "090", "9.0", "1000", "90f "])
def test_anything_else_is_refused(text):
    with pytest.raises(ManifestError, match="is not an architecture"):
        parse_sm(text)


def test_no_pattern_matches_every_device():
    assert sm_decline([], (1, 0)) is None


def test_a_device_below_every_range_is_too_low_and_another_family_is_another_variant():
    low = sm_decline([parse_sm("90+"), parse_sm("86")], (8, 0), "80")
    assert (low.code, low.expected, low.actual) == ("device.sm_too_low", ["90+", "86"], "80")
    variant = sm_decline([parse_sm("100f")], (9, 0), "90a")
    assert (variant.code, variant.expected, variant.actual) == ("device.sm_variant", ["100f"], "90a")


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("4.7", ">=4.7", True),
        ("4.7.0.post1", ">=4.7", True),
        ("4.7rc1", ">=4.7", False),
        ("4.8rc1", ">=4.7", True),
        ("4.10", ">=4.7,<5", True),
        ("5.0", ">=4.7,<5", False),
        ("4.7+cu13", "==4.7", True),
        ("0.4.2.dev1", "<0.4.2", False),
        ("0.4.2.dev1", "<=0.4.2,!=0.4.2", True),
        ("0.4.2rc1", "<0.4.2", False),
        ("0.4.1rc1", "<0.4.2", True),
        ("0.4.2.dev1", "<0.4.2rc1", True),
        ("4.7.post1", ">4.7", False),
        ("4.8.dev1", ">4.7", True),
        ("unknown", ">=0", False),
        ("", ">=0", False),
    ],
)
def test_versions_compare_as_pep_440_says_and_pre_releases_count(version, specifier, expected):
    assert satisfies(version, specifier) is expected


def test_a_malformed_condition_is_an_error():
    with pytest.raises(CudnnCoreError, match="newest"):
        check_specifier("newest")


def test_names_are_normalised_as_indexes_do():
    assert normalise("NVIDIA_cutlass.-DSL") == "nvidia-cutlass-dsl"


def test_a_requirement_is_met_missing_too_old_or_accepted():
    need = Requirement("Nvidia_Cutlass.DSL", ">=4.7", ("0.*",))
    assert requirement_decline(need, {"nvidia-cutlass-dsl": "4.8.1"}) is None
    assert requirement_decline(need, {"nvidia-cutlass-dsl": "0.0.0.dev1"}) is None
    old = requirement_decline(need, {"nvidia-cutlass-dsl": "4.6"})
    assert (old.code, old.actual, old.expected) == ("dep.too_old", "4.6", [">=4.7", "0.*"])
    absent = requirement_decline(need, {})
    assert (absent.code, absent.subject) == ("dep.missing", "Nvidia_Cutlass.DSL")
    assert "pip install" in absent.hint


def test_a_requirement_without_version_takes_any():
    assert requirement_decline(Requirement("x"), {"x": "what ever"}) is None
