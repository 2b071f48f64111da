"""The sizing: sizes are reached, its rules hold, and what the user gives wins."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from lightning_llm.accounting import sizing as module
from lightning_llm.accounting import step_flops
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.accounting.sizing import (
    given_options,
    parse_size,
    request_in,
    size_name,
    sizing_for,
    with_options,
)
from lightning_llm.io.config_file import config_path, read_config
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer

SIZES = [round(25_000 * 2000 ** (step / 23)) for step in range(24)]  # 25k to 50M
CONFIGS = ("quickstart", "shakespeare-char", "shakespeare-char-gpu", "shakespeare-gpt", "llama-125m")
BASE = {
    "model": {
        "architecture": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 70},
        "optimizer": {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.004, "weight_decay": 0.2}},
        "schedule": {"class_path": "lightning_llm.optim.WarmupLinear", "init_args": {"warmup_steps": 20}},
    },
    "data": {"context_length": 128, "global_batch_size": 16},
    "trainer": {"max_steps": 250, "val_check_interval": 125},
}
ARCHITECTURE, LR, DECAY = "model.architecture.", module.LR, module.DECAY


def shipped(name):
    return read_config(Path(config_path(name)))


def config_of(base, found, **fields):
    architecture = with_options(base, found.options)["model"]["architecture"]
    return ModelConfig(**{"vocab_size": 70, **architecture, **fields})


def counted(config):
    """Of the model itself, without embeddings and head."""
    with torch.device("meta"):
        model = Transformer(config)
    names = {name: p.numel() for name, p in model.named_parameters() if not name.startswith(("embed_", "lm_head"))}
    return sum(names.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_size_is_within_a_tenth_and_counted_as_the_model_has_it(name):
    base = shipped(name)
    for size in SIZES:
        found = sizing_for(base, size)
        assert abs(found.parameters / size - 1) <= 0.1, size
        config = config_of(base, found)
        assert config.head_dim in (16, 32, 64)
        assert config.head_dim * config.num_attention_heads == config.hidden_size
        assert found.parameters == counted(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"mlp": "relu2"},
        {"mlp": "swiglu", "tie_word_embeddings": True, "lm_head_bias": True},
        {"mlp": "gelu", "mlp_bias": True, "attention_bias": True, "norm": "layernorm", "position": "learned"},
        {"block": "sandwich", "qk_norm": True},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
    ],
)
def test_the_size_is_reached_with_the_parts_of_the_base(fields):
    base = with_options(BASE, {f"{ARCHITECTURE}{name}": value for name, value in fields.items()})
    for size in SIZES[::4]:
        found = sizing_for(base, size)
        assert abs(found.parameters / size - 1) <= 0.1
        assert found.parameters == counted(config_of(base, found))
    if "num_key_value_heads" in fields:
        config = config_of(base, sizing_for(base, 50_000_000))
        assert 1 <= config.num_key_value_heads <= config.num_attention_heads // 4


def test_width_and_depth_grow_together():
    shapes = [config_of(BASE, sizing_for(BASE, size)) for size in SIZES]
    aspects = [config.hidden_size / config.num_hidden_layers for config in shapes]
    assert all(abs(math.log2(aspect / 32)) <= 1 for aspect in aspects)
    assert all(25 <= aspect <= 40 for aspect in aspects[12:])  # wider models leave more choice
    assert all(1 <= config.intermediate_size / config.hidden_size <= 5 for config in shapes)
    assert all(first.hidden_size <= second.hidden_size for first, second in itertools.pairwise(shapes))


def test_parts_without_a_formula_are_measured_or_refused():
    base = with_options(BASE, {f"{ARCHITECTURE}mlp": f"{Path(__file__).stem}.Nothing"})
    with pytest.raises(ValueError, match="can only be measured"):
        sizing_for(base, 100_000)
    base = with_options(
        BASE, {f"{ARCHITECTURE}mlp": {"class_path": "mixture_of_experts", "init_args": {"num_experts": 4, "top_k": 1}}}
    )
    found = sizing_for(base, 400_000, measure=lambda config: measure_parts(config, "32-true", 16))
    assert abs(found.parameters / 400_000 - 1) <= 0.1
    assert found.parameters == counted(config_of(base, found))


@pytest.mark.parametrize("kind", ["AdamW", "MuonAdamW"])
def test_batch_rates_decay_and_shares_follow_the_table(kind):
    base = with_options(BASE, {"model.optimizer.class_path": f"lightning_llm.optim.{kind}"})
    base["model"]["optimizer"]["init_args"] = {"lr": 0.004, "weight_decay": 0.2}
    old_tokens = 250 * 16 * 128
    for size in SIZES[::3]:
        found = sizing_for(base, size)
        options, config = found.options, config_of(base, found)
        batch, steps = options["data.global_batch_size"], options["trainer.max_steps"]
        assert batch == max(1, round(16 * (10 * size / old_tokens) ** 0.38))
        assert abs(batch * steps * 128 - 10 * size) <= batch * 64
        of_width, of_batch = {"AdamW": (1, 0.5), "MuonAdamW": (0.5, 0)}[kind]
        width = (128 / config.hidden_size) ** of_width
        lr = 0.004 * width * (4 / config.num_hidden_layers) ** 0.5 * (batch / 16) ** of_batch
        assert options[LR] == pytest.approx(lr, rel=1e-3)
        assert options[LR] * options[DECAY] * steps == pytest.approx(0.004 * 0.2 * 250, rel=1e-3)
        assert options["model.schedule.init_args.warmup_steps"] == max(1, round(20 * steps / 250))
        assert options["trainer.val_check_interval"] == max(1, round(125 * steps / 250))
        assert options["data.eval_batch_size"] == 16


def test_mup_leaves_the_width_to_the_model():
    base = with_options(BASE, {f"{ARCHITECTURE}mup": {"base_width": 128, "base_head_dim": 64}})
    config, found = config_of(base, sizing_for(base, 50_000_000)), sizing_for(base, 50_000_000)
    factor = (4 / config.num_hidden_layers * found.options["data.global_batch_size"] / 16) ** 0.5
    assert found.options[LR] == pytest.approx(0.004 * factor, rel=1e-3)


def test_the_batch_is_a_multiple_of_what_a_step_allows():
    base = with_options(BASE, {"data.micro_batch_size": 4, "trainer.devices": 3})
    assert {sizing_for(base, size).options["data.global_batch_size"] % 12 for size in SIZES} == {0}


def test_the_same_number_gives_the_same_options_and_counts_its_flops():
    found = sizing_for(BASE, 100_000, 20.0)
    assert found == sizing_for(BASE, 100_000, 20.0)
    config = config_of(BASE, found)
    assert found.tokens == found.options["data.global_batch_size"] * found.options["trainer.max_steps"] * 128
    assert found.flops == step_flops(config, tokens=found.tokens, context_length=128).model
    assert abs(found.tokens / 2_000_000 - 1) < 0.01
    without = with_options(BASE, {f"{ARCHITECTURE}vocab_size": None})
    assert sizing_for(without, 100_000, 20.0).options == found.options
    assert sizing_for(without, 100_000, 20.0).flops is None


def test_what_the_user_gives_wins_and_the_size_is_reached_around_it():
    given = {f"{ARCHITECTURE}hidden_size": 96, f"{ARCHITECTURE}mlp": "relu", LR: 0.5, "trainer.max_steps": 40}
    found = sizing_for(BASE, 400_000, given=given)
    assert not given.keys() & found.options.keys()
    config = config_of(with_options(BASE, given), found)
    assert (config.hidden_size, config.mlp) == (96, "relu")
    assert found.parameters == counted(config)
    assert abs(found.parameters / 400_000 - 1) <= 0.1
    assert 0.5 * found.options[DECAY] * 40 == pytest.approx(0.004 * 0.2 * 250, rel=1e-3)
    assert found.options["data.global_batch_size"] == sizing_for(BASE, 400_000).options["data.global_batch_size"]
    assert found.tokens == 40 * 128 * found.options["data.global_batch_size"]
    with pytest.raises(ValueError, match="the nearest are"):
        sizing_for(BASE, 400_000, given={f"{ARCHITECTURE}intermediate_size": 8, f"{ARCHITECTURE}hidden_size": 16})


def test_given_options_are_found_with_and_without_init_args():
    options = with_options(BASE, {f"{ARCHITECTURE}mlp": {"class_path": "relu"}})
    names = [f"{ARCHITECTURE}mlp.class_path", "model.optimizer.lr", "data"]
    assert given_options(options, names) == {
        f"{ARCHITECTURE}mlp": {"class_path": "relu"},
        LR: 0.004,
        "data": BASE["data"],
    }
    section = {
        "model.optimizer": options["model"]["optimizer"],
        "model.optimizer.class_path": "lightning_llm.optim.AdamW",
    }
    assert given_options(options, ["model.optimizer.class_path"]) == section


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"trainer.max_steps": None}, "needs trainer.max_steps, got None"),
        ({"data.context_length": "x"}, "needs data.context_length, got 'x'"),
        ({"trainer.max_epochs": 3}, "leave trainer.max_epochs out"),
        ({"model.optimizer.class_path": "torch.optim.SGD"}, "learning rate of 'torch.optim.SGD' scales: use one of"),
        (
            {"model.schedule": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}},
            "StepLR",
        ),
        ({f"{ARCHITECTURE}partial_rotary_factor": 0.1}, "cannot be made: partial_rotary_factor"),
    ],
)
def test_a_base_that_lacks_what_a_rule_needs_is_refused(changed, problem):
    with pytest.raises(ValueError, match=problem):
        sizing_for(with_options(BASE, changed), 100_000)


def test_a_size_that_cannot_be_made_names_the_nearest_two():
    with pytest.raises(
        ValueError, match=r"size 10 cannot be made from this base: the nearest are (\d+) and (\d+)"
    ) as error:
        sizing_for(BASE, 10)
    nearest = [parse_size(word) for word in str(error.value).split() if word.isdigit() and word != "10"]
    assert [sizing_for(BASE, size).parameters for size in nearest] == nearest
    assert nearest[0] == 1456
    with pytest.raises(ValueError, match="the nearest are 1456 and"):
        sizing_for(BASE, 1300)  # 13% below it
    assert sizing_for(BASE, 1400).parameters == 1456


@pytest.mark.parametrize(("text", "size"), [("100k", 100_000), ("1.5M", 1_500_000), ("2B", 2 * 10**9), (1448, 1448)])
def test_sizes_are_read_and_written(text, size):
    assert parse_size(text) == size
    assert size_name(size) == str(text)


@pytest.mark.parametrize(
    "text", ["", "k", "0", "-1", "100K", "1e6", "0.5", "nan", True, None, [], "9" * 40, "1.00001k"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"such as 100k or 1\.5M"):
        parse_size(text)


def test_more_than_four_epochs_are_refused_with_the_largest_size_that_fits():
    found = sizing_for(BASE, 100_000)
    assert found.epoch_problem(250_000) == ""
    assert "4.0 times" not in found.epoch_problem(200_000)
    assert "5.0 times, more than 4: the largest size that fits is 80k; --repeat" in found.epoch_problem(200_000)
    assert sizing_for(BASE, 80_000).epoch_problem(200_000) == ""
    assert "fits is 12k;" in found.epoch_problem(31_234)
    assert sizing_for(BASE, 100_000, given={"trainer.max_steps": 9}).epoch_problem(100) == ""  # the user's own length


def test_the_last_config_with_a_size_ends_the_base():
    contents = [{"size": "25k", "tokens_per_parameter": 3}, {"size": "50k"}, {"repeat": True}]
    assert request_in(contents, {}) == (50_000, 3, True, 2)
    assert request_in(contents, {"size": "1M"}) == (1_000_000, 3, True, 3)
    assert request_in(contents, {"repeat": True, "tokens_per_parameter": 4}) == (50_000, 4, True, 2)
    assert request_in([*contents, {"size": None, "tokens_per_parameter": None, "repeat": None}], {}) is None
    assert request_in([{}], {"size": 5000}) == (5000, 10.0, False, 1)
    for typed, problem in (({"repeat": True}, "repeat needs size"), ({"tokens_per_parameter": 2}, "needs size")):
        with pytest.raises(ValueError, match=problem):
            request_in([{}], typed)
    for ratio in (0, -1, math.inf, math.nan, "x", True):
        with pytest.raises(ValueError, match="a number above 0"):
            request_in([], {"size": "1M", "tokens_per_parameter": ratio})


def test_the_page_has_every_source_of_the_table():
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    sources = {word.strip(",.;:()") for word in module.__doc__.split() if word.startswith("arXiv:")}
    assert len(sources) == 9
    assert not [source for source in sources if f"arxiv.org/abs/{source.removeprefix('arXiv:')}" not in page]
