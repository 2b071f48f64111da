"""Llama's and Qwen3's place in ``transformers``."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from lightning_llm.interop.family import Place
from lightning_llm.interop.fields import Fields, read_rope
from lightning_llm.io.untrusted import list_of, one_of
from lightning_llm.model.config import MOST_LAYERS, ModelConfig

# What both sides call the same.
SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("attention_bias", "initializer_range"),
)


@dataclasses.dataclass(frozen=True)
class Llama:
    """Llama, and what differs from it by the norm of query and key heads.

    Attributes:
        architecture: The class.
        model_type: Its short name.
        qk_norm: Whether it has the norm.
        defaults: Fields whose value differs between the two where ``config.json`` leaves them out.
    """

    architecture: str
    model_type: str
    qk_norm: bool
    defaults: dict[str, int | None]
    prefix: str = "model."

    def refusals(self, config: ModelConfig) -> list[str]:
        """See :class:`lightning_llm.interop.family.Family`."""
        return [
            reason
            for does_not_fit, reason in (
                (config.norm != "rmsnorm", f"norm {config.norm!r}: it has rmsnorm"),
                (config.position != "rope", f"position {config.position!r}: it has rope"),
                (not config.is_gated, f"mlp {config.mlp!r}: its MLP is SwiGLU"),
                (
                    config.qk_norm != self.qk_norm,
                    f"qk_norm {config.qk_norm}: it has {'one' if self.qk_norm else 'none'}",
                ),
                (config.mlp_bias and self.qk_norm, "mlp_bias True: its MLP has none"),
                (config.lm_head_bias, "lm_head_bias True: its head has none"),
                (
                    not self.qk_norm and config.hidden_size % config.num_attention_heads != 0,
                    f"hidden_size {config.hidden_size}: it must be a multiple of num_attention_heads "
                    f"{config.num_attention_heads}",
                ),
            )
            if does_not_fit
        ]

    def to_fields(self, config: ModelConfig) -> dict[str, Any]:
        """See :class:`lightning_llm.interop.family.Family`."""
        fields = {name: getattr(config, name) for name in SAME}
        fields |= {"hidden_act": "silu", "attention_dropout": 0.0}
        if self.qk_norm:
            fields |= {"use_sliding_window": False, "sliding_window": None}
        else:
            fields["mlp_bias"] = config.mlp_bias
        scaling = config.rope_scaling
        # transformers 5 reads the first, 4 the other two
        fields["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
        return {**fields, "rope_theta": config.rope_theta, "rope_scaling": scaling}

    def from_fields(self, fields: Fields) -> dict[str, Any]:
        """See :class:`lightning_llm.interop.family.Family`."""
        sizes = {name: fields.whole(name, default) for name, default in self.defaults.items()}
        theta, scaling = read_rope(fields, sizes["max_position_embeddings"] or 1)
        fields.must_be("hidden_act", ("silu", "swish"), "SwiGLU has SiLU")
        fields.must_be("rope_interleaved", (False, None), "the halves of a head are rotated here, not neighbours")
        fields.of_kind("layer_types", list_of(one_of("full_attention"), MOST_LAYERS))
        self._windows(fields)
        dropout = fields.share("attention_dropout", 0.0)
        if dropout:
            fields.notes.append(
                f"attention_dropout {dropout} acts in training only and is not taken over: architecture.dropout is 0"
            )
        mlp_bias = not self.qk_norm and fields.switch("mlp_bias")
        return {
            **sizes,
            "norm": "rmsnorm",
            "position": "rope",
            "qk_norm": self.qk_norm,
            "mlp": "swiglu" if mlp_bias else "memory_optimized_swiglu",
            "mlp_bias": mlp_bias,
            "attention_bias": fields.switch("attention_bias"),
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": fields.switch("tie_word_embeddings"),
            "initializer_range": fields.number("initializer_range", 0.02),
        }

    def places(self, names: Iterable[str]) -> list[Place]:
        """See :class:`lightning_llm.interop.family.Family`."""
        return [Place(name if name.startswith("lm_head.") else self.prefix + name, (name,)) for name in names]

    def _windows(self, fields: Fields) -> None:
        if not self.qk_norm:
            fields.must_be("sliding_window", (None,), "attention reaches all positions before")
            return
        if fields.switch("use_sliding_window"):
            fields.faults.append("use_sliding_window True is not supported: attention reaches all positions before")
        for ignored in ("sliding_window", "max_window_layers"):  # what they say holds with use_sliding_window only
            fields.take(ignored)


LLAMA = Llama(
    "LlamaForCausalLM",
    "llama",
    qk_norm=False,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
    },
)
QWEN3 = Llama(
    "Qwen3ForCausalLM",
    "qwen3",
    qk_norm=True,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
)
