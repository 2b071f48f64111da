"""Equal cost on both variants: the options that match a variant with its baseline."""

from types import SimpleNamespace

import pytest

from lightning_llm import ModelConfig
from lightning_llm.ablate.fit import cost
from lightning_llm.ablate.fit.matching import MATCHING, Matched, facts_of, scaled_options
from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.ablate.matching import MATCHES, matched_within
from lightning_llm.ablate.report.record import Variant as Reported
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.measure.timer import Timing
from lightning_llm.optim.schedules import Constant, Schedule, WarmupCosine, WarmupLinear, WarmupStableDecay

SIZES = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDTH = "model.architecture.intermediate_size"


class Data(TokenDataModule):
    """A module without a store."""

    vocab_size = 50


def variant(name, steps=100, schedule=None, given=None, tokens=256, **options):
    data = Data(global_batch_size=tokens // 16, context_length=16)
    trainer = SimpleNamespace(max_steps=steps, precision="32-true")
    model = SimpleNamespace(architecture=ModelConfig(**SIZES, **options), schedule=schedule)
    return Variant(name, {"model": {"schedule": given}}, model, data, trainer)


def timed(monkeypatch, *ratios):
    """Timings of both variants, in place of real ones: a step of the baseline takes 1, 2, 3, … seconds."""
    base = tuple(float(n + 1) for n in range(len(ratios)))
    timings = [Timing(base), Timing(tuple(a * b for a, b in zip(base, ratios, strict=True)))]
    monkeypatch.setattr(cost, "time_pair", lambda base, variant: (None, None, timings))


def matched(match, solved, base, variant):
    return MATCHING[match](base, variant, solved)


def closeness(match, base, variant):
    """By what a plan records of both."""
    return MATCHES[match].closeness(*({"steps": each.steps, **facts_of(each, Matched())} for each in (base, variant)))


def test_each_rule_is_carried_out():
    assert MATCHES.keys() == MATCHING.keys()


BASE, GELU, WIDE = variant("baseline"), variant("gelu", mlp="gelu"), variant("wide", intermediate_size=512)


def test_tokens_change_nothing():
    assert matched("tokens", None, BASE, WIDE) == Matched()
    assert closeness("tokens", BASE, WIDE) == 1.0


@pytest.mark.parametrize("match", ["tokens", "flops"])
def test_steps_follow_the_tokens_of_a_step_and_the_schedule_follows_the_steps(match):
    half = variant("half", tokens=512, schedule=WarmupLinear(warmup_steps=20))
    assert matched(match, None, BASE, half).options == {
        "trainer.max_steps": 50,
        "model.schedule.init_args.warmup_steps": 10,
    }
    own = variant("own", steps=50, tokens=512)
    assert matched(match, None, BASE, own).options == {"trainer.max_steps": 50}
    with pytest.raises(ValueError, match=rf"own has trainer\.max_steps 60, which is 1\.20 times the {match} of"):
        matched(match, None, BASE, variant("own", steps=60, tokens=512))


def test_a_variant_has_no_steps_of_its_own_where_time_is_equal():
    with pytest.raises(ValueError, match=r"own changes trainer\.max_steps, which match: time sets: leave it out"):
        matched("time", None, BASE, variant("own", steps=50))


def test_flops_scale_the_steps():
    options = matched("flops", None, BASE, WIDE).options
    wide = variant("wide", options["trainer.max_steps"], intermediate_size=512)
    assert wide.steps < 100
    assert closeness("flops", BASE, wide) == pytest.approx(1, abs=0.01)


def test_parameters_are_solved_for():
    options = matched("parameters", WIDTH, BASE, GELU).options
    gelu = variant("gelu", mlp="gelu", intermediate_size=options[WIDTH])
    assert closeness("parameters", BASE, gelu) == pytest.approx(1, abs=0.005)
    layers = {**SIZES, "num_hidden_layers": 3}
    deep = Variant("deep", {}, SimpleNamespace(architecture=ModelConfig(**layers)), BASE.data, BASE.trainer)
    options = matched("parameters", "model.architecture.num_hidden_layers", BASE, deep).options
    assert options == {"model.architecture.num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("model.architecture.num_hidden_layers", r"num_hidden_layers of wide gives [\d,]+; the nearest is 1, "),
        ("model.architecture.mlp", "is no whole number that can be solved for"),
        ("model.architecture.intermediate_siz", r"does not exist; did you mean model\.architecture\.intermediate_size"),
    ],
)
def test_what_cannot_be_solved_is_one_line(option, says):
    with pytest.raises(ValueError, match=says):
        matched("parameters", option, BASE, WIDE)


def test_time_scales_the_steps_by_the_interleaved_timing(monkeypatch):
    timed(monkeypatch, 2.0, 1.9, 2.1, 2.05, 1.95, 2.0, 1.7, 2.4)
    found = matched("time", None, BASE, WIDE)
    assert found.options == {"trainer.max_steps": 50}
    assert found.facts["time_ratio"] == pytest.approx(2.0)
    assert found.facts["time_ratio_interval"] == pytest.approx((1.7, 2.4))  # the extremes of eight rounds
    assert facts_of(WIDE, found).items() >= found.facts.items()


def test_steps_stay_as_they_are_inside_the_noise_of_the_timing(monkeypatch):
    timed(monkeypatch, 1.1, 1.2, 1.15, 1.1, 1.2, 0.99)
    found = matched("time", None, BASE, WIDE)
    assert (found.options, found.facts["time_ratio"]) == ({}, pytest.approx(1.125))
    assert found.facts["time_ratio_interval"] == pytest.approx((0.99, 1.2))
    timed(monkeypatch, 1.1, 1.2, 1.15, 1.1, 1.2, 1.01)
    assert matched("time", None, BASE, WIDE).options == {"trainer.max_steps": 89}
    timed(monkeypatch, 2.0, 2.0)  # too few rounds for an interval
    assert matched("time", None, BASE, WIDE).facts == {"time_ratio": 2.0, "time_ratio_interval": None}


@pytest.mark.parametrize(
    ("schedule", "scale", "options"),
    [
        (None, 0.5, {}),
        (WarmupCosine(), 0.5, {}),
        (Constant(warmup_steps=10), 0.5, {"warmup_steps": 5}),
        (WarmupCosine(warmup_steps=25, decay_steps=90), 0.5, {"warmup_steps": 12, "decay_steps": 45}),
        (WarmupLinear(warmup_steps=9, decay_steps=10), 2.0, {"decay_steps": 20, "warmup_steps": 18}),
        (WarmupStableDecay(warmup_steps=1, decay_steps=100), 0.213, {"warmup_steps": 1, "decay_steps": 21}),
    ],
)
def test_steps_of_a_built_in_schedule_follow_those_of_the_run(schedule, scale, options):
    found = scaled_options("flops", variant("a", schedule=schedule), 100, scale)
    assert found.pop("trainer.max_steps") == round(100 * scale)
    assert found == {f"model.schedule.init_args.{name}": value for name, value in options.items()}


def test_a_schedule_stays_as_it_is_if_the_steps_do():
    assert scaled_options("flops", variant("a", schedule=WarmupCosine(warmup_steps=10)), 100, 1.004) == {}
    assert scaled_options("flops", variant("a", schedule=lambda optimizer: None), 100, 1.0) == {}


class Own(Schedule):
    def factor(self, step, total_steps=None):
        return 1.0


class Longer(WarmupCosine):
    pass


@pytest.mark.parametrize(
    ("schedule", "init_args", "says"),
    [
        (Own(), {"cycle": 30}, "cycle 30 of model.schedule own.Own would not follow"),
        (Own(), {"at": [30, 60]}, "at [30, 60] of model.schedule own.Own would not follow"),
        (Longer(warmup_steps=5), {"warmup_steps": 5}, "warmup_steps 5 of model.schedule own.Own would not follow"),
        (lambda optimizer: None, {"gamma": 0.9}, "but model.schedule own.Own would not follow"),  # one of torch
    ],
)
@pytest.mark.parametrize("match", ["flops", "time"])
def test_steps_of_an_unknown_schedule_are_refused(match, schedule, init_args, says):
    mine = variant("mine", schedule=schedule, given={"class_path": "own.Own", "init_args": init_args}, mlp="gelu")
    with pytest.raises(ValueError, match=f"^match: {match} changes trainer.max_steps of mine, but ") as caught:
        matched(match, None, BASE, mine)  # for time, before anything is timed
    assert says in str(caught.value)
    assert "give shares of the total_steps that Schedule.factor gets, or use match: tokens" in str(caught.value)


def test_an_unknown_schedule_without_steps_is_accepted():
    given = {"class_path": "own.Own", "init_args": {"share": 0.5, "restart": True, "warmup_steps": 0, "shape": "sqrt"}}
    mine = variant("mine", schedule=Own(), given=given)
    assert scaled_options("time", mine, 100, 0.5) == {"trainer.max_steps": 50}
    assert scaled_options("time", variant("mine", schedule=Own(), given="own.Own"), 100, 2) != {}


def test_a_run_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match=r"give trainer\.max_steps"):
        _ = variant("baseline", steps=-1).steps


def test_matched_within_covers_the_interval_and_the_rounding():
    base = Reported(steps=200)
    assert matched_within(Reported(steps=100, time_ratio_interval=(1.9, 2.02)), base) == pytest.approx(0.05)
    assert matched_within(Reported(steps=101, time_ratio_interval=(2.0, 2.0)), base) == pytest.approx(0.01)
    assert matched_within(Reported(steps=200, time_ratio_interval=(0.99, 1.03)), base) == pytest.approx(0.03)
    assert matched_within(Reported(steps=200), base) is None
    assert matched_within(Reported(time_ratio_interval=(1.0, 1.0)), base) is None
