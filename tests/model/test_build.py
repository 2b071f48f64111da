"""Every mistake with a part is one line."""

import pytest
import torch

from lightning_llm import Transformer
from tests.model.made import config, with_arguments


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mlp": "elsewhere.Missing"}, "mlp 'elsewhere.Missing' cannot be imported: .*; give package.module.Class"),
        ({"norm": "elsewhere.number"}, "norm 'elsewhere.number' is 3: it must be a class derived from torch.nn.Module"),
        ({"block": "elsewhere.NoContext"}, r"block .* derived from lightning_llm.model.block.Block"),
        ({"position": "elsewhere.NoContext"}, r"position .* derived from lightning_llm.model.position.Position"),
        (
            {"mlp": "elsewhere.TwoWords"},
            r"mlp 'elsewhere.TwoWords' is called as TwoWords\(config, \*\*arguments\): missing a required .*'width'; "
            r"it takes \(config, \*, width, layer=None\)",
        ),
        (
            {"mlp": with_arguments("elsewhere.TwoWords", width=3, height=4)},
            r"mlp 'elsewhere.TwoWords' .*: got an unexpected keyword argument 'height'",
        ),
        (
            {"attention": "elsewhere.NoContext"},
            r"attention 'elsewhere.NoContext' is called as NoContext.forward\(x, context\): too many positional",
        ),
        (
            {"loss": "elsewhere.NoContext"},
            r"loss 'elsewhere.NoContext' is called as NoContext.forward\(hidden, head, targets, weights, num_chunks\)",
        ),
    ],
)
def test_a_part_that_cannot_be_made_is_named(options, says):
    with pytest.raises(ValueError, match=says) as error:
        Transformer(config(**options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"mlp": with_arguments("elsewhere.TwoWords", width=3)},
            r"mlp TwoWords must return the shape \(2, 5, 24\) of its input, got \(2, 5, 3\)",
        ),
        (
            {"position": "elsewhere.BadRotation"},
            r"position BadRotation must return the shape \(2, 4, 5, 10\) of its input",
        ),
        (
            {"position": "elsewhere.BadBias"},
            r"position BadBias: score_bias must return .*, here \(4, 5, 5\), got \(5, 5\)",
        ),
        ({"block": "elsewhere.LosesItsShape"}, r"block LosesItsShape must return the shape \(2, 5, 24\) of its input"),
    ],
)
def test_a_part_that_returns_another_shape_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        Transformer(config(**options))(torch.zeros(2, 5, dtype=torch.long))


def test_a_part_gets_its_layer_and_its_arguments():
    model = Transformer(config(mlp=with_arguments("elsewhere.TwoWords", width=24)))
    assert [(layer.mlp.layer, layer.mlp.width) for layer in model.layers] == [(0, 24), (1, 24)]
