"""The special tokens around a text: which ones a ``tokenizer.json`` names, and how it names others.

Hugging Face's field for them is ``post_processor``. A template such as ``<s> $A`` for a single text puts a
begin-of-text token before it, and ``$A </s>`` an end-of-text token after it. A template for a pair of texts, such as
``$A </s> $B``, says what is between two texts. The library's post-processor itself is never run: it may repeat a text
any number of times.

Many files do not say how a text ends. Then the name of a token does.
"""

import dataclasses
import json
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_llm.io.untrusted import shown

END_OF_TEXT = "<|endoftext|>"
# in GPT-2, Llama 3, Llama 2 and Gemma
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
# The letters of other names of special tokens, such as [EOS], <｜end▁of▁sentence｜> or <|im_end|>; the first one that a
# tokenizer has counts. The ends of a document come before the ends of a turn in a chat.
END_OF_TEXT_LETTERS = (
    *("endoftext", "endofsentence", "endofdocument", "eos", "eostoken", "eod"),
    *("eot", "eotid", "imend", "endofturn", "endofturntoken", "end"),
)


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """Ids around a text.

    Attributes:
        before: Put before every text.
        after: Put after every text.
        between: Put between two texts.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    between: tuple[int, ...] = ()


def read_boundaries(content: Mapping[str, Any]) -> Boundaries:
    """Boundaries that the post-processor of a ``tokenizer.json`` puts around a text.

    Raises:
        ValueError: If it is damaged, or an id is not a whole number.
    """
    found = Boundaries()
    try:
        for part in _parts(content.get("post_processor")):
            if part.get("type") == "TemplateProcessing":
                found = _of_template(part)
            elif part.get("type") in ("BertProcessing", "RobertaProcessing"):
                before, after = (_ids([part[name][1]]) for name in ("cls", "sep"))
                found = Boundaries(before, after, after)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("not a tokenizer.json: its post_processor is damaged: use another tokenizer") from error
    return found


def write_boundaries(content: str, boundaries: Boundaries, names: Mapping[int, str]) -> str:
    """The content of a ``tokenizer.json`` with other tokens around a text.

    Args:
        content: The file's content.
        boundaries: The tokens.
        names: The token of each of these ids.
    """
    before, after, between = ([_special(names[id_]) for id_ in ids] for ids in dataclasses.astuple(boundaries))
    used = {*boundaries.before, *boundaries.after, *boundaries.between}
    template = {
        "type": "TemplateProcessing",
        "single": [*before, _text("A"), *after],
        "pair": [*before, _text("A"), *between, *before, _text("B"), *after],
        "special_tokens": {names[n]: {"id": names[n], "ids": [n], "tokens": [names[n]]} for n in sorted(used)},
    }
    parsed = {**json.loads(content), "post_processor": template if used else None}
    return json.dumps(parsed, ensure_ascii=False, allow_nan=False)


def without_boundaries(content: str) -> dict[str, Any]:
    """The parsed content of a ``tokenizer.json`` without what it puts around a text: what decides the ids of a text."""
    return {**json.loads(content), "post_processor": None}


def end_of_text_in(content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int | None:
    """The id of the token whose name says that it ends a text."""
    if (known := next((vocabulary[name] for name in END_OF_TEXT_NAMES if name in vocabulary), None)) is not None:
        return known
    special = {
        _letters(token["content"]): token["id"] for token in content.get("added_tokens") or () if token["special"]
    }
    return next((special[letters] for letters in END_OF_TEXT_LETTERS if letters in special), None)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", name))).lower()


def _parts(processor: Any) -> Iterator[dict[str, Any]]:
    waiting = [processor]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, dict):
            yield part
            waiting += part.get("processors") or []


def _of_template(template: dict[str, Any]) -> Boundaries:
    before, after = _around(template, "single")
    _, between = _around(template, "pair", until="B")
    # in `<s> $A </s> <s> $B`, the second <s> begins a text
    ends = between[: -len(before)] if before and between[-len(before) :] == before else between
    return Boundaries(before, after, after or ends)


def _around(template: dict[str, Any], name: str, until: str | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before the text A, and after it up to the text ``until``."""
    sides: list[list[int]] = [[], []]
    is_after = False
    for piece in template.get(name) or []:
        if "Sequence" in piece:
            if piece["Sequence"].get("id") == until:
                break
            is_after = True
        else:
            token = template["special_tokens"][piece["SpecialToken"]["id"]]
            sides[is_after] += token["ids"]
    return _ids(sides[0]), _ids(sides[1])


def _ids(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(
            f"not a tokenizer.json: its post_processor puts {shown(numbers)} before or after a text, expected ids: use "
            "another tokenizer"
        )
    return tuple(numbers)


def _special(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def _text(name: str) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": 0}}
