"""The shape of a model, as one frozen value that checks itself.

Sizes carry the names of Hugging Face's ``LlamaConfig``, so that exporting is nearly the identity. What Llama does not
have (LayerNorm, learned positions, other MLPs, dropout) are options of their own. No torch is imported here: the
accounting and the command line read a config without paying for it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

from lightning_llm.io.untrusted import shown

Norm = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned", "none"]
Recompute = Literal["none", "mlp", "attention", "block"]

GATED_MLPS = ("swiglu", "memory_optimized_swiglu")
BUILT_IN_MLPS = (*GATED_MLPS, "gelu", "gelu_tanh", "relu")
CHECKPOINT_LEVELS = (0, 1, 2)
MOST_LAYERS = 2000  # twice the deepest that were trained (Wang et al. 2022, "DeepNet", arXiv:2203.00555)
MOST_SIZE, MOST_NUMBER = 2**40, 1e30  # beyond them torch overflows
MUP, MOST_BASE = ("base_width", "base_head_dim"), 2**16  # the options of mup
MOST_PARAMETERS = 10**13  # several times the largest that were trained
# The options of each way to stretch the rotation, by Hugging Face's names.
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# What a field of a type accepts. Those of type float are checked with their range.
KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: type(value) is int, "a whole number"),
    int | None: (lambda value: value is None or type(value) is int, "a whole number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys((str, Norm, Position, Recompute), (lambda value: isinstance(value, str), "a name")),
    dict[str, Any] | None: (lambda value: isinstance(value, dict | None), "options by name"),
    int | list[int]: (lambda value: {*map(type, _as_list(value))} <= {int}, "a whole number, or one for each layer"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer.

    All errors are reported at once. Sizes left at ``None`` are derived when the config is made, so that a config read
    back (``dataclasses.asdict``) holds the numbers that were used.

    Attributes:
        vocab_size: Number of token ids. ``None`` is filled from the token store by the command line.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP. ``None``: 8/3 of ``hidden_size`` rounded up to a multiple of 64 for
            the gated MLPs (Shazeer 2020, "GLU Variants Improve Transformer", section 3: equal parameters), else
            4 times ``hidden_size``.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key and value heads (Ainslie et al. 2023, "GQA"). ``None``: as many as queries.
        head_dim: Width of a head. ``None``: ``hidden_size / num_attention_heads``.
        max_position_embeddings: The longest context, in tokens.
        norm: ``rmsnorm`` (Zhang and Sennrich 2019) or ``layernorm``.
        rms_norm_eps: Added to the mean square, or to the variance for ``layernorm``.
        position: ``rope`` (Su et al. 2021, rotate-half form), ``learned`` (an embedding per position) or ``none``.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: How RoPE was extended beyond the context of pre-training, or ``None``:
            ``{rope_type: linear, factor: …}`` (Chen et al. 2023, "Extending Context Window of Large Language Models
            via Positional Interpolation") or ``{rope_type: llama3, factor: …, low_freq_factor: …, high_freq_factor: …,
            original_max_position_embeddings: …}``, which does not change the fast frequencies.
        mlp: ``swiglu``, ``memory_optimized_swiglu``, ``gelu`` (by the error function), ``gelu_tanh`` (as in GPT-2),
            ``relu``, or the import path of a class that is called with this config.
        checkpoint_level: Of ``memory_optimized_swiglu``: 0 saves what backward needs, 1 saves only the input and the
            weights and recomputes the rest, 2 includes the norm before it as well and saves nothing beyond the
            residual stream. A number, or a list with one for each layer.
        recompute: Parts of a block that save only their input in training and run again in backward
            (``torch.utils.checkpoint``): ``none``, ``mlp`` or ``attention`` with its norm, or the whole ``block``.
        qk_norm: RMSNorm on each query and key head before the rotation.
        dropout: Probability, on embeddings, attention weights and both residual branches.
        attention_bias: Biases in the four attention projections.
        mlp_bias: Biases in the MLP projections.
        lm_head_bias: A bias on the logits.
        tie_word_embeddings: The head shares the embedding's weight.
        initializer_range: Standard deviation of the initial weights.
        mup: Maximal update parametrization for AdamW (Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, table
            8): ``{base_width: 64, base_head_dim: 16}`` sets initial values and learning rates such that a learning
            rate tuned at ``hidden_size`` 64 and ``head_dim`` 16 fits wider models. ``None``: the same learning rate
            for all weights.
    """

    vocab_size: int | None = None
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 1024
    norm: Norm = "rmsnorm"
    rms_norm_eps: float = 1e-5
    position: Position = "rope"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    mlp: str = "memory_optimized_swiglu"
    checkpoint_level: int | list[int] = 0
    recompute: Recompute = "none"
    qk_norm: bool = False
    dropout: float = 0.0
    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    mup: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        faults = list(self._type_faults())
        if not faults:
            faults = list(self._size_faults())
            if not faults:  # derived sizes make sense only from sound ones
                self._fill_derived_sizes()
            faults += [*self._shape_faults(), *self._option_faults()]
        if faults := faults or list(self._magnitude_faults()):
            raise ValueError("; ".join(faults))

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is one of the built-in gated ones (three matrices)."""
        return self.mlp in GATED_MLPS

    @property
    def foreign_code(self) -> list[str]:
        """Import paths from outside this package: building the model imports and runs them."""
        return [self.mlp] if self.mlp not in BUILT_IN_MLPS and is_foreign(self.mlp) else []

    @property
    def checkpoint_levels(self) -> list[int]:
        """The level of each layer."""
        levels = _as_list(self.checkpoint_level)
        return levels * self.num_hidden_layers if isinstance(self.checkpoint_level, int) else levels

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, derived sizes filled in."""
        return dataclasses.asdict(self)

    def _fill_derived_sizes(self) -> None:
        head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
        derived = {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": None if rest else head_dim,  # reported by _shape_faults
            "intermediate_size": 64 * math.ceil(self.hidden_size / 24) if self.is_gated else 4 * self.hidden_size,
        }
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _type_faults(self) -> Iterator[str]:
        for field in dataclasses.fields(self):
            value, (fits, expected) = getattr(self, field.name), KINDS.get(field.type, (None, ""))
            if fits and not fits(value):
                yield f"{field.name} must be {expected}, got {shown(value)}"

    def _size_faults(self) -> Iterator[str]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            most = MOST_LAYERS if field.name == "num_hidden_layers" else MOST_SIZE
            if field.type in (int, int | None) and value is not None:
                if value < 1:
                    yield f"{field.name} must be at least 1, got {value}"
                elif value > most:
                    yield f"{field.name} must be at most {most}, got {shown(value)}"

    def _magnitude_faults(self) -> Iterator[str]:
        """A typing mistake may make a model that no machine can hold: reported before counting it takes hours."""
        assert self.intermediate_size is not None
        assert self.head_dim is not None
        layer = 2 * self.hidden_size * (self.num_attention_heads * self.head_dim + self.intermediate_size)
        positions = self.max_position_embeddings if self.position == "learned" else 0
        elements = self.num_hidden_layers * layer + self.hidden_size * ((self.vocab_size or 0) + positions)
        if elements > MOST_PARAMETERS:
            sizes = "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"
            given = ", ".join(f"{name} {getattr(self, name)}" for name in sizes)
            yield f"the model would have over {elements:.1e} parameters, more than {MOST_PARAMETERS:.0e}: lower {given}"

    def _shape_faults(self) -> Iterator[str]:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None and heads >= 1 and self.hidden_size % heads:
            yield (
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {heads}: "
                "change one of them or give head_dim"
            )
        if kv_heads is not None and kv_heads >= 1 and heads % kv_heads:
            yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        if self.position == "rope" and self.head_dim is not None and self.head_dim % 2:
            yield f"head_dim {self.head_dim} must be even with position 'rope': the rotation works on pairs"

    def _option_faults(self) -> Iterator[str]:
        for field in dataclasses.fields(self):
            value, accepted = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in accepted:
                yield f"{field.name} {value!r} is unknown: choose one of {', '.join(accepted)}"
        if self.mlp not in BUILT_IN_MLPS and "." not in self.mlp:
            yield (
                f"mlp {self.mlp!r} is unknown: choose one of {', '.join(BUILT_IN_MLPS)}, "
                "or give the import path of a class (package.module.Class)"
            )
        yield from self._level_faults()
        yield from self._scaling_faults()
        yield from self._mup_faults()
        if self.mlp_bias and self.mlp == "memory_optimized_swiglu":
            yield "mlp_bias is not supported by mlp 'memory_optimized_swiglu': use 'swiglu'"
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            yield f"dropout must be at least 0 and below 1, got {shown(self.dropout)}"
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not _is_positive(getattr(self, name)):
                yield f"{name} must be above 0 and finite, got {shown(getattr(self, name))}"

    def _scaling_faults(self) -> Iterator[str]:
        scaling = self.rope_scaling
        if scaling is None:
            return
        kind = scaling.get("rope_type")
        if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
            known = f"choose one of {', '.join(ROPE_SCALINGS)}, or leave rope_scaling out"
            yield f"rope_scaling.rope_type {shown(kind)} is not supported: {known}"
            return
        needed, given = ROPE_SCALINGS[kind], set(scaling) - {"rope_type"}
        faults = [f"rope_scaling of type {kind} lacks {name}" for name in needed if name not in given]
        unknown = sorted(shown(str(name))[1:-1] for name in given - set(needed))
        faults += [f"rope_scaling.{name} is unknown to type {kind}" for name in unknown]
        wrong = [name for name in sorted(given & set(needed)) if not _is_positive(scaling[name])]
        faults += [f"rope_scaling.{name} must be a number above 0, got {shown(scaling[name])}" for name in wrong]
        if not faults and kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
            faults.append(
                f"rope_scaling.low_freq_factor {scaling['low_freq_factor']} must be below "
                f"high_freq_factor {scaling['high_freq_factor']}"
            )
        yield from faults
        if self.position != "rope":
            yield f"rope_scaling needs position 'rope', got {self.position!r}"

    def _mup_faults(self) -> Iterator[str]:
        if self.mup is None:
            return
        sizes = [value for value in self.mup.values() if type(value) is int and 1 <= value <= MOST_BASE]
        if set(self.mup) != set(MUP) or len(sizes) != len(MUP):
            yield f"mup must have {' and '.join(MUP)}, whole numbers from 1 to {MOST_BASE}, got {shown(self.mup)}"
        if self.tie_word_embeddings:
            yield "mup needs tie_word_embeddings false: embedding and head get different learning rates"
        if self.mlp not in BUILT_IN_MLPS:
            yield f"mup knows the scales of mlp {', '.join(BUILT_IN_MLPS)}, not of {self.mlp!r}"

    def _level_faults(self) -> Iterator[str]:
        given = self.checkpoint_level
        levels = _as_list(given)
        if any(level not in CHECKPOINT_LEVELS for level in levels):
            yield f"checkpoint_level must be one of {', '.join(map(str, CHECKPOINT_LEVELS))}, got {given!r}"
            return
        if not isinstance(given, int) and len(levels) != self.num_hidden_layers:
            yield f"checkpoint_level lists {len(levels)} layers, num_hidden_layers is {self.num_hidden_layers}"
        if any(levels) and self.mlp != "memory_optimized_swiglu":
            yield f"checkpoint_level {given} needs mlp 'memory_optimized_swiglu', got {self.mlp!r}"
        if 2 in levels and self.norm != "rmsnorm":
            yield f"checkpoint_level 2 takes the norm in: it needs norm 'rmsnorm', got {self.norm!r}"


def is_foreign(path: str) -> bool:
    """Whether an import path is outside this package."""
    return not path.startswith("lightning_llm.")


def config_of_file(fields: dict[str, Any], source: object, *, trust_code: bool = False) -> ModelConfig:
    """The config in a file that may be untrusted, before its model is built.

    Args:
        fields: Of :class:`ModelConfig`.
        source: Names the file in errors.
        trust_code: Whether the file may name code from outside this package.

    Raises:
        ValueError: A field is wrong, or names code that is not trusted.
    """
    config = ModelConfig(**fields)
    if config.foreign_code and not trust_code:
        raise ValueError(
            f"{source} names code from outside lightning_llm: {', '.join(config.foreign_code)}; nothing was imported. "
            "If you trust it, give --trust-code (in Python: trust_code=True)"
        )
    return config


def _as_list(level: Any) -> list[Any]:
    return [*level] if isinstance(level, list | tuple) else [level]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value <= MOST_NUMBER
