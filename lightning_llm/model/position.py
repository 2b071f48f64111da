"""How a model knows the order of its tokens: rotary, learned, biased and no positions, and the base class of all.

The rotation is that of Su et al. 2021, "RoFormer", section 3.2.2, in the rotate-half form of Llama. It may be limited
to the first dimensions of each head (Black et al. 2022, "GPT-NeoX-20B", section 2.1.1), and be stretched for longer
contexts than those of pre-training.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.rope_scaling import attention_factor
from lightning_llm.ops.rotation import rotate_halves

Rotation = tuple[Tensor, Tensor]


class Position(nn.Module):
    """No positions: causal attention alone tells tokens apart (Haviv et al. 2022, arXiv:2203.16634).

    The base class of all others, which override what they need. It is the module ``embed_positions`` of the model.

    Args:
        config: Of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings of tokens, (batch, seq, hidden), with their positions: (seq,) or (batch, seq)."""
        return x

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> Any:
        """Compute what :meth:`rotate` needs: once per forward pass, used by every block.

        Args:
            positions: (seq,) or (batch, seq).
            dtype: Of queries and keys.
        """
        return None

    def rotate(self, query: Tensor, key: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Queries (batch, heads, seq, head_dim) and keys (batch, kv_heads, seq, head_dim), and what was prepared."""
        return query, key

    def score_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """Added to the scores, before softmax: (heads, queries, keys), or with the batch before it.

        A class that overrides this does so for every pair of positions. It is called for a block of queries at a time,
        and again in backward, so that no tensor of all pairs is saved.

        Args:
            query_positions: (queries,) or (batch, queries).
            key_positions: (keys,) or (batch, keys).
        """
        return None

    @property
    def has_score_bias(self) -> bool:
        """Whether the class adds to the scores."""
        return type(self).score_bias is not Position.score_bias


class LearnedPositions(Position, nn.Embedding):
    """An embedding for each position, added to that of the token (Vaswani et al. 2017; Radford et al. 2018)."""

    def __init__(self, config: ModelConfig) -> None:
        nn.Embedding.__init__(self, config.max_position_embeddings, config.hidden_size)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = x + self(positions)
        return out


class RotaryPositions(Position):
    """Pairs of dimensions of queries and keys are rotated by an angle that grows with the position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.rotary_dim = config.rotary_dim
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines, see :func:`rotation`."""
        return rotation(positions, self.rotary_dim, self.theta, dtype, self.scaling)

    def rotate(self, query: Tensor, key: Tensor, state: Rotation) -> tuple[Tensor, Tensor]:
        """The first dimensions of each head rotated, see ``ops/rotation.py``."""
        return rotate_halves(query, *state), rotate_halves(key, *state)


class LinearBiases(Position):
    """ALiBi: each head lowers a score by its slope times the distance of query and key (Press et al. 2021).

    "Train Short, Test Long", arXiv:2108.12409, section 3: nothing is embedded or rotated, and the slopes are not
    learned. With n heads they are ``2^(-8/n)`` and its powers, for any n.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        heads = config.num_attention_heads
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)
        self.slopes: Tensor

    def score_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        return -self.slopes * distance.unsqueeze(-3)


def rotation(
    positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype, scaling: dict[str, Any] | None = None
) -> Rotation:
    """Cosines and sines for the given positions: computed once per forward pass, used by every block.

    Args:
        positions: (seq,) or (batch, seq), token positions.
        rotary_dim: Dimensions of a head that are rotated; pair i (of dimensions i and i + rotary_dim / 2) rotates by
            ``theta^(-2i / rotary_dim)`` per position.
        theta: Base of the frequencies.
        dtype: Of the result. The angles are computed in float32 at least: bf16 cannot tell position 257 from 258.
        scaling: ``ModelConfig.rope_scaling``.

    Returns:
        Cosines and sines, each (seq, rotary_dim / 2) or (batch, 1, seq, rotary_dim / 2).
    """
    at_least = torch.promote_types(dtype, torch.float32)
    # positions for one radian, (rotary_dim / 2)
    periods = theta ** (torch.arange(0, rotary_dim, 2, dtype=at_least, device=positions.device) / rotary_dim)
    if scaling is not None:
        periods = _stretched(periods, theta, scaling)
    angles = positions.to(at_least).unsqueeze(-1) / periods  # (…, seq, rotary_dim / 2)
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)  # one rotation for all heads
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and (factor := attention_factor(scaling)) != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def _stretched(periods: Tensor, theta: float, scaling: dict[str, Any]) -> Tensor:
    """Periods of a model whose context was extended after pre-training: (rotary_dim / 2) -> (rotary_dim / 2).

    ``linear`` makes all of them longer by ``factor``. ``llama3`` does so with those that the first context did not see
    ``low_freq_factor`` times, leaves those that it saw ``high_freq_factor`` times, and blends between (the frequencies,
    linearly in the number of times): ``apply_scaling`` in Meta's llama-models, models/llama3/model.py. ``yarn`` blends
    linearly in the index of the pair instead, between those that it saw ``beta_slow`` and ``beta_fast`` times (Peng et
    al. 2023, "YaRN", arXiv:2309.00071, section 3.2; the whole indices of ``truncate`` as in their code).
    """
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return periods * factor
    first = float(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        times_seen = first / (2 * math.pi * periods)
        kept = ((times_seen - low) / (high - low)).clamp(0, 1)
    else:
        pairs = len(periods)
        bounds = [  # the pairs, between two of them, that the first context sees so many times
            pairs * math.log(first / (times * 2 * math.pi)) / math.log(theta)
            for times in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
        ]
        if scaling.get("truncate", True):
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        begin = max(bounds[0], 0)
        end = min(bounds[1], 2 * pairs - 1)
        index = torch.arange(pairs, dtype=periods.dtype, device=periods.device)
        kept = 1 - ((index - begin) / (end - begin if end != begin else 0.001)).clamp(0, 1)
    return periods / ((1 - kept) / factor + kept)
