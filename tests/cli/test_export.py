"""``lightning-llm export`` and ``import``, and training on from what was imported."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_llm import ModelConfig
from lightning_llm.__main__ import main
from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.reading import load_transformer, read_checkpoint
from lightning_llm.cli import training_output
from lightning_llm.cli.train import cli_main
from lightning_llm.data import tokenizer_json, tokenizers
from lightning_llm.interop.hf_mapping import mapping_for
from lightning_llm.training import initial_weights
from lightning_llm.training.callbacks import samples

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
    assert main(["export", str(runs["shakespeare-char"]), "out"]) == 0
    assert "(step 2) -> out, as Qwen3ForCausalLM" in capsys.readouterr().out
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["shakespeare-char", "shakespeare-gpt"])
def test_a_run_is_exported_and_loads(runs, tmp_path, name, capsys):
    assert main(["export", str(runs[name]), str(tmp_path / "out")]) == 0
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
    assert f"| loss on training text at the end (nats per token) | {summary['train_loss_eval']:.6g} |" in card
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
    assert main(["export", "model.ckpt", "again"]) == 0
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "nowhere", "x"], "nowhere"),
        (["export", "RUN", "out"], "out is not empty"),
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


STORE = {"data.store": "store", "data.tokenizer": "out/tokenizer.json"}


@pytest.mark.parametrize("command", ["generate", "export", "import", "fit"])
def test_a_command_checks_its_tokenizer_once(runs, exported, text_file, monkeypatch, command):
    run, config = str(runs["shakespeare-char"]), f"--config={CONFIGS / 'shakespeare-char'}.yaml"
    actions = {
        "generate": lambda: main(["generate", run, "--prompt", "Abcd", "--max-new-tokens", "1"]),
        "export": lambda: main(["export", run, "again"]),
        "import": lambda: main(["import", "out", "--out", "made.ckpt"]),
        "fit": lambda: fit(".", text_file, config, "--model.init_from=out", **STORE),
    }
    assert main(["prepare", str(text_file), "--tokenizer", STORE["data.tokenizer"], "--out", "store"]) == 0
    checked, check = [], tokenizer_json.read_content
    monkeypatch.setattr(tokenizer_json, "read_content", lambda text: checked.append(text) or check(text))
    monkeypatch.setattr(initial_weights, "_ids", pytest.fail)  # equal texts need no parsing
    tokenizers._of_content.cache_clear()
    actions[command]()
    assert len(checked) == 1


# ---- what is before each text


@pytest.fixture
def begun(text_file, tmp_path, monkeypatch, capsys):
    """A run on a store whose tokenizer puts <s> before each text, and the tokenizer."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizers.Tokenizer.train_bpe([Path(text_file).read_text()], 280, ["<s>"]).with_boundaries("<s>")
    Path("tokenizer.json").write_text(tokenizer.to_str())
    words = ["--tokenizer", "tokenizer.json", "--out", "store"]
    assert main(["prepare", str(text_file), *words]) == 0
    assert "documents begin with '<s>' (1)" in capsys.readouterr().out
    sample = {
        "class_path": "lightning_llm.training.callbacks.SampleText",
        "init_args": {"every_n_steps": 1, "prompt": "a"},
    }
    Path("sample.json").write_text(json.dumps({"trainer": {"callbacks": [sample]}}))
    changes = {"data.store": "store", "data.path": None}
    cli = fit(tmp_path, text_file, "--config=sample.json", **changes)
    return Path(cli.trainer.log_dir), tokenizer


def test_each_prompt_of_a_run_begins_as_its_texts(begun, text_file, tmp_path, monkeypatch):
    """Those of samples, of the report at the end, and of predict."""
    _, tokenizer = begun
    prompts = []

    def spy(module):
        generate = module.generate
        monkeypatch.setattr(
            module, "generate", lambda model, ids, **all: prompts.append(ids) or generate(model, ids, **all)
        )

    spy(samples)
    spy(training_output)
    changes = {"data.store": "store", "data.path": None}
    data = fit(tmp_path, text_file, "--config=sample.json", **changes).datamodule
    assert [ids[0].tolist() for ids in prompts] == [tokenizer.encode_prompt(text) for text in ("a", "a", "\n")]
    data.predict_prompts = ["a b"]
    (batch,) = data.predict_dataloader()
    assert batch["input_ids"].tolist() == [tokenizer.encode_prompt("a b")]


def test_a_run_writes_and_exports_as_it_was_trained(begun, text_file, capsys):
    run, tokenizer = begun
    assert main(["predict", "--ckpt_path", str(run), '--data.predict_prompts=["a b"]']) == 0
    (line,) = capsys.readouterr().out.splitlines()[-1:]
    assert json.loads(line)["text"].startswith("a b")
    assert main(["export", str(run), "out"]) == 0
    assert AutoTokenizer.from_pretrained("out")("a b").input_ids == tokenizer.encode_prompt("a b")
    theirs = AutoModelForCausalLM.from_pretrained("out")
    prompt = torch.tensor([tokenizer.encode_prompt("a b")])
    ids = theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist()
    capsys.readouterr()
    for model in ("out", str(run)):
        options = ["--prompt", "a b", "--max-new-tokens", "8", "--temperature", "0"]
        assert main(["generate", model, *options]) == 0
        assert capsys.readouterr().out.removesuffix("\n") == tokenizer.decode(ids[1:])
    assert main(["import", "out", "--out", "x.ckpt"]) == 0
    assert "note: each text begins with '<s>' (1)" in capsys.readouterr().out
    assert load_transformer("x.ckpt")[1] == tokenizer.to_str()


def test_a_checkpoint_of_an_earlier_version_was_trained_without(begun):
    run, tokenizer = begun
    content = read_checkpoint(run / "checkpoints" / "best.ckpt")
    del content["lightning_llm"]["boundaries"]
    write_atomically(content, Path("old.ckpt"))
    found = tokenizers.Tokenizer(load_transformer("old.ckpt")[1])
    assert found.begin_of_text is None
    assert found.encode("a b") == tokenizer.encode("a b")


def test_other_beginnings_than_those_of_the_weights_are_told(begun, text_file, tmp_path, capsys):
    run, _ = begun
    words = ["--tokenizer", "tokenizer.json", "--begin-of-text", "none", "--out", "other"]
    assert main(["prepare", str(text_file), *words]) == 0
    for store, says in (("other", True), ("store", False)):
        capsys.readouterr()
        fit(tmp_path, text_file, **{"data.store": store, "data.path": None, "model.init_from": run})
        told = "texts began with <s> in its training, and begin with no token in the data" in capsys.readouterr().err
        assert told == says
