"""Where a text is cut before it is encoded, and before a tokenizer learns from it.

Encoding takes time that grows with the text alone, however long its words are (0.2 µs per character in words of 16,384
letters, 0.6 in words of a million), so words are cut for it only where ``cut_at_newlines`` finds no other place.
Learning byte pairs takes time that grows with the square of a word's length: there long words are cut.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

PIECE_CHARACTERS = 1 << 17  # the library takes a fifth less time than for 1 << 15; a batch has 16 of them
LONGEST_PIECE = 1 << 20
LONGEST_WORD = 1 << 10  # learning from 50,000 letters takes 0.19 s, as in words of 64; 0.26 s in words of 4,096

# Which of GPT-2's classes are in a stretch of text: white space, letters and digits, other signs. Python counts four
# separators (U+001C to U+001F) as white space that the library does not.
_CLASSES = [re.compile(pattern) for pattern in (r"[^\S\x1c-\x1f]", r"[^\W_]", r"[^\w\s]|[_\x1c-\x1f]")]


def cut_at_newlines(texts: Iterable[str], size: int, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """Cuts the pieces of one text again, into about ``size`` characters, where kind ``bpe`` would cut anyway.

    GPT-2's pattern makes a newline between two characters that are not white space a word of its own, and begins a word
    with a single space, so that the ids of these pieces, one after another, are the ids of the whole. Only where
    ``longest`` characters hold neither, they are cut as they are. Where the cuts fall does not depend on the pieces.

    Args:
        texts: Pieces of one document.
        size: Characters; pieces grow longer only where no such newline comes.
        longest: Characters.
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
    newline = _lone(text, "\n", start + max(size, 1), start + longest)
    if newline is not None:
        return newline + 1
    if len(text) <= start + longest:
        return None
    return _lone(text, " ", start + max(size, 1), start + longest) or start + longest


def _lone(text: str, sign: str, start: int, stop: int) -> int | None:
    """Where the sign first stands between two characters that are not white space."""
    place = text.find(sign, start, stop)
    while 0 <= place < len(text) - 1:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place
        place = text.find(sign, place + 1, stop)
    return None


def cut_long_words(text: str, splitter: Any) -> Iterator[str]:
    """Cuts a text within words of more than ``LONGEST_WORD`` characters, and nowhere else.

    Args:
        text: Any text.
        splitter: The library's ``ByteLevel`` pre-tokenizer, which says what a word is.
    """
    start = 0
    if _may_hold_long_word(text):
        for _, (first, end) in splitter.pre_tokenize_str(text):
            for place in range(first + LONGEST_WORD, end, LONGEST_WORD):
                yield text[start:place]
                start = place
    yield text[start:]


def _may_hold_long_word(text: str) -> bool:
    """Whether some aligned half of the longest word is of one class: every longer word has such a half."""
    half = LONGEST_WORD // 2
    return any(
        sum(found.search(text, start, start + half) is not None for found in _CLASSES) == 1
        for start in range(0, len(text) - half + 1, half)
    )
