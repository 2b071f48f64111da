"""``model.init_from``: training starts with these weights, or the run does not start."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_llm import Transformer
from lightning_llm.__main__ import main
from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.reading import load_transformer, read_checkpoint
from lightning_llm.training.initial_weights import read_initial_weights

RUN = Path("runs/run/version_0")
SAVED = {"trainer.max_steps": 2, "trainer.val_check_interval": 1, "trainer.precision": "32-true"}


@pytest.fixture
def exported(tiny, capsys):
    """A run, and ``out``, its weights as a folder of transformers."""
    tiny("fit", **SAVED)
    assert main(["export", str(RUN), "out"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("source", ["out", "model.ckpt", str(RUN)])
def test_training_begins_with_the_given_weights(exported, tiny, source):
    assert main(["import", "out", "--out", "model.ckpt"]) == 0
    options = {"model.init_from": source, "model.optimizer.lr": 0.0, "trainer.precision": "32-true"}
    cli = tiny("fit", **options, **{"trainer.max_steps": 1})
    saved, _ = load_transformer("model.ckpt")
    for name, tensor in cli.model.transformer.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name])
    assert cli.trainer.global_step == 1
    run = Path(cli.trainer.log_dir)
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_from"] == source
    if source == "model.ckpt":  # a resumed run needs it no more
        Path("model.ckpt").unlink()
        assert tiny("fit", "--ckpt_path=last", **options, **{"trainer.max_steps": 2}).trainer.global_step == 2


def test_a_damaged_best_checkpoint_is_skipped(exported, tiny, capsys):
    best = RUN / "checkpoints" / "best.ckpt"
    content = best.read_bytes()
    best.unlink()  # which may share its file with the newest
    best.write_bytes(content[:-100])
    newest = RUN / "checkpoints" / "step-00000002.ckpt"
    cli = tiny("fit", **{"model.init_from": str(RUN), "model.optimizer.lr": 0.0, "trainer.max_steps": 1})
    saved, _ = load_transformer(newest)
    for name, tensor in cli.model.transformer.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name])
    line = f"checkpoint {best} is truncated or damaged: using {newest}, in place of the best\n"
    assert capsys.readouterr().err.count(line) == 1


def test_a_model_with_rows_for_no_token_begins_with_weights_without_them(exported):
    initial = read_initial_weights("out")
    model = Transformer(dataclasses.replace(initial.config, vocab_multiple_of=64), seed=1)
    assert not initial.problem(model.config, None)
    initial.fill(model)
    expected = Transformer(initial.config)
    initial.fill(expected)
    ids = torch.arange(10)[None]
    assert torch.equal(model.logits(model(ids)), expected.logits(expected(ids)))
    assert not model.lm_head.weight[initial.config.vocab_size :].any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.architecture.head_dim": 8}, "head_dim is 16 there and 8 here"),
        ({"model.architecture.rms_norm_eps": 0.1}, "rms_norm_eps is 1e-05 there and 0.1 here"),
        ({"model.architecture.tie_word_embeddings": True}, "tie_word_embeddings is False there and True here"),
        ({"data.tokenizer": "byte", "model.architecture.vocab_size": 256}, "its tokenizer is not that of the data"),
        ({"model.init_from": "nowhere"}, "init_from nowhere: checkpoint nowhere does not exist"),
        ({"model.init_from": "."}, "init_from .: it has neither config.json nor checkpoints"),
    ],
)
def test_weights_of_another_model_are_refused_before_there_is_a_run(exported, tiny, error_line, changes, says):
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{"model.init_from": "out", "trainer.default_root_dir": "others", **changes})
    assert leaving.value.code == 2
    assert says in error_line()
    assert not list(Path("others").rglob("config.yaml"))


@pytest.mark.parametrize("source", ["spoiled.ckpt", "out"])
def test_training_does_not_begin_with_nan_or_infinite_weights(exported, tiny, error_line, source):
    content = read_checkpoint(RUN / "checkpoints" / "best.ckpt")
    content["state_dict"]["transformer.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    write_atomically(content, Path("spoiled.ckpt"))
    tensors = load_file("out/model.safetensors")
    tensors["model.norm.weight"][2] = float("inf")
    save_file(tensors, "out/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{"model.init_from": source})
    assert leaving.value.code == 2
    weight = {"spoiled.ckpt": "layers.1.mlp.up_proj.weight", "out": "norm.weight"}[source]
    assert f"init_from {source}: the weights are NaN or infinite, such as {weight}" in error_line()


class Halves(nn.Module):
    """An MLP whose constructor sets its output layer."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 8, bias=False)
        self.out = nn.Linear(8, config.hidden_size, bias=False)
        nn.init.constant_(self.out.weight, 0.5)

    def forward(self, x):
        return self.out(self.up(x).relu())


CUSTOM = {
    "model.architecture.mlp": f"{__name__}.Halves",
    "model.schedule": "lightning_llm.optim.Constant",  # which does not depend on the number of steps
    "trainer.precision": "32-true",
}


def weights_of(cli):
    return {name: value.clone() for name, value in cli.model.transformer.state_dict().items()}


def summary_of(cli):
    return json.loads((Path(cli.trainer.log_dir) / "summary.json").read_text())


def test_what_a_constructor_sets_begins_no_resumed_and_no_loaded_run(tiny, capsys):
    whole = tiny("fit", **CUSTOM, **{"trainer.max_steps": 4})
    first = tiny("fit", **CUSTOM, **{"trainer.max_steps": 2})
    resumed = tiny("fit", f"--ckpt_path={first.trainer.log_dir}", **CUSTOM, **{"trainer.max_steps": 4})
    for name, value in weights_of(whole).items():
        assert torch.equal(value, weights_of(resumed)[name]), name
    layers = range(whole.model.architecture.num_hidden_layers)
    rules = {f"transformer.layers.{layer}.mlp.out.weight": "kept" for layer in layers}
    for cli in (whole, resumed):
        summary = summary_of(cli)
        assert {name: rule for name, rule in summary["initial_rules"].items() if ".mlp." in name} == rules
        assert summary["initial_scales"]["MLP output"][0] == 0.5
    trained = weights_of(whole)
    newest = Path(whole.trainer.log_dir) / "checkpoints" / "step-00000004.ckpt"
    frozen = {"model.init_from": str(newest), "model.optimizer.lr": 0.0, "trainer.max_steps": 1}
    loaded = tiny("fit", "--trust-code", **CUSTOM, **frozen)
    for name, value in weights_of(loaded).items():
        assert torch.equal(value, trained[name]), name
    assert summary_of(loaded)["initial_scales"]["MLP output"][0] != 0.5
    assert main(["export", whole.trainer.log_dir, "out", "--trust-code"]) == 2
    assert "Halves" in capsys.readouterr().err
