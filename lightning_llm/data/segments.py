"""Documents to segments: which split each belongs to, and where long ones are cut.

Splits. A single document is cut by position: the first ``int(0.9 * characters)`` characters train, the rest validates
(as in nanoGPT's ``data/shakespeare_char/prepare.py``). Of many documents each goes whole into one split, chosen by a
hash of its text, so that it lands there in whatever company and order it comes, and a copy lands where the original
does.

Shares. Of the bytes of all files, one after another, host ``index`` of ``count`` takes the documents that begin in the
``index``-th part of equal size. Where reading cannot begin within a file (one text, or a compressed file), the whole
file belongs to the part in which it begins.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_llm.data.corpora import Corpus
from lightning_llm.data.cuts import PIECE_CHARACTERS, cut_at_newlines
from lightning_llm.data.formats import Advance, Document
from lightning_llm.data.progress import Phase
from lightning_llm.data.tokenizers import Tokenizer

VALIDATION_FRACTION = 0.1
MOST_SHARES = 999_999  # a folder each
WHOLE_CHARACTERS = 1 << 18  # of a foreign tokenizer, which may look further than a line

_HASHED_CHARACTERS = 1 << 16  # of a document's beginning: tells documents apart, and comes with the first piece
_FEW_DOCUMENTS = 256  # 0.9^256 = 2e-12: of more, some surely fall into the validation split


class Segment(NamedTuple):
    """A piece of a document on its way to a split."""

    split: str
    text: str
    document: str
    ends_document: bool


class Cursor(NamedTuple):
    """How far the work has come: in which file, and how many of its segments are done."""

    file: int = 0
    segments: int = 0


@dataclasses.dataclass(frozen=True)
class Share:
    """The ``index``-th of ``count`` parts of the input, from 1 on.

    Raises:
        ValueError: If there are more than :data:`MOST_SHARES`, or the index is not from 1 to the count.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count <= MOST_SHARES:
            raise ValueError(
                f"shard {self.index} of {self.count}: the first must be at least 1 and at most the second, and the "
                f"second at most {MOST_SHARES}"
            )

    def spans(self, corpus: Corpus) -> list[tuple[int, int | None] | None]:
        """For each file the bytes within which the share's documents begin, ``None`` for "to the end"; or ``None``."""
        first, last = (corpus.size * index // self.count for index in (self.index - 1, self.index))
        spans: list[tuple[int, int | None] | None] = []
        start = 0
        for file in corpus.files:
            if file.can_be_cut:
                span = max(0, first - start), min(file.size, last - start)
                spans.append(span if span[0] < span[1] else None)
            else:
                spans.append((0, None) if first <= start < last else None)
            start += file.size
        return spans


@dataclasses.dataclass(frozen=True)
class Plan:
    """How documents go into splits.

    Attributes:
        ends: Of a single document the character at which each split ends; ``None`` for many documents.
        bound: Documents up to this place validate.
        test_fraction: As much above the bound tests.
    """

    ends: dict[str, int] | None
    bound: float = VALIDATION_FRACTION
    test_fraction: float = 0.0

    @property
    def ends_documents(self) -> bool:
        """Whether documents need a mark between them."""
        return self.ends is None

    def parts(self, document: Document) -> Iterator[tuple[str, Iterable[str]]]:
        """The splits that a document goes to, each with its text in pieces."""
        if self.ends is None:
            place = _place(document.first)
            split = "val" if place <= self.bound else "test" if place <= self.bound + self.test_fraction else "train"
            yield split, document.pieces()
            return
        for split, texts in itertools.groupby(_by_position(document, self.ends), key=lambda part: part[0]):
            yield split, (text for _, text in texts)


def make_plan(corpus: Corpus, test_fraction: float, phase: Phase) -> Plan:
    """Looks at the first documents, and measures a single one.

    Raises:
        ValueError: If there is no text at all, or it cannot be read.
    """
    places = sorted(_place(document.first) for document in itertools.islice(corpus.documents(), _FEW_DOCUMENTS + 1))
    if not places:
        raise ValueError(f"{', '.join(corpus.inputs)}: no text in {len(corpus.files)} files, only empty documents")
    if len(places) > 1:
        bound = VALIDATION_FRACTION
        if len(places) <= _FEW_DOCUMENTS:  # at least one validates and one trains
            bound = min(max(bound, places[0]), places[-2])
        return Plan(None, bound, test_fraction)
    advance = phase("measuring")
    documents = (document for file in corpus.files for document in file.documents(advance))
    length = sum(len(piece) for document in documents for piece in document.pieces())
    ends = {
        "train": int((1 - VALIDATION_FRACTION - test_fraction) * length),
        "val": int((1 - test_fraction) * length),
        "test": length,
    }
    return Plan(ends, test_fraction=test_fraction)


def segments(
    corpus: Corpus, plan: Plan, tokenizer: Tokenizer, share: Share, done: Cursor, advance: Advance
) -> Iterator[tuple[Cursor, Segment]]:
    """The segments of a share of the input that are not done yet, each with the cursor behind it.

    What comes is a function of the arguments, so that a killed run can go on where it was.
    """
    for index, (file, span) in enumerate(zip(corpus.files, share.spans(corpus), strict=True)):
        if span is None:
            continue
        if index < done.file:
            advance(file.size if span[1] is None else span[1] - span[0])
            continue
        skipped = done.segments if index == done.file else 0
        found = (
            segment
            for document in file.documents(advance, *span)
            for split, texts in plan.parts(document)
            for segment in _cut(split, document.name, texts, tokenizer)
        )
        for number, segment in enumerate(found, start=1):
            if number > skipped:
                yield Cursor(index, number), segment


def _by_position(document: Document, ends: dict[str, int]) -> Iterator[tuple[str, str]]:
    place = 0
    for piece in document.pieces():
        start = place
        for split, end in ends.items():
            if place < end and place < start + len(piece):
                yield split, piece[place - start : end - start]
                place = min(end, start + len(piece))


def _place(text: str) -> float:
    """Where between 0 and 1 a document lies, by its beginning."""
    digest = hashlib.blake2b(text[:_HASHED_CHARACTERS].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _cut(split: str, document: str, texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Segment]:
    """Cuts a text where its tokenizer would cut too, or where it must."""
    if tokenizer.kind == "file":
        texts = cut_at_newlines(texts, WHOLE_CHARACTERS)
    elif tokenizer.kind == "bpe":
        texts = cut_at_newlines(texts, PIECE_CHARACTERS)
    previous = None
    for text in texts:
        if previous is not None:
            yield Segment(split, previous, document, ends_document=False)
        previous = text
    yield Segment(split, previous or "", document, ends_document=True)
