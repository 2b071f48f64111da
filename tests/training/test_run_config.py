"""The run that configs and options describe, before anything is counted."""

import argparse
import json
from pathlib import Path

import pytest

from lightning_llm.cli.estimate import add_run_options
from lightning_llm.training.run_config import RunOptions, read_run

ARCHITECTURE = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = {"model": {"architecture": ARCHITECTURE}}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """``read(config, …, "--option", …)``: the run of these configs, in their order, and options."""
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_run_options(parser)

    def of(*words):
        arguments = []
        for number, word in enumerate(words):
            if isinstance(word, dict):
                Path(f"{number}.yaml").write_text(json.dumps(word))
                arguments += ["--config", f"{number}.yaml"]
            else:
                arguments.append(word)
        return read_run(RunOptions.of(parser.parse_args(arguments)))

    return of


def with_model(**options):
    return {"model": {"architecture": ARCHITECTURE, **options}}


def test_what_configs_leave_out_is_the_default_of_fit(read):
    run = read(CONFIG, "--precision", "32-true")
    assert (run.step.context_length, run.global_batch_size, run.micro_batch_size, run.max_steps) == (256, 32, None, 0)
    assert (run.step.world_size, run.step.strategy, run.step.device, run.device) == (1, "ddp", "cpu", None)
    assert (run.optimizer.name, run.optimizer.state_per_parameter, run.precision_reason) == ("AdamW", 2, "")
    assert read(CONFIG).precision_reason.startswith("the CPU has ")
    assert run.sizing is run.epochs is None


def test_a_later_config_overrides_single_options(read):
    later = {"model": {"architecture": {"hidden_size": 32}}, "data": {"context_length": 8}, "trainer": {"max_steps": 5}}
    run = read({**CONFIG, "data": {"context_length": 16, "global_batch_size": 4}}, later)
    assert (run.config.hidden_size, run.config.num_hidden_layers, run.config.vocab_size) == (32, 2, 200)
    assert (run.step.context_length, run.global_batch_size, run.max_steps) == (8, 4, 5)


@pytest.mark.parametrize(
    ("trainer", "words", "processes"),
    [
        ({"devices": 2, "num_nodes": 3}, [], 6),
        ({"devices": "4"}, [], 4),
        ({"devices": "auto", "num_nodes": 3}, [], 3),
        ({"devices": -1}, [], 1),
        ({"devices": 0}, [], 1),
        ({"devices": 2, "num_nodes": 3}, ["--world-size", "5"], 5),
    ],
)
def test_the_number_of_processes(read, trainer, words, processes):
    assert read({**CONFIG, "trainer": trainer}, *words).step.world_size == processes


@pytest.mark.parametrize(
    ("strategy", "words", "shared"),
    [
        ("auto", [], "ddp"),
        ("fsdp2", [], "fsdp2"),
        ("fsdp2_deferred", [], "fsdp2_deferred"),
        ({"class_path": "lightning_llm.training.ShardedStrategy", "init_args": {"defer_reduction": True}}, [], None),
        ({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}, [], "fsdp2"),
        ("fsdp2", ["--strategy", "ddp"], "ddp"),
    ],
)
def test_the_strategy_says_what_processes_share(read, strategy, words, shared):
    run = read({**CONFIG, "trainer": {"strategy": strategy}}, *words)
    assert run.step.strategy == (shared or "fsdp2_deferred")


@pytest.mark.parametrize(
    ("optimizer", "words", "state", "dtype"),
    [
        ({"class_path": "torch.optim.SGD"}, [], 0, None),
        ({"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}}, [], 1, None),
        ({"class_path": "lightning_llm.optim.AdamW", "init_args": {"state_dtype": "bfloat16"}}, [], 2, "bfloat16"),
        ("lightning_llm.optim.AdamW", ["--state-dtype", "bfloat16"], 2, "bfloat16"),
    ],
)
def test_the_state_of_an_optimizer(read, optimizer, words, state, dtype):
    run = read(with_model(optimizer=optimizer), *words, "--precision", "32-true")
    assert (run.optimizer.state_per_parameter, run.optimizer.state_dtype) == (state, dtype)
    assert run.step.state_itemsize == (None if dtype is None else 2)
    assert run.optimizer.is_own_adamw == (dtype is not None)


def test_an_optimizer_of_the_users_own_is_measured_whatever_its_name(read, tmp_path, monkeypatch):
    (tmp_path / "own_adamw.py").write_text("import torch\n\n\nclass AdamW(torch.optim.SGD):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = with_model(optimizer={"class_path": "own_adamw.AdamW", "init_args": {"lr": 0.1}})
    assert read(own, "--trust-code").optimizer.state_per_parameter == 0
    with pytest.raises(ValueError, match=r"the config names code from outside lightning_llm: own_adamw\.AdamW"):
        read(own)


def test_muon_has_one_tensor_for_its_matrices_and_two_for_the_rest(read):
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 192)  # attention and SwiGLU of two layers
    others = 200 * 64 * 2 + 5 * 64  # embedding, head and norms
    run = read(with_model(optimizer="lightning_llm.optim.MuonAdamW"), "--precision", "32-true")
    state = (matrices + 2 * others) / (matrices + others)
    assert run.config.intermediate_size == 192
    assert run.optimizer.state_per_parameter == pytest.approx(state, rel=1e-12)


def test_the_vocabulary_is_that_of_option_then_config_then_store_then_text(read, tmp_path):
    without = {"model": {"architecture": {**ARCHITECTURE, "vocab_size": None}}}
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "meta.json").write_text('{"vocab_size": 77}')
    (tmp_path / "text.txt").write_text("abcab")
    text = {"data": {"path": "text.txt", "tokenizer": "char"}}
    stored = {"data": {**text["data"], "store": "store"}}
    assert read(CONFIG, stored, "--vocab-size", "9").config.vocab_size == 9
    assert read(CONFIG, stored).config.vocab_size == 200
    assert read(without, stored).config.vocab_size == 77
    assert read(without, text).config.vocab_size == 3
    assert read(without, {"data": {"tokenizer": "bpe", "vocab_size": 300}}).config.vocab_size == 300
    assert read(without).config.vocab_size is None


def test_memory_that_stays_free(read):
    words = ("--gpu", "h100", "--precision", "bf16-mixed")
    assert read(CONFIG).reserve.fixed == 0  # on a CPU
    assert read(CONFIG, *words).reserve.fixed == 728 * 2**20
    assert read(with_model(memory_reserve="1GiB"), *words).reserve.fixed == 2**30
    assert read(with_model(memory_reserve="1GiB"), *words, "--reserve", "2GiB").reserve.fixed == 2**31


def test_a_size_sets_what_the_base_leaves_to_it(read):
    base = {"size": "25k", **with_model(), "data": {"context_length": 32, "global_batch_size": 8}}
    base["trainer"] = {"max_steps": 100}
    own = {"model": {"architecture": {"num_hidden_layers": 3}}}  # after the size: it is not replaced
    run = read(base, own)
    assert run.sizing.size == 25_000
    assert run.config.num_hidden_layers == 3
    assert "model.architecture.num_hidden_layers" not in run.sizing.options
    assert run.config.hidden_size == run.sizing.options["model.architecture.hidden_size"] < 64
    assert run.max_steps == run.sizing.options["trainer.max_steps"]
    assert run.epochs is None  # there is no store yet


@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        ({"data": {"context_length": 0}}, [], "data.context_length must be a whole number from 1 to .*, got 0"),
        (
            {"data": {"global_batch_size": 2.0}},
            [],
            "data.global_batch_size must be a whole number .*, got 2.0",
        ),
        ({"trainer": {"max_steps": -2}}, [], "trainer.max_steps must be a whole number from -1 to .*, got -2"),
        ({"data": {"document_mask": 1}}, [], "data.document_mask must be true or false, got 1"),
        ({"data": [1]}, [], r"data in the config must have options, got \[1\]"),
        ({"data": {"class_path": "my.Data"}}, [], "data.class_path my.Data is not run: add data.context_length and"),
        ({"model": {"class_path": 3}}, [], "model.class_path must be a name, got 3"),
        ({"model": {"architecture": {"width": 3}}}, [], "model.architecture.width is unknown: choose among vocab_size"),
        (with_model(optimizer="my.Other"), [], "optimizer 'my.Other' is not known: choose among AdamW, Adam"),
        (
            with_model(optimizer="torch.optim.AdamW"),
            ["--state-dtype", "bfloat16"],
            "the optimizer is AdamW: leave",
        ),
        (with_model(memory_reserve="much"), [], "model.memory_reserve 'much' is not a size"),
        (CONFIG, ["--world-size", "0"], "--world-size must be from 1 to .*, got 0"),
    ],
)
def test_a_mistake_is_named(read, config, words, says):
    with pytest.raises(ValueError, match=says):
        read(config, *words)
