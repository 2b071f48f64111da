"""Generated text every N steps: it is written, and the training does not notice."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_llm.training.callbacks import SampleText
from lightning_llm.training.callbacks import samples as samples_module
from lightning_llm.training.callbacks.samples import as_code

SAMPLE = "lightning_llm.training.callbacks.SampleText"


def with_samples(**options):
    return {"trainer.callbacks": [{"class_path": SAMPLE, "init_args": {"max_new_tokens": 20, **options}}]}


def samples(run):
    events = EventAccumulator(str(run))
    events.Reload()
    entries = events.Tensors("samples/text_summary") if "samples/text_summary" in events.Tags()["tensors"] else []
    return [(entry.step, entry.tensor_proto.string_val[0].decode()) for entry in entries]


def test_samples_are_written_every_n_steps(tiny):
    cli = tiny("fit", **with_samples(every_n_steps=2, prompt="Abc"), **{"data.micro_batch_size": 4})
    found = samples(cli.trainer.log_dir)
    assert [step for step, _ in found] == [2, 4, 6]
    assert all(text.startswith("    Abc") for _, text in found)
    assert all(len("".join(line[4:] + "\n" for line in text.split("\n"))) == 3 + 20 + 1 for _, text in found)


def test_ids_that_stand_for_nothing_are_left_out(tiny, monkeypatch):
    """Of a vocabulary that is larger than the tokenizer's."""
    cli = tiny("fit", **with_samples(every_n_steps=6), **{"model.architecture.vocab_size": 1000})
    ((_, text),) = samples(cli.trainer.log_dir)
    assert len(text) < len("    ") + 1 + 20


def test_the_training_does_not_notice(tiny):
    """With dropout, which draws from the global generator too."""
    options = {"model.architecture.dropout": 0.2, "model.architecture.mlp": "gelu"}
    without = tiny("fit", **options)
    drawn = torch.rand(1)
    seen = tiny("fit", **options, **with_samples(every_n_steps=1))
    assert torch.equal(torch.rand(1), drawn)
    assert len(samples(seen.trainer.log_dir)) == 6
    for name, value in without.model.state_dict().items():
        assert torch.equal(value, seen.model.state_dict()[name]), name


def test_each_part_keeps_its_mode(tiny, monkeypatch):
    modes = []
    original = SampleText.on_train_batch_end

    def recording(self, trainer, pl_module, *args):
        pl_module.transformer.norm.eval()
        before = [part.training for part in pl_module.modules()]
        original(self, trainer, pl_module, *args)
        modes.append(before == [part.training for part in pl_module.modules()])
        assert any(before)
        assert not all(before)

    monkeypatch.setattr(SampleText, "on_train_batch_end", recording)
    tiny("fit", **with_samples(every_n_steps=1))
    assert modes == [True] * 6


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_it_works_in_lower_precision(tiny, precision):
    options = {"trainer.precision": precision, "trainer.max_steps": 2}
    without = tiny("fit", **options)
    seen = tiny("fit", **options, **with_samples(every_n_steps=1))
    assert [step for step, _ in samples(seen.trainer.log_dir)] == [1, 2]
    for name, value in without.model.state_dict().items():
        assert torch.equal(value, seen.model.state_dict()[name]), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_generates_in_the_precision_of_the_run(tiny, monkeypatch, precision):
    autocast = []
    generate = samples_module.generate

    def recording(*args, **kwargs):
        autocast.append(torch.is_autocast_enabled("cpu"))
        return generate(*args, **kwargs)

    monkeypatch.setattr(samples_module, "generate", recording)
    tiny("fit", **{"trainer.precision": precision, "trainer.max_steps": 1}, **with_samples(every_n_steps=1))
    assert autocast == [precision == "bf16-mixed"]


@pytest.mark.parametrize("logger", [True, False])
def test_samples_are_printed_whatever_the_logger(tiny, capsys, logger):
    tiny("fit", **with_samples(every_n_steps=4, prompt="Abc"), **{"trainer.logger": logger})
    said = capsys.readouterr().out
    assert said.count("sample after step") == 1
    text = said.partition("sample after step 4\n")[2]
    assert text.startswith("Abc")
    assert len(text.partition("\n\n")[0]) >= 3


def test_text_is_shown_as_it_is():
    assert as_code("a\n  b\n") == "    a\n      b\n    "


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every_n_steps": 0}, "SampleText.every_n_steps must be at least 1, got 0"),
        ({"every_n_steps": -5}, "SampleText.every_n_steps must be at least 1, got -5"),
        ({"every_n_steps": 1, "max_new_tokens": 0}, "SampleText.max_new_tokens must be at least 1, got 0"),
        ({"every_n_steps": 1, "temperature": -0.5}, "SampleText.temperature must be at least 0, got -0.5"),
        ({"every_n_steps": 1, "top_k": 0}, "SampleText.top_k must be at least 1, got 0"),
        ({"every_n_steps": 1, "prompt": ""}, "SampleText.prompt is empty"),
        ({"every_n_steps": 1, "prompt": "☃"}, "SampleText.prompt '☃'"),
    ],
)
def test_bad_options_are_one_line(tiny, error_line, options, says):
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **with_samples(**options))
    assert leaving.value.code == 2
    assert says in error_line()


def test_a_sample_that_meets_nan_first_ends_the_run_as_diverged(tiny, capsys):
    options = {"trainer.log_every_n_steps": 4, "model.optimizer.init_args.lr": 1e30, "trainer.max_steps": 4}
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **options, **with_samples(every_n_steps=1))
    assert leaving.value.code == 1
    assert "stopped: logits are NaN" in capsys.readouterr().err
