"""Parts for tests of single parts: built-in ones in float64 with large weights, and custom ones."""

import math

import torch
from torch import nn

from lightning_llm import ModelConfig, Transformer
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.context import Context, CrossLayerState
from lightning_llm.model.kv_cache import KVCache
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
    return Context(positions, position, CrossLayerState(), **options)


def attention_run(documents=None, seq=20, **options):
    """The last attention of a model with large weights in float64, its input and its output."""
    model = Transformer(config(**options), seed=0).double()
    attention, seen = model.layers[-1].self_attn, []
    attention.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    for layer in model.layers:
        for parameter in layer.self_attn.parameters():
            nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(61, (2, seq) if documents is None else documents.shape)
    model(ids, documents=documents)
    ((x, out),) = seen
    return attention, x, out


def written_out(attention, x, *, window=None, softcap=None, bias=0.0, documents=None, heads=None, value=None, gate=1.0):
    """Attention as its formula says, in full; ``heads``, or ``value`` alone, instead of its own."""
    query, key, own = heads or (
        proj(x).unflatten(-1, (-1, 10)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    value = own if value is None else value
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = query @ key.mT / math.sqrt(10)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores, place = scores + bias, torch.arange(x.shape[1])
    seen = place[None] <= place[:, None]
    if window is not None:
        seen = seen & (place[:, None] - place[None] < window)
    if documents is not None:
        seen = seen & (documents[:, None, None] == documents[:, None, :, None])
    mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value
    return attention.o_proj(mixed.transpose(1, 2).flatten(2) * gate)


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
    def add_branches(self, x, context):
        return x[:, :1]


class FeedsFirst(Block):
    def add_branches(self, x, context):
        x = x + self.feed_forward(x)
        return x + self.attend(x, context)


class BadRotation(Position):
    def rotate(self, query, key, state):
        return query[..., :2], key


class BadBias(Position):
    def score_bias(self, query_positions, key_positions):
        return torch.zeros(len(query_positions), len(key_positions))


def assert_decoding_is_the_full_pass(model):
    """In pieces, and after prompts of unequal length; the cache after the pieces, of 15 tokens in 2 rows."""
    ids, device = torch.randint(61, (2, 15)), torch.device("cpu")
    whole, of_pieces, cache = model(ids), *(KVCache(model.config, 2, 15, device, torch.float64) for _ in range(2))
    pieces = [model(part, cache=of_pieces) for part in (ids[:, :2], ids[:, 2:10], *ids[:, 10:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    cache.expect([2, 12])
    model(ids[:, :12], cache=cache)
    cache.set_lengths([2, 12])
    for step in range(3):
        new = torch.stack([ids[0, 2 + step, None], ids[1, 12 + step, None]])
        expected = torch.stack([whole[0, 2 + step], whole[1, 12 + step]])
        torch.testing.assert_close(model(new, cache=cache)[:, 0], expected)
    return of_pieces
