"""Arguments of parts that refer to the config, and objects among them."""

import pytest
import torch
from torch import nn

from lightning_llm import ModelConfig
from lightning_llm.io.trust import refuse_custom
from lightning_llm.model.build import build
from lightning_llm.model.config import config_of_file
from lightning_llm.model.references import filled
from lightning_llm.model.transformer import Transformer
from tests.model.made import with_arguments
from tests.model.test_parts import LLAMA_MLP

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MINE = "tests.model.test_references.Own"


class Own(nn.Module):
    """Keeps what it gets."""

    def __init__(self, width, act=None, numbers=(), layer=None, eps=None, whole=None):
        super().__init__()
        if width == 13:
            raise ValueError("width 13 is unlucky")
        self.given = {"width": width, "act": act, "numbers": numbers, "layer": layer, "eps": eps, "whole": whole}
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale


def own(kind="mlp", layer=1, size=None, **arguments):
    config = ModelConfig(**SIZES, **{kind: with_arguments(MINE, **arguments)})
    return build(kind, config, seed=0, path=f"layers.{layer}.{kind}", layer=layer, size=size).given, config


def test_references_are_replaced_and_objects_are_made():
    act = {"class_path": "torch.nn.Softplus", "init_args": {"beta": "${num_attention_heads}"}}
    given, config = own(width="${hidden_size}", act=act, numbers=[1, "${layer}"], whole="${config}")
    assert own(width="${mlp_ratio}")[0]["width"] == 1.5
    assert (given["width"], given["numbers"], given["layer"]) == (32, [1, 1], None)
    assert (given["act"].beta, given["whole"]) == (2, config)
    norm, _ = own("norm", size=7, width="${size}", eps="${eps}", numbers=["x ${size}"])
    assert (norm["width"], norm["eps"], norm["numbers"]) == (7, config.rms_norm_eps, ["x ${size}"])
    assert filled({"a": ({"b": "${c}"},)}, {"c": 1}, None) == {"a": [{"b": 1}]}


def test_without_a_reference_the_config_comes_first():
    given, config = own(act={"class_path": "torch.nn.SiLU"})
    assert given["width"] == config
    assert isinstance(given["act"], nn.SiLU)
    assert given["layer"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"width": "${hidden_sise}"},
            r"mlp\.init_args refers to '\$\{hidden_sise\}', which does not exist; did",
        ),
        ({"width": "${size}"}, r"refers to '\$\{size\}', which does not exist"),
        ({"act": {"class_path": "SiLU"}}, "object with class_path 'SiLU': give package.module.Class"),
        ({"act": {"class_path": "torch.nn.SiLU", "inplace": True}}, "takes class_path and init_args, got"),
        ({"act": [{"class_path": 3}]}, "object with class_path 3"),
        ({"width": "${layer}", "act": {"class_path": "torch.nn.SiLUU"}}, "'torch.nn.SiLUU' cannot be imported"),
        (
            {"width": "${layer}", "act": {"class_path": "torch.nn.SiLU", "init_args": {"in": 1}}},
            r"mlp\.init_args: torch\.nn\.SiLU cannot be made with \{'in': 1\}: TypeError",
        ),
        ({"width": "${layer}", "wide": 1}, r"Own\(width=…, wide=…\): got an unexpected keyword argument 'wide'"),
        ({"width": 13, "eps": "${layer}"}, r"Own\(width=…, eps=…\), and its constructor failed: ValueError: width 13"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments, says):
    with pytest.raises(ValueError, match=says) as caught:
        own(**arguments)
    assert "\n" not in str(caught.value)


def test_a_constructor_that_does_not_take_the_size_is_told_of_references():
    config = ModelConfig(**SIZES, norm="torch.nn.Softmax")
    with pytest.raises(ValueError, match=r"name its arguments in init_args, such as \{dim: \$\{size\}\}, or write"):
        build("norm", config, seed=0, path="norm", size=4)


def test_objects_of_a_file_are_code_that_needs_trust():
    fields = {**SIZES, "mlp": LLAMA_MLP}
    with pytest.raises(ValueError, match=r"code from outside lightning_llm: .*LlamaMLP, transformers\.LlamaConfig;"):
        config_of_file(fields, "a file")
    parts = config_of_file(fields, "a file", trust_code=True).custom_parts
    assert set(parts) == {"mlp", "mlp.init_args[0]"}
    refuse_custom(parts.values(), "a file", trust_code=True)


def test_the_mlp_of_transformers_has_the_bits_of_swiglu():
    models = [Transformer(ModelConfig(**SIZES, mlp=mlp), seed=4) for mlp in ("swiglu", LLAMA_MLP)]
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    gradients = []
    for model in models:
        model(ids).square().mean().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    (first, second), (mine, others) = models, gradients
    assert dict(first.state_dict()).keys() == dict(second.state_dict()).keys()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert torch.equal(first(ids), second(ids))
    assert all(torch.equal(value, others[name]) for name, value in mine.items())
