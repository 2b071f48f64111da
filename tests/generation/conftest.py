"""The model of most tests of generation."""

import pytest
import torch

from lightning_llm import ModelConfig, Transformer


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=31,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            max_position_embeddings=24,
            initializer_range=0.3,
        )
    )
    return model.double().eval()
