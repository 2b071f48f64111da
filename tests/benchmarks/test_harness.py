"""What a bench is asked for, and what the harness measures of a case."""

from functools import partial

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Bench, Case, Request, measure, measure_memory, step_peak_bytes, timed_rows
from lightning_llm.measure.timer import Timing

ASKED = Request(bench="toy", shape="4x8", sizes={}, rounds=3)
KIB = 256  # float32 numbers


def _square(x, kib):
    return (x.repeat(kib) ** 2).sum()


def cases():
    x = torch.ones(KIB, requires_grad=True)
    return {f"{kib} KiB": Case(forward=partial(_square, x, kib), held=[x]) for kib in (1, 4)}


def test_memory_is_what_forward_saves_and_the_step_needs():
    saved, peak = measure_memory(cases()["4 KiB"], "cpu")
    assert saved == 4 * 2**10 + 4  # the repeated input, and the sum
    assert peak >= saved + 2 * 4 * 2**10
    assert measure_memory(Case(forward=lambda: torch.ones(1), held=[], is_eager=False), "cpu") == (None, None)


def test_rows_compare_with_the_first_chosen_case():
    first, second = measure(cases(), ASKED, tokens=10)
    assert (first.variant, second.variant) == ("1 KiB", "4 KiB")
    assert (first.ratio, first.peak_ratio) == (1, 1)
    assert second.peak_ratio == second.peak_bytes / first.peak_bytes > 3
    assert second.tokens_per_s == 10 / second.total_s
    (only,) = measure(cases(), Request(bench="toy", shape="", sizes={}, rounds=1, variants=["4 KiB"]), tokens=1)
    assert only.peak_ratio == 1


def test_whole_calls_are_interleaved():
    calls = []
    functions = {name: partial(calls.append, name) for name in "ab"}
    assert [row.variant for row in timed_rows(functions, ASKED, warmup=1)] == ["a", "b"]
    assert sorted(calls[-2:]) == sorted(calls[-4:-2]) == ["a", "b"]
    assert len(calls) == 8  # a warm-up, and three rounds whose order changes
    calls.clear()
    assert ASKED.interleaved({name: lambda name=name: calls.append(name) or name for name in "ab"}, 2) == {
        "a": ["a", "a"],
        "b": ["b", "b"],
    }
    assert "".join(calls) == "abab"


def test_a_step_counts_neither_weights_nor_state():
    model = torch.nn.Linear(KIB, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = [torch.ones(1, KIB)]

    def step():
        model(batch[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert 2**10 <= step_peak_bytes(step, model, optimizer, batch) < 1.1 * 2**10  # the gradient alone


def run(asked):
    yield asked.row("a")


def test_a_bench_reads_its_shapes():
    bench = Bench(run=run, shapes=["2x3"], sizes=("rows", "hidden"), named_shapes={"both": ["1x2", "3x4"]})
    assert bench.read_shapes(None) == {"2x3": {"rows": 2, "hidden": 3}}
    assert list(bench.read_shapes(["both", "5x6"])) == ["1x2", "3x4", "5x6"]
    with pytest.raises(ValueError, match="must be rows x hidden, such as 2x3, or both"):
        bench.read_shapes(["2"])
    assert Bench(run=run, shapes=["a"], parse=str.upper).read_shapes(None) == {"a": "A"}


def test_an_unknown_variant_is_named():
    asked = Request(bench="toy", shape="", sizes={}, variants=["c", "a"])
    assert asked.chosen(["a", "b", "c"]) == ["c", "a"]
    with pytest.raises(ValueError, match="variants 'c': there are a, b"):
        asked.chosen(["a", "b"])


def test_the_clocks_of_a_gpu_rise_before_the_timed_rounds(monkeypatch):
    calls = []

    def interleaved(functions, **options):
        calls.append((options["warmup"], options["budget_s"], options["rounds"]))
        return dict.fromkeys(functions, Timing((0.1, 0.1)))

    monkeypatch.setattr(harness, "interleave", interleaved)
    monkeypatch.setattr(harness, "measure_memory", lambda case, device: (None, None))
    monkeypatch.setattr(harness, "describe_machine", lambda device: "a machine")
    for device in ("cpu", "cuda"):
        request = Request(bench="x", shape="", sizes={}, device=device, budget_s=12.0, rounds=100)
        list(harness.measure({"a": Case(forward=lambda: torch.ones(()), held=[])}, request, tokens=1))
    assert calls[0] == calls[2] == (1, 12.0, 100)
    assert calls[1] == (0, harness.WARM_UP_S, 10_000)
