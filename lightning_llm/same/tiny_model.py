"""A model of a config's parts at tiny sizes, its weights, and a batch, for ``lightning-llm same``.

The weights are large enough for a wrong detail to show, and numbers of bfloat16, so that every precision starts from
the same ones.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_llm.data.batches import IGNORED, Batch
from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import Part, arguments_of, name_of, option_of
from lightning_llm.model.transformer import Transformer

ROWS, CONTEXT, VOCAB = 4, 64, 67  # in float32, the memory-optimized MLP then runs in tiles
LAYERS, HIDDEN, WIDTH, HEADS, HEAD_DIM, WINDOW, EXPERTS = 3, 32, 392, 2, 16, 25, 4

Weights = Mapping[str, Tensor]


def tiny_config(config: ModelConfig) -> ModelConfig:
    """The same parts and options at tiny sizes."""
    groups = config.num_attention_heads // (config.num_key_value_heads or 1)
    heads = max(HEADS, groups)
    layers = min(max(LAYERS, len(config.layers or ())), config.num_hidden_layers)
    level = config.checkpoint_level
    return dataclasses.replace(
        config,
        vocab_size=VOCAB,
        hidden_size=HEAD_DIM * heads if heads > HEADS else HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // groups,
        head_dim=HEAD_DIM,
        max_position_embeddings=max(CONTEXT, config.max_position_embeddings),
        checkpoint_level=level if isinstance(level, int) else level[:layers],
        dropout=0.0,
        layers=None if config.layers is None else [_tiny_layer(own, config, heads) for own in config.layers],
        **_small_parts({"attention": config.attention, "mlp": config.mlp}),
    )


def _tiny_layer(options: dict[str, Any], config: ModelConfig, heads: int) -> dict[str, Any]:
    """The options of a layer, for a model with so many heads."""
    own = {name: value for name, value in options.items() if name != "intermediate_size"}
    if (keys := own.get("num_key_value_heads")) is not None:
        own["num_key_value_heads"] = math.gcd(heads, max(1, heads * keys // config.num_attention_heads))
    return {**own, **_small_parts({kind: own[kind] for kind in ("attention", "mlp") if kind in own})}


def _small_parts(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Arguments of the parts that have a shorter window or fewer experts at tiny sizes."""
    small: dict[str, Part] = {}
    for kind, part in parts.items():
        if window := option_of(kind, part, "window"):
            small[kind] = _with_options(part, window=min(window, WINDOW))
        if experts := option_of(kind, part, "num_experts"):
            small[kind] = _with_options(part, num_experts=min(experts, max(EXPERTS, option_of(kind, part, "top_k"))))
    return small


def _with_options(part: Part, **options: Any) -> Part:
    return {CLASS_PATH: name_of(part), INIT_ARGS: {**arguments_of(part), **options}}


def plain_config(config: ModelConfig) -> ModelConfig:
    """The same function, in the plainest form."""
    optimized, plain = "memory_optimized_swiglu", "swiglu"
    layers = config.layers and [{**own, "mlp": plain} if own.get("mlp") == optimized else own for own in config.layers]
    mlp = plain if config.mlp == optimized else config.mlp
    return dataclasses.replace(config, mlp=mlp, layers=layers, checkpoint_level=0, recompute="none")


def random_weights(config: ModelConfig) -> Weights:
    """Values by name: parameters as numbers of bfloat16, of unit variance over what a row sums up; buffers as made."""
    model, generator = Transformer(config, seed=0), torch.Generator().manual_seed(1)
    state = model.state_dict()
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.is_floating_point():
            state[name] = _spread(value.detach(), generator).bfloat16().to(value.dtype)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    return state


def _spread(value: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(value.shape, generator=generator)
    if value.dim() < 2:
        return value + 0.1 * noise
    is_padding = (value.flatten(1) == 0).all(dim=1) & bool(value.any())
    return noise.masked_fill(is_padding.view(-1, *[1] * (value.dim() - 1)), 0) / math.sqrt(value[0].numel())


def moved(weights: Weights, sample: int, unit: float) -> Weights:
    """In float64, each value multiplied by about 1 ± ``unit``; another sample has other factors."""
    generator = torch.Generator().manual_seed(sample)
    found = dict(weights)
    for name, value in weights.items():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            found[name] = value.double() * (1 + unit * noise)
    return found


def make_batch(*, documents: bool) -> Batch:
    """Rows of random ids; a tenth of the targets does not count, and rows have different numbers of them."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (ROWS, CONTEXT + 1), generator=generator)
    share = torch.linspace(0, 0.2, ROWS)[:, None]
    targets = ids[:, 1:].masked_fill(torch.rand(ROWS, CONTEXT, generator=generator) < share, IGNORED)
    batch: Batch = {"input_ids": ids[:, :-1], "targets": targets}
    if documents:
        batch["documents"] = (torch.rand(ROWS, CONTEXT, generator=generator) < 0.05).cumsum(1)
    return batch
