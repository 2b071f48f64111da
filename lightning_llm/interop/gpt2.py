"""GPT-2's place in ``transformers``; see ``interop.families``."""

from collections.abc import Iterable
from typing import Any

from lightning_llm.interop.family import Place
from lightning_llm.interop.fields import Fields
from lightning_llm.io.untrusted import shown
from lightning_llm.model.config import ModelConfig

# ours -> what it is called there, and what is read as the same
ACTIVATIONS = {
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "gelu": ("gelu", "gelu_python"),
    "relu": ("relu",),
}
TOP = {
    "wte.weight": "embed_tokens.weight",
    "wpe.weight": "embed_positions.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
# there, ours, whether the weight is the transpose: it is (in, out) in GPT-2's Conv1D
IN_LAYER = (
    ("ln_1", ("input_layernorm",), False),
    ("attn.c_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), True),
    ("attn.c_proj", ("self_attn.o_proj",), True),
    ("ln_2", ("post_attention_layernorm",), False),
    ("mlp.c_fc", ("mlp.up_proj",), True),
    ("mlp.c_proj", ("mlp.down_proj",), True),
)


class GPT2:
    """GPT-2 and GPT-style models: LayerNorm, learned positions, an MLP of two matrices."""

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    prefix = "transformer."

    def refusals(self, config: ModelConfig) -> list[str]:
        """See :class:`lightning_llm.interop.family.Family`."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        assert config.head_dim is not None
        return [
            reason
            for does_not_fit, reason in (
                (config.norm != "layernorm", f"norm {config.norm!r}: it has layernorm"),
                (config.position != "learned", f"position {config.position!r}: it has learned"),
                (config.mlp not in ACTIVATIONS, f"mlp {config.mlp!r}: it has {', '.join(ACTIVATIONS)}"),
                (config.qk_norm, "qk_norm True: it has none"),
                (kv_heads != heads, f"num_key_value_heads {kv_heads}: it has as many as query heads"),
                (
                    heads * config.head_dim != config.hidden_size,
                    f"head_dim {config.head_dim}: it must be hidden_size / num_attention_heads",
                ),
                (config.lm_head_bias, "lm_head_bias True: its head has none"),
            )
            if does_not_fit
        ]

    def to_fields(self, config: ModelConfig) -> dict[str, Any]:
        """See :class:`lightning_llm.interop.family.Family`."""
        return {
            "vocab_size": config.vocab_size,
            "n_positions": config.max_position_embeddings,
            "n_embd": config.hidden_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "n_inner": config.intermediate_size,
            "activation_function": ACTIVATIONS[config.mlp][0],
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
            "layer_norm_epsilon": config.rms_norm_eps,
            "initializer_range": config.initializer_range,
            "tie_word_embeddings": config.tie_word_embeddings,
        }

    def from_fields(self, fields: Fields) -> dict[str, Any]:
        """See :class:`lightning_llm.interop.family.Family`."""
        hidden = fields.whole("n_embd", 768)
        positions = fields.whole("n_positions", 1024)
        assert hidden is not None
        fields.must_be("n_ctx", (positions, None), f"it must be n_positions {positions}")
        called = fields.take("activation_function", "gelu_new")
        mlp = next((ours for ours, theirs in ACTIVATIONS.items() if called in theirs), None)
        if mlp is None:
            known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
            fields.faults.append(f"activation_function {shown(called)} is not supported: there are {known}")
        fields.must_be("scale_attn_weights", (True, None), "attention is scaled by the root of head_dim")
        fields.must_be("scale_attn_by_inverse_layer_idx", (False, None))
        fields.must_be("add_cross_attention", (False, None))
        dropouts = {name: fields.share(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
        dropout = dropouts["resid_pdrop"]
        if len(set(dropouts.values())) > 1:
            fields.notes.append(f"{dropouts} cannot all be kept, they act in training only: architecture.dropout is 0")
            dropout = 0.0
        return {
            "vocab_size": fields.whole("vocab_size", 50257),
            "hidden_size": hidden,
            "intermediate_size": fields.whole("n_inner", 4 * hidden),
            "num_hidden_layers": fields.whole("n_layer", 12),
            "num_attention_heads": fields.whole("n_head", 12),
            "max_position_embeddings": positions,
            "norm": "layernorm",
            "position": "learned",
            "mlp": mlp or "gelu",
            "dropout": dropout,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
            "tie_word_embeddings": fields.switch("tie_word_embeddings", default=True),
            "initializer_range": fields.number("initializer_range", 0.02),
        }

    def places(self, names: Iterable[str]) -> list[Place]:
        """See :class:`lightning_llm.interop.family.Family`."""
        names = set(names)
        layers = sum(name.endswith(".input_layernorm.weight") for name in names)
        found = [Place(self.prefix + there, (ours,)) for there, ours in TOP.items()]
        found += [
            Place(
                f"{self.prefix}h.{layer}.{there}.{kind}",
                tuple(f"layers.{layer}.{part}.{kind}" for part in ours),
                transposed=is_linear and kind == "weight",
            )
            for layer in range(layers)
            for there, ours, is_linear in IN_LAYER
            for kind in ("weight", "bias")
        ]
        return found + [Place(name, (name,)) for name in ("lm_head.weight",) if name in names]
