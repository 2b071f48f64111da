"""The parts with an entry, and that nothing else is taken for one of them."""

import dataclasses
import json

import pytest

from lightning_llm import ModelConfig, Transformer
from lightning_llm.__main__ import main
from lightning_llm.accounting import find_device, parameters_by_part, step_memory
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.accounting.parts import KNOWN, parts_to_measure
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.accounting.step_time import CostModel, step_time
from lightning_llm.model import mlp, norm
from lightning_llm.model.parts import BUILT_IN, REQUIRED, BuiltIn
from tests.accounting.test_measured_parts import NewMLP, NewNorm
from tests.accounting.test_memory import second_step

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
STEP = {"rows": 3, "context_length": 200, "precision": "32-true"}
ARGUMENTS = {"window": 48}  # of parts that need them
WITH = {"latent": {"partial_rotary_factor": 0.5}, "gated_delta_net": {"position": "none"}}  # what else a part needs


NEW = {"mlp": (mlp, NewMLP), "norm": (norm, NewNorm)}


@pytest.fixture(params=NEW)
def new(request, monkeypatch):
    """The kind of a part that is added to the table of built-in parts, by the name ``new``."""
    kind = request.param
    module, part = NEW[kind]
    monkeypatch.setattr(module, part.__name__, part, raising=False)
    monkeypatch.setitem(BUILT_IN[kind], "new", BuiltIn(f"{kind}.{part.__name__}"))
    return kind


def test_the_estimate_of_a_new_built_in_part(new, tmp_path, capsys):
    """Its class and one line in the table are enough."""
    architecture = {**SIZES, new: "new"}
    content = {"model": {"architecture": architecture}, "data": {"context_length": 200, "global_batch_size": 3}}
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    words = ["estimate", "--config", str(tmp_path / "config.yaml"), "--precision", "32-true"]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    config = ModelConfig(**architecture)
    assert report["parameters"]["all"] == sum(p.numel() for p in Transformer(config).parameters())
    peak, state, parameters = second_step(config, loss_chunks=None, accumulation=1, **STEP)
    assert report["memory"]["peak"] == pytest.approx(peak + state + parameters, rel=0.005)
    assert f"parameters and FLOPs of {new} new were measured" in capsys.readouterr().out


def test_the_time_of_a_new_built_in_part_is_that_of_its_own_bytes(new):
    config = ModelConfig(**SIZES, **{new: "new"})
    part = measure_parts(config, "32-true", 200)[new]
    cost_model = CostModel(device=find_device("H200"))

    def traffic(saved_per_token):
        heavier = dataclasses.replace(part, saved=(0.0, saved_per_token, 0.0))
        return step_time(config, cost_model, StepSettings(**STEP, measured={new: heavier})).traffic

    assert traffic(2e6) - traffic(1e6) >= 2 * 600 * 1e6 * SIZES["num_hidden_layers"] / 4800e9


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_built_in_part_has_the_parameters_and_the_peak_of_the_built_model(kind):
    for name, part in BUILT_IN[kind].items():
        given = {option: ARGUMENTS[option] for option, told in part.options.items() if told.default is REQUIRED}
        value = {"class_path": name, "init_args": given} if given else name
        config = ModelConfig(**SIZES, **WITH.get(name, {}), **{kind: value})
        measured = measure_parts(config, "32-true", STEP["context_length"])
        model = Transformer(config)
        assert sum(parameters_by_part(config, measured).values()) == sum(p.numel() for p in model.parameters()), name
        peak = second_step(config, loss_chunks=None, accumulation=1, **STEP)[0]
        assert step_memory(config, **STEP).step_peak == pytest.approx(peak, rel=0.005), name


def test_entries_are_of_built_in_parts():
    assert {kind: set(names) - BUILT_IN[kind].keys() for kind, names in KNOWN.items()} == {
        kind: set() for kind in BUILT_IN
    }


def test_a_part_without_an_entry_has_no_formula(new):
    config = ModelConfig(**SIZES, **{new: "new"})
    assert parts_to_measure(config) == {new: "new"}
    with pytest.raises(ValueError, match=f"{new} 'new' has no formula"):
        parameters_by_part(config)
