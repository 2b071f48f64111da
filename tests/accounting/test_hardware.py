"""The table of devices: complete, consistent, and never a guess; the precision of a processor by its features."""

import re

import pytest
import torch

from lightning_llm.accounting import find_device, hardware
from lightning_llm.accounting.hardware import (
    DEVICES,
    FAMILIES,
    Reserve,
    auto_precision,
    cpu_features,
    cpu_name,
    device_from_part,
    gpu_features,
    matmul_precision,
    reserve_for,
)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_figure_has_a_plausible_size_and_a_source(device):
    assert re.search(r"\(20\d\d\)", device.source)
    assert 8e12 <= device.flops["float32"] <= device.flops["float16"] < 1e16
    assert device.flops.get("bfloat16", device.flops["float16"]) == device.flops["float16"]
    assert 1e10 < device.memory_bytes < 1e12
    assert 1e11 < device.bandwidth < 1e13


def test_names_are_found_as_torch_and_people_write_them():
    assert find_device("nvidia h200") is find_device("H200") is DEVICES["NVIDIA H200"]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("h200", "NVIDIA H200"),
        ("nvidia l4", "NVIDIA L4"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("RTX3090", "NVIDIA GeForce RTX 3090"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("HBM3", "NVIDIA H100 80GB HBM3"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        *((name.upper(), name) for name in DEVICES),
    ],
)
def test_a_part_that_one_device_has_is_enough(part, name):
    assert device_from_part(part) is DEVICES[name]


def test_a_family_is_its_module_with_the_most_memory():
    for part, name in FAMILIES.items():
        family = [device for other, device in DEVICES.items() if part in other.lower() and "sxm" in other.lower()]
        assert DEVICES[name].memory_bytes == max(device.memory_bytes for device in family or [DEVICES[name]])


def test_a_part_of_several_devices_is_refused_with_their_names():
    with pytest.raises(ValueError, match="device 'rtx' may be NVIDIA GeForce RTX 4090 or NVIDIA GeForce RTX 3090: "):
        device_from_part("rtx")


@pytest.mark.parametrize("part", ["H20", "L40", "H2000", "100", "", "-"])
def test_a_part_of_a_word_is_another_device(part):
    with pytest.raises(ValueError, match=rf"device '{part}' is not in the table"):
        device_from_part(part)


@pytest.mark.parametrize("name", ["H20", "NVIDIA H2000", "A100", "cpu", ""])
def test_a_similar_name_is_no_match(name):
    with pytest.raises(ValueError, match=rf"device '{name}' is not in the table: there are NVIDIA H200, "):
        find_device(name)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_device_reports_less_memory_than_it_is_sold_with(device):
    sold = re.search(r"(\d+)GB", device.name)
    least = 0.9 * int(sold[1]) * 1e9 if sold else 1e10
    assert least < device.memory_bytes < (int(sold[1]) * 2**30 if sold else 2**40)
    assert device.memory_within(10**9) == 10**9
    assert device.memory_within(10**13) == int(device.memory_bytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_this_gpu_reports_about_the_memory_of_the_table():
    total = torch.cuda.get_device_properties(0).total_memory
    assert find_device(torch.cuda.get_device_name(0)).memory_bytes == pytest.approx(total, rel=0.01)


def test_the_reserve_of_a_gpu_grows_with_the_tensors_and_the_processes():
    alone, several = reserve_for("cuda"), reserve_for("cuda", world_size=8)
    assert several.fixed - alone.fixed == 2**30
    assert alone.around(20 * 2**30) - alone.around(0) == pytest.approx(1.05 * 20 * 2**30)
    assert 2**29 < alone.around(0) < 2**30
    assert reserve_for("cpu", world_size=8) == Reserve()
    assert reserve_for("cuda", world_size=8, reserve=5).around(100) == 105
    assert "assumed" in str(alone)


X86 = "processor\t: 0\nmodel name\t: Some CPU 9000\nflags\t\t: fpu avx512f {}\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd {} i8mm\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (X86.format("avx512_bf16"), "bf16-mixed"),
        (X86.format("amx_bf16 amx_tile"), "bf16-mixed"),
        (X86.format("avx512_vnni"), "32-true"),
        (ARM.format("bf16"), "bf16-mixed"),
        (ARM.format("sve"), "32-true"),
        ("", "32-true"),
    ],
)
def test_the_features_of_a_cpu_decide(tmp_path, monkeypatch, content, expected):
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    hardware.CPU_INFO.write_text(content, encoding="utf-8")
    chosen, reason = auto_precision("the CPU", cpu_features())
    assert chosen == expected
    assert reason.startswith("the CPU has ")
    assert cpu_name() == ("Some CPU 9000" if "Some" in content else cpu_name())


def test_a_system_that_tells_nothing_gets_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "missing")
    assert auto_precision("the CPU", cpu_features())[0] == "32-true"
    assert cpu_name()


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "32-true"), ((8, 0), "bf16-mixed"), ((9, 0), "bf16-mixed")]
)
def test_the_capability_of_a_gpu_decides(capability, expected):
    assert auto_precision("a GPU", gpu_features(capability))[0] == expected


def test_every_listed_gpu_has_a_precision():
    found = {device.name: auto_precision(device.name, device.flops)[0] for device in DEVICES.values()}
    assert {name for name, chosen in found.items() if chosen == "32-true"} == {
        "Tesla V100-SXM2-32GB",
        "Tesla V100-SXM2-16GB",
        "Tesla T4",
    }


@pytest.mark.parametrize(
    ("precision", "tf32", "dtype"),
    [
        ("bf16-mixed", False, "bfloat16"),
        ("bf16-true", True, "bfloat16"),
        ("16-mixed", False, "float16"),
        ("32-true", False, "float32"),
        ("32-true", True, "tf32"),
    ],
)
def test_dtype_of_matmuls(precision, tf32, dtype):
    assert matmul_precision(precision, tf32=tf32) == dtype
