"""An option without a value: null, where its type does not accept it, is one line that names the option."""

import json
from functools import reduce

import pytest
from jsonargparse import ArgumentError

from lightning_llm.__main__ import main
from lightning_llm.cli import parsing
from lightning_llm.cli.parser_words import in_plain_words
from lightning_llm.io.config_file import merged
from tests.cli.test_parsing import nested

TAKE_NULL = """
trainer.precision trainer.run_dir trainer.logger trainer.callbacks trainer.plugins trainer.val_check_interval
trainer.enable_progress_bar trainer.tf32 trainer.max_epochs trainer.min_epochs trainer.min_steps trainer.max_time
trainer.limit_train_batches trainer.limit_val_batches trainer.limit_test_batches trainer.limit_predict_batches
trainer.check_val_every_n_epoch trainer.log_every_n_steps trainer.enable_checkpointing trainer.gradient_clip_val
trainer.gradient_clip_algorithm trainer.deterministic trainer.benchmark trainer.profiler trainer.model_registry
model.architecture.vocab_size model.architecture.intermediate_size model.architecture.num_key_value_heads
model.architecture.head_dim model.architecture.rope_scaling model.architecture.layers model.architecture.mup
model.schedule model.loss_chunks model.memory_budget model.init_from model.compile_mode model.memory_reserve
model.groups data.corpus data.path data.store data.micro_batch_size data.eval_batch_size data.raw_dtype
data.eval_context_length
data.predict_prompts data.mixture ckpt_path weights_only
"""
OPTIONAL = TAKE_NULL.split()


@pytest.fixture
def parser(tiny, monkeypatch):
    """The parser of ``check``."""
    parsers, parse = [], parsing.parse
    monkeypatch.setattr(parsing, "parse", lambda parser, words: parsers.append(parser) or parse(parser, words))
    tiny("check")
    monkeypatch.undo()
    return parsers[0]


def test_each_option_takes_null_or_is_named(parser, tmp_path):
    file = tmp_path / "null.yaml"
    words = ["check", f"--config={file}"]
    options = parsing.parse(parser, ["check"]).check.keys()
    names = {name.removesuffix(".class_path") for name in options if ".init_args" not in name} - {"config"}
    assert {*OPTIONAL} < names
    file.write_text(json.dumps(reduce(merged, (nested(name, None) for name in OPTIONAL))))
    parsed = parsing.parse(parser, words).check
    assert [name for name in OPTIONAL if parsed[name] is not None] == []
    for name in sorted(names - {*OPTIONAL}):
        file.write_text(json.dumps(nested(name, None)))
        with pytest.raises(ArgumentError) as refused:
            parsing.parse(parser, words)
        line = in_plain_words(str(refused.value))
        assert line.startswith(f"{name}: expected ")
        assert line.endswith(", got null")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model", "model must have options by name"),
        ("model.architecture", "model.architecture must have options by name"),
        ("model.architecture.mlp", "model.architecture.mlp: expected text or options by name, got null"),
        ("model.optimizer", "model.optimizer: expected an import path, got null"),
        ("model.optimizer.init_args", "model.optimizer: init_args: expected options by name, got null"),
        ("model.optimizer.init_args.lr", "model.optimizer: lr: expected a number, got null"),
        ("data.seed", "data.seed: expected a whole number, got null"),
        ("trainer.max_steps", "trainer.max_steps: expected a whole number, got null"),
        ("trainer.overfit_batches", "trainer.overfit_batches: expected a whole number or a number, got null"),
    ],
)
def test_null_is_one_line(flags, tmp_path, monkeypatch, error_line, name, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "null.yaml").write_text(json.dumps(nested(name, None)))
    words = [word for word in flags() if not word.startswith(f"--{name}")]
    optimizer = "--model.optimizer=lightning_llm.optim.AdamW"
    if name.startswith("model.optimizer."):
        (tmp_path / "first.yaml").write_text(json.dumps(nested("model.optimizer.class_path", optimizer[18:])))
        words.append("--config=first.yaml")
    assert main(["fit", *words, "--config=null.yaml"]) == 2
    assert f"error: {says}" in error_line().replace("config null.yaml: ", "")
