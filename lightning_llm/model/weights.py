"""The weights of a model: their initial values, rows for no token, and a check for NaN.

Initial values are a function of the seed, the parameter's name inside ``Transformer``, and its shape. Two models that
differ in one part start from equal values everywhere else, in whatever order and on however many processes they are
built:

=========================================  ==========================================================================
parameter                                  initial value
=========================================  ==========================================================================
embed_tokens, embed_positions              normal, standard deviation ``initializer_range``
q, k, v, gate, up projections, lm_head     normal, standard deviation ``initializer_range``
o_proj, down_proj (they write to the       normal, ``initializer_range / sqrt(2 · num_hidden_layers)``, so that the
residual stream)                           stream's variance does not grow with depth (Radford et al. 2019, "GPT-2",
                                           section 2.3)
rows of embed_tokens and lm_head for no    0
token (``vocab_multiple_of``)
biases                                     0
weights of norms                           1
=========================================  ==========================================================================

A module from elsewhere (a user's MLP) keeps the values of its own constructor, which draws from a generator seeded by
the seed and its name, except for linear layers, embeddings and norms, to which the table applies. ``mup.py`` has the
factors by which ``mup`` multiplies these scales.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.mup import width_factors

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")
VOCAB_TABLES = ("embed_tokens", "lm_head")  # with a row for each token


def seed_of(seed: int, name: str, shape: Iterable[int] = ()) -> int:
    """The seed of one parameter's generator. torch's generator of a CPU takes the lowest 32 bits of it."""
    return int.from_bytes(hashlib.sha256(repr((seed, name, tuple(shape))).encode()).digest()[:7], "big")


@contextmanager
def drawing(seed: int, name: str) -> Iterator[None]:
    """Draw from a generator of the module of that name; torch's global generator is as before afterwards.

    Args:
        seed: Of the model.
        name: The module's name inside ``Transformer``.
    """
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed_of(seed, name))
        yield


def initialize(part: nn.Module, config: ModelConfig, seed: int, name: str = "") -> None:
    """Give every parameter of ``part`` its initial value, in place.

    Args:
        part: A transformer, or a module of one.
        config: With the scales.
        seed: Of the model.
        name: The part's name inside the transformer.
    """
    scales = {pattern: scale for pattern, (scale, _) in _width_factors(config).items()}
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    for path, module in part.named_modules(prefix=name):
        factor = next((scale for pattern, scale in scales.items() if fnmatchcase(f"{path}.weight", pattern)), 1.0)
        if isinstance(module, nn.Linear | nn.Embedding):
            is_residual = path.rpartition(".")[2] in RESIDUAL_PROJECTIONS
            rows = config.vocab_size if path in VOCAB_TABLES else len(module.weight)  # the rest is for no token
            std = residual_std if is_residual else config.initializer_range
            _draw(module.weight.detach()[:rows], f"{path}.weight", seed, factor * std)
            nn.init.zeros_(module.weight.detach()[rows:])
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm) and module.weight is not None:
            nn.init.constant_(module.weight, factor)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _draw(weight: Tensor, name: str, seed: int, std: float) -> None:
    """Normal values, drawn in float32 on the CPU: the same for every device and dtype, to its rounding."""
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed_of(seed, name, weight.shape))
    drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu").normal_(0, std, generator=generator)
    with torch.no_grad():
        weight.copy_(drawn)


def with_vocab_rows(name: str, tensor: Tensor, rows: int | None) -> Tensor:
    """A tensor of a transformer whose tables of tokens have so many rows: cut, or with zeros added.

    Args:
        name: Inside the transformer; a tensor that is no such table is returned as it is.
        tensor: Its values.
        rows: ``vocab_size``, or ``vocab_rows``.
    """
    if rows is None or name.rpartition(".")[0] not in VOCAB_TABLES or len(tensor) == rows:
        return tensor
    if len(tensor) > rows:
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def lr_factors(config: ModelConfig) -> dict[str, float]:
    """By pattern of names inside ``Transformer``, what ``mup`` multiplies the learning rate by; the first applies."""
    return {pattern: rate for pattern, (_, rate) in _width_factors(config).items()}


def _width_factors(config: ModelConfig) -> dict[str, tuple[float, float]]:
    assert config.head_dim is not None
    return width_factors(config.mup, config.hidden_size, config.head_dim, qk_norm=config.qk_norm)


def only_finite(tensors: Iterable[tuple[str, Tensor]], source: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the same tensors, each checked as it passes. A model with a single NaN answers everything with NaN.

    Args:
        tensors: Names and tensors.
        source: Their origin, for the message.

    Raises:
        ValueError: At the first tensor that holds NaN or infinite values.
    """
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{source}: the weights are NaN or infinite, such as {name}: use an earlier checkpoint")
        yield name, tensor
