"""The shape of a model, as one frozen value that checks itself.

Sizes carry the names of Hugging Face's ``LlamaConfig``, so that exporting is nearly the identity. What Llama does not
have (LayerNorm, learned positions, other MLPs, dropout) are options of their own. No torch is imported here: the
accounting and the command line read a config without paying for it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal

from lightning_llm.io.options import number, option, option_problems, raise_all
from lightning_llm.io.trust import refuse_custom
from lightning_llm.io.untrusted import is_number, shown
from lightning_llm.model.layers import configs_of_layers, layer_form_problems, layer_problems, normalized_layers
from lightning_llm.model.mup import mup_problems
from lightning_llm.model.parts import (
    BUILT_IN,
    PARTIAL_ROPE,
    Part,
    arguments_of,
    by_path,
    form_problems,
    is_positive,
    name_of,
    normalized,
    option_of,
    part_problems,
    window_of_layer,
)
from lightning_llm.model.references import classes_in, reference_problems
from lightning_llm.model.rope_scaling import scaling_problems
from lightning_llm.ops.sizes import CHECKPOINT_LEVELS

Recompute = Literal["none", "mlp", "attention", "block"]

SWIGLUS = ("swiglu", "memory_optimized_swiglu")
MOST_LAYERS = 2000  # twice the deepest that were trained (Wang et al. 2022, "DeepNet", arXiv:2203.00555)
MOST_EXPERTS_IN_ALL = 2**17  # in all layers; the most that were trained are 30,720 (Switch-C, arXiv:2101.03961)
MOST_SIZE = 2**40  # beyond it torch overflows
MOST_PARAMETERS = 10**13  # several times the largest that were trained
# What a field of a type accepts. Fields of type float say themselves what they accept.
KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: type(value) is int, "a whole number"),
    int | None: (lambda value: value is None or type(value) is int, "a whole number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    Recompute: (lambda value: isinstance(value, str), "a name"),
    dict[str, Any] | None: (lambda value: isinstance(value, dict | None), "options by name"),
    int | list[int]: (lambda value: {*map(type, _as_list(value))} <= {int}, "a whole number, or one for each layer"),
}


def _positive(default: float) -> Any:
    return option(default, "above 0 and finite", is_positive)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer.

    All errors are reported at once. Sizes left at ``None`` are derived when the config is made, so that a config read
    back (``dataclasses.asdict``) holds the numbers that were used.

    A part (``attention``, ``mlp``, ``norm``, ``position``, ``block``, ``loss``) is a short name, the import path of a
    class, or ``{class_path: name or path, init_args: {…}}``. In Python, the class itself may be in place of its path;
    the config has the path. docs/parts.md has a table of the built-in ones with their
    options, and docs/extending.md says what a class of each kind gets and returns.

    Attributes:
        vocab_size: Number of token ids. ``None``: that of the run's data.
        vocab_multiple_of: Embedding and head are padded with rows to a multiple of this; 64 or 128 makes matmuls fast
            on a GPU. The rows after ``vocab_size`` are zero and stay so: they are no tokens and have no probability.
            Exports leave them out.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP. ``None``: 8/3 of ``hidden_size`` rounded up to a multiple of 64 for
            the gated MLPs (Shazeer 2020, "GLU Variants Improve Transformer", section 3: equal parameters), else
            4 times ``hidden_size``.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key and value heads (Ainslie et al. 2023, "GQA"). ``None``: as many as queries.
        head_dim: Width of a head. ``None``: ``hidden_size / num_attention_heads``.
        max_position_embeddings: The longest context, in tokens.
        attention: ``full``, ``sliding_window``, ``gated``, ``value_residual``, ``canon``,
            ``latent``, ``gated_delta_net``, or a class.
        block: How attention and MLP are joined: ``pre`` (norms before them), ``post``, ``sandwich``, or a class.
        loss: ``cross_entropy``, which takes ``z_loss`` and ``label_smoothing``, or a class. The validation loss is
            always the plain cross-entropy.
        norm: ``rmsnorm`` (Zhang and Sennrich 2019), ``layernorm``, ``dynamic_tanh``, or a class.
        rms_norm_eps: Added to the mean square, or to the variance for ``layernorm``.
        position: ``rope`` (Su et al. 2021, rotate-half form), ``learned`` (an embedding per position), ``alibi`` (a
            bias of the scores), ``none``, or a class.
        rope_theta: Base of the rotary frequencies.
        partial_rotary_factor: The share of each head that ``rope`` rotates: its first dimensions.
        rope_scaling: How RoPE was extended beyond the context of pre-training, or ``None``:
            ``{rope_type: linear, factor: …}`` (Chen et al. 2023, "Extending Context Window of Large Language Models
            via Positional Interpolation"), ``{rope_type: llama3, factor: …, low_freq_factor: …, high_freq_factor: …,
            original_max_position_embeddings: …}``, which does not change the fast frequencies, or ``{rope_type: yarn,
            factor: …, original_max_position_embeddings: …}`` (Peng et al. 2023, "YaRN").
        mlp: ``swiglu``, ``memory_optimized_swiglu``, ``geglu``, ``gelu`` (by the error function), ``gelu_tanh`` (as in
            GPT-2), ``relu``, ``relu2``, ``mixture_of_experts``, or a class.
        checkpoint_level: What ``memory_optimized_swiglu`` saves: at level 0, input, gate, and up (it recomputes the
            elementwise part); at 1, only the input (it recomputes the rest); at 2, the input of the norm before the MLP
            instead. A number, or a list with one for each layer.
        recompute: Parts of a block that save only their input in training and run again in backward
            (``torch.utils.checkpoint``): ``none``, ``mlp`` or ``attention`` with its norm, or the whole ``block``.
        qk_norm: RMSNorm on each query and key head before the rotation.
        layers: What some layers have in place of the options above: a list with the options of one layer each, begun
            again until all layers have theirs. So ``[{attention: gated_delta_net, position: none}, {}]`` is for every
            other layer. The options are ``attention``, ``mlp``, ``position`` (``none``, or that of the model),
            ``qk_norm``, ``num_key_value_heads`` and ``intermediate_size``. ``None``: all layers are alike.
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
    vocab_multiple_of: int = 1
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = dataclasses.field(default=4, metadata={"most": MOST_LAYERS})
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 1024
    attention: Part = "full"
    block: Part = "pre"
    loss: Part = "cross_entropy"
    norm: Part = "rmsnorm"
    rms_norm_eps: float = _positive(1e-5)
    position: Part = "rope"
    rope_theta: float = _positive(10000.0)
    partial_rotary_factor: float = number(1.0, "above 0 and at most 1", lambda value: 0 < value <= 1)
    rope_scaling: dict[str, Any] | None = None
    mlp: Part = "memory_optimized_swiglu"
    checkpoint_level: int | list[int] = 0
    recompute: Recompute = "none"
    qk_norm: bool = False
    layers: list[dict[str, Any]] | None = None
    dropout: float = number(0.0, "at least 0 and below 1", lambda value: 0 <= value < 1)
    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = _positive(0.02)
    mup: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for kind in BUILT_IN:
            object.__setattr__(self, kind, normalized(by_path(kind, getattr(self, kind))))
        object.__setattr__(self, "layers", normalized_layers(self.layers))
        problems = list(self._type_problems())
        if not problems:
            problems = list(self._size_problems())
            if not problems:  # derived sizes make sense only from sound ones
                self._fill_derived_sizes()
            problems += [*self._shape_problems(), *self._option_problems()]
        raise_all(problems or list(self._magnitude_problems()) or layer_problems(self))

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is one of the built-in gated ones (three matrices)."""
        built_in = BUILT_IN["mlp"].get(name_of(self.mlp))
        return built_in is not None and built_in.is_gated

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head ``rope`` rotates."""
        return int((self.head_dim or 0) * self.partial_rotary_factor)

    @property
    def attention_windows(self) -> list[int | None]:
        """How many positions the attention of each layer sees; ``None``: all before it."""
        windows = []
        for layer, config in enumerate(self.layer_configs):
            window, every = (option_of("attention", config.attention, name) for name in ("window", "every"))
            windows.append(window_of_layer(layer, window, every))
        return windows

    @cached_property
    def layer_configs(self) -> list["ModelConfig"]:
        """The config of each layer: this one, with the layer's own options. Equal layers share one."""
        return configs_of_layers(self)

    @property
    def custom_parts(self) -> dict[str, str]:
        """The kinds of parts that are not built in, and the import paths of their classes, which building imports.

        The classes of objects among their arguments have keys of their own.
        """
        parts = {kind: (kind, getattr(self, kind)) for kind in BUILT_IN}
        for index, options in enumerate(self.layers or ()):
            parts |= {f"layers[{index}].{kind}": (kind, options[kind]) for kind in BUILT_IN if kind in options}
        custom = {key: part for key, (kind, part) in parts.items() if name_of(part) not in BUILT_IN[kind]}
        found = {key: name_of(part) for key, part in custom.items()}
        for key, part in custom.items():
            found |= {f"{key}.init_args[{index}]": path for index, path in enumerate(classes_in(arguments_of(part)))}
        return found

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head; 0 where the vocabulary is not known."""
        return self.vocab_multiple_of * math.ceil((self.vocab_size or 0) / self.vocab_multiple_of)

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
            "head_dim": None if rest else head_dim,  # reported by _shape_problems
            "intermediate_size": 64 * math.ceil(self.hidden_size / 24) if self.is_gated else 4 * self.hidden_size,
        }
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _type_problems(self) -> Iterator[str]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fits, expected = KINDS.get(field.type, (None, ""))
            if fits and not fits(value):
                yield f"{field.name} must be {expected}, got {shown(value)}"
        for kind in BUILT_IN:
            yield from form_problems(kind, getattr(self, kind))
        yield from layer_form_problems(self.layers)

    def _size_problems(self) -> Iterator[str]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            most = field.metadata.get("most", MOST_SIZE)
            if field.type in (int, int | None) and value is not None:
                if value < 1:
                    yield f"{field.name} must be at least 1, got {value}"
                elif value > most:
                    yield f"{field.name} must be at most {most}, got {shown(value)}"

    def _magnitude_problems(self) -> Iterator[str]:
        """A typing mistake may make a model that no machine can hold: reported before counting it takes hours."""
        assert self.intermediate_size is not None
        assert self.head_dim is not None
        experts = option_of("mlp", self.mlp, "num_experts") or 1
        if (count := self.num_hidden_layers * experts) > MOST_EXPERTS_IN_ALL:
            given = f"num_hidden_layers {self.num_hidden_layers} or mlp.num_experts {experts}"
            yield f"the model would have {count} experts, more than {MOST_EXPERTS_IN_ALL}: lower {given}"
        wide = self.intermediate_size * experts
        layer = 2 * self.hidden_size * (self.num_attention_heads * self.head_dim + wide)
        positions = self.max_position_embeddings if self.position == "learned" else 0
        elements = self.num_hidden_layers * layer + self.hidden_size * (self.vocab_rows + positions)
        if elements > MOST_PARAMETERS:
            sizes = "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"
            given = ", ".join(f"{name} {getattr(self, name)}" for name in sizes)
            yield f"the model would have over {elements:.1e} parameters, more than {MOST_PARAMETERS:.0e}: lower {given}"

    def _shape_problems(self) -> Iterator[str]:
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
        is_partial = is_number(self.partial_rotary_factor) and 0 < self.partial_rotary_factor < 1
        if is_partial and self.position != "rope":
            yield f"partial_rotary_factor needs position 'rope', got {name_of(self.position)!r}"
        elif is_partial and self.head_dim and (self.rotary_dim % 2 or not self.rotary_dim):
            yield (
                f"partial_rotary_factor {self.partial_rotary_factor} rotates {self.rotary_dim} of {self.head_dim} "
                "dimensions of a head: it must be an even number of them, at least 2"
            )

    def _attention_problems(self) -> Iterator[str]:
        """Problems with options that a built-in attention cannot have."""
        name, position = name_of(self.attention), name_of(self.position)
        if (built_in := BUILT_IN["attention"].get(name)) is None:
            return
        if built_in.has_own_keys and self.qk_norm:
            yield f"attention {name!r} has a norm of its own: qk_norm must be false"
        if built_in.has_own_keys and self.num_key_value_heads != (heads := self.num_attention_heads):
            yield (
                f"attention {name!r} has keys for each of the {heads} query heads: num_key_value_heads must be null or "
                f"{heads}, got {self.num_key_value_heads}"
            )
        is_partial = position == "rope" and self.partial_rotary_factor < 1
        if built_in.positions and (PARTIAL_ROPE if is_partial else position) not in built_in.positions:
            yield f"attention {name!r} needs position {', or '.join(built_in.positions)}, got {position}"

    def _option_problems(self) -> Iterator[str]:
        problems = {kind: list(part_problems(kind, getattr(self, kind))) for kind in BUILT_IN}
        fields = [field.name for field in dataclasses.fields(self)]
        for kind in BUILT_IN:
            part = getattr(self, kind)
            if not problems[kind] and name_of(part) not in BUILT_IN[kind]:
                problems[kind] += reference_problems(kind, arguments_of(part), fields)
        yield from (problem for of_kind in problems.values() for problem in of_kind)
        experts, chosen = (option_of("mlp", self.mlp, name) for name in ("num_experts", "top_k"))
        if experts is not None and not problems["mlp"] and chosen > experts:
            yield f"mlp.top_k {chosen} must be at most mlp.num_experts {experts}"
        yield from self._attention_problems()
        yield from self._level_problems()
        if self.rope_scaling is not None:
            yield from scaling_problems(self.rope_scaling)
            if self.position != "rope":
                yield f"rope_scaling needs position 'rope', got {name_of(self.position)!r}"
        if self.mup is not None:
            names = {kind: name_of(getattr(self, kind)) for kind in BUILT_IN}
            yield from mup_problems(self.mup, names, ties_embeddings=self.tie_word_embeddings)
            if any(options.get("qk_norm", self.qk_norm) != self.qk_norm for options in self.layers or ()):
                yield "mup needs the same qk_norm in all layers, as learning rates depend on it: set it in the model"
        if self.mlp_bias and self.mlp == "memory_optimized_swiglu":
            yield "mlp_bias is not supported by mlp 'memory_optimized_swiglu': use 'swiglu'"
        yield from option_problems(self)

    def _level_problems(self) -> Iterator[str]:
        given = self.checkpoint_level
        levels = _as_list(given)
        if any(level not in CHECKPOINT_LEVELS for level in levels):
            yield f"checkpoint_level must be one of {', '.join(map(str, CHECKPOINT_LEVELS))}, got {given!r}"
            return
        if not isinstance(given, int) and len(levels) != self.num_hidden_layers:
            yield f"checkpoint_level lists {len(levels)} layers, num_hidden_layers is {self.num_hidden_layers}"
        if any(levels) and self.mlp != "memory_optimized_swiglu":
            yield f"checkpoint_level {given} needs mlp 'memory_optimized_swiglu', got {name_of(self.mlp)!r}"
        if 2 in levels and self.norm != "rmsnorm":
            yield f"checkpoint_level 2 includes the norm before the MLP: use norm 'rmsnorm', got {name_of(self.norm)!r}"
        if 2 in levels and self.block == "post":
            yield "checkpoint_level 2 includes the norm before the MLP: block 'post' has none there"


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
    refuse_custom(config.custom_parts.values(), source, trust_code=trust_code)
    return config


def _as_list(level: Any) -> list[Any]:
    return [*level] if isinstance(level, list | tuple) else [level]
