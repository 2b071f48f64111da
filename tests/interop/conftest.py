"""Tiny models of every family, random and offline."""

import pytest
import torch

from lightning_llm import ModelConfig, Transformer
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop import export_model

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.03,
}
GPT = {**SIZES, "num_key_value_heads": 6, "norm": "layernorm", "position": "learned"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "llama": {**SIZES, "rope_theta": 500.0, "rms_norm_eps": 3e-4},
    "llama, tied, biases": {**SIZES, "tie_word_embeddings": True, "mlp": "swiglu", **BIASES},
    "llama, rows for no token": {**SIZES, "vocab_multiple_of": 128},
    "llama, linear rope": {**SIZES, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama, llama3 rope": {**SIZES, "rope_scaling": LLAMA3},
    "llama, yarn, geglu": {**SIZES, "rope_scaling": YARN, "mlp": "geglu", "mlp_bias": True},
    "qwen3": {**SIZES, "qk_norm": True, "head_dim": 10, "attention_bias": True, "rms_norm_eps": 3e-4},
    "gpt2": {**GPT, "mlp": "gelu_tanh", "tie_word_embeddings": True, **BIASES, "dropout": 0.2},
    "gpt2, rows for no token": {**GPT, "mlp": "gelu", "tie_word_embeddings": True, "vocab_multiple_of": 64, **BIASES},
    "gpt2, relu, own head": {**GPT, "mlp": "relu", **BIASES, "rms_norm_eps": 3e-4},
    "gpt2, gelu, biases": {**GPT, "mlp": "gelu", **BIASES},
    "gpt2, relu2": {**GPT, "mlp": "relu2", **BIASES},
}
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 20


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train_bpe([TEXT], 300)


@pytest.fixture
def build():
    """``build("llama", option=value, …)``: weights so large that a wrong detail shows."""

    def model(name, **options):
        torch.manual_seed(0)
        made = Transformer(ModelConfig(**{**MODELS[name], **options})).eval()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
        return made

    return model


@pytest.fixture
def exported(build, tokenizer, tmp_path):
    """``exported("llama", option=value, …)``: the model, and the folder it was exported to."""

    def folder(name, max_shard_bytes=5 * 10**9, out="exported", **options):
        model = build(name, **options)
        export_model(model, tokenizer.to_str(), tmp_path / out, max_shard_bytes=max_shard_bytes)
        return model, tmp_path / out

    return folder
