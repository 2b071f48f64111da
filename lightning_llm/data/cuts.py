"""Where long text is cut into pieces that are encoded, or learned from, one by one.

Encoding takes time that grows with the text alone, however long its words are (0.2 µs per character in words of 16,384
letters, 0.6 in words of a million), so :func:`cut_at_newlines` cuts words only if it finds no other place. Learning
byte pairs takes time that grows with the square of a word's length: there :func:`cut_long_words` cuts them.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

PIECE_CHARACTERS = 1 << 17  # the library takes a fifth less time than for 1 << 15; a batch has 16 of them
LONGEST_PIECE = 1 << 20
WHOLE_CHARACTERS = 1 << 18  # for tokenizers of kind 'file', which may look beyond a line
LONGEST_WORD = 1 << 10  # learning from 50,000 letters takes 0.19 s, as in words of 64; 0.26 s in words of 4,096

# GPT-2's classes of characters: white space, letters and digits, other signs. Python counts four separators
# (U+001C to U+001F) as white space, the library does not.
_CLASSES = [re.compile(pattern) for pattern in (r"[^\S\x1c-\x1f]", r"[^\W_]", r"[^\w\s]|[_\x1c-\x1f]")]


def cut_for(kind: str, texts: Iterable[str]) -> Iterable[str]:
    """Cuts the pieces of a text again, where a tokenizer of this kind would cut too, or where it must."""
    if kind in ("char", "byte"):
        return texts
    return cut_at_newlines(texts, PIECE_CHARACTERS if kind == "bpe" else WHOLE_CHARACTERS)


def cut_at_newlines(texts: Iterable[str], size: int, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """Cuts the pieces of one text again, into about ``size`` characters, where kind ``bpe`` would cut anyway.

    GPT-2's pattern makes a newline between two characters that are not white space a word of its own, and begins a word
    with a single space. So the ids of these pieces, concatenated, are the ids of the whole. Only if ``longest``
    characters contain neither, they are cut anywhere. Where the cuts are does not depend on the pieces.
    """
    rest = ""
    for text in texts:
        rest += text
        start = 0
        while (end := _end_of_cut(rest, start, size, longest)) is not None:
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def _end_of_cut(text: str, start: int, size: int, longest: int) -> int | None:
    first = start + max(size, 1)
    last = start + longest
    if newline := _lone("\n", text, first, last):
        return newline + 1
    return None if len(text) <= last else _lone(" ", text, first, last) or last


def _lone(sign: str, text: str, start: int, stop: int) -> int | None:
    """The first place of the sign between two characters that are not white space."""
    place = text.find(sign, start, stop)
    while 0 <= place < len(text) - 1:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place
        place = text.find(sign, place + 1, stop)
    return None


def cut_long_words(text: str, splitter: Any) -> Iterator[str]:
    """Cuts a text inside words of more than ``LONGEST_WORD`` characters. ``ByteLevel``, the splitter, finds words."""
    start = 0
    half = LONGEST_WORD // 2
    # every longer word contains an aligned half of the longest word, with characters of one class
    halves = range(0, len(text) - half + 1, half)
    if any(sum(found.search(text, at, at + half) is not None for found in _CLASSES) == 1 for at in halves):
        for _, (first, end) in splitter.pre_tokenize_str(text):
            for place in range(first + LONGEST_WORD, end, LONGEST_WORD):
                yield text[start:place]
                start = place
    yield text[start:]
