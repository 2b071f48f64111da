"""A ``config.json``, field by field: what is used, what must have one value, what changes nothing, and the rest.

The rest is a field that nobody here knows. Where it says something (is neither null nor false nor empty) it may change
what the model computes, so it is refused by name.
"""

import sys
from collections.abc import Iterable
from typing import Any

from lightning_llm.io.untrusted import Kind, maybe, rule, shown

# They say how weights are stored, how text is generated, what a head for another task would do: not what logits are.
HARMLESS = frozenset(
    (
        *("_name_or_path", "name_or_path", "architectures", "model_type", "torch_dtype", "dtype"),
        *(
            "transformers_version",
            "transformers.js_config",
            "tokenizer_class",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "sep_token_id",
        ),
        *("decoder_start_token_id", "cls_token_id", "unk_token_id", "mask_token_id", "use_cache"),
        *("cache_implementation", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_flash_attn_2_enabled", "use_flash_attention_2", "output_attentions", "output_hidden_states"),
        *("output_scores", "return_dict", "return_dict_in_generate", "torchscript", "gradient_checkpointing"),
        *("chunk_size_feed_forward", "pretraining_tp", "is_llama_config", "unsloth_fixed", "unsloth_version"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix"),
        *("classifier_dropout", "max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "summary_type"),
        *("summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("reorder_and_upcast_attn",),
    )
)

UNSCALED = (None, 1, 1.0)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_ROPE = rule(
    "plain values, of one rotation for all layers",
    lambda given: (
        isinstance(given, dict)
        and all(value is None or isinstance(value, str | bool) or _is_finite(value) for value in given.values())
    ),
)


class Fields:
    """The content of a ``config.json``, being read.

    Attributes:
        faults: What cannot be taken over, so far.
        notes: What is not taken over and changes no logits.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._left = {name: value for name, value in content.items() if name not in HARMLESS}
        self.faults: list[str] = []
        self.notes: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` where it is missing or null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def of_kind(self, name: str, kind: Kind) -> Any:
        """The value of a field, where it is of a kind; else a fault and ``None``."""
        value = self.take(name)
        faults = list(maybe(kind)(value, name))
        self.faults += faults
        return None if faults else value

    def whole(self, name: str, default: int | None) -> int | None:
        """A size. A fault where it is none."""
        value = self.take(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            self.faults.append(f"{name} must be a whole number above 0, got {shown(value)}")
            return default
        assert value is None or isinstance(value, int)
        return value

    def number(self, name: str, default: float) -> float:
        """A number. A fault where it is none."""
        value = self.take(name, default)
        if not _is_finite(value):
            self.faults.append(f"{name} must be a number, got {shown(value)}")
            return default
        return float(value)

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1. A fault where it is none."""
        value = self.number(name, default)
        if not 0 <= value <= 1:
            self.faults.append(f"{name} must be from 0 to 1, got {value}")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false. A fault where it is neither."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.faults.append(f"{name} must be true or false, got {shown(value)}")
            return default
        return value

    def must_be(self, name: str, accepted: Iterable[Any], why: str = "") -> None:
        """A fault where the field is there and has another value."""
        accepted = tuple(accepted)
        value = self._left.pop(name, accepted[0])
        if all(value != known or isinstance(value, bool) != isinstance(known, bool) for known in accepted):
            self.faults.append(f"{name} {shown(value)} is not supported{': ' + why if why else ''}")

    def finish(self) -> None:
        """A fault for every field that is left and says something."""
        if self._left.pop("quantization_config", None):
            self.faults.append("quantization_config: quantized weights are not supported: get the unquantized model")
        if self._left.pop("auto_map", None):
            self.faults.append("auto_map: the model brings code of its own, which is not run")
        for name, value in self._left.items():
            if value not in (None, False, {}, [], ""):
                field = shown(name)[1:-1]
                self.faults.append(f"{field} {shown(value)} is unknown and may change what the model computes")


def read_rope(fields: Fields, longest: int) -> tuple[float, dict[str, Any] | None]:
    """``rope_theta`` and ``rope_scaling`` of a config, in the form of transformers 5 (``rope_parameters``) or before.

    Args:
        fields: The config.
        longest: ``max_position_embeddings``.
    """
    old, new = (fields.of_kind(name, _ROPE) for name in ("rope_scaling", "rope_parameters"))
    theta = fields.take("rope_theta")
    base, scaling = _rope_fields(fields, {} if new is None else new, longest)
    old_base, old_scaling = _rope_fields(fields, {} if old is None else old, longest)
    if old is not None and new is not None and scaling != old_scaling:
        fields.faults.append(f"rope_scaling {shown(old)} contradicts rope_parameters {shown(new)}")
    given = [value for value in (base, old_base, theta) if value is not None]
    bases = {float(value) for value in given if _is_finite(value)}
    if not all(map(_is_finite, given)):
        fields.faults.append(f"rope_theta must be a number, got {', '.join(map(shown, given))}")
    if len(bases) > 1:
        fields.faults.append(f"rope_theta {theta} contradicts rope_parameters {shown(new)}")
    fields.must_be("partial_rotary_factor", UNSCALED, "all of a head is rotated here")
    return bases.pop() if bases else 10000.0, scaling if new is not None else old_scaling


def _rope_fields(fields: Fields, given: dict[str, Any], longest: int) -> tuple[Any, dict[str, Any] | None]:
    given = {name: value for name, value in given.items() if value is not None}
    base = given.pop("rope_theta", None)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    partial = given.pop("partial_rotary_factor", 1)
    if partial not in UNSCALED:
        fields.faults.append(f"partial_rotary_factor {shown(partial)} is not supported: all of a head is rotated here")
    if kind == "default":
        return base, None
    if kind == "llama3":
        given.setdefault("original_max_position_embeddings", longest)
    return base, {"rope_type": kind, **given}
