"""Variants as ``fit`` reads them: the time and memory of a training step."""

from types import SimpleNamespace

import pytest
import torch

from lightning_llm.ablate.fit import cost
from lightning_llm.measure.timer import Timing
from lightning_llm.optim.groups import GroupRule


def weights(model):
    return {name: value.clone() for name, value in model.named_parameters()}


def test_a_step_trains(make_variant):
    steps = cost.TrainingSteps(make_variant("baseline"))
    before = weights(steps.model)
    steps.step()
    assert all(not torch.equal(value, before[name]) for name, value in weights(steps.model).items())
    assert all(value.grad is None for value in steps.model.parameters())
    fixed = sum(value.nbytes for value in before.values())
    assert steps.peak_bytes() > 4 * fixed  # weights, gradients and two averages of AdamW


def test_a_captured_step_is_timed_as_it_is_trained(make_variant, monkeypatch):
    variant, of_model = make_variant("baseline"), []

    def captured(model):
        of_model.append(model)
        return model.loss

    monkeypatch.setattr(cost, "CapturedLoss", captured)
    cost.TrainingSteps(variant)
    variant.trainer.capture = True
    steps = cost.TrainingSteps(variant)
    assert of_model == [steps.model]


def test_the_optimizer_has_the_groups_of_a_run(make_variant):
    variant = make_variant("baseline")
    variant.model.groups = [GroupRule(pattern="layers.0.*", lr_factor=0.5)]
    rates = [group["lr"] for group in cost.TrainingSteps(variant).optimizer.param_groups]
    assert min(rates) == max(rates) / 2


def test_time_and_memory_of_each_variant(make_variant, monkeypatch):
    monkeypatch.setattr(cost, "ROUNDS", 2)
    found = cost.measure("a plan", ["baseline", "wide"], make_variant, lambda line: None)
    assert found.variants.keys() == {"baseline", "wide"}
    assert found.variants["wide"].peak_bytes > found.variants["baseline"].peak_bytes
    assert found.variants["baseline"].ratio == 1.0
    assert found.variants["wide"].ratio_p20 <= found.variants["wide"].ratio <= found.variants["wide"].ratio_p80
    assert found.other_cores is None or found.other_cores >= -0.1
    assert found.threads == torch.get_num_threads()
    assert found.rounds == 2
    assert found.plan == "a plan"
    assert found.variants["wide"].ratio_interval is None  # of two rounds


def timed(monkeypatch, *pairs):
    """Samples of baseline and variant for each pair, in place of real ones."""
    pairs = iter(pairs)

    def time_pair(baseline, variant, rounds=0):
        steps = SimpleNamespace(device=torch.device("cpu"), peak_bytes=lambda: 1)
        return steps, steps, [Timing(each) for each in next(pairs)]

    monkeypatch.setattr(cost, "time_pair", time_pair)


def test_the_interval_of_a_ratio_is_that_of_its_rounds(monkeypatch):
    base = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    ratios = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8)
    timed(monkeypatch, (base, tuple(a * b for a, b in zip(base, ratios, strict=True))), (base[:8], base[:8]))
    found = cost.measure("a plan", ["baseline", "a", "b"], lambda name: name, lambda line: None)
    assert found.variants["a"].ratio_interval == pytest.approx((1.1, 1.7))  # the second of each end
    assert found.variants["a"].ratio == pytest.approx(1.4)
    assert found.variants["baseline"].ratio_interval == (1.0, 1.0)
    assert found.rounds == 8  # the fewest: a budget ends a pair earlier


def test_a_pair_takes_turns_within_a_budget(monkeypatch):
    """Six rounds in any case, then until the budget is spent; the order alternates."""
    order, now = [], [0.0]

    def steps(name):
        def step():
            order.append(name)
            now[0] += 10.0

        return SimpleNamespace(device=torch.device("cpu"), step=step)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(cost, "TrainingSteps", steps)
    monkeypatch.setattr(cost, "LEAST_ROUNDS", 6)
    *_, timings = cost.time_pair("a", "b")
    assert [len(timing.samples) for timing in timings] == [6, 6]  # 120 s
    assert order[6:] == ["a", "b", "b", "a"] * 3
    monkeypatch.setattr(cost, "BUDGET_S", 200.0)
    assert len(cost.time_pair("a", "b")[-1][0].samples) == 8  # 60 s of warm-up; the eighth ends after 220 s
    assert len(cost.time_pair("a", "b", rounds=2)[-1][0].samples) == 2


def test_a_machine_that_slows_down_between_pairs_changes_no_ratio(monkeypatch):
    timed(monkeypatch, ((1.0,), (1.0,)), ((3.0,), (3.0,)))
    costs = cost.measure("a plan", ["baseline", "a", "b"], lambda name: name, lambda line: None).variants
    assert (costs["b"].ratio, costs["b"].step_s, costs["b"].step_p80_s) == (1.0, 1.0, 1.0)
