"""Text to token store, as a stream: memory does not grow with the input.

1. *Survey*, only for what must be known in advance: the length of a single document (it is split by position), the
   characters of ``char``, the words that ``bpe`` learns from (:func:`train_tokenizer`).
2. *Encode* the pieces from ``splits.py``, in batches. While one batch is encoded (``bpe`` uses every core), the
   next one is read and the previous one written. If the tokenizer has an end-of-text token and there are several
   documents, the token follows each of them. If it has a token that begins a text, that comes before each document. A
   document that has one of them itself gets no second one.

Every few MiB the run commits its progress. A killed run leaves no store. The next run resumes from the last commit, or
starts over if text, tokenizer or options have changed.

Several hosts can divide the work: each encodes one shard, and ``merge_shards`` merges them into the same bytes that a
single process writes.
"""

import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tokenizers

from lightning_llm.data import splits
from lightning_llm.data.corpora import STDIN, Corpus, open_corpus
from lightning_llm.data.cuts import PIECE_CHARACTERS, cut_at_newlines, cut_for
from lightning_llm.data.formats import Document
from lightning_llm.data.splits import Cursor, Shard, SplitPiece
from lightning_llm.data.store_tokenizer import boundary_lines
from lightning_llm.data.token_store import SHARD, TokenStore, read_meta, sha256
from lightning_llm.data.token_store_writer import TokenStoreWriter, shard_folder, unfinished_tokenizer
from lightning_llm.data.tokenizers import NO_TOKEN, Ids, Tokenizer, check_bpe
from lightning_llm.io.progress import StartPhase, progress_bar
from lightning_llm.io.untrusted import prefixed

BUILT_IN_TOKENIZERS = ("char", "byte", "bpe")
DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZE = "bpe", 4096
BPE_TRAINING_CHARACTERS = 1 << 26  # more text of one kind changes few merges, but the table of words grows

_BATCH_CHARACTERS = 1 << 21  # encoded at once
_BATCH_SEGMENTS = 1 << 12
_BATCH_PIECES = 16  # of one document, encoded at once
_COMMITTED_CHARACTERS = 1 << 24
_AHEAD = 3  # batches that are read before the oldest of them is written
_CODE_VERSION = 3  # increase it when the same input gives other ids: runs killed before are not resumed


def prepare_store(
    inputs: Corpus | str | Sequence[str],
    out: str | Path,
    *,
    tokenizer: str | Tokenizer = DEFAULT_TOKENIZER,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    test_fraction: float = 0.0,
    text_key: str | None = None,
    begin_of_text: str | None = None,
    end_of_text: str | None = None,
    progress: bool = False,
    replace: bool = False,
    shard: Shard | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> TokenStore:
    """Makes a token store from text.

    Args:
        inputs: A corpus, or one or several inputs of :func:`~lightning_llm.data.corpora.open_corpus`.
        out: Folder of the store.
        tokenizer: ``char``, ``byte`` or ``bpe``, trained on the text; or the path of a ``tokenizer.json``; or a
            tokenizer.
        vocab_size: Number of ids of ``bpe``.
        test_fraction: Share of the text for a test split, taken from the training split; 0 makes none.
        text_key: Key or column of the text in JSON lines and parquet. Default: ``text``.
        begin_of_text: Token before each document, or ``none``. Default: the one that the tokenizer's file puts there.
        end_of_text: Token after each of several documents, or ``none``. Default: the tokenizer's, if one is known.
        progress: Show a bar, in bytes of the input, if there is a terminal.
        replace: Replace an existing store once the new one is complete.
        shard: Make only this shard, in a folder next to ``out``, for ``merge_shards``. Every host trains the tokenizer
            on the same text, not on its own shard.
        log: Called with the lines that a user should know of a finished store: how documents begin and end, and a
            warning if a split has far more or less of the text than it should.

    Returns:
        The store (or shard), opened.

    Raises:
        ValueError: If text is missing, empty, broken, binary or not UTF-8, if the tokenizer cannot encode it, if
            ``out`` exists, or if the disk is full. No store is left behind.
    """
    out = Path(os.path.normpath(out))  # a/../b is created even if a does not exist
    folder = out if shard is None else shard_folder(out, shard.index, shard.count)
    most = 1 - splits.VALIDATION_FRACTION
    if not 0 <= test_fraction < most:
        raise ValueError(f"test_fraction must be at least 0 and below {most}, got {test_fraction}")
    for existing in (out, folder):
        if existing.exists() and not replace:
            raise ValueError(f"{existing} exists already: remove it or choose another folder")
    given = given_tokenizer(tokenizer)
    given = given and given.with_boundaries(begin_of_text, end_of_text)
    if tokenizer == "bpe":
        check_bpe(vocab_size)
    if not isinstance(inputs, Corpus):
        names = [inputs] if isinstance(inputs, str) else inputs
        if shard is not None and STDIN in names:
            raise ValueError("--shard cannot share the standard input among hosts: give files")
        inputs = open_corpus(names, text_key=text_key, spool_dir=folder.absolute().parent)
    source = {
        "inputs": list(inputs.inputs),
        "fingerprint": inputs.fingerprint,
        "text_key": inputs.text_key,
        "tokenizer": tokenizer if isinstance(tokenizer, str) else tokenizer.kind,
        "vocab_size": vocab_size if tokenizer == "bpe" else None,
    }
    constants = [_CODE_VERSION, tokenizers.__version__, test_fraction, given and sha256(given.to_str().encode())]
    constants += [begin_of_text, end_of_text]
    key = sha256(json.dumps([constants, source]).encode())
    with progress_bar(inputs.size, progress) as phase:
        bounds = splits.find_bounds(inputs, test_fraction, phase)
        kept = None if given else unfinished_tokenizer(folder, key)
        trained = given or (Tokenizer(kept) if kept else train_tokenizer(str(tokenizer), vocab_size, inputs, phase))
        trained = trained.with_boundaries(begin_of_text, end_of_text)
        is_marked = bounds.ends is None and end_of_text != NO_TOKEN
        eos = trained.eos_token_id if is_marked else None  # a mark between several documents
        with TokenStoreWriter(
            folder,
            vocab_size=trained.vocab_size,
            tokenizer=trained.to_str(),
            source={**source, "eos_token_id": eos},
            replace=replace,
            key=key,
            shard=None if shard is None else (shard.index, shard.count),
        ) as writer:
            done = Cursor(*writer.resumed)
            pieces = splits.split_pieces(inputs, bounds, trained.kind, shard or Shard(), done, phase("encoding"))
            _write(writer, pieces, trained, eos)
            if shard is None:
                writer.check_splits()
    if shard is not None:
        return TokenStore.from_meta(folder, read_meta(folder, SHARD))
    store = TokenStore.open(out)
    for line in (*boundary_lines(store), *splits.split_warnings(store, test_fraction)):
        log(line)
    return store


def given_tokenizer(tokenizer: str | Tokenizer) -> Tokenizer | None:
    """The given tokenizer; ``None`` for one that is trained on the text."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer in BUILT_IN_TOKENIZERS:
        return None
    if not Path(tokenizer).is_file():
        raise ValueError(
            f"tokenizer {tokenizer!r} is unknown: choose one of {', '.join(BUILT_IN_TOKENIZERS)}, "
            "or give the path of a tokenizer.json"
        )
    return Tokenizer.from_file(tokenizer)


def train_tokenizer(
    kind: str, vocab_size: int, corpus: Corpus, phase: StartPhase, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer of a built-in kind, trained on a corpus; ``bpe`` learns from the first 64 Mi characters.

    The same text gives the same bytes.

    Raises:
        ValueError: As ``Tokenizer.train_char`` and ``train_bpe``, or the text cannot be read.
    """
    if kind == "byte":
        return Tokenizer.train_byte()
    documents = corpus.documents(phase(f"training tokenizer {kind}"))
    if kind == "char":
        return Tokenizer.train_char(piece for document in documents for piece in document.pieces())
    assert kind == "bpe"
    pieces = (piece for document in documents for piece in cut_at_newlines(document.pieces(), PIECE_CHARACTERS))
    return Tokenizer.train_bpe(_first_characters(pieces, BPE_TRAINING_CHARACTERS), vocab_size, special_tokens)


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text)


def encode_document(tokenizer: Tokenizer, document: Document) -> Iterator[tuple[list[int], int]]:
    """Ids of a document, and UTF-8 bytes, piece by piece: memory does not grow with the document."""
    texts = cut_for(tokenizer.kind, document.pieces())
    pieces = (SplitPiece("", text, document.name, begins_document=False, ends_document=False) for text in texts)
    at_once = 1 if tokenizer.kind in ("char", "byte") else _BATCH_PIECES
    while batch := list(itertools.islice(pieces, at_once)):
        for piece, ids in zip(batch, _encoded(batch, tokenizer), strict=True):
            yield ids.tolist(), _utf8_length(piece.text)


def bytes_and_tokens(tokenizer: Tokenizer, corpus: Corpus, phase: StartPhase) -> tuple[int, int]:
    """UTF-8 bytes of a corpus, and its number of tokens."""
    size = tokens = 0
    for document in corpus.documents(phase("counting tokens")):
        for ids, text_bytes in encode_document(tokenizer, document):
            size += text_bytes
            tokens += len(ids)
    return size, tokens


# ---- encoding

Batch = list[tuple[Cursor, SplitPiece]]


def _write(
    writer: TokenStoreWriter, pieces: Iterable[tuple[Cursor, SplitPiece]], tokenizer: Tokenizer, eos: int | None
) -> None:
    uncommitted = 0
    for batch, encoded in _encoded_ahead(_batches(pieces), tokenizer):
        for split in sorted({piece.split for _, piece in batch}):
            part = [(piece, ids) for (_, piece), ids in zip(batch, encoded, strict=True) if piece.split == split]
            ids = [array for piece, ids in part for array in _marked(ids, piece, tokenizer, eos)]
            text_bytes = sum(_utf8_length(piece.text) for piece, _ in part)
            documents = sum(piece.ends_document for piece, _ in part)
            writer.write(split, np.concatenate(ids), text_bytes=text_bytes, documents=documents)
        uncommitted += sum(len(piece.text) for _, piece in batch)
        if uncommitted >= _COMMITTED_CHARACTERS:
            writer.commit(batch[-1][0])
            uncommitted = 0


def _marked(ids: Ids, piece: SplitPiece, tokenizer: Tokenizer, eos: int | None) -> Iterator[Ids]:
    """The ids of a piece with the tokens that begin and end its document."""
    if piece.begins_document and eos is not None and len(ids) > 1 and ids[0] == eos:
        ids = ids[1:]  # it ends the document before, which has it already
    if piece.begins_document and tokenizer.boundaries.before != (eos,):
        yield np.array(tokenizer.begin_of(ids), dtype=tokenizer.dtype)
    yield ids
    if piece.ends_document and eos is not None and not (len(ids) and ids[-1] == eos):
        yield np.array([eos], dtype=tokenizer.dtype)


def _batches(pieces: Iterable[tuple[Cursor, SplitPiece]]) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for cursor, piece in pieces:
        batch.append((cursor, piece))
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_SEGMENTS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _encoded_ahead(batches: Iterable[Batch], tokenizer: Tokenizer) -> Iterator[tuple[Batch, list[Ids]]]:
    """Encodes in two threads: while the ids of one batch are copied, the library encodes the next batch.

    The library has one pool with a thread per core, however many callers it has.
    """
    waiting: deque[tuple[Batch, Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(_encoded, [piece for _, piece in batch], tokenizer)))
            if len(waiting) > _AHEAD:
                first, future = waiting.popleft()
                yield first, future.result()
        yield from ((first, future.result()) for first, future in waiting)


def _encoded(batch: list[SplitPiece], tokenizer: Tokenizer) -> list[Ids]:
    try:
        return tokenizer.encode_batch([piece.text for piece in batch])
    except ValueError:
        for piece in batch:  # find the one that failed
            with prefixed(piece.document, ValueError):
                tokenizer.encode(piece.text)
        raise


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
