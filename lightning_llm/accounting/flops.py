"""FLOPs of a training step, from the config: matrix products, counted as 2 m k n.

Elementwise work, norms, softmax and the embedding's look-up are not counted: they are bound by bandwidth. Attention
counts all pairs of positions, the masked ones too, as Chowdhery et al. 2022 ("PaLM", appendix B) do for the utilisation
they define. Backward takes two products for each of forward's: one for each factor's gradient.

``model`` FLOPs are what the maths asks for; ``hardware`` FLOPs add what is computed twice to save memory. Utilisation
by the first (MFU) says how fast the run is, by the second (HFU) how busy the device is.
"""

import dataclasses

from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of forward and backward over a number of tokens.

    Attributes:
        forward: Products of the forward pass.
        backward: Twice as many.
        recomputed: What backward computes again of forward.
        by_part: Forward's, split into ``attention_projections``, ``attention_scores``, ``mlp`` and ``lm_head``.
    """

    forward: int
    backward: int
    recomputed: int
    by_part: dict[str, int]

    @property
    def model(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """With what is recomputed."""
        return self.model + self.recomputed


def step_flops(config: ModelConfig, *, tokens: int, context_length: int) -> StepFlops:
    """The FLOPs of one optimiser step.

    Args:
        config: ``vocab_size`` must be known.
        tokens: Of the step, all micro-batches together.
        context_length: Tokens per row; attention is quadratic in it.

    Raises:
        ValueError: If the MLP is the user's own class, or the vocabulary is not known.
    """
    if config.vocab_size is None:
        raise ValueError("vocab_size is null: the products of the head cannot be counted without it")
    layer = layer_products(config, context_length)
    layers = config.num_hidden_layers
    by_part = {
        "attention_projections": (layer["qkv"] + layer["o"]) * layers,
        "attention_scores": layer["scores"] * layers,
        "mlp": (layer["mlp_in"] + layer["mlp_out"]) * layers,
        "lm_head": 2 * config.hidden_size * config.vocab_size,
    }
    by_part = {name: tokens * flops for name, flops in by_part.items()}
    forward = sum(by_part.values())
    recomputed = tokens * sum(_recomputed(config, layer, level) for level in config.checkpoint_levels)
    return StepFlops(forward=forward, backward=2 * forward, recomputed=recomputed, by_part=by_part)


def layer_products(config: ModelConfig, context_length: int) -> dict[str, int]:
    """FLOPs of one block per token: ``qkv``, ``scores``, ``o``, ``mlp_in`` (gate and up) and ``mlp_out`` (down)."""
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    assert config.intermediate_size is not None
    if config.mlp not in BUILT_IN_MLPS:
        raise ValueError(f"mlp {config.mlp!r} is a class of its own: its products cannot be counted from the config")
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    return {
        "qkv": 2 * hidden * (width + 2 * kv_width),
        "scores": 4 * context_length * width,  # Q Kᵀ and P V
        "o": 2 * width * hidden,
        "mlp_in": 2 * hidden * config.intermediate_size * (2 if config.is_gated else 1),
        "mlp_out": 2 * config.intermediate_size * hidden,
    }


def _recomputed(config: ModelConfig, layer: dict[str, int], level: int) -> int:
    """What backward does again in one block.

    Checkpointing stops at the last tensor that backward needs, the input of ``down`` or of ``o``. The memory-optimised
    op has no such place inside: it runs again to its end.
    """
    whole = config.recompute == "block"
    again = layer["mlp_in"] if level else 0  # inside the op, also where the block around it runs again
    if config.recompute == "mlp" or whole:
        again += layer["mlp_in"] + (layer["mlp_out"] if config.mlp == "memory_optimized_swiglu" else 0)
    if config.recompute == "attention" or whole:
        again += layer["qkv"] + layer["scores"]
    if whole:
        again += layer["o"]  # the MLP comes behind it
    return again
