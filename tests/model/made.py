"""Parts for tests of single parts: built-in ones in float64 with large weights, and custom ones."""

import torch
from torch import nn

from lightning_llm import ModelConfig
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.context import Context, Shared
from lightning_llm.model.position import Position

SIZES = {"vocab_size": 61, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def config(**options):
    return ModelConfig(**{**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 64, **options})


def with_arguments(path, **arguments):
    return {"class_path": path, "init_args": arguments}


def built(kind, **options):
    """A part with large weights, in float64."""
    torch.manual_seed(0)
    made = build(kind, config(**options), seed=0, path=kind).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def context_of(seq, **options):
    positions, position = torch.arange(seq), Position(config())
    return Context(positions, position, Shared(), **options)


class Distance(Position):
    """Scores fall with the distance, by head."""

    def score_bias(self, query_positions, key_positions):
        distance = (query_positions[..., :, None] - key_positions[..., None, :]).unsqueeze(-3)
        return -distance * torch.arange(1, 5)[:, None, None] / 7


class TwoWords(nn.Module):
    def __init__(self, config, *, width, layer=None):
        super().__init__()
        self.width, self.layer = width, layer

    def forward(self, x):
        return x[..., : self.width]


class NoContext(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return x


class LosesItsShape(Block):
    def join(self, x, context):
        return x[:, :1]


class BadRotation(Position):
    def rotate(self, query, key, state):
        return query[..., :2], key


class BadBias(Position):
    def score_bias(self, query_positions, key_positions):
        return torch.zeros(len(query_positions), len(key_positions))
