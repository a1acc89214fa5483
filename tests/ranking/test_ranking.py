"""The order of engines: each term of the key, the three bases and what they may claim, and a total order."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_core._engine import PlanConfig
from cudnn_core._ranking import calibration_error, rank, time_bucket
from cudnn_core._tuning import Sample, TuningRecord


def calibrated(folder, arch="90a", error=0.1, name="calibration.json"):
    (folder / name).write_text(json.dumps({"schema": 1, "sm": {arch: {"p90_error": error}}}))
    return {"calibration": name, "package_dir": folder}


def record(fake, **times):
    """A record with one sample an engine: ``a=12.0`` is ``a:e@1``."""
    samples = tuple(
        Sample(f"{name}:e@1", PlanConfig(f"{name}:e@1", {}, ""), us, 30, 0.02) for name, us in times.items()
    )
    return TuningRecord(fake.KEY, {}, {}, samples)


def ids(ranked):
    return [item.candidate.entry.spec.short_id for item in ranked]


# --- the sort key, term by term


def test_an_order_rule_comes_before_everything(fake):
    pool = [fake.candidate("a:fast", efficiency=0.8), fake.candidate("z:slow", tier="reference", efficiency=0.1)]
    assert ids(rank(pool, fake.order("z:slow"), fake.device(), roofline=10.0)) == ["z:slow", "a:fast"]


def test_order_rules_rank_by_their_index(fake):
    pool = [fake.candidate("a:e", efficiency=0.8), fake.candidate("b:e"), fake.candidate("c:e")]
    ranked = rank(pool, fake.order("c:e", "b:e"), fake.device(), roofline=10.0)
    assert [(item.order_index, *ids([item])) for item in ranked] == [(0, "c:e"), (1, "b:e"), (None, "a:e")]


def test_a_reference_engine_comes_after_every_normal_one(fake):
    pool = [fake.candidate("a:ref", tier="reference", efficiency=0.8), fake.candidate("b:slow", efficiency=0.01)]
    assert ids(rank(pool, fake.order(), fake.device(), roofline=10.0)) == ["b:slow", "a:ref"]


def test_a_shorter_time_wins_across_buckets(fake):
    ranked = rank(
        [fake.candidate("a:e"), fake.candidate("b:e")], fake.order(), fake.device(), record=record(fake, a=12.0, b=11.0)
    )
    assert ids(ranked) == ["b:e", "a:e"]


def test_times_in_one_bucket_tie_and_efficiency_decides(fake):
    assert time_bucket(101.0) == time_bucket(102.0)
    pool = [fake.candidate("a:e", efficiency=0.4), fake.candidate("b:e", efficiency=0.6)]
    ranked = rank(pool, fake.order(), fake.device(), record=record(fake, a=101.0, b=102.0))
    assert ids(ranked) == ["b:e", "a:e"]


def test_buckets_are_five_percent_wide(fake):
    edges = [us / 1000 for us in range(10_000, 20_000) if time_bucket(us / 1000) != time_bucket((us + 1) / 1000)]
    ratios = [b / a for a, b in pairwise(edges)]
    assert ratios == pytest.approx([1.05] * len(ratios), rel=1e-3)


def test_then_maturity_then_the_id(fake):
    pool = [
        fake.candidate("c:e", maturity="experimental"),
        fake.candidate("a:e", maturity="preview"),
        fake.candidate("d:e"),
        fake.candidate("b:e"),
    ]
    assert ids(rank(pool, fake.order(), fake.device(), roofline=10.0)) == ["b:e", "d:e", "a:e", "c:e"]


_ENGINES = st.fixed_dictionaries(
    {
        "tier": st.sampled_from(["normal", "reference"]),
        "efficiency": st.sampled_from([0.1, 0.5, 0.79, 0.8, 0.9, 1.0]),
        "maturity": st.sampled_from(["stable", "preview", "experimental"]),
        "us": st.none() | st.floats(1e-3, 1e6),
        "variant": st.sampled_from(["", "eng1", "eng2"]),
        "knobs": st.sampled_from([{}, {"t": 1}, {"t": 2}]),
        "engine": st.sampled_from(["a:x", "a:y", "b:x"]),
    }
)


@given(st.lists(_ENGINES, max_size=8), st.none() | st.floats(1e-3, 1e6), st.data())
def test_the_order_is_total_and_does_not_depend_on_the_input_order(fake, rows, roofline, data):
    pool = [fake.candidate(**row) for row in rows]
    shuffled = data.draw(st.permutations(pool))
    order = fake.order("b:x")
    first = rank(pool, order, fake.device(), roofline=roofline)
    second = rank(shuffled, order, fake.device(), roofline=roofline)

    def facts(ranked):
        return [(item.id, item.us, item.basis, item.bucket, dict(item.candidate.config.knobs)) for item in ranked]

    assert sorted(map(id, (item.candidate.entry for item in first))) == sorted(map(id, (c.entry for c in pool)))
    assert facts(first) == facts(second)


@given(st.floats(1e-6, 1e12), st.floats(1e-6, 1e12))
def test_buckets_never_reverse_two_times(a, b):
    assert (time_bucket(a) <= time_bucket(b)) if a <= b else (time_bucket(a) >= time_bucket(b))


# --- prior


def test_a_prior_is_the_roofline_over_the_efficiency(fake):
    (ranked,) = rank([fake.candidate(efficiency=0.5)], fake.order(), fake.device(), roofline=10.0)
    assert (ranked.us, ranked.basis) == (20.0, "prior")


def test_no_uncalibrated_engine_is_believed_beyond_eighty_percent(fake):
    pool = [fake.candidate("a:honest", efficiency=0.8), fake.candidate("b:boaster", efficiency=0.99)]
    ranked = rank(pool, fake.order(), fake.device(), roofline=8.0)
    assert [(item.us, *ids([item])) for item in ranked] == [(10.0, "a:honest"), (10.0, "b:boaster")]


def test_a_calibrated_engine_keeps_its_efficiency(fake, tmp_path):
    pool = [fake.candidate(efficiency=0.95, us=1.0, basis="prior", **calibrated(tmp_path))]
    (ranked,) = rank(pool, fake.order(), fake.device(), roofline=9.5)
    assert (ranked.us, ranked.basis) == (pytest.approx(10.0), "prior")


def test_without_any_published_rate_priors_share_one_place_and_efficiency_decides(fake):
    pool = [fake.candidate("a:e", efficiency=0.3), fake.candidate("b:e", efficiency=0.6)]
    ranked = rank(pool, fake.order(), fake.device(), roofline=None)
    assert ids(ranked) == ["b:e", "a:e"]
    assert [(item.us, item.basis) for item in ranked] == [(None, "prior")] * 2
    assert ranked[0].bucket == ranked[1].bucket


def test_a_known_time_comes_before_an_unknown_one(fake, tmp_path):
    pool = [
        fake.candidate("a:e", efficiency=0.8),
        fake.candidate("b:e", efficiency=0.1, us=1e6, **calibrated(tmp_path)),
    ]
    assert ids(rank(pool, fake.order(), fake.device(), roofline=None)) == ["b:e", "a:e"]


# --- model


def test_a_calibrated_estimate_is_a_model(fake, tmp_path):
    (ranked,) = rank([fake.candidate(us=3.0, **calibrated(tmp_path))], fake.order(), fake.device(), roofline=10.0)
    assert (ranked.us, ranked.basis) == (3.0, "model")


def test_an_estimate_for_a_cpu_is_calibrated_under_cpu(fake, tmp_path):
    device = fake.device(arch="", type="cpu")
    (ranked,) = rank([fake.candidate(us=3.0, **calibrated(tmp_path, "cpu"))], fake.order(), device, roofline=10.0)
    assert ranked.basis == "model"


@pytest.mark.parametrize("basis", ["prior", "measured", "trust me"])
def test_only_the_basis_model_makes_a_model(fake, tmp_path, basis):
    pool = [fake.candidate(us=3.0, basis=basis, **calibrated(tmp_path))]
    (ranked,) = rank(pool, fake.order(), fake.device(), roofline=10.0)
    assert ranked.basis == "prior"


def test_an_estimate_without_a_calibration_file_is_a_prior(fake, tmp_path):
    for more in ({}, {"calibration": "absent.json", "package_dir": tmp_path}):
        (ranked,) = rank([fake.candidate(us=0.001, **more)], fake.order(), fake.device(), roofline=10.0)
        assert (ranked.us, ranked.basis) == (20.0, "prior")


def test_a_calibration_of_another_architecture_does_not_count(fake, tmp_path):
    pool = [fake.candidate(us=0.001, **calibrated(tmp_path, "100a"))]
    (ranked,) = rank(pool, fake.order(), fake.device("90a"), roofline=10.0)
    assert (ranked.us, ranked.basis) == (20.0, "prior")


def test_an_untrusted_estimate_may_admit_to_be_slow(fake):
    (ranked,) = rank([fake.candidate(us=70.0, basis="prior")], fake.order(), fake.device(), roofline=10.0)
    assert (ranked.us, ranked.basis) == (70.0, "prior")


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan, math.inf, "fast", True])
def test_an_estimate_that_is_no_time_is_ignored(fake, tmp_path, us):
    (ranked,) = rank([fake.candidate(us=us, **calibrated(tmp_path))], fake.order(), fake.device(), roofline=10.0)
    assert (ranked.us, ranked.basis) == (20.0, "prior")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "sm": {"90a": {"p90_error": 0.1}}}',
        '{"schema": 1, "sm": {"90a": {}}}',
        '{"schema": 1, "sm": {"90a": {"p90_error": -1}}}',
        '{"schema": 1, "sm": {"90a": {"p90_error": NaN}}}',
        '{"schema": 1, "sm": {"90a": {"p90_error": 0.1, "p50": 1}}}',
        '{"schema": 1, "sm": {}, "sm": {"90a": {"p90_error": 0.1}}}',
    ],
)
def test_a_malformed_calibration_file_calibrates_nothing_and_is_logged(fake, tmp_path, caplog, text):
    (tmp_path / "c.json").write_text(text)
    assert calibration_error(tmp_path, "c.json", fake.device()) is None
    assert "c.json ignored" in caplog.text


def test_a_calibration_file_outside_the_package_does_not_count(fake, tmp_path, caplog):
    package = tmp_path / "package"
    package.mkdir()
    calibrated(tmp_path)
    (package / "link.json").symlink_to(tmp_path / "calibration.json")
    for name in ("../calibration.json", str(tmp_path / "calibration.json"), "link.json"):
        assert calibration_error(package, name, fake.device()) is None
    assert caplog.text.count("outside the plugin's package") == 3


def test_a_calibration_file_gives_its_error(fake, tmp_path):
    calibrated(tmp_path, error=0.25)
    assert calibration_error(tmp_path, "calibration.json", fake.device()) == 0.25


# --- measured


def test_a_measurement_beats_model_and_prior(fake, tmp_path):
    pool = [fake.candidate("a:e", us=3.0, **calibrated(tmp_path)), fake.candidate("b:e")]
    ranked = rank(pool, fake.order(), fake.device(), roofline=10.0, record=record(fake, a=50.0, b=40.0))
    assert [(item.us, item.basis, *ids([item])) for item in ranked] == [
        (40.0, "measured", "b:e"),
        (50.0, "measured", "a:e"),
    ]


def test_a_record_counts_only_if_it_covers_every_candidate(fake):
    pool = [fake.candidate("a:e"), fake.candidate("new:e")]
    ranked = rank(pool, fake.order(), fake.device(), roofline=10.0, record=record(fake, a=50.0))
    assert {item.basis for item in ranked} == {"prior"}


def test_a_new_revision_was_never_measured(fake):
    pool = [fake.candidate("a:e", revision=2)]
    (ranked,) = rank(pool, fake.order(), fake.device(), roofline=10.0, record=record(fake, a=50.0))
    assert ranked.basis == "prior"


def test_an_upgrade_of_a_plugin_or_of_what_it_requires_was_never_measured(fake):
    old, new = {"acme": "1.0", "torch": "2.9"}, {"acme": "1.0", "torch": "2.10"}
    sample = record(fake, a=50.0).samples[0]._replace(dists=old)
    made = record(fake)._replace(samples=(sample,))
    for dists, basis in ((old, "measured"), (new, "prior")):
        (ranked,) = rank([fake.candidate("a:e", dists=dists)], fake.order(), fake.device(), roofline=10.0, record=made)
        assert ranked.basis == basis


def test_samples_of_engines_that_no_longer_compete_do_no_harm(fake):
    (ranked,) = rank([fake.candidate("a:e")], fake.order(), fake.device(), record=record(fake, a=50.0, gone=1.0))
    assert (ranked.us, ranked.basis) == (50.0, "measured")


def test_the_best_measured_config_is_the_one_that_competes(fake):
    best = PlanConfig("a:e@1", {"tile": 128}, "eng7")
    tuned = TuningRecord(fake.KEY, {}, {}, (Sample("a:e@1", best, 5.0, 30, 0.02),))
    pool = [fake.candidate("a:e", knobs={"tile": 64}, configs=[PlanConfig("a:e@1", {"tile": 64}, ""), best])]
    (ranked,) = rank(pool, fake.order(), fake.device(), record=tuned)
    assert ranked.candidate.config == best
    assert ranked.id == "a:e@1/eng7"


def test_a_measured_config_that_is_no_longer_on_offer_counts_as_never_measured(fake):
    stale = Sample("a:e@1", PlanConfig("a:e@1", {"tile": 128}, ""), 5.0, 30, 0.02)
    pool = [fake.candidate("a:e", knobs={"tile": 64})]
    (ranked,) = rank(pool, fake.order(), fake.device(), roofline=10.0, record=TuningRecord(fake.KEY, {}, {}, (stale,)))
    assert (ranked.basis, dict(ranked.candidate.config.knobs)) == ("prior", {"tile": 64})


def test_a_measurement_at_other_runtime_sizes_does_not_count(fake):
    at_64 = record(fake, a=50.0).samples[0]._replace(sizes={"m": 64})
    tuned = TuningRecord(fake.KEY, {}, {}, (at_64,))
    pool = [fake.candidate("a:e")]
    bases = [
        rank(pool, fake.order(), fake.device(), roofline=1.0, record=tuned, sizes=sizes)[0].basis
        for sizes in ({"m": 64}, {"m": 128}, None)
    ]
    assert bases == ["measured", "prior", "prior"]
