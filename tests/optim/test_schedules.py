import dataclasses
import inspect
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm import LanguageModel
from lightning_llm.optim import (
    Constant,
    Schedule,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    constant_lr,
    cosine_lr,
    linear_lr,
    schedules,
    wsd_lr,
)
from lightning_llm.optim.schedules import SCHEDULES

SPAN = {"max_lr": 2.0, "min_lr": 0.5, "warmup_steps": 4, "decay_steps": 12}


def test_cosine_is_the_formula_exactly():
    for step in range(20):
        if step < 4:
            expected = step / 4 * 2.0
        elif step <= 12:
            expected = 0.5 + (1 + math.cos((step - 4) / (12 - 4) * math.pi)) / 2 * (2.0 - 0.5)
        else:
            expected = 0.5
        assert cosine_lr(step, **SPAN) == expected
    # Numbers known without the formula: the quarter of a cosine is √½.
    assert [cosine_lr(step, **SPAN) for step in (0, 1, 4, 8, 12, 13)] == [0.0, 0.5, 2.0, 1.25, 0.5, 0.5]
    assert cosine_lr(6, **SPAN) == pytest.approx(0.5 + 1.5 * (1 + math.sqrt(0.5)) / 2, rel=1e-15)


def test_linear_goes_straight():
    assert [linear_lr(step, **SPAN) for step in (0, 2, 4, 6, 8, 12, 13)] == [0.0, 1.0, 2.0, 1.625, 1.25, 0.5, 0.5]


def test_constant_stays():
    assert [constant_lr(step, max_lr=3.0) for step in (0, 10)] == [3.0, 3.0]
    assert [constant_lr(step, max_lr=3.0, warmup_steps=4) for step in (0, 1, 3, 4, 99)] == [0.0, 0.75, 2.25, 3.0, 3.0]


def test_wsd_holds_then_decays():
    steps = (0, 2, 4, 7, 8, 9, 12, 13)
    linear = [wsd_lr(step, **SPAN, decay_start=8, shape="linear") for step in steps]
    assert linear == [0.0, 1.0, 2.0, 2.0, 2.0, 1.625, 0.5, 0.5]
    by_root = [wsd_lr(step, **SPAN, decay_start=8) for step in steps]
    assert by_root == [0.0, 1.0, 2.0, 2.0, 2.0, 1.25, 0.5, 0.5]  # 1 - √¼ is a half


@pytest.mark.parametrize("rate", [cosine_lr, linear_lr])
def test_no_warmup_and_no_decay(rate):
    assert rate(0, max_lr=1.0, min_lr=0.1, warmup_steps=0, decay_steps=10) == 1.0
    at_once = {"max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 5, "decay_steps": 5}
    assert [rate(step, **at_once) for step in (4, 5, 6)] == [0.8, 1.0, 0.1]


@given(
    warmup=st.integers(0, 50),
    span=st.integers(0, 50),
    stable=st.integers(0, 50),
    low=st.floats(0, 1),
    height=st.floats(0.001, 1),
)
def test_rates_rise_in_the_warmup_and_fall_after_it(warmup, span, stable, low, height):
    start, end = warmup + stable, warmup + stable + span
    limits = {"max_lr": low + height, "min_lr": low, "warmup_steps": warmup, "decay_steps": end}
    for rate in (
        lambda step: cosine_lr(step, **limits),
        lambda step: linear_lr(step, **limits),
        lambda step: wsd_lr(step, **limits, decay_start=start),
        lambda step: wsd_lr(step, **limits, decay_start=start, shape="linear"),
    ):
        rates = [rate(step) for step in range(end + 3)]
        up, down = rates[: warmup + 1], rates[warmup:]
        assert up == sorted(up)
        assert down == sorted(down, reverse=True)
        assert down[0] == low + height
        assert rates[end + 1] == rates[end + 2] == low


@pytest.mark.parametrize("schedule", [WarmupCosine, WarmupLinear, WarmupStableDecay])
def test_objects_are_factors_of_the_functions(schedule):
    function, more = {
        WarmupCosine: (cosine_lr, {}),
        WarmupLinear: (linear_lr, {}),
        WarmupStableDecay: (wsd_lr, {"decay_start": 9}),  # the last quarter of 12
    }[schedule]
    own = {"decay_fraction": 0.25} if more else {}
    limits = {"max_lr": 1.0, "min_lr": 0.25, "warmup_steps": 4, "decay_steps": 12}
    by_run, by_itself = (
        schedule(warmup_steps=4, min_lr_ratio=0.25, **own),
        schedule(warmup_steps=4, decay_steps=12, min_lr_ratio=0.25, **own),
    )
    for step in range(20):
        assert by_run.factor(step, 12) == by_itself.factor(step) == by_itself.factor(step, 99)
        assert by_run.factor(step, 12) == function(step, **limits, **more)


def test_constant_needs_no_end():
    assert [Constant(warmup_steps=4).factor(step) for step in (0, 1, 4)] == [0.0, 0.25, 1.0]
    assert Constant().factor(0) == 1.0


def test_shape_of_the_decay_is_passed_on():
    assert WarmupStableDecay(decay_fraction=1.0).factor(1, 4) == 0.5
    assert WarmupStableDecay(decay_fraction=1.0, shape="linear").factor(1, 4) == 0.75


@pytest.mark.parametrize("schedule", [WarmupCosine, WarmupLinear, WarmupStableDecay])
def test_a_run_shorter_than_the_warmup_is_all_warmup(schedule):
    assert [schedule(warmup_steps=8).factor(step, 4) for step in range(5)] == [0.0, 0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize("total", [None, -1])
def test_the_end_must_be_known(total):
    with pytest.raises(ValueError, match=r"WarmupCosine does not know at which step .* set trainer\.max_steps"):
        WarmupCosine().factor(0, total)


def test_faults_are_reported_at_once():
    with pytest.raises(ValueError, match="; ") as caught:
        WarmupStableDecay(warmup_steps=-1, decay_steps=0, decay_fraction=1.5, min_lr_ratio=-0.1, shape="cubic")
    assert str(caught.value).split("; ") == [
        "warmup_steps must be a whole number of at least 0, got -1",
        "min_lr_ratio must be between 0 and 1, got -0.1",
        "decay_steps must be a whole number of at least 1 or null, got 0",
        "decay_fraction must be between 0 and 1, got 1.5",
        "shape 'cubic' is unknown: choose one of linear, sqrt",
    ]
    for schedule in (WarmupCosine, WarmupLinear, WarmupStableDecay):
        for wrong in (math.nan, math.inf):
            with pytest.raises(ValueError, match=f"min_lr_ratio must be between 0 and 1, got {wrong}"):
                schedule(min_lr_ratio=wrong)
    for schedule in (WarmupCosine, WarmupLinear):
        with pytest.raises(ValueError, match="decay_steps 5 must not be before warmup_steps 6"):
            schedule(warmup_steps=6, decay_steps=5)
    with pytest.raises(ValueError, match=r"warmup_steps must be a whole number of at least 0, got 1\.5"):
        Constant(warmup_steps=1.5)


def test_every_schedule_here_is_one():
    classes = [member for _, member in inspect.getmembers(schedules, inspect.isclass)]
    made = [member for member in classes if member.__module__ == schedules.__name__ and not inspect.isabstract(member)]
    assert {member.__name__: member for member in made} == SCHEDULES
    assert all(issubclass(member, Schedule) for member in made)


@pytest.mark.parametrize("schedule", SCHEDULES.values())
def test_a_schedule_names_all_of_its_options_that_count_steps(schedule):
    whole_numbers = [field.name for field in dataclasses.fields(schedule) if field.type in (int, int | None)]
    assert sorted(schedule.step_options) == sorted(whole_numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseSqrt(Schedule):
    """A schedule that is not in the table."""

    warmup_steps: int = 2

    def factor(self, step, total_steps=None):
        return min(step / self.warmup_steps, math.sqrt(self.warmup_steps / step))


def test_a_schedule_of_the_table_is_trained_with_saved_and_resumed(tiny, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "InverseSqrt", InverseSqrt)
    schedule = {"class_path": f"{__name__}.InverseSqrt", "init_args": {"warmup_steps": 3}}
    whole = tiny("fit", "--trainer.run_dir=whole", **{"model.schedule": schedule})
    assert rate_of(whole) == whole.trainer.optimizers[0].defaults["lr"] * math.sqrt(3 / 7)  # of the next step
    middle = "whole/checkpoints/step-00000003.ckpt"
    loaded = LanguageModel.load_from_checkpoint(middle, weights_only=True)  # a warning would be an error
    assert loaded.schedule == InverseSqrt(warmup_steps=3)
    resumed = tiny("fit", "--trainer.run_dir=resumed", f"--ckpt_path={middle}", **{"model.schedule": schedule})
    assert rate_of(resumed) == rate_of(whole)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def rate_of(run):
    return run.trainer.optimizers[0].param_groups[0]["lr"]


def test_schedules_cost_no_torch():
    code = "import sys; from lightning_llm.optim import WarmupCosine, cosine_lr; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
