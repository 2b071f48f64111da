"""Checks of a ``tokenizer.json`` before the library reads it, and which of our kinds it is.

The library prints its own stack trace if a file contradicts itself, and some files make it run for hours: regular
expressions that try every way to match, replacements that double the text thirty times. So this file

1. allows a list of part types and fields (:func:`read_content`),
2. limits how much longer all parts together may make a text,
3. limits what all regular expressions together may cost (``data/regex_cost.py``),
4. recognizes the tokenizers that we have faster code for (:func:`kind_of`).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from lightning_llm.data.regex_cost import RUN, Cost, cost_of
from lightning_llm.io.schema import BOOL, Schema, check, list_of, maybe, open_record, record, validate, whole
from lightning_llm.io.untrusted import MIB, parse_json, shown

LARGEST_TOKENIZER = 48 * MIB  # Gemma's has 32
MOST_IDS = 1 << 19  # Gemma has half as many; the library takes about 1 kB for each
MOST_BYTES = 1 << 20  # of a unigram vocabulary, T5's has 300,000, and of added tokens; the library takes 300 for each
MOST_ADDED = 1 << 14  # tokens; the library takes 0.1 ms for each
MOST_MERGES = 640_000  # Gemma has 580,604
MOST_PARTS = 64
MOST_GROWTH = 64
LONGEST_TEXT = 2000
LONGEST_AFFIX = 64
MOST = 1000
LONGEST_TOKEN = 1 << 12  # characters; the longest that `train_bpe` can learn
MOST_WAYS = 32 * RUN  # the pattern of o200k has 1,500

# These make few characters longer, at most 12 times in bytes, one after the other too: NFKD of U+FDFA has 33 bytes.
_OF_SPACES = 5 / 3  # a Chinese character of three bytes gets a space on both sides, each time
_UNICODE = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
_OF_UNICODE = 12
_GROWTH = {"ByteLevel": 2, "Metaspace": 1, "WordPiece": 2, "BPEDecoder": 3, "CTC": 3}

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


def read_content(content: str) -> dict[str, Any]:
    """The object in a ``tokenizer.json``.

    Raises:
        ValueError: It is not JSON, or contains something that is impossible or would take hours.
    """
    if len(content) > LARGEST_TOKENIZER:
        raise ValueError(f"not a tokenizer.json: {len(content)} characters, expected at most {LARGEST_TOKENIZER}")
    parsed = parse_json(content, "not a tokenizer.json: the content")
    validate(parsed, _FILE, "not a tokenizer.json", "get it again, or use another tokenizer")
    for fields in (("normalizer", "pre_tokenizer"), ("decoder",)):
        name = f"the tokenizer's {' and '.join(fields)}"
        growth = 1.0
        inserted = 1.0
        ways = 0.0
        may_grow = True
        for part in (part for field in fields for part in _parts(parsed.get(field), field)):
            pattern = _pattern_of(part, name)
            added = str(part.get("content") or part.get("prepend") or "")
            cost = cost_of(pattern) if pattern else Cost()
            ways += inserted**2 * cost.alone if pattern else 0  # a search begins at each character of a run
            is_unicode = part["type"] in _UNICODE
            factor = _growth(part, len(added.encode()), cost.takes)
            factor *= _OF_SPACES if part["type"] == "BertNormalizer" else 1
            growth *= factor * (_OF_UNICODE if is_unicode and may_grow else 1)
            inserted *= factor
            may_grow = not is_unicode and (may_grow or part["type"] in _GROWTH or not added.isascii())
            if growth > MOST_GROWTH:
                raise ValueError(f"{name} may make a text {growth:.3g} times as long, expected at most {MOST_GROWTH}")
            if ways >= MOST_WAYS:
                raise ValueError(
                    f"{name} has the pattern {shown(pattern)}, which may take hours on some texts or is unknown here: "
                    "expected no repeats of repeats, at most one repeat before what may not match, no back-references"
                )
        tokens = [token for token in parsed.get("added_tokens") or () if token.get("normalized")]
        if fields[0] == "normalizer" and growth * sum(len(each["content"].encode()) for each in tokens) > MOST_BYTES:
            raise ValueError(f"{name} may make the added tokens longer than {MOST_BYTES} bytes: use another tokenizer")
    return parsed


def _pattern_of(part: dict[str, Any], name: str) -> str:
    """A part's regular expression, or none; a ValueError if it is empty or the decoder would crash."""
    pattern = part.get("pattern")
    if pattern is not None and (not isinstance(pattern, dict) or "" in pattern.values()):
        raise ValueError(f"{name} of type {part['type']} has an empty pattern: use another tokenizer")
    if name.endswith("decoder") and part["type"] == "Strip" and part.get("stop"):  # the library reads before the token
        raise ValueError(f"{name} of type Strip has stop {shown(part['stop'])}, expected 0: use another tokenizer")
    found = pattern and pattern.get("Regex")
    return found if isinstance(found, str) else ""


def _growth(part: dict[str, Any], added: int, takes: bool) -> float:
    """How many times as many bytes a part makes of any text that is not empty, at most.

    Args:
        part: The part.
        added: Bytes of the text that it adds.
        takes: Whether each match of its pattern has a character. Others are before each character and at the end.
    """
    kind = part["type"]
    if kind == "Replace" and isinstance(replaced := (part.get("pattern") or {}).get("String"), str):
        return max(1.0, added / len(replaced.encode()))
    if kind in ("Replace", "Prepend"):
        return max(1, added) if takes and kind == "Replace" else 1 + 2 * added
    if kind == "Metaspace":
        return 1 + len(str(part.get("replacement") or "").encode())
    return _GROWTH.get(kind, 1) * (2 if kind == "ByteLevel" and part.get("add_prefix_space", True) else 1)


def _parts(part: Any, field: str) -> Iterable[dict[str, Any]]:
    """A part of a tokenizer and the parts in it, in order; a ValueError if types, number or sizes are not allowed."""
    name = f"the tokenizer's {field}"
    types = sorted(_PARTS[field].split())
    waiting = [part] if part is not None else []
    seen = 0
    while waiting:
        part = waiting.pop(0)
        seen += 1
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types or seen > MOST_PARTS:
            raise ValueError(f"{name} is {shown(part)[:80]}, expected at most {MOST_PARTS} of {', '.join(types)}")
        for field, value in part.items():
            if field in _LISTS and isinstance(value, list):
                waiting[:0] = value
                continue
            for each in value.values() if isinstance(value, dict) else (value,):
                if not (each is None or isinstance(each, str) or (isinstance(each, int | float) and 0 <= each <= MOST)):
                    raise ValueError(f"{name} of type {kind} has an absurd {field[:40]!r}: use another tokenizer")
        yield part


def _are_ids(vocab: Any) -> bool:
    if not isinstance(vocab, dict) or len(vocab) > MOST_IDS or max(map(len, vocab), default=0) > LONGEST_TOKEN:
        return False
    return all(type(id_) is int and 0 <= id_ < MOST_IDS for id_ in vocab.values())


def _are_scores(vocab: Any) -> bool:
    pairs = vocab if isinstance(vocab, list) else []
    are_pairs = all(isinstance(pair, list) and len(pair) == 2 and _is_token(pair[0], 0) for pair in pairs)
    return bool(pairs) and are_pairs and sum(len(token.encode()) for token, _ in pairs) <= MOST_BYTES


def _is_token(text: Any, least: int = 1) -> bool:
    return isinstance(text, str) and least <= len(text) <= LONGEST_TOKEN


def _is_small(value: Any) -> bool:
    waiting = [value]
    seen = 0
    while waiting and seen < MOST_ADDED:
        each = waiting.pop()
        seen += 1
        if isinstance(each, str) and len(each) > LONGEST_TEXT:
            return False
        waiting += [*each, *each.values()] if isinstance(each, dict) else each if isinstance(each, list) else []
    return not waiting


_IDS = check(
    f"at most {MOST_IDS} tokens with whole numbers below that, each up to {LONGEST_TOKEN} characters", _are_ids
)
_SCORES = check(f"pairs of token and score, and tokens of at most {MOST_BYTES} bytes in total", _are_scores)
_ADDED = {"id": whole(0, MOST_IDS - 1), "content": check(f"a text of 1 to {LONGEST_TOKEN} characters", _is_token)}
_ADDED |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), BOOL)
_AFFIX = maybe(
    check(f"up to {LONGEST_AFFIX} characters", lambda text: _is_token(text, 0) and len(text) <= LONGEST_AFFIX)
)
_MODEL = {
    "type": check("a kind of model", lambda kind: kind in (None, "BPE", "WordLevel", "WordPiece", "Unigram")),
    "merges": check(f"at most {MOST_MERGES}", lambda merges: isinstance(merges, list) and len(merges) <= MOST_MERGES),
    "max_input_chars_per_word": whole(1, MOST),
    **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix", "unk_token"), _AFFIX),
}
_SMALL = check(f"at most {MOST_ADDED} values and texts of up to {LONGEST_TEXT} characters", _is_small)


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """A record whose other fields, which the library knows or ignores, are small."""

    def check(value: Any, name: str) -> Iterable[str]:
        others = dict.fromkeys(value if isinstance(value, dict) else (), _SMALL)
        return record(required, {**others, **optional})(value, name)

    return check


def _check_model(model: Any, name: str) -> Iterable[str]:
    """The type of the model decides what its vocabulary is."""
    is_unigram = isinstance(model, dict) and model.get("type") == "Unigram"
    yield from _object({"vocab": _SCORES if is_unigram else _IDS}, _MODEL)(model, name)
    prefix = isinstance(model, dict) and model.get("continuing_subword_prefix")
    if isinstance(prefix, str) and prefix and isinstance(model.get("merges"), list):
        pairs = (each if isinstance(each, list) else str(each).split(" ") for each in model["merges"])
        if not all(pair and isinstance(pair[-1], str) and pair[-1].startswith(prefix) for pair in pairs):
            yield f"{name}.merges has pairs whose second part does not begin with {prefix[:40]!r}"


def _check_added(tokens: Any, name: str) -> Iterable[str]:
    yield from (problems := list(maybe(list_of(open_record(_ADDED), MOST_ADDED))(tokens, name)))
    if not problems and sum(len(token["content"].encode()) for token in tokens or ()) > MOST_BYTES:
        yield f"{name} has tokens of more than {MOST_BYTES} bytes in total"


_FILE = _object({"model": _check_model}, {"added_tokens": _check_added})


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte (``bytes_to_unicode`` in its encoder.py), indexed by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def bytes_of_characters(content: Mapping[str, Any]) -> dict[str, int]:
    """The byte that each character of a token stands for, if the decoder is of byte level; else nothing."""
    decoders = _parts(content.get("decoder"), "decoder")
    is_byte_level = any(part["type"] == "ByteLevel" for part in decoders)
    return {character: byte for byte, character in enumerate(byte_alphabet())} if is_byte_level else {}


def kind_of(content: dict[str, Any]) -> Kind:
    """Kind of a ``tokenizer.json`` among our own ones; ``file`` if it is none of them."""
    model = content["model"]
    splitter = content.get("pre_tokenizer") or {}
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
