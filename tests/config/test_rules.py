"""Rules: what matches, in which order, and what they say about engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_core import _config


def rule(match=None, **fields):
    fields.setdefault("avoid", ["a:b"])
    return _config.load({"HOME": "/nowhere"}, "/", {"rule": [{"match": match or {}, **fields}]}).rules[0]


@pytest.fixture(autouse=True)
def _no_system_file(world):
    """Rules are built through ``load``."""


def test_a_rule_without_match_applies_to_every_graph(subject):
    assert rule().matches(subject("anything", type="cpu", capability=(0, 0)))


@pytest.mark.parametrize(
    ("pattern", "op", "matches"),
    [
        ("matmul", "matmul", True),
        ("mat", "matmul", False),
        ("mat*", "matmul", True),
        (["conv_fprop", "matmul"], "matmul", True),
        ("moe_?", "moe_grouped_matmul", False),
    ],
)
def test_op(subject, pattern, op, matches):
    assert rule({"op": pattern}).matches(subject(op)) is matches


@pytest.mark.parametrize(
    ("pattern", "capability", "matches"),
    [
        ("90", (9, 0), True),
        ("90a", (9, 0), True),
        (90, (9, 0), True),
        ("90", (10, 0), False),
        ("100f", (10, 3), True),
        ("103f", (10, 0), False),
        ("100f", (12, 0), False),
        ("80+", (8, 0), True),
        ("80+", (12, 1), True),
        ("80+", (7, 5), False),
        (["80", "90"], (9, 0), True),
    ],
)
def test_sm(subject, pattern, capability, matches):
    assert rule({"sm": pattern}).matches(subject(capability=capability)) is matches


def test_sm_matches_no_cpu(subject):
    assert not rule({"sm": "10+"}).matches(subject(type="cpu", capability=(0, 0), name="cpu"))


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("NVIDIA H200", True),
        ("H200", False),
        ("NVIDIA H2*", True),
        ("*H200", True),
        ("nvidia h200", False),
        ("cuda", True),
        ("cpu", False),
    ],
)
def test_device_is_the_whole_name_or_the_type(subject, pattern, matches):
    assert rule({"device": pattern}).matches(subject()) is matches


def test_a_cpu_is_a_device(subject):
    assert rule({"device": "cpu"}).matches(subject(type="cpu", name="AMD EPYC"))


def test_dtype_maps_operands(subject):
    dtypes = {"A": "fp8_e4m3", "B": "bfloat16"}
    assert rule({"dtype": {"A": "fp8_e4m3"}}).matches(subject(dtypes=dtypes))
    assert rule({"dtype": {"A": ["float16", "fp8_e4m3"], "B": "bfloat16"}}).matches(subject(dtypes=dtypes))
    assert not rule({"dtype": {"A": "fp8_e4m3", "B": "float16"}}).matches(subject(dtypes=dtypes))
    assert not rule({"dtype": {"Z": "float16"}}).matches(subject(dtypes=dtypes))


def test_dims_must_all_hold_and_exist(subject):
    one = rule({"m": "..64", "k": "4096..", "n": [128, 256]})
    assert one.matches(subject(m=64, k=4096, n=256))
    assert not one.matches(subject(m=65, k=4096, n=256))
    assert not one.matches(subject(m=64, k=4095, n=256))
    assert not one.matches(subject(m=64, k=4096, n=192))
    assert not one.matches(subject(m=64, k=4096))


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_conditions_are_a_conjunction(m, low, high):
    span = {"m": f"{min(low, high)}..{max(low, high)}", "op": "matmul"}
    device = type("Device", (), {"type": "cuda", "compute_capability": (9, 0), "device_name": "x"})()
    for op in ("matmul", "sdpa"):
        got = rule(span).matches(_config.RuleSubject(op, {"m": m}, {}, device, {}))
        assert got == (op == "matmul" and min(low, high) <= m <= max(low, high))


@pytest.mark.parametrize(
    ("installed", "matches"),
    [
        ({"cudnn-core-linear-attention": "0.4.1"}, True),
        ({"cudnn-core-linear-attention": "0.4.2"}, False),
        ({"cudnn-core-linear-attention": "0.4.1.dev1"}, True),
        (
            {"cudnn-core-linear-attention": "0.4.2.dev1"},
            False,
        ),  # PEP 440: "<" leaves the pre-releases of its own bound out
        ({"cudnn-core-linear-attention": "not a version"}, False),
        ({}, False),
    ],
)
def test_versions_limit_a_rule_to_releases(subject, installed, matches):
    one = rule({"op": "gdn"}, versions={"cudnn_core.Linear-Attention": "<0.4.2"})
    assert one.matches(subject("gdn", dists=installed)) is matches


def test_all_versions_must_hold(subject):
    one = rule(versions={"a": ">=1", "b": "<2"})
    assert one.matches(subject(dists={"a": "1", "b": "1"}))
    assert not one.matches(subject(dists={"a": "1", "b": "2"}))


def test_matching_rules_come_highest_layer_first_and_in_file_order(world, subject):
    world.write("system", '[[rule]]\nname = "s1"\nuse = "a:x"\n[[rule]]\nname = "s2"\navoid = ["a:y"]\n')
    world.write(
        "named", '[[rule]]\nname = "n1"\nmatch = { op = "sdpa" }\nuse = "a:x"\n[[rule]]\nname = "n2"\nuse = "b:x"\n'
    )
    names = [found.name for found in world.load().matching_rules(subject("matmul"))]
    assert names == ["n2", "s1", "s2"]


def test_pins_and_avoids_are_names_or_globs(subject):
    one = rule(use="frost_gemm:*", avoid=["cudnn_backend:graph/eng1*", "frost_gemm:sm90_streamk"])
    assert one.pins("frost_gemm:sm90_wgmma")
    assert not one.pins("frost:sm90_wgmma")
    assert one.avoids("cudnn_backend:graph/eng12")
    assert one.avoids("frost_gemm:sm90_streamk")
    assert not one.avoids("frost_gemm:sm90_streamk2")
    assert not rule().pins("a:b")


def test_a_rule_carries_everything_it_says(world):
    file = world.write(
        "named",
        "[[rule]]\n"
        'name = "decode projections"\n'
        'match = { op = "matmul", sm = "90", device = "NVIDIA H*", dtype = { A = "fp8_e4m3" }, m = "..64", n = [1, "8..16"], k = "4096.." }\n'
        'use = "frost_gemm:sm90_wgmma"\n'
        "knobs = { tile_m = 64, split_k = 4 }\n"
        'avoid = ["acme:*"]\n'
        'reason = "ticket 1234"\n'
        'versions = { Acme_Dist = "<2" }\n'
        "strict = true\n",
    )
    one = world.load().rules[0]
    assert one.origin == f"{file}:2"
    assert one.to_dict() == {
        "name": "decode projections",
        "match": {
            "op": "matmul", "sm": "90", "device": "NVIDIA H*", "dtype": {"A": "fp8_e4m3"},
            "m": "..64", "n": [1, "8..16"], "k": "4096..",
        },
        "use": "frost_gemm:sm90_wgmma",
        "knobs": {"tile_m": 64, "split_k": 4},
        "avoid": ["acme:*"],
        "reason": "ticket 1234",
        "versions": {"acme-dist": "<2"},
        "strict": True,
    }  # fmt: skip


def test_strict_of_a_rule_is_open_unless_it_is_said():
    assert rule().strict is None
    assert rule(strict=False).strict is False
