"""The config checks itself and reports every fault at once."""

import math
import subprocess
import sys

import pytest

from lightning_llm import ModelConfig
from tests.interop.conftest import LLAMA3

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def window(**options):
    return {"class_path": "sliding_window", "init_args": options}


def loss(**options):
    return {"class_path": "cross_entropy", "init_args": options}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden_size": 10, "num_attention_heads": 3}, "hidden_size 10 is not divisible by num_attention_heads 3"),
        ({"num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": 4}, "6 is not a multiple of .* 4"),
        ({"mlp": "swigloo"}, "mlp 'swigloo' is unknown: choose one of swiglu, memory_optimized_swiglu"),
        ({"norm": "batchnorm"}, "norm 'batchnorm' is unknown: choose one of rmsnorm, layernorm"),
        ({"position": "sinusoids"}, "position 'sinusoids' is unknown"),
        ({"checkpoint_level": 7, "mlp": "memory_optimized_swiglu"}, "checkpoint_level must be one of .* got 7"),
        ({"checkpoint_level": 1, "mlp": "swiglu"}, "checkpoint_level 1 needs mlp 'memory_optimized_swiglu'"),
        (
            {"checkpoint_level": [0, 1], "mlp": "memory_optimized_swiglu"},
            "checkpoint_level lists 2 layers, num_hidden_layers is 4",
        ),
        (
            {"checkpoint_level": 2, "mlp": "memory_optimized_swiglu", "norm": "layernorm"},
            "checkpoint_level 2 includes the norm before the MLP: use norm 'rmsnorm'",
        ),
        ({"recompute": "everything"}, "recompute 'everything' is unknown: choose one of none, mlp, attention, block"),
        ({"mlp_bias": True, "mlp": "memory_optimized_swiglu"}, "mlp_bias is not supported"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"hidden_size": 12.5}, "hidden_size must be a whole number, got 12.5"),
        ({"vocab_size": -1}, "vocab_size must be at least 1"),
        ({"vocab_multiple_of": 0}, "vocab_multiple_of must be at least 1, got 0"),
        ({"vocab_size": 50, "vocab_multiple_of": 2**39}, "parameters, more than 1e\\+13"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be above 0"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be above 0 and finite, got inf"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be above 0 and finite, got '1e-5'"),
        ({"rope_theta": math.nan}, "rope_theta must be above 0 and finite, got nan"),
        ({"initializer_range": math.inf}, "initializer_range must be above 0 and finite, got inf"),
        ({"dropout": math.nan}, "dropout must be at least 0 and below 1, got nan"),
        ({"hidden_size": math.inf}, "hidden_size must be a whole number, got inf"),
        (
            {"rope_scaling": {"factor": 2.0}},
            "rope_type None is not supported: choose one of linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
            "rope_scaling.rope_type 'longrope' is not supported",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "type yarn lacks original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate must be true or false, got 1"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "beta_slow 2 must be below beta_fast 1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must be above 0 and at most 1, got 0"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3 rotates 19 of 64 dimensions"),
        ({"partial_rotary_factor": 0.5, "position": "none"}, "partial_rotary_factor needs position 'rope', got 'none'"),
        ({"attention": 3}, "attention must be a name, an import path, or class_path and init_args, got 3"),
        ({"norm": {"class": "rmsnorm"}}, "norm must be a name, .* got the key class"),
        ({"mlp": {"class_path": "gelu", "init_args": [1]}}, r"mlp.init_args must be options by name, got \[1\]"),
        ({"mlp": {"class_path": "gelu", "init_args": {"a": 1}}}, "mlp 'gelu' has no argument 'a': it takes none"),
        ({"attention": window(size=3)}, "'sliding_window' has no argument 'size': it takes window, every, softcap"),
        ({"attention": "sliding_window"}, "attention 'sliding_window' needs window: a whole number from 1"),
        ({"attention": window(window=0)}, "attention.window must be a whole number from 1, got 0"),
        ({"attention": window(window=4, softcap=-1)}, "attention.softcap must be null or a number above 0, got -1"),
        ({"loss": loss(zloss=1)}, "loss 'cross_entropy' has no argument 'zloss': it takes z_loss, label_smoothing"),
        ({"loss": loss(z_loss=-1)}, "loss.z_loss must be a number of at least 0, got -1"),
        ({"loss": loss(label_smoothing=1)}, "loss.label_smoothing must be a number from 0 to below 1, got 1"),
        ({"block": "parallel"}, "block 'parallel' is unknown: choose one of pre, post, sandwich"),
        ({"block": "post", "checkpoint_level": 2}, "norm before the MLP: block 'post' has none there"),
        (
            {"mlp": {"class_path": "mixture_of_experts", "init_args": {"num_experts": 4, "top_k": 5}}},
            "mlp.top_k 5 must be at most mlp.num_experts 4",
        ),
        ({"loss": {"class_path": "my.Loss", "init_args": {"a": [[[[[]]]]]}}}, "must be plain values"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type linear lacks factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -1}},
            "rope_scaling.factor must be a number above 0",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "x": 1}}, "rope_scaling.x is unknown to type linear"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "rope_scaling.low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}, "position": "learned"},
            "rope_scaling needs position 'rope', got 'learned'",
        ),
    ],
)
def test_a_fault_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        ModelConfig(**options)


def test_all_faults_are_reported_at_once():
    with pytest.raises(ValueError, match=r"hidden_size 10 .*; .*mlp 'x' is unknown.*; .*dropout"):
        ModelConfig(hidden_size=10, num_attention_heads=3, mlp="x", dropout=2.0)


def test_derived_sizes():
    gated = ModelConfig(hidden_size=384, num_attention_heads=6)
    assert (gated.head_dim, gated.num_key_value_heads, gated.intermediate_size) == (64, 6, 1024)
    assert ModelConfig(hidden_size=384, num_attention_heads=6, mlp="gelu").intermediate_size == 1536
    assert ModelConfig(hidden_size=384, num_attention_heads=6, mlp="gelu_tanh").intermediate_size == 1536
    assert ModelConfig(**gated.to_dict()) == gated
    stretched = ModelConfig(rope_scaling=LLAMA3)
    assert ModelConfig(**stretched.to_dict()) == stretched


def test_a_part_without_arguments_is_its_name():
    config = ModelConfig(mlp={"class_path": "gelu"}, norm={"class_path": "my.Norm", "init_args": {}})
    assert (config.mlp, config.norm, config.custom_parts) == ("gelu", "my.Norm", {"norm": "my.Norm"})
    own = window(window=8)
    assert ModelConfig(attention=own).attention == own
    assert ModelConfig(**ModelConfig(attention=own).to_dict()) == ModelConfig(attention=own)


class OwnPart:
    class Inner: ...


def test_a_class_is_its_path():
    path = f"{OwnPart.__module__}.OwnPart"
    assert ModelConfig(mlp=OwnPart).mlp == path
    assert ModelConfig(mlp={"class_path": OwnPart, "init_args": {"a": 1}}).mlp["class_path"] == path
    assert ModelConfig(mlp=OwnPart) == ModelConfig(**ModelConfig(mlp=path).to_dict())
    with pytest.raises(ValueError, match=r"mlp OwnPart\.Inner is inside a function or class"):
        ModelConfig(mlp=OwnPart.Inner)


def test_code_from_elsewhere_is_listed_for_every_kind_of_part():
    kinds = ("attention", "mlp", "norm", "position", "block", "loss")
    config = ModelConfig(**{kind: {"class_path": f"my.{kind}", "init_args": {"a": [1, {"b": "c"}]}} for kind in kinds})
    assert config.custom_parts == {kind: f"my.{kind}" for kind in kinds}
    in_layers = ModelConfig(layers=[{}, {"mlp": OwnPart, "attention": "my.attention"}]).custom_parts
    assert in_layers == {"layers[1].mlp": f"{OwnPart.__module__}.OwnPart", "layers[1].attention": "my.attention"}
    assert ModelConfig(mlp="lightning_llm.model.experts.MixtureOfExperts").custom_parts == {}


def test_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        ModelConfig().hidden_size = 3
    with pytest.raises(TypeError):
        ModelConfig(99)


def test_no_torch_is_imported():
    code = "import sys, lightning_llm.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
