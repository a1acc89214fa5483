"""Every builder has the frontend's parameters: names, order, defaults and kinds."""

import json
import lzma
from pathlib import Path

import pytest

from cudnn_core._ops._schema import REQUIRED
from cudnn_core._ops._table import all_builders, in_tree

API = json.loads(lzma.decompress((Path(__file__).parent.parent / "data" / "frontend_api.json.xz").read_bytes()))

# (builder, parameter): (the frontend's entry, ours, why)
DIFFERENCES = {
    (op, "cu_seqlens"): (
        ["cu_seqlens", "pk", "$required"],
        ["cu_seqlens", "pk", None],
        "without boundaries the tokens are one sequence",
    )
    for op in ("gdn", "kda")
}


def frontend_default(value):
    if isinstance(value, str) and value.startswith("$enum:"):
        return value.rpartition(".")[2]
    return value


def our_entry(param):
    default = "$required" if param.default is REQUIRED else param.default
    return [param.name, "ko" if param.keyword_only else "pk", default]


@pytest.mark.parametrize("method", sorted(all_builders()))
def test_builder_has_the_frontends_parameters(method):
    expected = [[name, kind, frontend_default(default)] for name, kind, default in API["graph_methods"][method]]
    actual = [our_entry(param) for param in all_builders()[method].builders[method][0]]
    for (op, name), (theirs, ours, _) in DIFFERENCES.items():
        if op == method:
            assert theirs in expected, name
            assert ours in actual, name
            expected[expected.index(theirs)] = ours
    assert actual == expected


def test_no_pointwise_builder_of_the_frontend_is_missing():
    theirs = {name for name, op in API["ops"].items() if op["group"] == "pointwise"}
    ours = {name for name, row in all_builders().items() if row.group == "pointwise"}
    assert ours == theirs


@pytest.mark.parametrize("method", sorted(all_builders()))
def test_output_ports_follow_the_frontends_order_and_number(method):
    row = all_builders()[method]
    ours = [port.name for port in row.outputs if not port.optional]
    assert len(ours) == len(API["ops"][method]["outputs"])
    assert (API["ops"][method]["returns"] == "list") == (len(row.outputs) > 1)


@pytest.mark.parametrize("method", sorted(all_builders()))
def test_attribute_defaults_are_the_frontends_effective_ones(method):
    row = all_builders()[method]
    attrs = {attr.name: attr.default for attr in row.attrs}
    # An absent padding is zeros and an absent stride ones, of a length that only the image tells; slices likewise; None is
    # no top_k; the bound is only read under safe_gate, where None means -5.
    own = {"padding", "pre_padding", "post_padding", "stride", "dilation", "slices", "top_k", "gate_lower_bound"}
    for name, default in API["ops"][method].get("effective_defaults", {}).items():
        if name not in own:
            assert attrs[name] == frontend_default(default), name


@pytest.mark.parametrize("name", sorted(in_tree()))
def test_row_is_well_formed(name):
    row = in_tree()[name]
    named = [item.name for item in (*row.inputs, *row.outputs, *row.attrs)]
    assert len(named) == len(set(named))
    assert row.doc.endswith(".")
    assert row.builders
    assert row.cost is not None
    ports = {port.name for port in (*row.inputs, *row.outputs)}
    assert set(row.operands.values()) <= ports
    assert all(out in ports and source in ports for out, source in row.alias)
    for params, _ in row.builders.values():
        targets = {param.to or param.name for param in params if param.to != "-"}
        assert targets - {"name", "compute_data_type"} <= set(named)


def test_groups_that_manifests_name_exist():
    groups = {row.group for row in in_tree().values()}
    assert {"pointwise", "norm", "conv", "sdpa", "block_scale", "moe", "linear_attention"} <= groups
