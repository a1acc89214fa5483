"""The fit of the cost model: it finds the coefficients that made the data, and states its error on data that it has not seen."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest
from frost_gemm import calibrate, model
from frost_gemm.config import TileConfig
from frost_gemm.facts import arch_facts
from frost_gemm.ir import Gemm, Matrix, Program, Ref, Store
from frost_gemm.model import Coefficients, Model, Shape, machine, work

import cudnn_core
from cudnn_core import DeviceInfo

H200 = DeviceInfo.preset("H200")
TRUTH = replace(Coefficients(), tensor=0.62, dram=0.71, launch_us=5.0, tile_us=0.9)
TILES = [
    TileConfig(128, 256, 128, cluster_m=2),
    TileConfig(128, 128, 128, schedule="pingpong"),
    TileConfig(64, 64, 128),
    TileConfig(64, 16, 128, swap_ab=True),
]


def results(noise=0.0):
    """A document of RESULTS.json that a GPU of the coefficients TRUTH would give."""
    program = Program((Matrix("bfloat16"),), (Matrix("bfloat16"),), (Gemm(),), (Store(Ref("acc", 0), "bfloat16"),))
    what, facts, chance = work(program), arch_facts(H200), random.Random(0)
    gpu = machine(H200, facts, TRUTH)
    rows = []
    for m, n, k in calibrate.SHAPES:
        for tile in TILES:
            us = Model(what, Shape(m, n, k), gpu, TRUTH).us(tile) * chance.uniform(1 - noise, 1 + noise)
            rows.append({"work": asdict(what), "shape": [m, n, k, 1], "config": asdict(tile), "us": us})
    return json.loads(json.dumps({"device": H200.to_dict(), "samples": rows}))


def test_what_made_the_data_is_found():
    samples = calibrate.samples_of(results())
    found = calibrate.fit(samples, H200, Coefficients())
    assert found.p90_error < 0.05
    assert found.regret < 1.01
    assert found.coefficients.tensor == pytest.approx(TRUTH.tensor, rel=0.06)
    assert found.coefficients.dram == pytest.approx(TRUTH.dram, rel=0.05)


def test_the_stated_error_is_of_problems_that_were_not_fitted_to():
    document = results()
    held = calibrate.SHAPES[calibrate.HELD_OUT - 1 :: calibrate.HELD_OUT]
    for row in document["samples"]:
        if tuple(row["shape"][:3]) in held:
            row["us"] *= 3
    assert calibrate.fit(calibrate.samples_of(document), H200).p90_error > 0.5


def test_too_few_problems_are_refused():
    with pytest.raises(ValueError, match="too few"):
        calibrate.fit(calibrate.samples_of(results())[: 2 * len(TILES)], H200)


def test_files_are_those_that_the_model_and_the_core_read(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "calibration"
    folder.mkdir()
    (folder / "errors.json").write_text('{"schema": 1, "sm": {"100a": {"p90_error": 0.3}}}')
    monkeypatch.setattr(calibrate, "CALIBRATION", folder)
    monkeypatch.setattr(model, "CALIBRATION", folder)
    (tmp_path / "r.json").write_text(json.dumps(results(noise=0.03)))
    assert calibrate.main([str(tmp_path / "r.json"), "--write"]) == 0
    assert "p90 error" in capsys.readouterr().out
    errors = json.loads((folder / "errors.json").read_text())
    assert errors["schema"] == 1
    assert errors["sm"]["100a"] == {"p90_error": 0.3}
    assert 0 < errors["sm"]["90a"]["p90_error"] < 0.15
    read = model.coefficients.__wrapped__("sm_90a", "wgmma")
    assert read.tensor == pytest.approx(TRUTH.tensor, rel=0.2)
    from cudnn_core._ranking import calibration_error

    assert calibration_error(tmp_path, "calibration/errors.json", H200) == errors["sm"]["90a"]["p90_error"]


def test_shipped_calibration_is_named_by_the_estimate_if_there_is_one():
    from frost_gemm import engines
    from graphs import plain

    graph = plain(m=4096, n=4096, k=4096).freeze("cuda")
    ctx = cudnn_core.ExecutionContext(None, H200)
    engine = engines.Sm90Wgmma()
    config = engine.check_support(graph, ctx).configs[0]
    estimate = engine.estimate(graph, config, ctx)
    shipped = (model.CALIBRATION / "errors.json").is_file()
    assert (estimate.basis, estimate.calibration) == (("model", engines.ERRORS) if shipped else ("prior", ""))
