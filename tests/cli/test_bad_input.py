"""A mistake is answered in one line that names it, with exit status 2; nothing is left half written."""

import stat

import pytest
import torch
import yaml

from lightning_llm.__main__ import main

ARCHITECTURE = [
    ("vocab_size", 3, "vocab_size 3 is smaller than"),
    ("vocab_size", 0, "vocab_size must be at least 1, got 0"),
    ("hidden_size", 33, "hidden_size 33 is not divisible by num_attention_heads 2"),
    ("hidden_size", -32, "hidden_size must be at least 1, got -32"),
    ("hidden_size", "wide", "hidden_size"),
    ("hidden_size", 32.5, "hidden_size"),
    ("intermediate_size", 0, "intermediate_size must be at least 1"),
    ("num_hidden_layers", 0, "num_hidden_layers must be at least 1"),
    ("num_attention_heads", 5, "num_attention_heads 5"),
    ("num_key_value_heads", 3, "num_key_value_heads 3"),
    ("head_dim", 7, "head_dim 7 must be even"),
    ("max_position_embeddings", 8, "max_position_embeddings 8"),
    ("norm", "batchnorm", "batchnorm"),
    ("rms_norm_eps", 0, "rms_norm_eps must be above 0"),
    ("position", "sinusoids", "sinusoids"),
    ("rope_theta", -1, "rope_theta must be above 0"),
    ("mlp", "swigloo", "mlp 'swigloo' is unknown"),
    ("checkpoint_level", 7, "checkpoint_level must be one of"),
    ("checkpoint_level", [0, 1, 2], "checkpoint_level lists 3 layers"),
    ("recompute", "everything", "everything"),
    ("qk_norm", "perhaps", "qk_norm"),
    ("dropout", 1.5, "dropout must be at least 0 and below 1, got 1.5"),
    ("tie_word_embeddings", 3, "tie_word_embeddings"),
    ("initializer_range", 0, "initializer_range must be above 0"),
    ("depth", 3, "depth"),
    ("rms_norm_eps", ".inf", "rms_norm_eps must be above 0 and finite, got inf"),
    ("rope_theta", ".nan", "rope_theta must be above 0 and finite, got nan"),
    ("hidden_size", ".inf", "hidden_size"),
    ("hidden_size", 10**6, "parameters, more than 1e+13: lower hidden_size 1000000"),
    ("num_hidden_layers", 10**8, "num_hidden_layers must be at most 2000, got 100000000"),
    ("vocab_size", 10**12, "more than 1e+13: lower hidden_size 32"),
    ("vocab_size", 10**11, "the model is too large for the memory: parameters and gradients need"),
]
DATA = [
    ("context_length", 0, "context_length must be at least 1, got 0"),
    ("context_length", 10**6, "context_length 1000000"),
    ("context_length", "long", "context_length"),
    ("global_batch_size", 0, "global_batch_size must be at least 1, got 0"),
    ("global_batch_size", -8, "global_batch_size must be at least 1, got -8"),
    ("micro_batch_size", 3, "global_batch_size 8 cannot be divided by 1 device times data.micro_batch_size 3"),
    ("micro_batch_size", 0, "micro_batch_size must be at least 1"),
    ("eval_batch_size", 0, "eval_batch_size must be at least 1"),
    ("num_workers", -1, "num_workers must be at least 0"),
    ("seed", "lucky", "seed"),
    ("tokenizer", "words", "words"),
    ("tokenizer", "nowhere.json", "nowhere.json"),
    ("path", "no-such-file.txt", "no-such-file.txt"),
    ("raw_dtype", "uint16", "raw_dtype needs store"),
    ("vocab_size", 10**11, "vocab_size must be at least 1 and at most 524288, got 100000000000"),
    ("vocab_size", 0, "vocab_size must be at least 1 and at most 524288, got 0"),
    ("colour", "red", "colour"),
]
TRAINER = [
    ("precision", "3-bit", "3-bit"),
    ("precision", "16-mixed", "precision 16-mixed needs a GPU"),
    ("precision", "16-true", "precision 16-true needs a GPU"),
    ("devices", 0, "devices"),
    ("devices", "many", "devices"),
    ("accelerator", "abacus", "abacus"),
    ("strategy", "hope", "hope"),
    ("strategy", "fsdp", "write fsdp2"),
    ("strategy", "deepspeed", "deepspeed"),
    ("accelerator", "gpu", "gpu"),
    ("devices", 4096, "trainer.devices 4096: this machine has"),
    ("devices", 4096, "global_batch_size 8 cannot be divided by 4096 devices"),
    ("max_steps", "all", "max_steps"),
    ("max_steps", -7, "max_steps"),
    ("max_epochs", "two", "max_epochs"),
    ("val_check_interval", "often", "val_check_interval"),
    ("gradient_clip_val", "strong", "gradient_clip_val"),
    ("accumulate_grad_batches", 3, "trainer.accumulate_grad_batches 3 contradicts"),
    ("log_every_n_steps", "x", "log_every_n_steps"),
    ("speed", 11, "speed"),
    ("callbacks", [{"class_path": "nowhere.Callback"}], "nowhere"),
    ("default_root_dir", "/proc/nowhere", "trainer.default_root_dir"),
]
OTHER = [
    ("model.optimizer", "torch.optim.Magic", "Magic"),
    ("model.optimizer.lr", "fast", "lr"),
    ("model.schedule", "lightning_llm.optim.Zigzag", "Zigzag"),
    ("model.compile_mode", "fast", "compile_mode"),
    ("model.compile_mode", "reduce-overhead", "compile_mode"),
    ("model.loss_chunks", -1, "loss_chunks must be at least 0 or null, got -1"),
    ("seed_everything", "x", "seed_everything"),
    ("keep_freed_memory", "maybe", "keep_freed_memory"),
    ("ckpt_path", "last", "no checkpoint in"),
    ("ckpt_path", "best", "no checkpoint in"),
    ("ckpt_path", "nowhere.ckpt", "no such file"),
    ("ckpt_path", "http://localhost/x.ckpt", "is a URL"),
    ("ckpt_path", "s3://bucket/x.ckpt", "is a URL"),
    ("weights_only", False, "would run code"),
]
CASES = [
    *((f"model.architecture.{name}", value, says) for name, value, says in ARCHITECTURE),
    *((f"data.{name}", value, says) for name, value, says in DATA),
    *((f"trainer.{name}", value, says) for name, value, says in TRAINER),
    *OTHER,
    ("model.optimizer.lr", ".nan", "lr must be a number of at least 0, got nan"),
    (
        "model.schedule",
        {"class_path": "lightning_llm.optim.WarmupCosine", "init_args": {"min_lr_ratio": ".nan"}},
        "nan",
    ),
]


@pytest.mark.parametrize(("name", "value", "says"), CASES, ids=[f"{name}={value}" for name, value, _ in CASES])
def test_a_wrong_value_is_named(refused, name, value, says):
    assert says in refused("fit", **{name: value})


INTEGER_OR_NULL = "a whole number or a number or null"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("trainer.max_steps", "all", "trainer.max_steps: expected a whole number, got all ("),
        ("trainer.limit_val_batches", "x", f"trainer.limit_val_batches: expected {INTEGER_OR_NULL}, got x ("),
        ("model.optimizer.lr", "fast", "model.optimizer: lr: expected a number, got fast ("),
        ("model.architecture.qk_norm", "maybe", "qk_norm: expected true or false, got maybe ("),
        ("model.architecture.checkpoint_level", ["a"], "checkpoint_level: expected a whole number, got ['a'] ("),
        ("model.architecture", "text", "model.architecture: expected options by name, got text ("),
        ("trainer", "text", "trainer: expected options by name, got text ("),
        ("data.mixture", "text", "data.mixture: expected options by name or null, got text ("),
        ("model.optimizer.init_args", 3, "model.optimizer.init_args must have options by name, got '3'"),
        ("model.schedule.init_args", "x", "model.schedule.init_args must have options by name, got 'x'"),
        ("trainer.callbacks", 3, "trainer.callbacks: expected a list or an import path or null, got 3 ("),
        ("seed_everything", "x", "seed_everything: expected true or false or a whole number, got x ("),
    ],
)
def test_types_are_named_in_plain_words(refused, name, value, says):
    assert says in refused("check", **{name: value})


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"init_args": "text"}, "init_args must have options by name, got 'text'"),
        ({"class_path": "a.B", "init_args": [3]}, "init_args of a.B must have options by name, got [3]"),
        ({"class_path": 3}, "class_path must be an import path, got 3"),
    ],
)
def test_arguments_that_are_no_options_are_named(refused, tmp_path, part, says):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"model": {"schedule": part}}))
    assert f"error: {says} (" in refused("check", "--config", "tiny.yaml", tiny=False)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"architecture": 5}, "model.architecture must have options by name, got 5"),
        ({"architecture": [5]}, "model.architecture must have options by name, got [5]"),
        ({"optimizer": 5}, "model.optimizer: expected an import path, got 5"),
    ],
)
def test_numbers_in_place_of_options_are_named(refused, text_file, tmp_path, model, says):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"data": {"path": str(text_file)}, "model": model}))
    assert f"error: {says} (" in refused("check", "--config", "tiny.yaml", tiny=False)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"a\0b", "is binary"), (b"caf\xe9 " * 99, "is not UTF-8"), (b"short", "token")],
)
def test_bad_text_is_named(refused, tmp_path, content, says):
    (tmp_path / "bad.txt").write_bytes(content)
    assert says in refused("fit", **{"data.path": "bad.txt"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("model: [", "tiny.yaml"),
        ("just words", "tiny.yaml"),
        ("modle: {}", "modle"),
        ("model: {architecture: {hidden_sizes: 3}}", "hidden_sizes"),
        ("model: 3", "model"),
        ("trainer: {max_steps: [1]}", "max_steps"),
        ("\x00\x01", "tiny.yaml"),
    ],
)
def test_a_bad_config_is_named(refused, tmp_path, content, says):
    (tmp_path / "tiny.yaml").write_text(content)
    assert says in refused("fit", "--config", "tiny.yaml", tiny=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["fit", "--config"], "config"),
        (["fit", "--config", "."], "config"),
        (["fit", "word"], "word"),
        (["fit", "--colour=red"], "colour"),
        (["validate"], "model"),
        (["check", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["test", "--ckpt_path", "nowhere"], "no such file"),
        (["predict", "--ckpt_path", "last"], "no checkpoint in"),
    ],
)
def test_wrong_words_are_named(refused, words, says):
    assert says in refused(*words, tiny=False)


def test_a_directory_without_checkpoints_is_named(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    said = refused("fit", ckpt_path="empty")
    assert "empty holds no checkpoint: give a run directory, such as runs/quickstart/version_0" in said


def test_the_folder_above_a_run_is_answered_with_the_run(finished, tiny, error_line):
    with pytest.raises(SystemExit, match="2"):
        tiny("validate", ckpt_path="runs/run")
    assert "runs/run holds no checkpoint: give a run directory, such as runs/run/version_0" in error_line()


@pytest.mark.parametrize("content", ["empty", "text", "a tensor", "a strange archive", "no state"])
def test_what_is_no_checkpoint_is_named(refused, tmp_path, content):
    path = tmp_path / "x.ckpt"
    if content in ("empty", "text"):
        path.write_text("" if content == "empty" else "words " * 99)
    else:
        torch.save({"a tensor": torch.ones(3), "no state": {}, "a strange archive": {"loops": 3}}[content], path)
    assert "checkpoint" in refused("fit", ckpt_path="x.ckpt")


@pytest.mark.parametrize("command", ["validate", "test", "predict", "fit", "check"])
def test_a_file_of_another_kind_is_named_before_anything_is_prepared(refused, tmp_path, command):
    (tmp_path / "README.md").write_text("words " * 99)
    (tmp_path / "empty.ckpt").touch()
    torch.save({"model": {}}, tmp_path / "x.pt")
    error = refused(command, ckpt_path="README.md")
    assert "error: README.md is not a checkpoint: give one that lightning-llm fit has saved (" in error
    assert "empty.ckpt is truncated or damaged, or not a checkpoint: use an earlier one" in refused(
        command, ckpt_path="empty.ckpt"
    )
    assert "x.pt was not written by lightning-llm fit: it lacks state_dict, " in refused(command, ckpt_path="x.pt")
    assert not (tmp_path / "stores").exists()


def test_a_file_without_permission_is_named(flags, tmp_path, monkeypatch, capsys, obeying_permissions):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("words " * 999)
    (tmp_path / "text.txt").chmod(stat.S_IWUSR)
    assert main(["fit", *flags(**{"data.path": "text.txt"})]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("lightning-llm fit: error: ")
    assert "text.txt" in error
    assert "\n" not in error
    assert [path.name for path in tmp_path.iterdir() if path.name != "stores"] == ["text.txt"]


def test_a_file_where_a_folder_should_be_is_named(refused, tmp_path):
    (tmp_path / "taken").write_text("")
    assert "taken" in refused("fit", **{"trainer.default_root_dir": "taken"})
