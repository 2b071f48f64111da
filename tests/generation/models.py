"""Small models of every kind that generation knows, and prompts for them."""

import torch
from torch import nn

from lightning_llm import ModelConfig, Transformer

SIZES = {
    "vocab_size": 31, "hidden_size": 48, "intermediate_size": 77, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "initializer_range": 0.3,
}  # fmt: skip


GPT = {"norm": "layernorm", "position": "learned", "num_key_value_heads": 6}


MODELS = {
    "llama": {},
    "llama, biases, stretched": {
        "attention_bias": True, "mlp": "swiglu", "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "qk-norm": {"qk_norm": True, "head_dim": 10, "tie_word_embeddings": True},
    "gpt": {**GPT, "mlp": "gelu_tanh", "mlp_bias": True, "attention_bias": True, "lm_head_bias": True},
    "no positions": {"position": "none", "mlp": "relu"},
    "own mlp": {"mlp": f"{__name__}.OwnMLP"},
}  # fmt: skip


class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        assert x.dim() == 3
        return torch.tanh(self.mix(x))


def built(name, **options):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SIZES, **MODELS[name], **options})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(31, (length,), generator=generator).tolist() for length in lengths]
