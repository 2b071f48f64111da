"""``lightning-llm export`` and ``import``, and training on from what was imported."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_llm import ModelConfig, Transformer
from lightning_llm.__main__ import main
from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.reading import load_transformer, read_checkpoint
from lightning_llm.cli.train import cli_main
from lightning_llm.interop.hf_mapping import mapping_for
from lightning_llm.training.initial_weights import read_initial_weights

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {
    "model.architecture.hidden_size": 32,
    "model.architecture.num_hidden_layers": 2,
    "model.architecture.num_attention_heads": 2,
    "model.architecture.max_position_embeddings": 32,
    "data.context_length": 16,
    "data.global_batch_size": 8,
    "trainer.val_check_interval": 1,
    "trainer.log_every_n_steps": 1,
    "trainer.precision": "32-true",
    "trainer.accelerator": "cpu",
    "keep_freed_memory": False,
}


def fit(root, text_file, *words, steps=2, **changes):
    options = {**SMALL, "data.path": text_file, "trainer.max_steps": steps, "trainer.default_root_dir": root, **changes}
    return cli_main(["fit", *words, *(f"--{name}={value}" for name, value in options.items() if value is not None)])


@pytest.fixture(scope="module")
def runs(text_file, tmp_path_factory):
    """Two of the shipped Shakespeare configs, small: the run directories."""
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {
            name: Path(fit(folder, text_file, f"--config={CONFIGS / name}.yaml").trainer.log_dir)
            for name in ("shakespeare-char", "shakespeare-gpt")
        }


@pytest.fixture
def exported(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(runs["shakespeare-char"]), "--to", "hf", "out"]) == 0
    assert "(step 2) -> out, as Qwen3ForCausalLM" in capsys.readouterr().out
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["shakespeare-char", "shakespeare-gpt"])
def test_a_run_is_exported_and_loads(runs, tmp_path, name, capsys):
    assert main(["export", str(runs[name]), "--to", "hf", str(tmp_path / "out")]) == 0
    ours, content = load_transformer(runs[name] / "checkpoints" / "best.ckpt")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == content
    ids = tokenizer("Abcd efg", return_tensors="pt").input_ids
    torch.testing.assert_close(theirs(ids).logits, ours.logits(ours(ids)))
    text = tokenizer.decode(theirs.generate(ids, max_new_tokens=20, do_sample=False)[0])
    capsys.readouterr()
    words = ["--prompt", "Abcd efg", "--max-new-tokens", "20", "--temperature", "0"]
    assert main(["generate", str(runs[name]), *words]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    card = (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((runs[name] / "summary.json").read_text())
    assert f"| {summary['best_val_loss']:.6g} |" in card
    assert "tokenizer: char" in card
    assert 'tokenizer("\\n", ' in card  # a text that these characters can write
    assert "`best.ckpt`, saved at optimizer step 2" in card


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_has_a_home(config):
    model = yaml.safe_load(config.read_text()).get("model")
    if model is None:
        return  # it says only how to train
    home = mapping_for(ModelConfig(**model["architecture"], vocab_size=65))
    expected = {"shakespeare-gpt": "GPT2LMHeadModel", "shakespeare-char": "Qwen3ForCausalLM"}
    expected |= {"quickstart": "Qwen3ForCausalLM"}
    assert home.architecture == expected.get(config.stem, "LlamaForCausalLM")


def test_an_imported_model_is_exported_again_to_the_same_bytes(exported, tmp_path, capsys):
    assert main(["import", "out", "--out", "model.ckpt"]) == 0
    assert "its architecture: model.yaml" in capsys.readouterr().out
    assert main(["export", "model.ckpt", "again", "--to", "hf"]) == 0
    for file in exported.iterdir():
        if file.name != "README.md":
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    assert "was not in a run directory" in (tmp_path / "again" / "README.md").read_text()


def test_an_imported_checkpoint_generates_and_validates(exported, runs, text_file, tmp_path, capsys):
    assert main(["import", "out", "--out", "model.ckpt"]) == 0
    words = ["--prompt", "Abc", "--seed", "3", "--max-new-tokens", "20"]
    texts = []
    for checkpoint in ("model.ckpt", str(runs["shakespeare-char"])):
        capsys.readouterr()
        assert main(["generate", checkpoint, *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    data = ["--data.path", str(text_file), "--data.tokenizer=char", "--data.context_length=16"]
    options = ["--ckpt_path=model.ckpt", "--trainer.precision=32-true", "--keep_freed_memory=false"]
    cli = cli_main(["validate", "--config", "model.yaml", *options, *data])
    loss = json.loads((runs["shakespeare-char"] / "summary.json").read_text())["best_val_loss"]
    assert float(cli.trainer.callback_metrics["val_loss"]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("source", ["out", "model.ckpt", "run"])
def test_training_begins_with_the_given_weights(exported, runs, text_file, tmp_path, source):
    assert main(["import", "out", "--out", "model.ckpt"]) == 0
    given = str(runs["shakespeare-char"]) if source == "run" else source
    assert main(["prepare", str(text_file), "--tokenizer", "out/tokenizer.json", "--out", "store"]) == 0
    data = {"data.path": None, "data.store": "store", "model.init_from": given, "model.optimizer.init_args.lr": 0.0}
    cli = fit(tmp_path, text_file, "--config=model.yaml", steps=1, **data)
    before, _ = load_transformer(tmp_path / "model.ckpt")
    for name, tensor in cli.model.transformer.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name])
    assert cli.trainer.global_step == 1
    run = Path(cli.trainer.log_dir)
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_from"] == given
    if source == "model.ckpt":  # a resumed run needs it no more
        Path("model.ckpt").unlink()
        again = fit(tmp_path, text_file, "--config=model.yaml", "--ckpt_path=last", steps=2, **data)
        assert again.trainer.global_step == 2


def test_a_model_with_rows_for_no_token_begins_with_weights_without_them(exported):
    initial = read_initial_weights("out")
    model = Transformer(dataclasses.replace(initial.config, vocab_multiple_of=64), seed=1)
    assert not initial.fault(model.config, None)
    initial.fill(model)
    expected = Transformer(initial.config)
    initial.fill(expected)
    ids = torch.arange(10)[None]
    assert torch.equal(model.logits(model(ids)), expected.logits(expected(ids)))
    assert not model.lm_head.weight[initial.config.vocab_size :].any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.architecture.rms_norm_eps": 0.1}, "rms_norm_eps is 1e-05 there and 0.1 here"),
        ({"model.architecture.tie_word_embeddings": True}, "tie_word_embeddings is False there and True here"),
        ({"data.tokenizer": "byte", "model.architecture.vocab_size": 256}, "its tokenizer is not that of the data"),
        ({"model.init_from": "nowhere"}, "init_from nowhere: checkpoint nowhere does not exist"),
        ({"model.init_from": "."}, "init_from .: it holds neither config.json nor checkpoints"),
    ],
)
def test_weights_of_another_model_are_refused(exported, runs, text_file, tmp_path, error_line, changes, says):
    options = {"model.init_from": "out", **changes}
    with pytest.raises(SystemExit) as leaving:
        fit(tmp_path / "runs", text_file, f"--config={CONFIGS / 'shakespeare-char.yaml'}", **options)
    assert leaving.value.code == 2
    assert says in error_line()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "nowhere", "--to", "hf", "x"], "nowhere"),
        (["export", "RUN", "--to", "hf", "out"], "out is not empty"),
        (["export", "RUN", "--to", "gguf", "x"], "invalid choice: 'gguf'"),
        (["export", "RUN", "x", "--max-shard-size", "5Gig"], "'5Gig' is not a size"),
        (["export", "RUN", "x", "--max-shard-size", "0"], "must hold at least a byte"),
        (["import", "nowhere", "--out", "x.ckpt"], "nowhere is not a folder"),
        (["import", "out", "--out", "there.ckpt"], "there.ckpt exists"),
        (["import", "out", "--out", "x.yaml"], "a checkpoint is not YAML"),
        (["import", "out"], "--out"),
    ],
)
def test_a_users_mistake_is_one_line(exported, runs, tmp_path, capsys, words, says):
    (tmp_path / "there.ckpt").touch()
    assert main([str(runs["shakespeare-char"]) if word == "RUN" else word for word in words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "x.ckpt").exists()


def test_such_mistakes_are_found_before_there_is_a_run(exported, text_file, tmp_path, error_line):
    options = {"model.init_from": "out", "model.architecture.head_dim": 8}
    config = f"--config={CONFIGS / 'shakespeare-char.yaml'}"
    with pytest.raises(SystemExit):
        fit(tmp_path / "runs", text_file, config, **options)
    assert "head_dim is 16 there and 8 here" in error_line()
    assert not list((tmp_path / "runs").rglob("config.yaml"))


@pytest.fixture
def spoiled(exported, runs, tmp_path):
    """A checkpoint and an exported folder with a NaN and an infinite weight."""
    content = read_checkpoint(runs["shakespeare-char"] / "checkpoints" / "best.ckpt")
    content["state_dict"]["transformer.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    write_atomically(content, tmp_path / "spoiled.ckpt")
    file = exported / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][2] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    return {"spoiled.ckpt": "layers.1.mlp.up_proj.weight", "out": "norm.weight"}


def test_an_import_follows_no_link_and_quotes_its_names(exported, tmp_path, capsys):
    os.symlink("precious", "o.yaml")
    assert main(["import", "out", "--out", "o.ckpt"]) == 2
    assert "o.yaml exists: give another --out" in capsys.readouterr().err
    assert not os.path.lexists("precious")
    assert not os.path.exists("o.ckpt")
    os.rename("out", "$(touch PWNED) b")
    assert main(["import", "$(touch PWNED) b", "--out", "a b.ckpt"]) == 0
    said = capsys.readouterr().out
    assert "prepare TEXT --tokenizer '$(touch PWNED) b/tokenizer.json' --out STORE" in said
    assert "fit --config 'a b.yaml' --model.init_from 'a b.ckpt' --data.store STORE" in said


@pytest.mark.parametrize("source", ["spoiled.ckpt", "out"])
@pytest.mark.parametrize("command", ["generate", "evaluate", "export", "import"])
def test_weights_that_are_nan_or_infinite_are_refused_in_one_line(spoiled, text_file, capsys, command, source):
    if (command, source) in (("export", "out"), ("import", "spoiled.ckpt")):
        return  # not what that command takes
    words = {"evaluate": ["--data", str(text_file)], "export": ["exported"], "import": ["--out", "imported.ckpt"]}
    assert main([command, source, *words.get(command, [])]) == 2
    error = capsys.readouterr().err.strip()
    assert f"{source}: the weights are NaN or infinite, such as {spoiled[source]}" in error
    assert len(error.splitlines()) == 1
    assert not Path("exported").exists()
    assert not Path("imported.ckpt").exists()


@pytest.mark.parametrize("source", ["spoiled.ckpt", "out"])
def test_training_does_not_begin_with_such_weights(spoiled, text_file, tmp_path, error_line, source):
    config = f"--config={CONFIGS / 'shakespeare-char.yaml'}"
    with pytest.raises(SystemExit) as leaving:
        fit(tmp_path / "runs", text_file, config, **{"model.init_from": source})
    assert leaving.value.code == 2
    assert f"init_from {source}: the weights are NaN or infinite, such as {spoiled[source]}" in error_line()
