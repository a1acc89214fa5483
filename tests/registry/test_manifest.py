"""Manifests: what is accepted, and that a refusal names the field."""

from __future__ import annotations

import json
import re

import pytest

from cudnn_core import _manifest
from cudnn_core._errors import ManifestError
from cudnn_core._knobs import KnobError
from cudnn_core._manifest import api_decline, parse
from tests.zoo._make import manifest, to_toml

FULL = """
schema = 1
plugin = "frost_gemm"
api = "1.0"
hooks = ["frost_gemm.hooks"]
requires = [{ dist = "nvidia-cutlass-dsl", version = ">=4.7", accept = ["0.*"] }]
[provides]
backend = "frost_gemm.api"
[[engine]]
name = "sm90_wgmma"
factory = "frost_gemm.engines:Sm90Wgmma"
revision = 3
ops = ["matmul", "pointwise", "reduction"]
anchors = ["matmul"]
devices = ["cuda"]
sm = ["90a", "100f", "120+"]
dtypes = ["bfloat16", "fp8_e4m3"]
maturity = "preview"
tier = "reference"
aot = true
efficiency = 0.7
notes = ["deterministic", "cuda_graph"]
variants = "eng[0-9]+"
requires = [{ dist = "cuda-python" }]
[engine.knobs.tile_m]
type = "int"
choices = [128, 64, 256]
[engine.knobs.split_k]
type = "int"
min = 1
max = 16
[engine.knobs.swizzle]
type = "bool"
[[op]]
name = "acme_norm"
factory = "acme.ops:ACME_NORM"
"""


def test_every_field_is_read():
    found = parse(FULL)
    assert (found.plugin, found.api, found.hooks) == ("frost_gemm", (1, 0), ("frost_gemm.hooks",))
    assert found.provides == {"backend": "frost_gemm.api"}
    assert found.ops == {"acme_norm": "acme.ops:ACME_NORM"}
    (engine,) = found.engines
    assert (engine.id, engine.short_id) == ("frost_gemm:sm90_wgmma@3", "frost_gemm:sm90_wgmma")
    assert engine.factory == "frost_gemm.engines:Sm90Wgmma"
    assert (engine.ops, engine.anchors) == (("matmul", "pointwise", "reduction"), ("matmul",))
    assert (engine.devices, engine.dtypes) == (("cuda",), ("bfloat16", "fp8_e4m3"))
    assert [pattern.text for pattern in engine.sm] == ["90a", "100f", "120+"]
    assert (engine.maturity, engine.tier, engine.aot, engine.efficiency) == ("preview", "reference", True, 0.7)
    assert engine.notes == {"deterministic", "cuda_graph"}
    assert [item.dist for item in engine.requires] == ["nvidia-cutlass-dsl", "cuda-python"]
    assert engine.requires[0].accept == ("0.*",)
    assert list(engine.knobs) == ["tile_m", "split_k", "swizzle"]


def test_defaults_are_those_of_the_contract():
    (engine,) = parse('schema=1\nplugin="p"\napi="1.0"\n[[engine]]\nname="e"\nfactory="p:E"\nops=["matmul"]\n').engines
    assert (engine.revision, engine.devices, engine.sm, engine.dtypes) == (1, ("cuda",), (), ())
    assert engine.anchors == ("matmul",)
    assert (engine.maturity, engine.tier, engine.aot, engine.variants) == ("stable", "normal", False, "")
    assert engine.notes == frozenset()


def test_toml_and_json_say_the_same():
    document = manifest("alpha", engine={"sm": ["90a"], "knobs": {"tile": {"type": "int", "choices": [1, 2]}}})
    assert parse(to_toml(document)) == parse(json.dumps(document), "json") == parse(document)


def changed(path, value):
    """FULL with the field at ``path`` replaced (by the marker DELETE: removed)."""
    document = _manifest.load(FULL, "toml")
    target = document
    for key in path[:-1]:
        target = target[key]
    if value is DELETE:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return document


DELETE = object()
REFUSED = [
    (("schema",), DELETE, "schema", "missing"),
    (("schema",), 2, "schema", "schema 2"),
    (("schema",), True, "schema", "integer"),
    (("plugin",), "Frost-Gemm", "plugin", "a name"),
    (("plugin",), "x" * 49, "plugin", "a name"),
    (("api",), "1", "api", "MAJOR.MINOR"),
    (("api",), 1.0, "api", "string"),
    (("hokks",), [], "hokks", "did you mean 'hooks'"),
    (("hooks",), ["not a module"], "hooks[0]", "dotted module"),
    (("provides",), {"backend": "1x"}, "provides.backend", "dotted module"),
    (("requires",), [{"dist": "x", "version": "newest"}], "requires[0].version", "version condition"),
    (("requires",), [{"dist": "-x"}], "requires[0].dist", "distribution"),
    (("requires",), [{"dist": "x", "vresion": ">1"}], "requires[0].vresion", "did you mean 'version'"),
    (("requires",), ["x>=1"], "requires[0]", "table"),
    (("engine",), {}, "engine", "list"),
    (("engine", 0, "name"), DELETE, "engine[0].name", "missing"),
    (("engine", 0, "name"), "9lives", "engine[0].name", "a name"),
    (("engine", 0, "factory"), "frost_gemm.engines.Sm90", "engine[0].factory", "package.module:Name"),
    (("engine", 0, "revision"), 0, "engine[0].revision", "1 or more"),
    (("engine", 0, "revision"), "3", "engine[0].revision", "integer"),
    (("engine", 0, "ops"), [], "engine[0].ops", "empty"),
    (("engine", 0, "ops"), "matmul", "engine[0].ops", "list"),
    (("engine", 0, "ops"), ["matmul", "matmul"], "engine[0].ops", "twice"),
    (("engine", 0, "devices"), ["gpu"], "engine[0].devices[0]", "cuda, cpu"),
    (("engine", 0, "sm"), ["sm_90"], "engine[0].sm[0]", "architecture"),
    (("engine", 0, "dtypes"), ["float16", "bfloat61"], "engine[0].dtypes[1]", "did you mean 'bfloat16'"),
    (("engine", 0, "dtypes"), ["not_set"], "engine[0].dtypes[0]", "not one of"),
    (("engine", 0, "maturity"), "beta", "engine[0].maturity", "stable, preview, experimental"),
    (("engine", 0, "tier"), "refrence", "engine[0].tier", "did you mean 'reference'"),
    (("engine", 0, "aot"), 1, "engine[0].aot", "true or false"),
    (("engine", 0, "efficiency"), 1.5, "engine[0].efficiency", "(0, 1]"),
    (("engine", 0, "efficiency"), 0, "engine[0].efficiency", "(0, 1]"),
    (("engine", 0, "variants"), "eng[", "engine[0].variants", "regular expression"),
    (("engine", 0, "effciency"), 0.5, "engine[0].effciency", "did you mean 'efficiency'"),
    (("engine", 0, "knobs", "tile_m", "type"), "integer", "engine[0].knobs.tile_m.type", "int, float, bool, str"),
    (("engine", 0, "knobs", "tile_m", "choices"), [], "engine[0].knobs.tile_m.choices", "empty"),
    (("engine", 0, "knobs", "tile_m", "choices"), [64, "x"], "engine[0].knobs.tile_m.choices[1]", "of type int"),
    (("engine", 0, "knobs", "tile_m", "default"), 32, "engine[0].knobs.tile_m.default", "domain"),
    (("engine", 0, "knobs", "tile_m", "min"), 32, "engine[0].knobs.tile_m.min", "without choices"),
    (("engine", 0, "knobs", "split_k", "min"), DELETE, "engine[0].knobs.split_k.default", "needed"),
    (("engine", 0, "knobs", "split_k", "multiple_of"), 0, "engine[0].knobs.split_k.multiple_of", "1 or more"),
    (("engine", 0, "knobs", "Tile"), {"type": "bool"}, "engine[0].knobs.Tile", "a name"),
    (("op", 0, "factory"), DELETE, "op[0].factory", "missing"),
    (("op", 0, "group"), "norm", "op[0].group", "unknown field"),
]


@pytest.mark.parametrize(("path", "value", "subject", "text"), REFUSED)
def test_a_refusal_names_the_dotted_field(path, value, subject, text):
    with pytest.raises(ManifestError, match=re.escape(text)) as refused:
        parse(changed(path, value), where="m.toml")
    assert refused.value.subject == subject
    assert "m.toml" in str(refused.value)


def test_a_missing_field_that_is_misspelt_is_pointed_at():
    document = manifest("alpha")
    document["engine"][0]["facotry"] = document["engine"][0].pop("factory")
    with pytest.raises(ManifestError, match="facotry"):
        parse(document)


def test_names_of_engines_and_ops_are_unique():
    document = manifest("alpha")
    document["engine"].append(document["engine"][0])
    with pytest.raises(ManifestError, match="'main' occurs twice"):
        parse(document)
    ops = [{"name": "acme", "factory": "a:B"}] * 2
    with pytest.raises(ManifestError, match="'acme' occurs twice"):
        parse(manifest("alpha", op=ops))


@pytest.mark.parametrize(
    ("data", "fmt"),
    [
        ("schema = = 1", "toml"),
        ("{", "json"),
        ("[1]", "json"),
        ('{"schema": 1, "schema": 1}', "json"),
        ('{"schema": NaN}', "json"),
        ('{"schema": 1e999}', "json"),
        (b"\xff\xfe", "toml"),
        ("[" * 100_000, "json"),
        (b"#" * (1 << 20) + b"\n", "toml"),
    ],
)
def test_text_that_is_no_manifest_is_refused(data, fmt):
    with pytest.raises(ManifestError):
        parse(data, fmt)


@pytest.mark.parametrize(
    ("core", "plugin", "code"),
    [
        ((1, 4), "1.4", None),
        ((1, 4), "1.0", None),
        ((1, 4), "1.5", "api.too_new"),
        ((1, 4), "2.0", "api.too_new"),
        ((2, 0), "1.9", "api.too_old"),
        ((1, 4), "1.10", "api.too_new"),
    ],
)
def test_the_handshake_needs_the_same_major_and_no_higher_minor(core, plugin, code):
    decline = api_decline({"plugin": "p", "api": plugin}, core)
    assert (decline and decline.code) == code


def test_the_handshake_comes_before_the_validation_of_fields_that_a_newer_core_may_know():
    with pytest.raises(ManifestError, match=r"api\.too_new"):
        parse(manifest("p", api="1.99", novelty=1, schema=2))


def knobs(**tables):
    return parse(manifest("p", engine={"knobs": tables})).engines[0]


def test_knobs_are_completed_with_defaults_in_manifest_order():
    engine = knobs(
        tile={"type": "int", "choices": [128, 64]},
        split={"type": "int", "min": 2, "max": 8},
        alpha={"type": "float", "min": 0, "max": 1, "default": 1},
        fast={"type": "bool"},
        mode={"type": "str", "choices": ["a", "b"], "default": "b"},
    )
    complete = engine.complete_knobs({"tile": 64, "alpha": 0})
    assert complete == {"tile": 64, "split": 2, "alpha": 0.0, "fast": False, "mode": "b"}
    assert list(complete) == ["tile", "split", "alpha", "fast", "mode"]
    assert type(complete["alpha"]) is float


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"tlie": 64}, "knob.unknown"),
        ({"tile": "64"}, "knob.type"),
        ({"tile": 64.0}, "knob.type"),
        ({"tile": True}, "knob.type"),
        ({"tile": 65}, "knob.domain"),
        ({"split": 0}, "knob.domain"),
        ({"split": 17}, "knob.domain"),
        ({"split": 6}, "knob.domain"),
        ({"alpha": float("nan")}, "knob.type"),
        ({"alpha": 2}, "knob.domain"),
        ({"fast": 1}, "knob.type"),
    ],
)
def test_a_wrong_knob_is_declined(given, code):
    engine = knobs(
        tile={"type": "int", "choices": [64, 128]},
        split={"type": "int", "min": 4, "max": 16, "multiple_of": 4},
        alpha={"type": "float", "min": 0, "max": 1},
        fast={"type": "bool"},
    )
    (decline,) = engine.knob_declines(given)
    assert decline.code == code
    assert decline.subject == f"knob:{next(iter(given))}"
    with pytest.raises(KnobError, match="p:main"):
        engine.complete_knobs(given)


def test_all_wrong_knobs_are_reported_at_once():
    engine = knobs(tile={"type": "int", "choices": [64, 128]})
    with pytest.raises(KnobError) as refused:
        engine.complete_knobs({"tile": 1, "tiel": 64})
    assert [decline.code for decline in refused.value.declines] == ["knob.domain", "knob.unknown"]
    assert "tile" in refused.value.declines[1].hint


def test_variants_match_the_whole_name():
    engine = parse(manifest("p", engine={"variants": "eng[0-9]+"})).engines[0]
    assert engine.has_variant("")
    assert engine.has_variant("eng7")
    assert not engine.has_variant("eng7x")
    assert not parse(manifest("p")).engines[0].has_variant("eng7")
