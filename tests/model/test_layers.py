"""The options of single layers: the configs that they make, and what is refused."""

import pytest

from lightning_llm.model.config import ModelConfig
from tests.model.made import with_arguments


def test_each_layer_has_its_options_and_the_models_others():
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}
    config = ModelConfig(
        num_hidden_layers=5, layers=[{"mlp": {"class_path": "gelu"}, "position": "none"}, {}], **scaled
    )
    plain, usual = config.layer_configs[:2]
    assert [of_layer is plain for of_layer in config.layer_configs] == [True, False, True, False, True]
    assert (plain.mlp, plain.position, plain.rope_scaling, plain.rotary_dim) == ("gelu", "none", None, 64)
    assert usual == ModelConfig(num_hidden_layers=5, **scaled)
    assert ModelConfig(**config.to_dict()) == config
    windows = ModelConfig(
        num_hidden_layers=3, layers=[{"attention": with_arguments("sliding_window", window=8)}, {}]
    ).attention_windows
    assert windows == [8, None, 8]
    assert ModelConfig(layers=[{"attention": "value_residual"}]).layer_configs[3].attention == "value_residual"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": []}, r"layers must be null, or a list with the options of each layer, got \[\]"),
        ({"layers": [3]}, r"^layers must be null, or a list with the options of each layer, got \[3\]$"),
        ({"layers": [{}] * 5}, "layers has the options of 5 layers, num_hidden_layers is 4"),
        ({"layers": [{}, {"hidden_size": 8}]}, r"layers\[1\] has hidden_size, which no layer has: give attention, mlp"),
        ({"layers": [{"mlp": 3}]}, r"layers\[0\].mlp must be a name, an import path, or class_path"),
        ({"layers": [{"mlp": "swigloo"}]}, r"layers\[0\]: mlp 'swigloo' is unknown"),
        ({"layers": [{"qk_norm": 3}]}, r"layers\[0\]: qk_norm must be true or false, got 3"),
        ({"layers": [{"position": "alibi"}]}, r"layers\[0\].position must be none, or the model's rope, got 'alibi'"),
        (
            {"layers": [{}, {"attention": "gated_delta_net"}]},
            r"layers\[1\]: .* needs position learned, or none, got rope",
        ),
        ({"layers": [{"attention": "value_residual"}, {}]}, "'value_residual' uses what the first layer leaves"),
        (
            {"attention": "value_residual", "layers": [{"num_key_value_heads": 2}, {}]},
            "'value_residual' uses what the first layer leaves: give it to all layers, with as many heads",
        ),
        ({"layers": [{}, {"mlp": "gelu"}], "checkpoint_level": 1}, r"layers\[1\]: checkpoint_level 1 needs mlp"),
    ],
)
def test_a_fault_names_its_layer(options, says):
    with pytest.raises(ValueError, match=says):
        ModelConfig(**options)
