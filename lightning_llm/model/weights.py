"""The weights of a model: their initial values, a check for NaN, and when to read one instead of calling its module.

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

``mup`` multiplies these scales and the learning rates by powers of m = ``hidden_size / base_width`` and of
q = ``sqrt(base_head_dim / head_dim)``, which are 1 at the base width (Yang et al. 2022, "Tensor Programs V",
arXiv:2203.03466, tables 3 and 8, for Adam):

===================================  =======================  ======================
parameter                            initial value times      learning rate times
===================================  =======================  ======================
q_proj.weight, with ``qk_norm`` not  q / sqrt(m)              q / m
q_proj.bias, with ``qk_norm``        q                        q
q_norm.weight
lm_head.weight                       1 / m                    1 / m
other projections                    1 / sqrt(m)              1 / m
embeddings, norms, biases            1                        1
===================================  =======================  ======================

In table 8, attention is scaled by 1 / head_dim instead of 1 / sqrt(head_dim), and logits by 1 / m. Adam's steps do not
depend on the scale of a gradient. So a factor before a weight is the same as a factor of its initial value and learning
rate, as which the first is in the query here, and the second in the head. The model computes what it does without
``mup``, in training, generation and exports.

A module from elsewhere (a user's MLP) keeps the values of its own constructor, which draws from a generator seeded by
the seed and its name, except for linear layers, embeddings and norms, to which the table applies.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_llm.model.config import ModelConfig

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")
VOCAB_TABLES = ("embed_tokens", "lm_head")  # with a row for each token
# Classes whose hooks change nothing, by name: this file imports none of them. A subclass counts as its base.
WATCHERS = frozenset(
    {
        ("lightning_llm.measure.attribution", "AttributedMeter"),
        ("torch.utils.module_tracker", "ModuleTracker"),  # of FlopCounterMode
        ("lightning.pytorch.profilers.pytorch", "RegisterRecordFunction"),  # of trainer.profiler "pytorch"
    }
)


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
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    for path, module in part.named_modules(prefix=name):
        factor = _width_factor(config, f"{path}.weight")
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


def _width_factor(config: ModelConfig, name: str) -> float:
    """What ``mup`` multiplies the initial values of a parameter by."""
    return next((scale for pattern, (scale, _) in _width_factors(config).items() if fnmatchcase(name, pattern)), 1.0)


def _width_factors(config: ModelConfig) -> dict[str, tuple[float, float]]:
    """The table of ``mup``: factors of initial values and of learning rates, by pattern; the first applies."""
    if config.mup is None:
        return {}
    assert config.head_dim is not None
    m, q = config.hidden_size / config.mup["base_width"], math.sqrt(config.mup["base_head_dim"] / config.head_dim)
    query = {"*.q_proj.weight": (q / math.sqrt(m), q / m), "*.q_proj.bias": (q, q)}
    if config.qk_norm:  # it makes the scale of the projection irrelevant
        query = {"*.q_norm.weight": (q, q)}
    return {**query, "lm_head.weight": (1 / m, 1 / m), "*_proj.weight": (1 / math.sqrt(m), 1 / m)}


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


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of ``module`` computes the formula of its class from its parameters, and nothing else happens.

    An operator that takes ``projection.weight`` skips everything else that happens in a call of the projection: a LoRA
    adapter, a quantized matmul, a hook. Hooks that only watch do not count, so that the memory profiler does not
    change the run. A parametrization (``torch.nn.utils.parametrize``) is plain: ``module.weight`` computes it.

    Args:
        module: With a ``weight``.
        kinds: The classes whose formula the caller knows; a subclass is none of them.

    Returns:
        False for another class, for hooks that may change something, for a ``forward`` set on the object, and for a
        weight that is a tensor subclass with tensors inside (quantized, or a ``DTensor``).
    """
    kind = type(module)
    if kind not in kinds and not (parametrize.is_parametrized(module) and kind.__bases__[0] in kinds):
        return False
    weight = getattr(module, "weight", None)
    return "forward" not in module.__dict__ and not hasattr(weight, "__tensor_flatten__") and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook of the module itself, or one for all modules, may change what a call of it computes."""
    of_all: Any = nn.modules.module
    hooks: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    hooks += [module._backward_pre_hooks, module._backward_hooks]
    hooks += [of_all._global_forward_pre_hooks, of_all._global_forward_hooks]
    hooks += [of_all._global_backward_pre_hooks, of_all._global_backward_hooks]
    return any(not _only_watches(hook) for group in hooks for hook in group.values())


def _only_watches(hook: Any) -> bool:
    owner = getattr(getattr(hook, "func", hook), "__self__", None)  # of a method, or of a partial of one
    return any((base.__module__, base.__qualname__) in WATCHERS for base in type(owner).__mro__)
