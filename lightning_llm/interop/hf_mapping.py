"""How our models map to Hugging Face classes: which class computes the same, its config fields, its tensor names.

===================  ==============================  ==================================================================
class                a model with                    its tensors
===================  ==============================  ==================================================================
LlamaForCausalLM     rmsnorm, rope, SwiGLU or GeGLU  ours with the prefix ``model.``, except for ``lm_head``
Qwen3ForCausalLM     the same with ``qk_norm``       the same
GPT2LMHeadModel      layernorm, learned positions,   ``(in, out)`` instead of ``(out, in)``; q, k and v in one; always
                     GELU (both forms), ReLU, ReLU²  with biases: zeros if we have none
===================  ==============================  ==================================================================

Each mapping has four methods: ``mismatches`` (why a model does not fit), ``to_fields`` and ``from_fields``
(``config.json``), and ``tensor_maps``.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from lightning_llm.interop.config_json import Fields, read_rope
from lightning_llm.io.schema import list_of, one_of
from lightning_llm.io.untrusted import shown
from lightning_llm.model.config import MOST_LAYERS, SWIGLUS, ModelConfig
from lightning_llm.model.parts import name_of

LLAMA_SIZES = {  # names of Llama's config and ours: Llama's default, and Qwen3's
    "vocab_size": (32000, 151936),
    "hidden_size": (4096, 4096),
    "intermediate_size": (11008, 22016),
    "num_hidden_layers": (32, 32),
    "num_attention_heads": (32, 32),
    "num_key_value_heads": (None, 32),
    "head_dim": (None, 128),
    "max_position_embeddings": (2048, 32768),
}
SHARED = (*LLAMA_SIZES, "rms_norm_eps", "tie_word_embeddings", "attention_bias", "initializer_range")

# GPT-2's name for a size, ours, GPT-2's default
GPT2_SIZES = (
    ("vocab_size", "vocab_size", 50257),
    ("n_positions", "max_position_embeddings", 1024),
    ("n_embd", "hidden_size", 768),
    ("n_layer", "num_hidden_layers", 12),
    ("n_head", "num_attention_heads", 12),
)
GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
# ours -> its name in GPT-2, and aliases that are read as the same
GPT2_ACTIVATIONS = {
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "gelu": ("gelu", "gelu_python"),
    "relu": ("relu",),
    "relu2": ("relu2",),
}
LLAMA_ACTIVATIONS = {**dict.fromkeys(SWIGLUS, ("silu", "swish")), "geglu": ("gelu",)}
GPT2_TOP = {
    "wte.weight": "embed_tokens.weight",
    "wpe.weight": "embed_positions.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
# GPT-2's name, ours, whether the weight is the transpose: it is (in, out) in GPT-2's Conv1D
GPT2_LAYER = (
    ("ln_1", ("input_layernorm",), False),
    ("attn.c_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), True),
    ("attn.c_proj", ("self_attn.o_proj",), True),
    ("ln_2", ("post_attention_layernorm",), False),
    ("mlp.c_fc", ("mlp.up_proj",), True),
    ("mlp.c_proj", ("mlp.down_proj",), True),
)


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A Hugging Face tensor, and the tensors of ours that it consists of.

    Attributes:
        name: In the Hugging Face model.
        ours: Names in our model; several are concatenated by rows.
        transposed: Whether it is the transpose of that.
    """

    name: str
    ours: tuple[str, ...]
    transposed: bool = False


def _of_all_classes(config: ModelConfig) -> dict[str, bool]:
    """Requirements of every class, and whether a model meets them. A loss is no part of what is exported."""
    return {
        f"attention {config.attention!r}: it has full attention": config.attention == "full",
        "layers: all of its layers are alike": config.layers is None,
        f"block {config.block!r}: its norms are before attention and MLP": config.block == "pre",
    }


@dataclasses.dataclass(frozen=True)
class LlamaMapping:
    """Llama, and Qwen3, which also has a norm of query and key heads.

    Attributes:
        architecture: The class.
        model_type: Its short name.
        qk_norm: Whether it has the norm.
        sizes: Defaults of the sizes that are not in ``config.json``.
        prefix: Of all tensor names except the head's; some folders omit it.
    """

    architecture: str
    model_type: str
    qk_norm: bool
    sizes: Mapping[str, int | None]
    prefix: str = "model."

    def mismatches(self, config: ModelConfig) -> list[str]:
        """Why the class cannot compute a model; empty if it can."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        fits = {
            f"norm {config.norm!r}: it has rmsnorm": config.norm == "rmsnorm",
            f"position {config.position!r}: it has rope": config.position == "rope",
            f"mlp {config.mlp!r}: its MLP is SwiGLU or GeGLU": name_of(config.mlp) in LLAMA_ACTIVATIONS,
            **_of_all_classes(config),
            f"partial_rotary_factor {config.partial_rotary_factor}: it rotates whole heads": config.rotary_dim
            == config.head_dim,
            f"qk_norm {config.qk_norm}: it has {'one' if self.qk_norm else 'none'}": config.qk_norm == self.qk_norm,
            "mlp_bias True: its MLP has none": not (config.mlp_bias and self.qk_norm),
            "lm_head_bias True: its head has none": not config.lm_head_bias,
            f"hidden_size {hidden}: it must be a multiple of num_attention_heads {heads}": self.qk_norm
            or hidden % heads == 0,
        }
        return [reason for reason, is_met in fits.items() if not is_met]

    def to_fields(self, config: ModelConfig) -> dict[str, Any]:
        """The fields of ``config.json``."""
        fields = {name: getattr(config, name) for name in SHARED}
        fields |= {"hidden_act": LLAMA_ACTIVATIONS[name_of(config.mlp)][0], "attention_dropout": 0.0}
        window = {"use_sliding_window": False, "sliding_window": None}
        fields |= window if self.qk_norm else {"mlp_bias": config.mlp_bias}
        scaling = config.rope_scaling
        # transformers 5 reads the first, 4 the other two
        fields["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
        return {**fields, "rope_theta": config.rope_theta, "rope_scaling": scaling}

    def from_fields(self, fields: Fields) -> dict[str, Any]:
        """The options of ``ModelConfig``; adds to the problems and notes of ``fields``."""
        sizes = {name: fields.size(name, default) for name, default in self.sizes.items()}
        theta, scaling = read_rope(fields, sizes["max_position_embeddings"] or 1)
        activation = fields.one_of("hidden_act", dict.fromkeys(LLAMA_ACTIVATIONS.values()), "silu")
        fields.must_be("rope_interleaved", (False, None), "the halves of a head are rotated here, not neighbors")
        fields.checked("layer_types", list_of(one_of("full_attention"), MOST_LAYERS))
        full = "attention reaches all positions before"
        if not self.qk_norm:
            fields.must_be("sliding_window", (None,), full)
        else:
            fields.must_be("use_sliding_window", (False, None), full)
            for ignored in ("sliding_window", "max_window_layers"):  # they apply with use_sliding_window only
                fields.take(ignored)
        if dropout := fields.fraction("attention_dropout", 0.0):
            fields.notes.append(
                f"attention_dropout {dropout} acts in training only and is not imported: architecture.dropout is 0"
            )
        mlp_bias = not self.qk_norm and fields.flag("mlp_bias")
        return {
            **sizes,
            "norm": "rmsnorm",
            "position": "rope",
            "qk_norm": self.qk_norm,
            "mlp": "geglu" if activation == "gelu" else "swiglu" if mlp_bias else "memory_optimized_swiglu",
            "mlp_bias": mlp_bias,
            "attention_bias": fields.flag("attention_bias"),
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": fields.flag("tie_word_embeddings"),
            "initializer_range": fields.number("initializer_range", 0.02),
        }

    def tensor_maps(self, names: Iterable[str]) -> list[TensorMap]:
        """The Hugging Face tensors of a model with these tensors of ours."""
        return [TensorMap(name if name.startswith("lm_head.") else self.prefix + name, (name,)) for name in names]


class GPT2Mapping:
    """GPT-2 and GPT-style models: LayerNorm, learned positions, an MLP of two matrices. Methods as in Llama's."""

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    prefix = "transformer."

    def mismatches(self, config: ModelConfig) -> list[str]:
        """Why the class cannot compute a model; empty if it can."""
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        head_dim = config.head_dim
        assert head_dim is not None
        fits = {
            f"norm {config.norm!r}: it has layernorm": config.norm == "layernorm",
            f"position {config.position!r}: it has learned": config.position == "learned",
            f"mlp {config.mlp!r}: it has {', '.join(GPT2_ACTIVATIONS)}": name_of(config.mlp) in GPT2_ACTIVATIONS,
            **_of_all_classes(config),
            "qk_norm True: it has none": not config.qk_norm,
            f"num_key_value_heads {kv_heads}: it has as many as query heads": kv_heads == heads,
            f"head_dim {head_dim}: it must be hidden_size / num_attention_heads": heads * head_dim
            == config.hidden_size,
            "lm_head_bias True: its head has none": not config.lm_head_bias,
        }
        return [reason for reason, is_met in fits.items() if not is_met]

    def to_fields(self, config: ModelConfig) -> dict[str, Any]:
        """The fields of ``config.json``."""
        return {
            **{theirs: getattr(config, ours) for theirs, ours, _ in GPT2_SIZES},
            "n_inner": config.intermediate_size,
            "activation_function": GPT2_ACTIVATIONS[name_of(config.mlp)][0],
            **dict.fromkeys(GPT2_DROPOUTS, config.dropout),
            "layer_norm_epsilon": config.rms_norm_eps,
            "initializer_range": config.initializer_range,
            "tie_word_embeddings": config.tie_word_embeddings,
        }

    def from_fields(self, fields: Fields) -> dict[str, Any]:
        """The options of ``ModelConfig``; adds to the problems and notes of ``fields``."""
        sizes = {ours: fields.size(theirs, default) for theirs, ours, default in GPT2_SIZES}
        positions, hidden = sizes["max_position_embeddings"], sizes["hidden_size"]
        assert hidden is not None
        fields.must_be("n_ctx", (positions, None), f"it must be n_positions {positions}")
        activation = fields.one_of("activation_function", GPT2_ACTIVATIONS.values(), "gelu_new")
        mlp = next((ours for ours, theirs in GPT2_ACTIVATIONS.items() if activation in theirs), "gelu")
        fields.must_be("scale_attn_weights", (True, None), "attention is scaled by the root of head_dim")
        fields.must_be("scale_attn_by_inverse_layer_idx", (False, None))
        fields.must_be("add_cross_attention", (False, None))
        dropouts = {name: fields.fraction(name, 0.1) for name in GPT2_DROPOUTS}
        dropout = dropouts["resid_pdrop"]
        if len(set(dropouts.values())) > 1:
            fields.notes.append(f"{dropouts} cannot all be kept, they act in training only: architecture.dropout is 0")
            dropout = 0.0
        return {
            **sizes,
            "intermediate_size": fields.size("n_inner", 4 * hidden),
            "norm": "layernorm",
            "position": "learned",
            "mlp": mlp,
            "dropout": dropout,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
            "initializer_range": fields.number("initializer_range", 0.02),
        }

    def tensor_maps(self, names: Iterable[str]) -> list[TensorMap]:
        """The Hugging Face tensors of a model with these tensors of ours."""
        names = set(names)
        layers = sum(name.endswith(".input_layernorm.weight") for name in names)
        found = [TensorMap(self.prefix + theirs, (own,)) for theirs, own in GPT2_TOP.items()]
        for layer, (theirs, ours, is_linear), kind in product(range(layers), GPT2_LAYER, ("weight", "bias")):
            parts = tuple(f"layers.{layer}.{part}.{kind}" for part in ours)
            found.append(TensorMap(f"{self.prefix}h.{layer}.{theirs}.{kind}", parts, is_linear and kind == "weight"))
        return found + [TensorMap(name, (name,)) for name in ("lm_head.weight",) if name in names]


HFMapping = LlamaMapping | GPT2Mapping
MAPPINGS: tuple[HFMapping, ...] = (
    LlamaMapping("LlamaForCausalLM", "llama", False, {name: size for name, (size, _) in LLAMA_SIZES.items()}),
    LlamaMapping("Qwen3ForCausalLM", "qwen3", True, {name: size for name, (_, size) in LLAMA_SIZES.items()}),
    GPT2Mapping(),
)


def mapping_for(config: ModelConfig) -> HFMapping:
    """The Hugging Face class that computes the same as a model with this config.

    Raises:
        ValueError: No class does; with all mismatches of the classes that come nearest.
    """
    mismatches = [(mapping, mapping.mismatches(config)) for mapping in MAPPINGS]
    fewest = min(len(reasons) for _, reasons in mismatches)
    nearest = [(mapping, reasons) for mapping, reasons in mismatches if len(reasons) == fewest]
    if not fewest:
        return nearest[0][0]
    listed = " | ".join(f"{mapping.architecture} cannot have {'; '.join(reasons)}" for mapping, reasons in nearest)
    raise ValueError(f"no Hugging Face class computes what this model does: {listed}")


def mapping_in(content: dict[str, object]) -> HFMapping:
    """The mapping of the class in a ``config.json``.

    Raises:
        ValueError: The class is missing or not supported.
    """
    known = ", ".join(f"{mapping.architecture} ({mapping.model_type})" for mapping in MAPPINGS)
    kind, classes = content.get("model_type"), content.get("architectures")
    for mapping in MAPPINGS:
        if kind == mapping.model_type and (not classes or classes == [mapping.architecture]):
            return mapping
    if kind is None and classes is None:
        raise ValueError(f"it has neither model_type nor architectures; the supported ones are {known}")
    found = f"model_type {shown(kind)} with architectures {shown(classes)}"
    raise ValueError(f"{found} is not supported; there are {known}")
