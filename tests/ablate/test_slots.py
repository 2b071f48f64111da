"""The places in which runs train."""

import pytest

from lightning_llm.ablate import slots
from lightning_llm.ablate.slots import Slot


def test_slots_share_the_cores(experiment, monkeypatch):
    monkeypatch.setattr(slots, "cores", lambda: [2, 3, 5, 7])
    assert slots.threads_for("cpu", 0, 1, None) == 1
    assert slots.threads_for("cpu", 0, 1, 2) == 2
    assert slots.threads_for("cpu", 0, 1 << 60, None) == 4  # memory for one
    monkeypatch.setattr(slots, "host_memory", lambda: 1000)
    for fitting, threads in ((4, 1), (3, 2), (2, 2)):
        assert slots.threads_for("cpu", 0, int(slots.MEMORY_SHARE * 1000) // fitting, None) == threads
        assert slots.runs_at_a_time(threads, "cpu", 0, None) <= fitting
    assert slots.threads_for("cpu", 0, 1, 3) == 1
    assert slots.runs_at_a_time(1, "cpu", 0, 3) == 3
    assert slots.runs_at_a_time(1, "cuda", 8, None) == 8
    assert slots.threads_for("cuda", 2, 1, None) == 2
    plan = experiment({"a": {"effect": 0.0}}, record={"threads": 2})
    assert slots.slots_for(plan, None) == [Slot([2, 3]), Slot([5, 7])]
    assert slots.slots_for(plan, 1) == [Slot([2, 3])]
    plan = experiment({"a": {"effect": 0.0}}, out="gpu", record={"threads": 2, "accelerator": "cuda"})
    monkeypatch.setattr(slots, "visible_gpus", lambda: ["4", "6"])
    assert slots.slots_for(plan, None) == [Slot([2, 3], {slots.VISIBLE: "4"}), Slot([5, 7], {slots.VISIBLE: "6"})]
    monkeypatch.setattr(slots, "visible_gpus", list)
    with pytest.raises(ValueError, match="was planned for GPUs, and none is visible here: continue it where one is"):
        slots.slots_for(plan, 4)
