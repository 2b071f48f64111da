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

The table applies to linear layers, embeddings and norms that still have torch's default values. What the constructor of
a custom part set to anything else is kept; ``initial_values.py`` says how that is known, and which layers of a custom
part write to the residual stream. ``mup.py`` has the factors by which ``mup`` multiplies these
scales.
"""

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.initial_values import RULE, TABLE_LAYERS, InitialRule, seed_of
from lightning_llm.model.mup import width_factors
from lightning_llm.ops import traced

VOCAB_TABLES = ("embed_tokens", "lm_head")  # with a row for each token


def initialize(part: nn.Module, config: ModelConfig, seed: int, name: str = "") -> None:
    """Give every parameter of ``part`` its initial value, in place, unless its constructor has.

    Args:
        part: A transformer, or a module of one.
        config: With the scales.
        seed: Of the model.
        name: The part's name inside the transformer.
    """
    if traced.current() is not None:  # no values
        return
    stds = assigned_stds(part, config, name)
    scales = _scales(config)
    for path, module, parameter in _of_table(part, name):
        weight = parameter.detach()
        if path.endswith(".bias"):
            nn.init.zeros_(weight)
        elif path not in stds:  # of a norm
            nn.init.constant_(weight, _factor(path, scales))
        else:
            is_vocab = path.removesuffix(".weight") in VOCAB_TABLES
            rows = config.vocab_size if is_vocab else len(weight)  # the rest is for no token
            _draw(weight[:rows], path, seed, stds[path])
            nn.init.zeros_(weight[rows:])
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                nn.init.zeros_(weight[module.padding_idx])


def assigned_stds(part: nn.Module, config: ModelConfig, name: str = "") -> dict[str, float]:
    """By name, the standard deviation from which each matrix of the table is drawn.

    Args:
        part: A transformer, or a module of one.
        config: With the scales.
        name: The part's name inside the transformer.
    """
    residual = residual_paths(part, name)
    scales = _scales(config)
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    stds = {}
    for path, module, _ in _of_table(part, name):
        if isinstance(module, nn.Linear | nn.Embedding) and path.endswith(".weight"):
            is_residual = path.removesuffix(".weight") in residual
            stds[path] = _factor(path, scales) * (residual_std if is_residual else config.initializer_range)
    return stds


def residual_paths(part: nn.Module, name: str = "") -> set[str]:
    """Paths of the layers that write to the residual stream."""
    return {_joined(path, each) for path, rule in _rules(part, name) for each in rule.residual}


def kept_names(part: nn.Module, name: str = "") -> set[str]:
    """Names of the parameters that keep what the constructor of a custom part set."""
    return {_joined(path, each) for path, rule in _rules(part, name) for each in rule.kept}


def _rules(part: nn.Module, name: str) -> Iterator[tuple[str, InitialRule]]:
    for path, module in part.named_modules(prefix=name):
        if (rule := getattr(module, RULE, None)) is not None:
            yield path, rule


def _of_table(part: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """The parameters to which the table applies, tied ones by their first name."""
    kept = kept_names(part, name)
    seen = set()
    for path, module in part.named_modules(prefix=name):
        for each, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) not in seen and isinstance(module, TABLE_LAYERS) and each not in kept:
                yield each, module, parameter
            seen.add(id(parameter))


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def _scales(config: ModelConfig) -> dict[str, float]:
    return {pattern: scale for pattern, (scale, _) in _width_factors(config).items()}


def _factor(name: str, scales: dict[str, float]) -> float:
    return next((scale for pattern, scale in scales.items() if fnmatchcase(name, pattern)), 1.0)


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
