"""What a ``tokenizer.json`` may hold, decided before the library reads it.

The library prints a stack trace of its own where a file contradicts itself, and some files make it work for hours:
regular expressions that try every way to match, replacements that double the text thirty times. So kinds of parts are
listed, and patterns and replacements have a price.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_llm.io.untrusted import MIB, TEXT, Kind, list_of, maybe, parse_json, record, rule, shown, validate, whole

LARGEST_TOKENIZER = 48 * MIB  # Gemma's has 32
MOST_IDS = 1 << 19  # Gemma has half as many; the library takes about 1 kB for each
MOST_SCORED = 1 << 20  # characters of a unigram vocabulary, T5's has 200,000; the library takes 300 bytes for each
MOST_ADDED = 1 << 14  # tokens; the library takes 0.1 ms for each
MOST_PARTS, MOST_GROWTH, LONGEST_TEXT, MOST = 64, 64, 2000, 1000
RUN = 256  # characters alike in a row, in which the ways to match are counted
MOST_WAYS = RUN**3  # the pattern of o200k has 2 million

_PARTS = {
    "normalizer": {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "Replace", "ByteLevel"),
        *("BertNormalizer", "Nmt", "Sequence"),
    },
    "pre_tokenizer": {
        *("ByteLevel", "Metaspace", "Split", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits"),
        *("Punctuation", "CharDelimiterSplit", "UnicodeScripts", "Sequence"),
    },
    "decoder": {
        *("ByteLevel", "Metaspace", "Fuse", "ByteFallback", "Replace", "Strip", "WordPiece", "BPEDecoder", "CTC"),
        "Sequence",
    },
}
_LISTS = ("normalizers", "pretokenizers", "decoders")
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|<[A-Za-z_]\w*>|[im]*(?:-[im]+)?:))?")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^{}]*\}|[^1-9kgKRX])", re.DOTALL)


def read_content(content: str) -> dict[str, Any]:
    """What a ``tokenizer.json`` says.

    Raises:
        ValueError: It is no JSON, or holds something that cannot be, or would take hours.
    """
    if len(content) > LARGEST_TOKENIZER:
        raise ValueError(f"not a tokenizer.json: {len(content)} characters, expected at most {LARGEST_TOKENIZER}")
    parsed = parse_json(content, "not a tokenizer.json: the content")
    validate(parsed, _FILE, "not a tokenizer.json", "get it again, or take another tokenizer")
    for field, kinds in _PARTS.items():
        name = f"the tokenizer's {field}"
        parts = list(_parts(parsed.get(field), name, kinds))
        growth = math.prod(max(1, len(part.get("content") or part.get("prepend") or "")) for part in parts)
        if growth > MOST_GROWTH:
            raise ValueError(f"{name} makes a text {growth} times as long, expected at most {MOST_GROWTH} times")
        for part in parts:
            pattern = part.get("pattern")
            if pattern is not None and (not isinstance(pattern, dict) or "" in pattern.values()):
                raise ValueError(f"{name} of type {part['type']} has an empty pattern: take another tokenizer")
            if pattern and isinstance(pattern.get("Regex"), str):
                check_pattern(pattern["Regex"], name)
    return parsed


def check_pattern(pattern: str, name: str) -> None:
    """Refuse a regular expression that may try very many ways to match a text.

    The price of a pattern is the number of its ways through a run of :data:`RUN` characters that are all alike.

    Raises:
        ValueError: There are more than :data:`MOST_WAYS`, or it has what is not known here, such as back-references.
    """
    ways, end = _alternatives(pattern, 0, 0)
    if ways >= MOST_WAYS or end < len(pattern):
        raise ValueError(
            f"{name} has the pattern {pattern[:200]!r}, which may take hours on some texts or is not known here: "
            "expected no repeats of repeats or of alternatives, and no back-references"
        )


def _alternatives(pattern: str, place: int, depth: int) -> tuple[float, int]:
    """Ways through the alternatives that begin at a place, and where they end. Unknown forms have infinitely many."""
    total, ways = 0.0, 1.0
    while place < len(pattern) and pattern[place] != ")" and depth < 30:
        if pattern[place] == "|":
            total, ways, place = total + ways, 1.0, place + 1
            continue
        of_item, place = _item(pattern, place, depth)
        of_item, place = _repeated(pattern, place, of_item)
        ways *= of_item
    return total + ways, place


def _item(pattern: str, place: int, depth: int) -> tuple[float, int]:
    if pattern[place] == "[":
        return _class(pattern, place)
    if pattern[place] == "\\":
        escape = _ESCAPE.match(pattern, place)
        return (1.0, escape.end()) if escape else (math.inf, len(pattern))
    if pattern[place] != "(":
        return 1.0, place + 1
    if flags := re.compile(r"\(\?i\)").match(pattern, place):
        return 1.0, flags.end()
    group = _GROUP.match(pattern, place)
    if group is None or pattern[group.end() : group.end() + 1] == "?":
        return math.inf, len(pattern)
    ways, end = _alternatives(pattern, group.end(), depth + 1)
    return (ways, end + 1) if pattern[end : end + 1] == ")" else (math.inf, len(pattern))


def _class(pattern: str, place: int) -> tuple[float, int]:
    """Skips a class of characters, which may hold others."""
    depth = 0
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            if pattern[place + 1 : place + 2] == "]" or pattern[place + 1 : place + 3] == "^]":
                break  # whether this bracket is meant itself depends on the dialect
            depth += 1
        elif pattern[place] == "]":
            depth -= 1
            if not depth:
                return 1.0, place + 1
        place += 1
    return math.inf, len(pattern)


def _repeated(pattern: str, place: int, ways: float) -> tuple[float, int]:
    found = _QUANTIFIER.match(pattern, place)
    if not found or found[0] in ("{}", "{,}"):
        return ways, place
    place = found.end()
    if found[0] == "?":
        ways += 1
    else:
        low, high = (int((found[n] or "0")[:9]) for n in (1, 3)) if found[2] or found[1] else (0, 0)
        is_open = found[0] in "*+" or (bool(found[2]) and not found[3])
        most = RUN if is_open else max(low, high)
        is_fixed = not is_open and not found[2]
        ways = math.inf if ways > 1 or max(low, high) > MOST else 1.0 if is_fixed else float(max(1, most))
    if found[0] in "*+?" and pattern[place : place + 1] in ("?", "+"):  # lazy, possessive
        place += 1
    return (math.inf if _QUANTIFIER.match(pattern, place) else ways), place


def _parts(part: Any, name: str, kinds: set[str]) -> Iterable[dict[str, Any]]:
    """A part of a tokenizer and those in it.

    Raises:
        ValueError: One is of a kind that is not listed, or they are too many or too large.
    """
    waiting, seen = [part] if part is not None else [], 0
    while waiting:
        part, seen = waiting.pop(), seen + 1
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds or seen > MOST_PARTS:
            raise ValueError(f"{name} is {shown(part)[:80]}, expected at most {MOST_PARTS} of {_listed(kinds)}")
        for field, value in part.items():
            if field in _LISTS and isinstance(value, list):
                waiting += value
                continue
            for each in value.values() if isinstance(value, dict) else (value,):
                is_text, is_number = isinstance(each, str), isinstance(each, int | float)
                if each is not None and not (len(each) <= LONGEST_TEXT if is_text else is_number and 0 <= each <= MOST):
                    raise ValueError(f"{name} of type {kind} has an absurd {field[:40]!r}: take another tokenizer")
        yield part


def _listed(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))


_IDS = rule(
    f"at most {MOST_IDS} tokens with whole numbers below that",
    lambda vocab: (
        isinstance(vocab, dict)
        and len(vocab) <= MOST_IDS
        and all(type(id_) is int and 0 <= id_ < MOST_IDS for id_ in vocab.values())
    ),
)
_SCORES = rule(
    f"pairs of token and score, and tokens of at most {MOST_SCORED} characters",
    lambda vocab: (
        isinstance(vocab, list)
        and bool(vocab)
        and all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in vocab)
        and sum(len(token) for token, _ in vocab) <= MOST_SCORED
    ),
)
_FLAG = rule("true or false", lambda value: isinstance(value, bool))
_ADDED = {"id": whole(0, MOST_IDS - 1), "content": rule("a text", lambda text: isinstance(text, str) and text != "")}
_ADDED |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), _FLAG)


def _model(model: Any, name: str) -> Iterable[str]:
    """Where the kind of the model decides what its vocabulary is."""
    is_unigram = isinstance(model, dict) and model.get("type") == "Unigram"
    known = {"vocab": _SCORES if is_unigram else _IDS}
    kinds: Mapping[str, Kind] = {
        "type": rule("a kind of model", lambda kind: kind in (None, "BPE", "WordLevel", "WordPiece", "Unigram")),
        "merges": rule(f"at most {MOST_IDS}", lambda merges: isinstance(merges, list) and len(merges) <= MOST_IDS),
        "max_input_chars_per_word": whole(1, MOST),
        "continuing_subword_prefix": maybe(TEXT),
        "unk_token": maybe(TEXT),
    }
    yield from record(known, kinds, others=True)(model, name)
    prefix = isinstance(model, dict) and model.get("continuing_subword_prefix")
    if isinstance(prefix, str) and prefix and isinstance(model.get("merges"), list):
        pairs = (each if isinstance(each, list) else str(each).split(" ") for each in model["merges"])
        if not all(pair and isinstance(pair[-1], str) and pair[-1].startswith(prefix) for pair in pairs):
            yield f"{name}.merges has pairs whose second part does not begin with {prefix[:40]!r}"


_FILE = record(
    {"model": _model}, {"added_tokens": maybe(list_of(record(_ADDED, others=True), MOST_ADDED))}, others=True
)
