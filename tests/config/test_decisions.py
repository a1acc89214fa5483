"""What a Config answers to planning: declines with their reasons, and the order."""

from __future__ import annotations

import pytest

from cudnn_core._declines import check_code


def codes(declines):
    for decline in declines:
        check_code(decline.code)
    return [decline.code for decline in declines]


def test_nothing_is_declined_by_default(world):
    config = world.load()
    assert config.plugin_declines("anything") == []
    assert config.engine_declines("anything:engine", "stable") == []
    assert config.engine_declines("anything:engine", "preview") == []


def test_allow_leaves_out_what_it_does_not_name(world):
    world.write("named", '[plugins]\nallow = ["frost_gemm", "acme_*"]\n')
    config = world.load()
    assert config.plugin_declines("frost_gemm") == []
    assert config.plugin_declines("acme_norm") == []
    for outsider in ("frost_gemm2", "frost", "my_acme_norm"):
        (decline,) = config.plugin_declines(outsider)
        assert (decline.code, decline.subject, decline.origin) == ("config.not_allowed", outsider, f"{world.named}:3")
        assert decline.expected == ["frost_gemm", "acme_*"]


def test_the_origin_of_a_list_that_layers_add_to_is_asked_by_item(world):
    world.write("system", '[engines]\nrequire = ["deterministic"]\n')
    world.write("named", '[engines]\nrequire = ["cuda_graph"]\nmax_workspace = 5\n')
    config = world.load()
    assert config.origin("engines.require", "deterministic") == f"{world.system}:3"
    assert config.origin("engines.require", "cuda_graph") == f"{world.named}:3"
    assert config.origin("engines.max_workspace") == f"{world.named}:4"
    assert config.origin("engines.order") == "built-in"


def test_an_empty_allow_list_admits_none(world):
    assert codes(world.load(allow=[]).plugin_declines("a")) == ["config.not_allowed"]


def test_deny_beats_allow_of_another_layer(world):
    world.write("system", '[plugins]\ndeny = ["acme_*"]\n')
    (decline,) = world.load(allow=["acme_norm"]).plugin_declines("acme_norm")
    assert (decline.code, decline.origin) == ("config.not_allowed", f"{world.system}:3")
    assert "acme_*" in decline.hint


def test_disable(world):
    world.write("named", '[engines]\ndisable = [\n  "frost_gemm:sm90_streamk",\n  "acme:*"\n]\n')
    config = world.load()
    (decline,) = config.engine_declines("frost_gemm:sm90_streamk", "stable")
    assert (decline.code, decline.origin) == ("config.disabled", f"{world.named}:4")
    assert codes(config.engine_declines("acme:whatever", "stable")) == ["config.disabled"]
    assert config.engine_declines("frost_gemm:sm90_streamk2", "stable") == []
    assert config.engine_declines("frost_gemm:sm90", "stable") == []


def test_a_variant_can_be_disabled_alone(world):
    config = world.load(disable=["cudnn_backend:graph/eng7"])
    assert codes(config.engine_declines("cudnn_backend:graph/eng7")) == ["config.disabled"]
    assert config.engine_declines("cudnn_backend:graph/eng8") == []
    assert config.engine_declines("cudnn_backend:graph") == []


def test_an_experimental_engine_is_off_until_it_is_enabled(world):
    (decline,) = world.load().engine_declines("linear_attention:kda_sm100", "experimental")
    assert decline.code == "config.maturity"
    assert decline.hint == 'engines.enable = ["linear_attention:kda_sm100"] admits it'
    config = world.load(enable=["linear_attention:kda_sm100"])
    assert config.engine_declines("linear_attention:kda_sm100", "experimental") == []
    assert codes(config.engine_declines("linear_attention:kda_sm100b", "experimental")) == ["config.maturity"]


def test_enabling_a_variant_lets_its_engine_be_looked_at(world):
    config = world.load(enable=["b:graph/eng7"])
    assert config.engine_declines("b:graph", "experimental") == []
    assert config.engine_declines("b:graph/eng7", "experimental") == []
    assert codes(config.engine_declines("b:graph/eng8", "experimental")) == ["config.maturity"]


def test_every_reason_is_given_at_once(world):
    world.write("system", '[plugins]\ndeny = ["a"]\n[engines]\ndisable = ["a:x", "*:x"]\n')
    config = world.load(allow=["b"])
    assert codes(config.engine_declines("a:x@3", "experimental")) == [
        "config.not_allowed",
        "config.not_allowed",
        "config.disabled",
        "config.disabled",
        "config.maturity",
    ]


def test_order_gives_the_first_glob_that_covers(world):
    config = world.load(order=["frost_gemm:sm90_*", "cudnn_backend:*", "frost_gemm:*"])
    assert config.order_index("frost_gemm:sm90_wgmma") == 0
    assert config.order_index("frost_gemm:sm100_umma@2") == 2
    assert config.order_index("cudnn_backend:graph/eng1") == 1
    assert config.order_index("acme:x") is None


def test_max_workspace_is_bytes_with_an_origin(world):
    world.write("named", '[engines]\nmax_workspace = "256 MiB"\n')
    config = world.load()
    assert config.max_workspace == 268435456
    assert config.origin("engines.max_workspace") == f"{world.named}:3"
    assert config.origin("engines.order") == "built-in"


@pytest.mark.parametrize("engine", ["a:x", "a:x@7", "a:x@7/eng1"])
def test_knobs_are_found_with_and_without_revision(world, engine):
    assert world.load(knobs={"a:x": {"t": 1}}).knobs_for(engine) == {"t": (1, "configure()")}
