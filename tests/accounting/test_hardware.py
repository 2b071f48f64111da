"""The table of devices: complete, consistent, and never a guess."""

import re

import pytest

from lightning_llm.accounting import DEVICES, find_device


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_figure_has_a_plausible_size_and_a_source(device):
    assert re.search(r"\(20\d\d\)", device.source)
    assert 8e12 <= device.flops["float32"] <= device.flops["float16"] < 1e16
    assert device.flops.get("bfloat16", device.flops["float16"]) == device.flops["float16"]
    assert 1e10 < device.memory_bytes < 1e12
    assert 1e11 < device.bandwidth < 1e13


def test_names_are_found_as_torch_and_people_write_them():
    assert find_device("nvidia h200") is find_device("H200") is DEVICES["NVIDIA H200"]


@pytest.mark.parametrize("name", ["H20", "NVIDIA H2000", "A100", "cpu", ""])
def test_a_similar_name_is_no_match(name):
    with pytest.raises(ValueError, match=rf"device '{name}' is not in the table: there are NVIDIA H200, "):
        find_device(name)
