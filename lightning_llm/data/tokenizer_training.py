"""Tokenizers learnt from a corpus, read as a stream, and what a tokenizer makes of one."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from lightning_llm.data.corpora import Corpus
from lightning_llm.data.cuts import PIECE_CHARACTERS, cut_at_newlines
from lightning_llm.data.formats import Advance, Document
from lightning_llm.data.progress import Phase
from lightning_llm.data.segments import WHOLE_CHARACTERS
from lightning_llm.data.tokenizers import Tokenizer, check_bpe

KINDS = ("bpe", "char", "byte")
BPE_TRAINING_CHARACTERS = 1 << 26  # more text of one kind changes few merges, and the table of words grows with it
_PIECES = 16  # encoded at once, on every core, where there is a library to do it


def train_tokenizer(
    kind: str, vocab_size: int, corpus: Corpus, phase: Phase, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer made from a corpus. The same text gives the same bytes.

    Args:
        kind: ``char``, ``byte`` or ``bpe``, which learns from the first 64 Mi characters.
        vocab_size: Ids of ``bpe``.
        corpus: The text.
        phase: Shows the progress.
        special_tokens: Of ``bpe``, beside the end of text.

    Raises:
        ValueError: As ``Tokenizer.train_char`` and ``train_bpe``, or the text cannot be read.
    """
    if kind == "byte":
        return Tokenizer.train_byte()
    if kind == "bpe":
        check_bpe(vocab_size, special_tokens)
    advance = phase(f"training tokenizer {kind}")
    documents = _documents(corpus, advance)
    if kind == "char":
        return Tokenizer.train_char(piece for document in documents for piece in document.pieces())
    words = (piece for document in documents for piece in cut_at_newlines(document.pieces(), PIECE_CHARACTERS))
    return Tokenizer.train_bpe(_first_characters(words, BPE_TRAINING_CHARACTERS), vocab_size, special_tokens)


def encode_document(tokenizer: Tokenizer, document: Document) -> Iterator[tuple[list[int], int]]:
    """Ids of a document, and UTF-8 bytes, piece by piece: memory does not grow with it."""
    pieces, at_once = document.pieces(), 1
    if tokenizer.kind not in ("char", "byte"):
        at_once = _PIECES
        pieces = cut_at_newlines(pieces, PIECE_CHARACTERS if tokenizer.kind == "bpe" else WHOLE_CHARACTERS)
    while batch := list(itertools.islice(pieces, at_once)):
        try:
            encoded = tokenizer.encode_batch(batch)
        except ValueError as error:
            raise ValueError(f"{document.name}: {error}") from error
        for text, ids in zip(batch, encoded, strict=True):
            yield ids.tolist(), len(text.encode())


def bytes_and_tokens(tokenizer: Tokenizer, corpus: Corpus, phase: Phase) -> tuple[int, int]:
    """UTF-8 bytes of a corpus, and how many tokens they become."""
    sizes = [0, 0]
    for document in _documents(corpus, phase("counting tokens")):
        for ids, size in encode_document(tokenizer, document):
            sizes[0] += size
            sizes[1] += len(ids)
    return sizes[0], sizes[1]


def _documents(corpus: Corpus, advance: Advance) -> Iterator[Document]:
    return (document for file in corpus.files for document in file.documents(advance))


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text)
