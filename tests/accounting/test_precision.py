"""The precision that ``auto`` means is a function of the hardware's features."""

import pytest

from lightning_llm.accounting import hardware
from lightning_llm.accounting.hardware import DEVICES, auto_precision, cpu_features, cpu_name, gpu_features

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
