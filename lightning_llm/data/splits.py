"""How text is divided: documents into splits, the input into shards, and both into the pieces that are encoded.

Splits. A single document is cut by position: the first ``int(0.9 * characters)`` characters train, the rest validates
(as nanoGPT does for its character model). If there are several documents, each belongs to one split,
chosen by a hash of its text. So the split depends neither on other documents nor on their order, and copies of a
document belong to the same split.

Shards. The bytes of all files, concatenated, are divided into ``count`` parts of equal size. Host ``index`` takes the
documents that begin in part ``index``. If reading cannot begin within a file (plain text, or a compressed file), the
whole file belongs to the part in which it begins.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_llm.data.corpora import Corpus
from lightning_llm.data.cuts import cut_for
from lightning_llm.data.formats import Document
from lightning_llm.data.token_store import TokenStore
from lightning_llm.io.progress import Advance, StartPhase

VALIDATION_FRACTION = 0.1
MOST_SHARDS = 999_999  # a folder each
FAR_FROM_SHARE = 2  # times as many tokens as a split should have, or as few, that users are told of

_HASHED_CHARACTERS = 1 << 16  # of a document's beginning: tells documents apart, and is within the first piece
_FEW_DOCUMENTS = 256  # 0.9^256 = 2e-12: with more documents, the validation split is practically never empty


class SplitPiece(NamedTuple):
    """A piece of a document for a split."""

    split: str
    text: str
    document: str
    begins_document: bool
    ends_document: bool


class Cursor(NamedTuple):
    """How far the work has come: the current file, and how many of its pieces are done."""

    file_index: int = 0
    pieces: int = 0


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` of the input, counted from 1.

    Raises:
        ValueError: If there are more than :data:`MOST_SHARDS`, or the index is not from 1 to the count.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count <= MOST_SHARDS:
            raise ValueError(
                f"shard {self.index} of {self.count}: the first must be at least 1 and at most the second, and the "
                f"second at most {MOST_SHARDS}"
            )

    def spans(self, corpus: Corpus) -> Iterator[tuple[int, int | None] | None]:
        """For each file, the bytes in which the shard's documents begin; an end of ``None`` is the end of the file.

        ``None`` for a file without such documents.
        """
        first, last = (corpus.size * index // self.count for index in (self.index - 1, self.index))
        start = 0
        for file in corpus.files:
            if file.can_be_cut:
                span = max(0, first - start), min(file.size, last - start)
                yield span if span[0] < span[1] else None
            else:
                yield (0, None) if first <= start < last else None
            start += file.size


@dataclasses.dataclass(frozen=True)
class SplitBounds:
    """How documents are divided into splits.

    Attributes:
        ends: For a single document, the character at which each split ends; ``None`` for several documents.
        bound: Documents whose hash (from 0 to 1) is up to this belong to the validation split.
        test_fraction: This much above the bound belongs to the test split.
    """

    ends: dict[str, int] | None
    bound: float = VALIDATION_FRACTION
    test_fraction: float = 0.0

    def parts(self, document: Document) -> Iterator[tuple[str, Iterable[str]]]:
        """The splits of a document, each with its text in pieces."""
        if self.ends is None:
            place = _place(document.first)
            split = "val" if place <= self.bound else "test" if place <= self.bound + self.test_fraction else "train"
            yield split, document.pieces()
            return
        for split, texts in itertools.groupby(_by_position(document, self.ends), key=lambda part: part[0]):
            yield split, (text for _, text in texts)


def find_bounds(corpus: Corpus, test_fraction: float, phase: StartPhase) -> SplitBounds:
    """Reads the first documents; if there is only one, measures its length.

    Raises:
        ValueError: If there is no text at all, or only copies of one document, or it cannot be read.
    """
    places = sorted(_place(document.first) for document in itertools.islice(corpus.documents(), _FEW_DOCUMENTS + 1))
    if not places:
        raise ValueError(f"{', '.join(corpus.inputs)}: no text in {len(corpus.files)} files, only empty documents")
    if len(places) > 1:
        bound = VALIDATION_FRACTION
        if len(places) <= _FEW_DOCUMENTS:  # at least one validates and one trains
            if places[0] == places[-1]:
                raise ValueError(
                    f"{', '.join(corpus.inputs)}: nothing is left for the train split: all {len(places)} documents "
                    f"have the same first {_HASHED_CHARACTERS:,} characters, and such copies belong to the same split: "
                    "give the text once"
                )
            bound = min(max(bound, places[0]), places[-2])
            if bound == places[-1]:  # copies, which stay together
                bound = max(place for place in places if place < places[-1])
        return SplitBounds(None, bound, test_fraction)
    length = sum(len(piece) for document in corpus.documents(phase("measuring")) for piece in document.pieces())
    kept = {"train": 1 - VALIDATION_FRACTION - test_fraction, "val": 1 - test_fraction}
    ends = {split: int(fraction * length) for split, fraction in kept.items()}
    return SplitBounds({**ends, "test": length}, test_fraction=test_fraction)


def split_warnings(store: TokenStore, test_fraction: float = 0.0) -> Iterator[str]:
    """A line if a split has far more or fewer tokens than it should: documents are few, or of very unequal lengths."""
    total = sum(split.tokens for split in store.splits.values())
    wanted = {"val": VALIDATION_FRACTION} | ({"test": test_fraction} if test_fraction else {})
    found = {name: store.splits[name].tokens / total if name in store.splits else 0.0 for name in wanted}
    far = [
        f"the {name} split has {found[name]:.2%} of the tokens instead of about {share:.0%}"
        for name, share in wanted.items()
        if not share / FAR_FROM_SHARE <= found[name] <= share * FAR_FROM_SHARE
    ]
    if far:
        yield (
            f"warning: {' and '.join(far)}, and the train split has {store.splits['train'].tokens:,} tokens: each "
            "document belongs to one split as a whole. To cut the text by position instead, give it as one: "
            "cat FILES | lightning-llm prepare - --out DIR"
        )


def split_pieces(
    corpus: Corpus, bounds: SplitBounds, kind: str, shard: Shard, done: Cursor, advance: Advance
) -> Iterator[tuple[Cursor, SplitPiece]]:
    """The pieces of a shard that are not done yet, each with the cursor after it: a function of the arguments."""
    for index, (file, span) in enumerate(zip(corpus.files, shard.spans(corpus), strict=True)):
        if span is None:
            continue
        if index < done.file_index:
            advance(file.size if span[1] is None else span[1] - span[0])
            continue
        documents = file.documents(advance, *span)
        pieces = (piece for document in documents for piece in _pieces(document, bounds, kind))
        numbered = enumerate(pieces, start=1)
        skipped = done.pieces if index == done.file_index else 0
        yield from ((Cursor(index, number), piece) for number, piece in numbered if number > skipped)


def _pieces(document: Document, bounds: SplitBounds, kind: str) -> Iterator[SplitPiece]:
    is_first = True
    for split, texts in bounds.parts(document):
        for text, following in itertools.pairwise(itertools.chain(cut_for(kind, texts), [""])):
            yield SplitPiece(split, text, document.name, begins_document=is_first, ends_document=not following)
            is_first = False


def _by_position(document: Document, ends: dict[str, int]) -> Iterator[tuple[str, str]]:
    place = 0
    for piece in document.pieces():
        start = place
        for split, end in ends.items():
            if place < end and place < start + len(piece):
                yield split, piece[place - start : end - start]
                place = min(end, start + len(piece))


def _place(text: str) -> float:
    """A hash from 0 to 1 of a document's beginning."""
    digest = hashlib.blake2b(text[:_HASHED_CHARACTERS].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
