"""Parameters and FLOPs of a model from its config, and the sizes that all formulas are written in.

A size is a ``Count``: a number that remembers the product it came from, which gives the formulas of ``--explain``. The
letters are those of ``docs/accounting.md``: V vocabulary, h hidden, i intermediate, H heads, K key and value heads, d
width of a head, P positions, L layers.

FLOPs are those of matrix multiplications, 2 m k n each. Elementwise work, norms, softmax and the embedding's lookup are
bound by bandwidth and not counted. Attention counts all pairs of positions, the masked ones too, as Chowdhery et al.
2022 ("PaLM", appendix B) do for the utilization they define. Backward takes two matmuls for each one in forward.
``model`` FLOPs are what the math asks for; ``hardware`` FLOPs add what is recomputed to save memory. Utilization by the
first (MFU) says how fast the run is, by the second (HFU) how busy the device is.
"""

import dataclasses

from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig

LETTERS = {  # of each size: its field in the config, and how it is written
    "vocab": ("vocab_size", "V"),
    "hidden": ("hidden_size", "h"),
    "intermediate": ("intermediate_size", "i"),
    "heads": ("num_attention_heads", "H"),
    "kv_heads": ("num_key_value_heads", "K"),
    "head_dim": ("head_dim", "d"),
    "positions": ("max_position_embeddings", "P"),
    "layers": ("num_hidden_layers", "L"),
}


class Count(int):
    """A number of elements and the product it came from, such as ``B·T·h``."""

    formula: str

    def __new__(cls, value: int, formula: str = "") -> "Count":
        """``formula`` is how it is written; a bare number by default."""
        made = super().__new__(cls, value)
        made.formula = formula or str(value)
        return made

    def __mul__(self, other: int) -> "Count":
        if other == 1 and not isinstance(other, Count):
            return self
        return Count(int(self) * int(other), f"{self.formula}·{getattr(other, 'formula', other)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredMLP:
    """What was measured of an MLP class that the formulas do not know, for one layer.

    Attributes:
        parameters: Number of elements.
        flops: Of matmuls in forward, per token.
        saved: Bytes saved for backward besides the input: fixed, and per token.
        forward: Bytes of temporaries in forward: fixed, and per token.
        backward: The same in backward.
    """

    parameters: int
    flops: int
    saved: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """All sizes of a model that formulas are written in."""

    vocab: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    positions: Count
    layers: Count
    is_gated: bool

    @classmethod
    def of(cls, config: ModelConfig, mlp: MeasuredMLP | None = None) -> "Sizes":
        """The sizes of a config.

        Raises:
            ValueError: The vocabulary is not known, or the MLP is the user's own class and was not measured.
        """
        if config.vocab_size is None:
            raise ValueError("vocab_size is null: give the number of token ids (--vocab-size)")
        if config.mlp not in BUILT_IN_MLPS and mlp is None:
            raise ValueError(f"mlp {config.mlp!r} is not built in: its cost cannot be computed from the config")
        sizes = {name: Count(getattr(config, field), letter) for name, (field, letter) in LETTERS.items()}
        return cls(**sizes, is_gated=config.is_gated)

    @property
    def queries(self) -> Count:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> Count:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim

    def matrices(self) -> dict[str, tuple[Count, Count]]:
        """The linear layers of a block with a built-in MLP, each (out, in), in the order of the model."""
        hidden, wide = self.hidden, self.intermediate
        return {
            "q_proj": (self.queries, hidden),
            "k_proj": (self.keys, hidden),
            "v_proj": (self.keys, hidden),
            "o_proj": (hidden, self.queries),
            **({"gate_proj": (wide, hidden)} if self.is_gated else {}),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }


def parameters_by_part(config: ModelConfig, mlp: MeasuredMLP | None = None) -> dict[str, int]:
    """The number of parameters of embeddings, attention, MLP, norms and head, summed over layers.

    A tied head has no parameters of its own but its bias.

    Raises:
        ValueError: As in ``Sizes.of``.
    """
    return {part: sum(terms.values()) for part, terms in parameter_terms(config, mlp).items()}


def parameter_terms(config: ModelConfig, mlp: MeasuredMLP | None = None) -> dict[str, dict[str, int]]:
    """The same, term by term: for each part the products that add up to it, written out, and their values."""
    s = Sizes.of(config, mlp)
    layers, hidden, wide = s.layers, s.hidden, s.intermediate
    vectors = 2 if config.norm == "layernorm" else 1  # weight and bias
    widening = 2 if s.is_gated else 1  # matrices
    has_attention_bias, has_mlp_bias = config.attention_bias, config.mlp_bias and mlp is None
    whole_mlp = layers * hidden * wide * (widening + 1)
    rows = [
        ("embeddings", True, s.vocab * hidden),
        ("embeddings", config.position == "learned", s.positions * hidden),
        ("attention", True, layers * hidden * s.heads * s.head_dim * 2),  # q and o
        ("attention", True, layers * hidden * s.kv_heads * s.head_dim * 2),  # k and v
        ("attention", has_attention_bias, layers * s.heads * s.head_dim),
        ("attention", has_attention_bias, layers * s.kv_heads * s.head_dim * 2),
        ("attention", has_attention_bias, layers * hidden),
        ("mlp", True, whole_mlp if mlp is None else layers * Count(mlp.parameters, "measured")),
        ("mlp", has_mlp_bias, layers * wide * widening),
        ("mlp", has_mlp_bias, layers * hidden),
        ("norms", True, layers * hidden * (2 * vectors)),
        ("norms", True, hidden * vectors),
        ("norms", config.qk_norm, layers * s.head_dim * 2),
        ("head", not config.tie_word_embeddings, s.vocab * hidden),
        ("head", config.lm_head_bias, s.vocab),
    ]
    terms: dict[str, dict[str, int]] = {part: {} for part, _, _ in rows}
    for part, is_there, count in rows:
        if is_there:
            terms[part][count.formula] = int(count)
    return terms


def hidden_matrix_parameters(config: ModelConfig) -> int:
    """Parameters of the matrices of attention and MLP: the group ``hidden_matrices`` of ``optim.param_groups``."""
    return config.num_hidden_layers * sum(out * into for out, into in Sizes.of(config).matrices().values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of forward and backward over a number of tokens.

    Attributes:
        forward: Matmuls of the forward pass.
        backward: Twice as many.
        recomputed: What backward recomputes of forward.
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
        """Including recomputation."""
        return self.model + self.recomputed


def step_flops(config: ModelConfig, *, tokens: int, context_length: int, mlp: MeasuredMLP | None = None) -> StepFlops:
    """The FLOPs of one optimizer step.

    Args:
        config: ``vocab_size`` must be known.
        tokens: Of the step, summed over micro-batches.
        context_length: Tokens per row; attention is quadratic in it.
        mlp: Of a class that the formulas do not know.

    Raises:
        ValueError: As in ``Sizes.of``.
    """
    layer, s = layer_flops(config, context_length, mlp), Sizes.of(config, mlp)
    by_part = {
        "attention_projections": (layer["qkv"] + layer["o"]) * s.layers,
        "attention_scores": layer["scores"] * s.layers,
        "mlp": (layer["mlp_in"] + layer["mlp_out"]) * s.layers,
        "lm_head": 2 * s.hidden * s.vocab,
    }
    by_part = {name: tokens * int(flops) for name, flops in by_part.items()}
    forward = sum(by_part.values())
    recomputed = tokens * sum(_recomputed(config, layer, level) for level in config.checkpoint_levels)
    return StepFlops(forward=forward, backward=2 * forward, recomputed=recomputed, by_part=by_part)


def layer_flops(config: ModelConfig, context_length: int, mlp: MeasuredMLP | None = None) -> dict[str, int]:
    """FLOPs of one block per token: ``qkv``, ``scores``, ``o``, ``mlp_in`` (gate and up) and ``mlp_out`` (down)."""
    s = Sizes.of(config, mlp)
    flops = {name: 2 * int(out) * int(into) for name, (out, into) in s.matrices().items()}
    return {
        "qkv": flops["q_proj"] + flops["k_proj"] + flops["v_proj"],
        "scores": 4 * context_length * int(s.queries),  # Q Kᵀ and P V
        "o": flops["o_proj"],
        "mlp_in": mlp.flops if mlp is not None else flops["up_proj"] + flops.get("gate_proj", 0),
        "mlp_out": 0 if mlp is not None else flops["down_proj"],
    }


def _recomputed(config: ModelConfig, layer: dict[str, int], level: int) -> int:
    """What backward recomputes in one block.

    Checkpointing stops at the last tensor that backward needs, the input of ``down`` or of ``o``. The memory-optimized
    operator has no such place inside: it runs to its end.
    """
    block = config.recompute == "block"
    again = layer["mlp_in"] if level else 0  # inside the operator, also where the block around it is recomputed
    if block or config.recompute == "mlp":
        again += layer["mlp_in"] + (layer["mlp_out"] if config.mlp == "memory_optimized_swiglu" else 0)
    if block or config.recompute == "attention":
        again += layer["qkv"] + layer["scores"]
    return again + (layer["o"] if block else 0)  # the MLP comes after it
