"""Text to token store, as a stream: memory does not grow with the input.

1. *Survey*, only where something must be known beforehand: the length of a single document (it is split by position),
   the characters of ``char``, the words that ``bpe`` learns from.
2. *Encode*: document after document, in pieces; byte-pair encoding works on many pieces at once, on every core.

Splits. A single document is cut by position: the first ``int(0.9 * characters)`` characters train, the rest validates
(as in nanoGPT's ``data/shakespeare_char/prepare.py``). Of many documents each goes whole into one split, chosen by a
hash of its text, so that it lands there in whatever company and order it comes, and a copy lands where the original
does. Where the tokenizer has an end-of-text token, it follows each of many documents.

A killed run leaves no store; start it again.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from lightning_llm.data.corpora import Corpus, Document, open_corpus
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer, cut_at_newlines

BUILT_IN_TOKENIZERS = ("char", "byte", "bpe")
DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZE = "bpe", 4096
VALIDATION_FRACTION = 0.1

_BPE_TRAINING_CHARACTERS = 1 << 28  # more text of one kind changes few merges, and the table of words grows with it
_HASHED_CHARACTERS = 1 << 16  # of a document's beginning: tells documents apart, and comes with the first piece
_FEW_DOCUMENTS = 256  # 0.9^256 = 2e-12: of more, some surely fall into the validation split
_BATCH_CHARACTERS = 1 << 22  # encoded at once
_PIECE_CHARACTERS = 1 << 15  # so that a batch occupies every core

Advance = Callable[[int], None]
Phase = Callable[[str], Advance]


@dataclasses.dataclass(frozen=True)
class _Segment:
    """A piece of a document on its way to a split."""

    split: str
    text: str
    document: str
    ends_document: bool


def prepare_store(
    inputs: Corpus | str | Sequence[str],
    out: str | Path,
    *,
    tokenizer: str | Tokenizer = DEFAULT_TOKENIZER,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    test_fraction: float = 0.0,
    progress: bool = False,
    replace: bool = False,
) -> TokenStore:
    """Makes a token store from text.

    Args:
        inputs: A corpus, or what :func:`~lightning_llm.data.corpora.open_corpus` takes: one input or several.
        out: Folder of the store.
        tokenizer: ``char``, ``byte`` or ``bpe``, trained here; or the path of a ``tokenizer.json``; or a tokenizer.
        vocab_size: Ids of ``bpe``.
        test_fraction: Share of the text for a test split, taken from the training split; 0 makes none.
        progress: Show a bar, in bytes of text, where the terminal can.
        replace: Put the new store in the place of an old one, once it is whole.

    Returns:
        The store, opened.

    Raises:
        ValueError: If text is missing, empty, binary or not UTF-8, if the tokenizer cannot encode it, if ``out``
            exists, or if the disk is full. No store is left behind.
    """
    if not 0 <= test_fraction < 1 - VALIDATION_FRACTION:
        raise ValueError(f"test_fraction must be at least 0 and below {1 - VALIDATION_FRACTION}, got {test_fraction}")
    if not replace and Path(out).exists():  # said before the work, not after it
        raise ValueError(f"{out} exists already: remove it or choose another folder")
    corpus = inputs if isinstance(inputs, Corpus) else open_corpus([inputs] if isinstance(inputs, str) else inputs)
    with _bar(corpus.size, progress) as phase:
        trained = tokenizer if isinstance(tokenizer, Tokenizer) else _tokenizer(tokenizer, vocab_size, corpus, phase)
        source = {
            "inputs": list(corpus.inputs),
            "fingerprint": corpus.fingerprint,
            "tokenizer": tokenizer if isinstance(tokenizer, str) else trained.kind,
            "vocab_size": vocab_size if tokenizer == "bpe" else None,
        }
        content = trained.to_str()
        with TokenStoreWriter(
            out, vocab_size=trained.vocab_size, tokenizer=content, source=source, replace=replace
        ) as writer:
            if len(corpus.documents) == 1:
                segments = _by_position(corpus.documents[0], trained, test_fraction, phase)
            else:
                segments = _by_document(corpus.documents, trained, test_fraction)
            _write(writer, segments, trained, end_documents=len(corpus.documents) > 1, advance=phase("encoding"))
    return TokenStore.open(out)


def _tokenizer(name: str, vocab_size: int, corpus: Corpus, phase: Phase) -> Tokenizer:
    if name == "byte":
        return Tokenizer.train_byte()
    if name not in BUILT_IN_TOKENIZERS:
        if not Path(name).is_file():
            raise ValueError(
                f"tokenizer {name!r} is unknown: choose one of {', '.join(BUILT_IN_TOKENIZERS)}, "
                "or give the path of a tokenizer.json"
            )
        return Tokenizer.from_file(name)
    advance = phase(f"training tokenizer {name}")
    pieces = (_counted(document.pieces(), advance) for document in corpus.documents)
    if name == "char":
        return Tokenizer.train_char(itertools.chain.from_iterable(pieces))
    words = itertools.chain.from_iterable(cut_at_newlines(texts, _PIECE_CHARACTERS) for texts in pieces)
    return Tokenizer.train_bpe(_first_characters(words, _BPE_TRAINING_CHARACTERS), vocab_size)


def _by_position(document: Document, tokenizer: Tokenizer, test_fraction: float, phase: Phase) -> Iterator[_Segment]:
    length = sum(map(len, _counted(document.pieces(), phase("measuring"))))
    ends = {
        "train": int((1 - VALIDATION_FRACTION - test_fraction) * length),
        "val": int((1 - test_fraction) * length),
        "test": length,
    }

    def parts() -> Iterator[tuple[str, str]]:
        place = 0
        for piece in document.pieces():
            start = place
            for split, end in ends.items():
                if place < end and place < start + len(piece):
                    yield split, piece[place - start : end - start]
                    place = min(end, start + len(piece))

    for split, texts in itertools.groupby(parts(), key=lambda part: part[0]):
        yield from _segments(split, document.name, (text for _, text in texts), tokenizer)


def _by_document(documents: Sequence[Document], tokenizer: Tokenizer, test_fraction: float) -> Iterator[_Segment]:
    bound = VALIDATION_FRACTION
    if len(documents) <= _FEW_DOCUMENTS:  # at least one validates and one trains
        places = sorted(_place(next(document.pieces(), "")) for document in documents)
        bound = min(max(bound, places[0]), places[-2])
    for document in documents:
        pieces = document.pieces()
        first = next(pieces, "")
        place = _place(first)
        split = "val" if place <= bound else "test" if place <= bound + test_fraction else "train"
        yield from _segments(split, document.name, itertools.chain([first], pieces), tokenizer)


def _place(text: str) -> float:
    """Where between 0 and 1 a document lies, by its beginning."""
    digest = hashlib.blake2b(text[:_HASHED_CHARACTERS].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _segments(split: str, document: str, texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[_Segment]:
    """Cuts a text only where its tokenizer would cut too."""
    if tokenizer.kind == "file":
        texts = ["".join(texts)]
    elif tokenizer.kind == "bpe":
        texts = cut_at_newlines(texts, _PIECE_CHARACTERS)
    previous = None
    for text in texts:
        if previous is not None:
            yield _Segment(split, previous, document, ends_document=False)
        previous = text
    yield _Segment(split, previous or "", document, ends_document=True)


def _write(
    writer: TokenStoreWriter, segments: Iterable[_Segment], tokenizer: Tokenizer, end_documents: bool, advance: Advance
) -> None:
    eos = [] if tokenizer.eos_token_id is None or not end_documents else [tokenizer.eos_token_id]
    end = np.array(eos, dtype=tokenizer.dtype)
    written = set()
    for batch in _batches(segments):
        for segment, ids in zip(batch, _encoded(batch, tokenizer), strict=True):
            size = _utf8_length(segment.text)
            whole = np.concatenate([ids, end]) if segment.ends_document else ids
            writer.write(segment.split, whole, text_bytes=size, documents=int(segment.ends_document))
            written |= {segment.split} if len(whole) else set()
            advance(size)
    if missing := {"train", "val"} - written:
        raise ValueError(f"too little text: nothing is left for the {' and the '.join(sorted(missing))} split")


def _encoded(batch: list[_Segment], tokenizer: Tokenizer) -> list[np.ndarray]:
    try:
        return list(tokenizer.encode_batch([segment.text for segment in batch]))
    except ValueError:
        for segment in batch:  # which of them was it?
            try:
                tokenizer.encode_array(segment.text)
            except ValueError as error:
                raise ValueError(f"{segment.document}: {error}") from error
        raise


def _batches(segments: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    batch: list[_Segment] = []
    size = 0
    for segment in segments:
        batch.append(segment)
        size += len(segment.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text)


def _counted(texts: Iterable[str], advance: Advance) -> Iterator[str]:
    for text in texts:
        advance(_utf8_length(text))
        yield text


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@contextlib.contextmanager
def _bar(total: int, show: bool) -> Iterator[Phase]:
    """A progress bar on the terminal; each phase of the work counts the bytes of the text once."""
    if not show:
        yield lambda description: lambda size: None
        return
    from rich import progress  # where no bar is shown, it need not be loaded
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def phase(description: str) -> Advance:
            task = bar.add_task(description, total=total)
            return lambda size: bar.advance(task, size)

        yield phase
