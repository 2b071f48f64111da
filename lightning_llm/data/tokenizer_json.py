"""What a ``tokenizer.json`` may contain, checked before the library reads it, and which of our kinds it is.

The library prints its own stack trace if a file contradicts itself, and some files make it run for hours: regular
expressions that try every way to match, replacements that double the text thirty times. So this file

1. allows a list of part types and fields (:func:`read_content`),
2. limits what a regular expression may cost (:func:`check_pattern`),
3. recognizes the tokenizers that we have faster code for (:func:`kind_of`).
"""

import json
import math
import re
from collections.abc import Iterable
from typing import Any, Literal

from lightning_llm.io.untrusted import MIB, TEXT, list_of, maybe, parse_json, record, rule, shown, validate, whole

LARGEST_TOKENIZER = 48 * MIB  # Gemma's has 32
MOST_IDS = 1 << 19  # Gemma has half as many; the library takes about 1 kB for each
MOST_SCORED = 1 << 20  # characters of a unigram vocabulary, T5's has 200,000; the library takes 300 bytes for each
MOST_ADDED = 1 << 14  # tokens; the library takes 0.1 ms for each
MOST_PARTS, MOST_GROWTH, LONGEST_TEXT, MOST = 64, 64, 2000, 1000
RUN = 256  # length of the run of equal characters in which matches are counted
MOST_WAYS = RUN**3  # the pattern of o200k has 2 million

Kind = Literal["char", "byte", "bpe", "file"]

ONE_CHARACTER = r"[\s\S]"
_PARTS = {
    "normalizer": "NFC NFD NFKC NFKD Lowercase Strip StripAccents Prepend Replace ByteLevel BertNormalizer Nmt "
    "Sequence",
    "pre_tokenizer": "ByteLevel Metaspace Split Whitespace WhitespaceSplit BertPreTokenizer Digits Punctuation "
    "CharDelimiterSplit UnicodeScripts Sequence",
    "decoder": "ByteLevel Metaspace Fuse ByteFallback Replace Strip WordPiece BPEDecoder CTC Sequence",
}
_LISTS = ("normalizers", "pretokenizers", "decoders")
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|<[A-Za-z_]\w*>|[im]*(?:-[im]+)?:))?")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^{}]*\}|[^1-9kgKRX])", re.DOTALL)
_FLAGS = re.compile(r"\(\?i\)")


def read_content(content: str) -> dict[str, Any]:
    """The object in a ``tokenizer.json``.

    Raises:
        ValueError: It is not JSON, or contains something that is impossible or would take hours.
    """
    if len(content) > LARGEST_TOKENIZER:
        raise ValueError(f"not a tokenizer.json: {len(content)} characters, expected at most {LARGEST_TOKENIZER}")
    parsed = parse_json(content, "not a tokenizer.json: the content")
    validate(parsed, _FILE, "not a tokenizer.json", "get it again, or use another tokenizer")
    for field, types in _PARTS.items():
        name = f"the tokenizer's {field}"
        parts = list(_parts(parsed.get(field), name, sorted(types.split())))
        growth = math.prod(max(1, len(part.get("content") or part.get("prepend") or "")) for part in parts)
        if growth > MOST_GROWTH:
            raise ValueError(f"{name} makes a text {growth} times as long, expected at most {MOST_GROWTH} times")
        for part in parts:
            pattern = part.get("pattern")
            if pattern is not None and (not isinstance(pattern, dict) or "" in pattern.values()):
                raise ValueError(f"{name} of type {part['type']} has an empty pattern: use another tokenizer")
            if pattern and isinstance(pattern.get("Regex"), str):
                check_pattern(pattern["Regex"], name)
    return parsed


def _parts(part: Any, name: str, types: list[str]) -> Iterable[dict[str, Any]]:
    """A part of a tokenizer and the parts in it; a ValueError if their types, number or sizes are not allowed."""
    waiting, seen = [part] if part is not None else [], 0
    while waiting:
        part, seen = waiting.pop(), seen + 1
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types or seen > MOST_PARTS:
            raise ValueError(f"{name} is {shown(part)[:80]}, expected at most {MOST_PARTS} of {', '.join(types)}")
        for field, value in part.items():
            if field in _LISTS and isinstance(value, list):
                waiting += value
                continue
            for each in value.values() if isinstance(value, dict) else (value,):
                is_text, is_number = isinstance(each, str), isinstance(each, int | float)
                if each is not None and not (len(each) <= LONGEST_TEXT if is_text else is_number and 0 <= each <= MOST):
                    raise ValueError(f"{name} of type {kind} has an absurd {field[:40]!r}: use another tokenizer")
        yield part


# ---- the cost of a regular expression


def check_pattern(pattern: str, name: str) -> None:
    """Rejects a regular expression that may try very many ways to match a text.

    The cost of a pattern is the number of ways it can match a run of :data:`RUN` equal characters.

    Raises:
        ValueError: There are more than :data:`MOST_WAYS`, or it has unsupported syntax, such as back-references.
    """
    ways, end = _alternatives(pattern, 0, 0)
    if ways >= MOST_WAYS or end < len(pattern):
        raise ValueError(
            f"{name} has the pattern {pattern[:200]!r}, which may take hours on some texts or is not known here: "
            "expected no repeats of repeats or of alternatives, and no back-references"
        )


def _alternatives(pattern: str, place: int, depth: int) -> tuple[float, int]:
    """Ways to match the alternatives that begin at a position, and their end. Infinite for unsupported syntax."""
    total, ways = 0.0, 1.0
    while place < len(pattern) and pattern[place] != ")" and depth < 30:
        if pattern[place] == "|":
            total, ways, place = total + ways, 1.0, place + 1
            continue
        of_item, place = _repeated(pattern, *_item(pattern, place, depth))
        ways *= of_item
    return total + ways, place


def _item(pattern: str, place: int, depth: int) -> tuple[float, int]:
    unknown = math.inf, len(pattern)
    if pattern[place] == "[":
        return _class(pattern, place)
    if pattern[place] == "\\":
        escape = _ESCAPE.match(pattern, place)
        return (1.0, escape.end()) if escape else unknown
    if pattern[place] != "(":
        return 1.0, place + 1
    if flags := _FLAGS.match(pattern, place):
        return 1.0, flags.end()
    group = _GROUP.match(pattern, place)
    if group is None or pattern[group.end() : group.end() + 1] == "?":
        return unknown
    ways, end = _alternatives(pattern, group.end(), depth + 1)
    return (ways, end + 1) if pattern[end : end + 1] == ")" else unknown


def _class(pattern: str, place: int) -> tuple[float, int]:
    """Skips a character class, which may contain others."""
    depth = 0
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            if pattern[place + 1 : place + 2] == "]" or pattern[place + 1 : place + 3] == "^]":
                break  # whether this bracket is literal depends on the dialect
            depth += 1
        elif pattern[place] == "]":
            depth -= 1
            if not depth:
                return 1.0, place + 1
        place += 1
    return math.inf, len(pattern)


def _repeated(pattern: str, ways: float, place: int) -> tuple[float, int]:
    found = _QUANTIFIER.match(pattern, place)
    if not found or found[0] in ("{}", "{,}"):
        return ways, place
    place = found.end()
    if found[0] == "?":
        ways += 1
    else:
        low, high = (int((found[n] or "0")[:9]) for n in (1, 3))
        is_open = found[0] in "*+" or (bool(found[2]) and not found[3])
        most = RUN if is_open else max(low, high)
        is_fixed = not is_open and not found[2]
        ways = math.inf if ways > 1 or max(low, high) > MOST else 1.0 if is_fixed else float(max(1, most))
    if found[0] in "*+?" and pattern[place : place + 1] in ("?", "+"):  # lazy, possessive
        place += 1
    return (math.inf if _QUANTIFIER.match(pattern, place) else ways), place


# ---- the schema of the file


def _are_ids(vocab: Any) -> bool:
    ids = vocab.values() if isinstance(vocab, dict) else [None]
    return len(ids) <= MOST_IDS and all(type(id_) is int and 0 <= id_ < MOST_IDS for id_ in ids)


def _are_scores(vocab: Any) -> bool:
    pairs = vocab if isinstance(vocab, list) else []
    are_pairs = all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    return bool(pairs) and are_pairs and sum(len(token) for token, _ in pairs) <= MOST_SCORED


_IDS = rule(f"at most {MOST_IDS} tokens with whole numbers below that", _are_ids)
_SCORES = rule(f"pairs of token and score, and tokens of at most {MOST_SCORED} characters", _are_scores)
_FLAG = rule("true or false", lambda value: isinstance(value, bool))
_ADDED = {"id": whole(0, MOST_IDS - 1), "content": rule("a text", lambda text: isinstance(text, str) and text != "")}
_ADDED |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), _FLAG)
_MODEL = {
    "type": rule("a kind of model", lambda kind: kind in (None, "BPE", "WordLevel", "WordPiece", "Unigram")),
    "merges": rule(f"at most {MOST_IDS}", lambda merges: isinstance(merges, list) and len(merges) <= MOST_IDS),
    "max_input_chars_per_word": whole(1, MOST),
    "continuing_subword_prefix": maybe(TEXT),
    "unk_token": maybe(TEXT),
}


def _check_model(model: Any, name: str) -> Iterable[str]:
    """The type of the model decides what its vocabulary is."""
    is_unigram = isinstance(model, dict) and model.get("type") == "Unigram"
    yield from record({"vocab": _SCORES if is_unigram else _IDS}, _MODEL, others=True)(model, name)
    prefix = isinstance(model, dict) and model.get("continuing_subword_prefix")
    if isinstance(prefix, str) and prefix and isinstance(model.get("merges"), list):
        pairs = (each if isinstance(each, list) else str(each).split(" ") for each in model["merges"])
        if not all(pair and isinstance(pair[-1], str) and pair[-1].startswith(prefix) for pair in pairs):
            yield f"{name}.merges has pairs whose second part does not begin with {prefix[:40]!r}"


_ADDED_TOKENS = maybe(list_of(record(_ADDED, others=True), MOST_ADDED))
_FILE = record({"model": _check_model}, {"added_tokens": _ADDED_TOKENS}, others=True)


# ---- which kind it is


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte (``bytes_to_unicode`` in its encoder.py), indexed by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def kind_of(content: dict[str, Any]) -> Kind:
    """Which of our own kinds a ``tokenizer.json`` is; ``file`` if it is none of them."""
    model, splitter = content["model"], content.get("pre_tokenizer") or {}
    added = content.get("added_tokens") or []
    if content.get("normalizer"):
        return "file"
    if model.get("type") == "WordLevel" and splitter.get("pattern") == {"Regex": ONE_CHARACTER} and not added:
        vocabulary = model["vocab"]
        one_each = all(len(token) == 1 for token in vocabulary)
        return "char" if one_each and sorted(vocabulary.values()) == list(range(len(vocabulary))) else "file"
    byte_level = splitter.get("type") == "ByteLevel" and not splitter.get("add_prefix_space", True)
    if model.get("type") == "BPE" and byte_level and not model.get("dropout"):
        if splitter.get("use_regex", True):
            return "bpe" if not any(map(_matches_more, added)) else "file"
        if model["vocab"] == {character: byte for byte, character in enumerate(byte_alphabet())} and not added:
            return "byte"
    return "file"


def _matches_more(token: dict[str, Any]) -> bool:
    """Whether an added token matches more than its own ASCII letters, so that text near it must not be cut."""
    content = token["content"]
    return not content.isascii() or any(map(str.isspace, content)) or token["lstrip"] or token["rstrip"]


def drops_characters(content: dict[str, Any]) -> bool:
    """Whether the library silently drops characters that are not in the vocabulary."""
    model = content["model"]
    has_bytes = model.get("byte_fallback") or "ByteLevel" in json.dumps(content.get("pre_tokenizer"), allow_nan=False)
    return model.get("type") == "BPE" and model.get("unk_token") is None and not has_bytes
