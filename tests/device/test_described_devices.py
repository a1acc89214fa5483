"""Devices that are not here: presets, our JSON, cuDNN's DeviceProperties. None of them touches the driver."""

from __future__ import annotations

import json

import pytest

from cudnn_core._context import create_device_properties
from cudnn_core._device import DeviceInfo
from cudnn_core._dtypes import STORAGE_DTYPES
from cudnn_core._errors import ConfigError
from cudnn_core._presets import PRESETS, REPRESENTATIVE

pytestmark = pytest.mark.usefixtures("poisoned")

OURS = {"type": "cuda", "compute_capability": [9, 0], "sm_count": 132}


def test_h200_has_its_published_numbers():
    h200 = DeviceInfo.preset("H200")
    assert h200.key() == ("cuda", (9, 0), 132, 232448, 0)
    assert h200.l2_cache_bytes == 60 * 1024 * 1024
    assert h200.memory_bandwidth == 4.8e12
    assert h200.peak("bfloat16") == h200.peak("float16") == 989.4e12
    assert h200.peak("fp8_e4m3") == h200.peak("fp8_e5m2") == 1978.9e12
    assert h200.peak("fp4_e2m1") is None
    assert (h200.synthetic, h200.ordinal) == (True, None)


@pytest.mark.parametrize(
    ("name", "arch", "sm_count"),
    [
        ("A100", "80", 108),
        ("L40S", "89", 142),
        ("H100", "90a", 132),
        ("H200", "90a", 132),
        ("B200", "100a", 148),
        ("GB200", "100a", 152),
        ("B300", "103a", 148),
        ("GB300", "103a", 152),
        ("R200", "107a", 216),
        ("RTX5090", "120a", 170),
        ("RTX_PRO_6000", "120a", 188),
    ],
)
def test_presets(name, arch, sm_count):
    info = DeviceInfo.preset(name)
    assert (info.arch, info.sm_count, info.type) == (arch, sm_count, "cuda")


def test_every_preset_has_a_row_above():
    assert set(PRESETS) == {row[0] for row in test_presets.pytestmark[-1].args[1]}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_numbers_are_plausible(name):
    info = DeviceInfo.preset(name)
    assert info.shared_memory_per_block_optin in {101376, 166912, 232448}
    assert info.l2_cache_bytes is None or 30e6 < info.l2_cache_bytes < 200e6
    assert info.memory_bytes is None or 30e9 < info.memory_bytes < 300e9
    assert info.memory_bandwidth is None or 0.8e12 < info.memory_bandwidth < 25e12
    assert set(info.peak_flops) <= set(STORAGE_DTYPES)
    assert info.peak("fp8_e4m3") == info.peak("fp8_e5m2")
    assert info.peak("bfloat16") == info.peak("float16")
    rates = [info.peak(dtype) for dtype in ("float32", "bfloat16", "fp8_e4m3", "fp4_e2m1")]
    published = [rate for rate in rates if rate is not None]
    assert published == sorted(published)


def test_rubin_is_mostly_unpublished_and_has_oversized_shared_memory():
    rubin = DeviceInfo.preset("R200")
    assert rubin.oversized_shared_memory_per_block == 334848
    assert rubin.l2_cache_bytes is None
    assert all(rubin.peak(dtype) is None for dtype in STORAGE_DTYPES)
    for name in set(PRESETS) - {"R200"}:
        assert DeviceInfo.preset(name).oversized_shared_memory_per_block == 0


@pytest.mark.parametrize("spelling", ["h200", "H200", "NVIDIA H200", " nvidia h200"])
def test_preset_names_are_forgiving(spelling):
    assert DeviceInfo.preset(spelling.strip()) == DeviceInfo.preset("H200")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'H200'"):
        DeviceInfo.preset("H2000")
    with pytest.raises(ConfigError, match="there are: A100, L40S, H100"):
        DeviceInfo.preset("quantum")
    with pytest.raises(ConfigError):
        DeviceInfo.preset("")


def test_every_representative_has_its_capability():
    for capability, name in REPRESENTATIVE.items():
        assert DeviceInfo.preset(name).compute_capability == capability


@pytest.mark.parametrize("name", PRESETS)
def test_our_json_round_trips(name):
    info = DeviceInfo.preset(name)
    text = info.to_json()
    assert DeviceInfo.from_json(text) == info
    assert DeviceInfo.from_json(text.encode()) == info
    assert DeviceInfo.from_json(text).to_json() == text
    assert DeviceInfo.from_json(info.to_dict()) == info


def test_the_json_of_a_live_device_describes_the_part_and_not_the_slot():
    data = DeviceInfo.preset("H200").to_dict()
    assert not {"ordinal", "synthetic"} & set(data)
    assert data["schema"] == 1


def test_our_json_needs_only_type_capability_and_sm_count():
    info = DeviceInfo.from_json(json.dumps(OURS))
    assert info.shared_memory_per_block_optin == 232448  # of capability 9.0
    assert (info.l2_cache_bytes, info.memory_bandwidth, info.oversized_shared_memory_per_block) == (None, None, 0)
    assert DeviceInfo.from_json({"type": "cpu", "compute_capability": [0, 0], "sm_count": 8}).arch == ""


def test_cudnn_device_properties_are_read():
    info = DeviceInfo.from_json('{"deviceVer": 1000, "multiProcessorCount": 148, "somethingUnpublished": [1]}')
    assert (info.compute_capability, info.sm_version, info.sm_count) == ((10, 0), 100, 148)
    assert (info.arch, info.shared_memory_per_block_optin, info.synthetic) == ("100a", 232448, True)
    assert DeviceInfo.from_json({"deviceVer": 1070, "multiProcessorCount": 216}).compute_capability == (10, 7)
    assert DeviceInfo.from_json({"deviceVer": 890, "multiProcessorCount": 142}).arch == "89"


def test_create_device_properties_round_trips_like_the_frontends():
    text = DeviceInfo.preset("B300").serialize()
    assert json.loads(text) == {"deviceVer": 1030, "multiProcessorCount": 148}
    assert create_device_properties(text).key() == DeviceInfo.preset("B300").key()
    assert json.loads(create_device_properties(text).serialize()) == json.loads(text)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"type": None}, "type"),
        ({"type": "tpu"}, "type"),
        ({"compute_capability": None}, "compute_capability"),
        ({"compute_capability": [9]}, "compute_capability"),
        ({"compute_capability": "9.0"}, "compute_capability"),
        ({"compute_capability": [9, 10]}, "compute_capability"),
        ({"compute_capability": [0, 0]}, "compute_capability"),
        ({"compute_capability": [True, 0]}, "compute_capability"),
        ({"type": "cpu"}, "compute_capability"),
        ({"sm_count": 0}, "sm_count"),
        ({"sm_count": "132"}, "sm_count"),
        ({"sm_count": True}, "sm_count"),
        ({"shared_memory_per_block_optin": -1}, "shared_memory_per_block_optin"),
        ({"compute_capability": [14, 0]}, "shared_memory_per_block_optin"),
        ({"oversized_shared_memory_per_block": None}, "oversized_shared_memory_per_block"),
        ({"l2_cache_bytes": 1.5}, "l2_cache_bytes"),
        ({"device_name": 7}, "device_name"),
        ({"memory_bytes": "80 GB"}, "memory_bytes"),
        ({"memory_bandwidth": 0}, "memory_bandwidth"),
        ({"memory_bandwidth": float("nan")}, "memory_bandwidth"),
        ({"memory_bandwidth": float("inf")}, "memory_bandwidth"),
        ({"peak_flops": []}, "peak_flops"),
        ({"peak_flops": {"bf16": 1.0}}, "peak_flops"),
        ({"peak_flops": {"bfloat16": "fast"}}, "peak_flops.bfloat16"),
        ({"schema": 2}, "schema"),
        ({"sm_counts": 1}, "sm_counts"),
        ({"deviceVer": 900.0, "multiProcessorCount": 1}, "deviceVer"),
        ({"deviceVer": 905, "multiProcessorCount": 1}, "deviceVer"),
        ({"deviceVer": 9, "multiProcessorCount": 1}, "deviceVer"),
        ({"deviceVer": 900}, "multiProcessorCount"),
        ({"deviceVer": 900, "multiProcessorCount": 0}, "multiProcessorCount"),
    ],
)
def test_a_bad_field_is_named(change, field):
    with pytest.raises(ConfigError) as caught:
        DeviceInfo.from_json({**OURS, **change})
    assert caught.value.key == field
    assert field.split(".")[0] in str(caught.value)


@pytest.mark.parametrize("field", OURS)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=f"field {field!r} is missing"):
        DeviceInfo.from_json({name: value for name, value in OURS.items() if name != field})


def test_an_unknown_field_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'sm_count'"):
        DeviceInfo.from_json({**OURS, "sm_cuont": 1})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff\xfe", "null"])
def test_text_that_is_no_device_is_refused(text):
    with pytest.raises(ConfigError, match="device JSON"):
        DeviceInfo.from_json(text)
