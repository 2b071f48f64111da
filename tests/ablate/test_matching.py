"""Equal cost on both sides: the options that match a variant with its baseline."""

from types import SimpleNamespace

import pytest

from lightning_llm import ModelConfig
from lightning_llm.ablate import cost, matching
from lightning_llm.ablate.cost import Side
from lightning_llm.measure.timer import Timing

SIZES = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDTH = "model.architecture.intermediate_size"


def side(name, steps=100, **options):
    data = SimpleNamespace(vocab_size=50, tokens_per_step=256, context_length=16)
    trainer = SimpleNamespace(max_steps=steps, precision="32-true")
    return Side(name, {}, SimpleNamespace(architecture=ModelConfig(**SIZES, **options)), data, trainer)


BASE, GELU, WIDE = side("baseline"), side("gelu", mlp="gelu"), side("wide", intermediate_size=512)


def test_tokens_change_nothing():
    assert matching.matched_options("tokens", None, BASE, WIDE, None) == {}
    assert matching.closeness("tokens", matching.facts(BASE), matching.facts(WIDE)) == 1.0


def test_flops_scale_the_steps():
    options = matching.matched_options("flops", None, BASE, WIDE, None)
    found = matching.facts(side("wide", options["trainer.max_steps"], intermediate_size=512))
    assert found["steps"] < 100
    assert matching.closeness("flops", matching.facts(BASE), found) == pytest.approx(1, abs=0.01)


def test_parameters_are_solved_for():
    options = matching.matched_options("parameters", WIDTH, BASE, GELU, None)
    found = matching.facts(side("gelu", mlp="gelu", intermediate_size=options[WIDTH]))
    assert matching.closeness("parameters", matching.facts(BASE), found) == pytest.approx(1, abs=0.005)
    layers = {**SIZES, "num_hidden_layers": 3}
    deep = Side("deep", {}, SimpleNamespace(architecture=ModelConfig(**layers)), BASE.data, BASE.trainer)
    options = matching.matched_options("parameters", "model.architecture.num_hidden_layers", BASE, deep, None)
    assert options == {"model.architecture.num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("model.architecture.num_hidden_layers", r"num_hidden_layers of wide gives [\d,]+; the nearest is 1, "),
        ("model.architecture.mlp", "is no whole number that can be solved for"),
    ],
)
def test_what_cannot_be_solved_is_one_line(option, says):
    with pytest.raises(ValueError, match=says):
        matching.matched_options("parameters", option, BASE, WIDE, None)


def test_time_scales_the_steps_by_the_interleaved_timing(monkeypatch):
    timings = [Timing((1.0, 2.0, 4.0)), Timing((2.0, 4.0, 8.0))]
    monkeypatch.setattr(cost, "time_pair", lambda base, variant: (None, None, timings))
    assert matching.matched_options("time", None, BASE, WIDE, str) == {"trainer.max_steps": 50}


def test_a_run_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match=r"give trainer\.max_steps"):
        matching.steps_of(side("baseline", steps=-1))
