"""Checks of a ``tokenizer.json`` before the library reads it, and which of our kinds it is.

The library prints its own stack trace if a file contradicts itself. So this file

1. allows a list of part types, and checks the fields that they and the model have (:func:`read_content`),
2. recognizes the tokenizers that we have faster code for (:func:`kind_of`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from lightning_llm.io.schema import BOOL, TEXT, check, list_of, maybe, open_record, validate, whole
from lightning_llm.io.untrusted import MIB, parse_json, shown

LARGEST_TOKENIZER = 48 * MIB  # Gemma's has 32
MOST_IDS = 1 << 19  # Gemma has half as many

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
        ValueError: It is not JSON, or contains something that is impossible.
    """
    parsed = parse_json(content, "not a tokenizer.json: the content")
    validate(parsed, _FILE, "not a tokenizer.json", "get it again, or use another tokenizer")
    for field in _PARTS:
        for part in _parts(parsed.get(field), field):
            _check_part(part, f"the tokenizer's {field} of type {part['type']}")
    return parsed


def _check_part(part: dict[str, Any], name: str) -> None:
    pattern = part.get("pattern")
    if pattern is not None and (not isinstance(pattern, dict) or "" in pattern.values()):
        raise ValueError(f"{name} has an empty pattern: use another tokenizer")
    if part["type"] == "Strip" and part.get("stop"):  # of a decoder: the library reads before the token
        raise ValueError(f"{name} has stop {shown(part['stop'])}, expected 0: use another tokenizer")


def _parts(part: Any, field: str) -> Iterable[dict[str, Any]]:
    """A part of a tokenizer and the parts in it, in order; a ValueError if a type is not allowed."""
    types = sorted(_PARTS[field].split())
    waiting = [part] if part is not None else []
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, dict) or part.get("type") not in types:
            raise ValueError(f"the tokenizer's {field} is {shown(part)[:80]}, expected one of {', '.join(types)}")
        waiting[:0] = [inner for name in _LISTS if isinstance(part.get(name), list) for inner in part[name]]
        yield part


def _are_ids(vocab: Any) -> bool:
    return isinstance(vocab, dict) and all(type(id_) is int and 0 <= id_ < MOST_IDS for id_ in vocab.values())


def _are_scores(vocab: Any) -> bool:
    pairs = vocab if isinstance(vocab, list) else []
    return bool(pairs) and all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)


_IDS = check(f"tokens with whole numbers from 0 to {MOST_IDS - 1}", _are_ids)
_SCORES = check("pairs of token and score", _are_scores)
_ADDED = {
    "id": whole(0, MOST_IDS - 1),
    "content": check("a text of at least one character", lambda text: isinstance(text, str) and bool(text)),
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), BOOL),
}
_MODEL = {
    "type": check("a kind of model", lambda kind: kind in (None, "BPE", "WordLevel", "WordPiece", "Unigram")),
    "merges": check("a list", lambda merges: isinstance(merges, list)),
    "max_input_chars_per_word": whole(1),
    **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix", "unk_token"), maybe(TEXT)),
}


def _check_model(model: Any, name: str) -> Iterable[str]:
    """The type of the model decides what its vocabulary is."""
    is_unigram = isinstance(model, dict) and model.get("type") == "Unigram"
    yield from open_record({"vocab": _SCORES if is_unigram else _IDS}, _MODEL)(model, name)
    prefix = isinstance(model, dict) and model.get("continuing_subword_prefix")
    if isinstance(prefix, str) and prefix and isinstance(model.get("merges"), list):
        pairs = (each if isinstance(each, list) else str(each).split(" ") for each in model["merges"])
        if not all(pair and isinstance(pair[-1], str) and pair[-1].startswith(prefix) for pair in pairs):
            yield f"{name}.merges has pairs whose second part does not begin with {prefix[:40]!r}"


_FILE = open_record({"model": _check_model}, {"added_tokens": maybe(list_of(open_record(_ADDED)))})


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte (``bytes_to_unicode`` in its encoder.py), indexed by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _has_byte_level(content: Mapping[str, Any], field: str) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(content.get(field), field))


def bytes_of_characters(content: Mapping[str, Any]) -> dict[str, int]:
    """The byte that each character of a token stands for, if the decoder is of byte level; else nothing."""
    is_byte_level = _has_byte_level(content, "decoder")
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
    has_bytes = model.get("byte_fallback") or _has_byte_level(content, "pre_tokenizer")
    return model.get("type") == "BPE" and model.get("unk_token") is None and not has_bytes
