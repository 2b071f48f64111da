import time

import pytest
import torch

from lightning_llm.measure.timer import PhaseClock


@pytest.fixture
def now(monkeypatch):
    """A clock that the test sets."""
    times = {"now": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: times["now"])
    return times


def test_phases_add_up_from_mark_to_mark(now):
    clock = PhaseClock()
    clock.mark("too early")
    clock.start()
    for at, phase in ((1, "a"), (3, "b"), (7, "a")):
        now["now"] = at
        clock.mark(phase)
    assert clock.take() == {"a": 5, "b": 2}
    now["now"] = 8
    clock.mark("b")
    now["now"] = 20
    clock.start()  # what lies before does not count
    now["now"] = 21
    clock.mark("a")
    assert clock.take() == {"b": 1, "a": 1}
    assert clock.take() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_device_is_timed():
    clock, matrix = PhaseClock("cuda"), torch.randn(4096, 4096, device="cuda")
    clock.start()
    for _ in range(20):
        matrix = matrix @ matrix / 4096
    clock.mark("products")
    clock.mark("nothing")
    torch.cuda.synchronize()
    seconds = clock.take()
    assert seconds["products"] > 10 * seconds["nothing"]
