"""Custom parts that ignore positions or see later tokens are named."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_llm import ModelConfig
from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.initial_scales import one_of_each_kind
from lightning_llm.model.token_order import token_order_lines
from tests.model.made import with_arguments

HERE = "tests.model.test_token_order"
SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
EXAMPLES = Path(__file__).parents[2] / "examples" / "parts"


class Mean(nn.Module):
    """Of the values of all tokens so far, or of all tokens; its output starts at zero."""

    def __init__(self, config, looks_ahead=False, fails=False):
        super().__init__()
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.looks_ahead, self.fails = looks_ahead, fails
        nn.init.zeros_(self.value.weight)

    def forward(self, x, context):
        if self.fails and x.shape[1] < 9:
            raise ValueError("too few tokens")
        values = self.value(x)
        if self.looks_ahead:
            return values.mean(1, keepdim=True).expand_as(values)
        return values.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Rotated(CausalSelfAttention):
    """The usual one."""


class Shifted(nn.Module):
    """An MLP that adds the next token."""

    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * x.roll(-1, 1)


def lines(**options):
    config = ModelConfig(**SIZES, **options)
    return token_order_lines(one_of_each_kind(config, 0), config)


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_attention_that_ignores_positions_is_named(position):
    (line,) = lines(attention=f"{HERE}.Mean", position=position)
    assert line == (
        f"layers.0.self_attn: attention {HERE}.Mean does not use position {position} (two tokens give the same output "
        "at any distance): if it has positions of its own, set position: none; otherwise it cannot tell the order of "
        "tokens"
    )


@pytest.mark.parametrize("position", ["none", "learned"])
def test_positions_that_do_not_act_inside_attention_are_not_missed(position):
    assert lines(attention=f"{HERE}.Mean", position=position) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "gated_delta_net", "position": "none"},
        {"attention": f"{HERE}.Rotated"},
        {"attention": f"{HERE}.Rotated", "position": "alibi"},
        {"attention": with_arguments(f"{HERE}.Mean", fails=True)},
    ],
    ids=["usual", "built in", "rotated", "with biases", "too few tokens"],
)
def test_what_is_right_or_not_known_is_not_named(options):
    assert lines(**options) == []


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"attention": with_arguments(f"{HERE}.Mean", looks_ahead=True), "position": "none"}, f"attention {HERE}.Mean"),
        ({"mlp": f"{HERE}.Shifted"}, f"mlp {HERE}.Shifted"),
    ],
)
def test_a_part_that_sees_later_tokens_is_named(options, names):
    (line,) = lines(**options)
    assert (
        line == f"layers.0: with {names}, outputs change with later tokens: the model would see what it is to predict"
    )


def test_each_kind_of_layer_is_looked_at():
    layers = [{}, {"attention": f"{HERE}.Mean"}]
    (line,) = lines(layers=layers)
    assert line.startswith("layers.1.self_attn: attention")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("option", "is_causal"), [("gate_values", True), ("inverted_attention", False)])
def test_the_example_of_another_package_sees_positions_and_only_what_came_before(monkeypatch, option, is_causal):
    monkeypatch.syspath_prepend(EXAMPLES)
    found = lines(attention=with_arguments("x_heads.Heads", **{option: True}), position="none")
    assert (found == []) == is_causal
    near_and_far = lines(attention=with_arguments("x_heads.Heads", **{option: True}))  # it rotates by itself
    assert not any("does not use position" in line for line in near_and_far)
    sys.modules.pop("x_heads")
