"""Text to token store, as a stream: memory does not grow with the input.

1. *Survey*, only for what must be known in advance: the length of a single document (it is split by position), the
   characters of ``char``, the words that ``bpe`` learns from (:func:`train_tokenizer`).
2. *Encode* the segments from ``corpora.py``, in batches. While one batch is encoded (``bpe`` uses every core), the
   next one is read and the previous one written. If the tokenizer has an end-of-text token and there are several
   documents, the token follows each of them.

Every few MiB the run commits its progress. A killed run leaves no store. The next run resumes from the last commit, or
starts over if text, tokenizer or options have changed.

Several hosts can divide the work: each encodes one shard, and ``merge_shards`` merges them into the same bytes that a
single process writes.

:func:`find_or_prepare` decides which store the ``data.*`` options of a run mean, and whether it still matches them.
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

from lightning_llm.data import corpora
from lightning_llm.data.corpora import Corpus, Cursor, Segment, Share, open_corpus
from lightning_llm.data.formats import Document, Phase, progress_bar
from lightning_llm.data.token_store import SHARD, TokenStore, read_meta, sha256, shards_of
from lightning_llm.data.token_store_writer import TokenStoreWriter, shard_folder, unfinished_tokenizer
from lightning_llm.data.tokenizers import PIECE_CHARACTERS, Ids, Tokenizer, check_bpe, cut_at_newlines
from lightning_llm.io.untrusted import file_name

BUILT_IN_TOKENIZERS = ("char", "byte", "bpe")
DEFAULT_CORPUS, DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZE = "stdlib", "bpe", 4096
BPE_TRAINING_CHARACTERS = 1 << 26  # more text of one kind changes few merges, but the table of words grows

_BATCH_CHARACTERS = 1 << 21  # encoded at once
_BATCH_SEGMENTS = 1 << 12
_BATCH_PIECES = 16  # of one document, encoded at once
_COMMITTED_CHARACTERS = 1 << 24
_AHEAD = 3  # batches that are read before the oldest of them is written
_CODE_VERSION = 2  # increase it when the same input gives other ids: runs killed before are not resumed


def prepare_store(
    inputs: Corpus | str | Sequence[str],
    out: str | Path,
    *,
    tokenizer: str | Tokenizer = DEFAULT_TOKENIZER,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    test_fraction: float = 0.0,
    text_key: str | None = None,
    progress: bool = False,
    replace: bool = False,
    share: Share | None = None,
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
        progress: Show a bar, in bytes of the input, if there is a terminal.
        replace: Replace an existing store once the new one is complete.
        share: Make only this shard, in a folder next to ``out``, for ``merge_shards``. Every host trains the tokenizer
            on the same text, not on its own share.

    Returns:
        The store (or shard), opened.

    Raises:
        ValueError: If text is missing, empty, broken, binary or not UTF-8, if the tokenizer cannot encode it, if
            ``out`` exists, or if the disk is full. No store is left behind.
    """
    out = Path(os.path.normpath(out))  # a/../b is created even if a does not exist
    folder = out if share is None else shard_folder(out, share.index, share.count)
    most = 1 - corpora.VALIDATION_FRACTION
    if not 0 <= test_fraction < most:
        raise ValueError(f"test_fraction must be at least 0 and below {most}, got {test_fraction}")
    for existing in (out, folder):
        if existing.exists() and not replace:
            raise ValueError(f"{existing} exists already: remove it or choose another folder")
    given = given_tokenizer(tokenizer)
    if tokenizer == "bpe":
        check_bpe(vocab_size)
    if not isinstance(inputs, Corpus):
        names = [inputs] if isinstance(inputs, str) else inputs
        if share is not None and corpora.STDIN in names:
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
    key = sha256(json.dumps([constants, source]).encode())
    with progress_bar(inputs.size, progress) as phase:
        plan = corpora.make_plan(inputs, test_fraction, phase)
        kept = None if given else unfinished_tokenizer(folder, key)
        trained = given or (Tokenizer(kept) if kept else train_tokenizer(str(tokenizer), vocab_size, inputs, phase))
        eos = trained.eos_token_id if plan.ends is None else None  # a mark between several documents
        with TokenStoreWriter(
            folder,
            vocab_size=trained.vocab_size,
            tokenizer=trained.to_str(),
            source={**source, "eos_token_id": eos},
            replace=replace,
            key=key,
            shard=None if share is None else (share.index, share.count),
        ) as writer:
            done = Cursor(*writer.resumed)
            found = corpora.segments(inputs, plan, trained, share or Share(), done, phase("encoding"))
            _write(writer, found, trained, eos)
            if share is None:
                writer.check_splits()
    return TokenStore.open(out) if share is None else TokenStore.from_meta(folder, read_meta(folder, SHARD))


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
    kind: str, vocab_size: int, corpus: Corpus, phase: Phase, special_tokens: Sequence[str] = ()
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
    texts = corpora.cut_for(tokenizer, document.pieces())
    pieces = (Segment("", text, document.name, ends_document=False) for text in texts)
    at_once = 1 if tokenizer.kind in ("char", "byte") else _BATCH_PIECES
    while batch := list(itertools.islice(pieces, at_once)):
        for segment, ids in zip(batch, _encoded(batch, tokenizer), strict=True):
            yield ids.tolist(), _utf8_length(segment.text)


def bytes_and_tokens(tokenizer: Tokenizer, corpus: Corpus, phase: Phase) -> tuple[int, int]:
    """UTF-8 bytes of a corpus, and its number of tokens."""
    size = tokens = 0
    for document in corpus.documents(phase("counting tokens")):
        for ids, text_bytes in encode_document(tokenizer, document):
            size, tokens = size + text_bytes, tokens + len(ids)
    return size, tokens


# ---- the store of a run


def find_or_prepare(
    *,
    corpus: str | None = None,
    path: str | None = None,
    store: str | None = None,
    tokenizer: str = DEFAULT_TOKENIZER,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    prepare: bool = True,
    progress: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> TokenStore:
    """The store that a run's ``data.*`` options mean; prepares a missing store if its text is given.

    A named store that exists is used as it is, unless an option that differs from its default contradicts the store's
    source. An unnamed store is in :func:`default_store`, and is made again when its text has changed. To check that,
    the text is read if ``path`` is given or ``store`` is not.

    Args:
        corpus: Name of a corpus. ``None``: ``stdlib`` if neither path nor store is given.
        path: Text: a file, folder or glob, instead of the corpus.
        store: The store's folder.
        tokenizer: As in :func:`prepare_store`, and so are ``vocab_size`` and ``progress``.
        vocab_size: Number of ids of ``bpe``.
        prepare: Whether to read the text at all. If not, the store must exist and is used as it is.
        progress: Show a bar.
        say: Called with a line before a store is prepared.

    Raises:
        ValueError: As :func:`prepare_store` and ``TokenStore.open``; if the store was made from something else, or a
            named store is missing and no text is given.
    """
    if tokenizer == "bpe":
        check_bpe(vocab_size)
    check_named_store(store, corpus, path)
    if path is None and corpus not in (None, *corpora.NAMED_CORPORA):
        known = ", ".join(corpora.NAMED_CORPORA)
        raise ValueError(
            f"corpus {corpus!r} is unknown: choose one of {known}, or give a file, folder or glob as data.path"
        )
    given = path if path is not None else corpus or DEFAULT_CORPUS
    out = Path(store) if store is not None else default_store([given], tokenizer, vocab_size)
    if not prepare:
        return TokenStore.open(out)
    if store is not None and out.exists():
        opened = TokenStore.open(out)
        _check_source(opened, corpus, path, tokenizer, vocab_size)
        return opened
    documents = open_corpus([given])
    if out.exists():
        opened = TokenStore.open(out)
        if opened.source.get("fingerprint") == documents.fingerprint and _has_tokenizer(opened, tokenizer):
            return opened
        say(f"The text or the tokenizer of {out} has changed since it was prepared.")
    say(f"Preparing {out} from {given} ({documents.size / 1e6:.1f} MB), tokenizer {tokenizer}.")
    try:
        return prepare_store(
            documents, out, tokenizer=tokenizer, vocab_size=vocab_size, progress=progress, replace=out.exists()
        )
    except ValueError:
        if store is None and out.exists():  # another process was faster
            return TokenStore.open(out)
        raise


def check_named_store(store: str | None, corpus: str | None, path: str | None) -> None:
    """Rejects a named store that is missing, unless its text is given too: the name may be a typo.

    Raises:
        ValueError: If the store is missing, and neither a corpus nor a path was given with it.
    """
    if store is None or Path(store).exists() or corpus is not None or path is not None:
        return
    if shards_of(Path(store)):
        TokenStore.open(store)  # raises, with what to do with the shards
    raise ValueError(
        f"data.store {store!r} does not exist: give an existing store, or the text to prepare it from, as "
        "data.path or, on the command line, as data.corpus"
    )


def default_store(inputs: Sequence[str], tokenizer: str, vocab_size: int) -> Path:
    """The folder of an unnamed store, such as ``stores/shakespeare-char`` or ``stores/stdlib-bpe-4096``.

    Paths among the inputs, and that of a ``tokenizer.json``, add eight hex digits of a hash of the absolute paths.
    """
    paths = [given for given in inputs if given not in corpora.NAMED_CORPORA]
    words = ["+".join(given if given in corpora.NAMED_CORPORA else Path(given).stem.strip("*?[]") for given in inputs)]
    if tokenizer in BUILT_IN_TOKENIZERS:
        words += [tokenizer, str(vocab_size)] if tokenizer == "bpe" else [tokenizer]
    else:
        words, paths = [*words, "file"], [*paths, tokenizer]
    if paths:
        words.append(sha256("\n".join(str(Path(path).expanduser().absolute()) for path in paths).encode())[:8])
    return Path("stores", file_name("-".join(words)))


def _check_source(store: TokenStore, corpus: str | None, path: str | None, tokenizer: str, vocab_size: int) -> None:
    made = store.source
    problems = []
    if path is not None:
        if made.get("fingerprint") != open_corpus([path]).fingerprint:
            problems.append(f"data.path {path!r}{' as it is now' if made.get('inputs') == [path] else ''}")
    elif corpus not in (None, DEFAULT_CORPUS) and made.get("inputs") != [corpus]:
        problems.append(f"data.corpus {corpus!r}")
    if tokenizer != DEFAULT_TOKENIZER and not _has_tokenizer(store, tokenizer):
        problems.append(f"data.tokenizer {tokenizer!r}")
    if vocab_size != DEFAULT_VOCAB_SIZE and made.get("tokenizer") == "bpe" and made.get("vocab_size") != vocab_size:
        problems.append(f"data.vocab_size {vocab_size}")
    if problems:
        inputs = ", ".join(made.get("inputs", []))
        raise ValueError(
            f"token store {store.path} was made from {inputs} with tokenizer {made.get('tokenizer')} of "
            f"{store.vocab_size} ids, not with {' and '.join(problems)}: drop the option, or choose another data.store"
        )


def _has_tokenizer(store: TokenStore, tokenizer: str) -> bool:
    if tokenizer in BUILT_IN_TOKENIZERS:
        return bool(store.source.get("tokenizer") == tokenizer)
    return store.tokenizer_sha256 == sha256(Tokenizer.from_file(tokenizer).to_str().encode())


# ---- encoding segment after segment

Batch = list[tuple[Cursor, Segment]]


def _write(
    writer: TokenStoreWriter, found: Iterable[tuple[Cursor, Segment]], tokenizer: Tokenizer, eos: int | None
) -> None:
    end = np.array([] if eos is None else [eos], dtype=tokenizer.dtype)
    uncommitted = 0
    for batch, encoded in _encoded_ahead(_batches(found), tokenizer):
        for split in sorted({segment.split for _, segment in batch}):
            part = [(segment, ids) for (_, segment), ids in zip(batch, encoded, strict=True) if segment.split == split]
            ids = [array for segment, ids in part for array in ((ids, end) if segment.ends_document else (ids,))]
            text_bytes = sum(_utf8_length(segment.text) for segment, _ in part)
            documents = sum(segment.ends_document for segment, _ in part)
            writer.write(split, np.concatenate(ids), text_bytes=text_bytes, documents=documents)
        uncommitted += sum(len(segment.text) for _, segment in batch)
        if uncommitted >= _COMMITTED_CHARACTERS:
            writer.commit(batch[-1][0])
            uncommitted = 0


def _batches(found: Iterable[tuple[Cursor, Segment]]) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for cursor, segment in found:
        batch.append((cursor, segment))
        size += len(segment.text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_SEGMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded_ahead(batches: Iterable[Batch], tokenizer: Tokenizer) -> Iterator[tuple[Batch, list[Ids]]]:
    """Encodes in two threads: while the ids of one batch are copied, the library encodes the next batch.

    The library has one pool with a thread per core, however many callers it has.
    """
    waiting: deque[tuple[Batch, Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(_encoded, [segment for _, segment in batch], tokenizer)))
            if len(waiting) > _AHEAD:
                first, future = waiting.popleft()
                yield first, future.result()
        yield from ((first, future.result()) for first, future in waiting)


def _encoded(batch: list[Segment], tokenizer: Tokenizer) -> list[Ids]:
    try:
        return tokenizer.encode_batch([segment.text for segment in batch])
    except ValueError:
        for segment in batch:  # find the one that failed
            try:
                tokenizer.encode(segment.text)
            except ValueError as error:
                raise ValueError(f"{segment.document}: {error}") from error
        raise


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
