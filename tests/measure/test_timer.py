import contextlib
import gc
import time

import pytest
import torch

from lightning_llm.measure import Timing, interleave
from lightning_llm.measure.timer import PhaseClock, num_threads


class Clock:
    """A clock that only the timed functions advance, by the durations given."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.calls = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def takes(self, name, *durations):
        durations = iter(durations)

        def function():
            self.calls.append(name)
            self.now += next(durations)

        return function


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_the_order_alternates_after_the_warmup(clock):
    timings = interleave({"a": clock.takes("a", 64, 1, 2, 4), "b": clock.takes("b", 64, 8, 16, 32)}, rounds=3, warmup=1)
    assert clock.calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert timings == {"a": Timing((1.0, 2.0, 4.0)), "b": Timing((8.0, 16.0, 32.0))}
    assert list(timings) == ["a", "b"]
    clock.calls.clear()
    interleave({name: clock.takes(name, 1, 1) for name in "abc"}, rounds=2, warmup=0)
    assert clock.calls == [*"abc", *"cba"]


def test_a_budget_ends_after_the_round_that_exceeds_it(clock):
    functions = {"a": clock.takes("a", *[2] * 99), "b": clock.takes("b", *[1] * 99)}
    assert len(interleave(functions, rounds=20, warmup=1, budget_s=9)["b"].samples) == 3  # 3 s are the warm-up's
    assert len(interleave(functions, rounds=20, warmup=1, budget_s=0.5)["b"].samples) == 1
    assert len(interleave(functions, rounds=5, warmup=1, budget_s=99)["b"].samples) == 5
    assert len(interleave(functions, rounds=20, warmup=1, budget_s=0.5, least=4)["b"].samples) == 4
    assert len(interleave(functions, rounds=20, warmup=1, budget_s=9, least=2)["b"].samples) == 3


def test_quantiles():
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0, 6.0))
    assert (timing.median, timing.p20, timing.p80) == (3.5, 2.0, 5.0)
    assert [timing.quantile(fraction) for fraction in (0, 0.1, 1)] == [1.0, 1.5, 6.0]
    assert Timing((2.0,)).p80 == 2.0


def test_ratio_pairs_the_rounds():
    # The machine slows down eightfold: within a round one takes twice the other, whatever the round.
    slow, fast = Timing((2.0, 8.0, 16.0)), Timing((1.0, 4.0, 8.0))
    assert slow.ratio_to(fast) == 2.0
    assert Timing((2.0, 9.0)).ratios_to(Timing((4.0, 3.0))) == [0.5, 3.0]
    assert fast.ratio_to(slow) == 0.5
    assert Timing((2.0, 2.0, 9.0)).ratio_to(Timing((1.0, 4.0, 3.0))) == 2.0  # the medians' would be 2/3
    with pytest.raises(ValueError, match="timings of 3 and 1 rounds were not interleaved"):
        slow.ratio_to(Timing((1.0,)))


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_collection_meanwhile(enabled):
    seen = []
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        interleave({"a": lambda: seen.append(gc.isenabled())}, rounds=2, warmup=0)
        assert seen == [False, False]
        assert gc.isenabled() is enabled

        def fails():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            interleave({"a": fails}, rounds=1, warmup=0)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_faults_are_reported_at_once():
    with pytest.raises(ValueError, match="; ") as caught:
        interleave({}, rounds=0, warmup=-1, device="meta", budget_s=0, least=2)
    assert str(caught.value).split("; ") == [
        "functions must name at least one",
        "rounds must be at least 1, got 0",
        "least must be between 1 and rounds, got 2",
        "warmup must be at least 0, got -1",
        "device must be cpu or cuda, got 'meta'",
        "budget_s must be above 0 or None, got 0",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_events_see_the_work_of_the_device():
    small, large = torch.ones(64, 64, device="cuda"), torch.ones(4096, 4096, device="cuda")
    timings = interleave({"small": lambda: small @ small, "large": lambda: large @ large}, device="cuda")
    assert 0 < timings["small"].median < timings["large"].median < 1


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
    clock.mark("a")
    clock.drop()
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


def test_threads_are_as_before_afterwards():
    before, seen = torch.get_num_threads(), []
    with contextlib.suppress(KeyError), num_threads(before + 1):
        seen.append(torch.get_num_threads())
        raise KeyError
    assert [*seen, torch.get_num_threads()] == [before + 1, before]
