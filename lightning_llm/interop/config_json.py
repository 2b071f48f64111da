"""A Hugging Face ``config.json``, field by field: used, fixed to one value, harmless, or unknown.

An unknown field that has a value (not null, false or empty) may change what the model computes, so it is rejected.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from lightning_llm.io.schema import Schema, check, maybe
from lightning_llm.io.untrusted import shown

# How weights are stored, how text is generated, what a head for another task does: they do not change logits.
_HARMLESS = """
    _name_or_path name_or_path architectures model_type torch_dtype dtype transformers_version transformers.js_config
    tokenizer_class bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id unk_token_id
    mask_token_id use_cache cache_implementation attn_implementation _attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled use_flash_attention_2 output_attentions output_hidden_states
    output_scores return_dict return_dict_in_generate torchscript gradient_checkpointing chunk_size_feed_forward
    pretraining_tp is_llama_config unsloth_fixed unsloth_version id2label label2id num_labels problem_type
    finetuning_task task_specific_params prefix classifier_dropout max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    reorder_and_upcast_attn
"""
HARMLESS = frozenset(_HARMLESS.split())
UNSCALED = (None, 1, 1.0)
WHOLE_HEAD = "all of a head is rotated here"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_ROPE = check(
    "plain values, of one rotation for all layers",
    lambda given: (
        isinstance(given, dict)
        and all(value is None or isinstance(value, str | bool) or _is_finite(value) for value in given.values())
    ),
)


class Fields:
    """The content of a ``config.json`` while it is read.

    Attributes:
        problems: Fields that cannot be honored, so far.
        notes: Fields that are ignored and change no logits.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._left = {name: value for name, value in content.items() if name not in HARMLESS}
        self.problems: list[str] = []
        self.notes: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` if it is missing or null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def checked(self, name: str, kind: Schema) -> Any:
        """The value of a field if it matches a schema; else adds a problem and returns ``None``."""
        value = self.take(name)
        problems = list(maybe(kind)(value, name))
        self.problems += problems
        return None if problems else value

    def _take_if(self, name: str, default: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self.take(name, default)
        if fits(value):
            return value
        self.problems.append(f"{name} must be {expected}, got {shown(value)}")
        return default

    def size(self, name: str, default: int | None) -> int | None:
        """A whole number above 0; otherwise adds a problem."""
        expected = "a whole number above 0"
        value: int | None = self._take_if(name, default, lambda n: n is default or (type(n) is int and n > 0), expected)
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number; otherwise adds a problem."""
        return float(self._take_if(name, default, _is_finite, "a number"))

    def fraction(self, name: str, default: float) -> float:
        """A number from 0 to 1; otherwise adds a problem."""
        value = self.number(name, default)
        if not 0 <= value <= 1:
            self.problems.append(f"{name} must be from 0 to 1, got {value}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; otherwise adds a problem."""
        return bool(self._take_if(name, default, lambda value: isinstance(value, bool), "true or false"))

    def one_of(self, name: str, accepted: Iterable[Iterable[str]], default: str) -> Any:
        """A field that has one of these values; adds a problem if it has another."""
        value = self.take(name, default)
        known = [each for names in accepted for each in names]
        if value not in known:
            self.problems.append(f"{name} {shown(value)} is not supported: there are {', '.join(known)}")
        return value

    def must_be(self, name: str, accepted: tuple[Any, ...], why: str = "") -> None:
        """Adds a problem if the field is present and has another value."""
        value = self._left.pop(name, accepted[0])
        if all(value != known or isinstance(value, bool) != isinstance(known, bool) for known in accepted):
            self.problems.append(f"{name} {shown(value)} is not supported{': ' + why if why else ''}")

    def finish(self) -> None:
        """Adds a problem for every remaining field that has a value."""
        if self._left.pop("quantization_config", None):
            self.problems.append("quantization_config: quantized weights are not supported: get the unquantized model")
        if self._left.pop("auto_map", None):
            self.problems.append("auto_map: the model brings code of its own, which is not run")
        for name, value in self._left.items():
            if value not in (None, False, {}, [], ""):
                field = shown(name)[1:-1]
                self.problems.append(f"{field} {shown(value)} is unknown and may change what the model computes")


def read_rope(fields: Fields, longest: int) -> tuple[float, dict[str, Any] | None]:
    """``rope_theta`` and ``rope_scaling`` of a config, in the form of transformers 5 (``rope_parameters``) or 4.

    Args:
        fields: The config.
        longest: ``max_position_embeddings``.
    """
    old, new = (fields.checked(name, _ROPE) for name in ("rope_scaling", "rope_parameters"))
    theta = fields.take("rope_theta")
    base, scaling = _rope_fields(fields, new or {}, longest)
    old_base, old_scaling = _rope_fields(fields, old or {}, longest)
    if old is not None and new is not None and scaling != old_scaling:
        fields.problems.append(f"rope_scaling {shown(old)} contradicts rope_parameters {shown(new)}")
    given = [value for value in (base, old_base, theta) if value is not None]
    bases = {float(value) for value in given if _is_finite(value)}
    if not all(map(_is_finite, given)):
        fields.problems.append(f"rope_theta must be a number, got {', '.join(map(shown, given))}")
    if len(bases) > 1:
        fields.problems.append(f"rope_theta {theta} contradicts rope_parameters {shown(new)}")
    fields.must_be("partial_rotary_factor", UNSCALED, WHOLE_HEAD)
    return bases.pop() if bases else 10000.0, scaling if new is not None else old_scaling


def _rope_fields(fields: Fields, given: dict[str, Any], longest: int) -> tuple[Any, dict[str, Any] | None]:
    given = {name: value for name, value in given.items() if value is not None}
    base, type_ = given.pop("rope_theta", None), given.pop("type", "default")
    kind = given.pop("rope_type", type_)
    partial = given.pop("partial_rotary_factor", 1)
    if partial not in UNSCALED:
        fields.problems.append(f"partial_rotary_factor {shown(partial)} is not supported: {WHOLE_HEAD}")
    if kind == "default":
        return base, None
    if kind in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", longest)
    return base, {"rope_type": kind, **given}
