"""Text to token store, as a stream: memory does not grow with the input.

1. *Survey*, only where something must be known beforehand: the length of a single document (it is split by position),
   the characters of ``char``, the words that ``bpe`` learns from.
2. *Encode*: segment after segment (``segments.py``), in batches. While one batch is encoded, in byte-pair encoding on
   every core, the next one is read and the last one written. Where the tokenizer has an end-of-text token, it follows
   each of many documents.

Every few MiB the run commits where it is. A killed run leaves no store; started again it goes on from the last commit,
or anew if text, tokenizer or options have changed.

Several hosts can share the work: each encodes one shard, and ``shards.py`` makes the store of them, the same bytes as
one process makes.
"""

import dataclasses
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lightning_llm.data.corpora import STDIN, Corpus, open_corpus
from lightning_llm.data.progress import progress_bar
from lightning_llm.data.segments import (
    VALIDATION_FRACTION,
    Cursor,
    Segment,
    Share,
    make_plan,
    segments,
)
from lightning_llm.data.shards import check_splits, shard_folder
from lightning_llm.data.token_store import TokenStore, sha256
from lightning_llm.data.token_store_writer import TokenStoreWriter, unfinished_tokenizer
from lightning_llm.data.tokenizer_training import train_tokenizer
from lightning_llm.data.tokenizers import Ids, Tokenizer, check_bpe

BUILT_IN_TOKENIZERS = ("char", "byte", "bpe")
DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZE = "bpe", 4096

_BATCH_CHARACTERS = 1 << 21  # encoded at once
_BATCH_SEGMENTS = 1 << 12
_COMMITTED_CHARACTERS = 1 << 24
_AHEAD = 3  # batches that are read before the oldest of them is written
_CODE_VERSION = 2  # another one where the same input gives other ids: runs killed before are not gone on with


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
) -> TokenStore:
    """Makes a token store from text.

    Args:
        inputs: A corpus, or what :func:`~lightning_llm.data.corpora.open_corpus` takes: one input or several.
        out: Folder of the store.
        tokenizer: ``char``, ``byte`` or ``bpe``, trained here; or the path of a ``tokenizer.json``; or a tokenizer.
        vocab_size: Ids of ``bpe``.
        test_fraction: Share of the text for a test split, taken from the training split; 0 makes none.
        text_key: Key or column of the text in JSON lines and parquet. Default: ``text``.
        progress: Show a bar, in bytes of the input, where the terminal can.
        replace: Put the new store in the place of an old one, once it is whole.

    Returns:
        The store, opened.

    Raises:
        ValueError: If text is missing, empty, broken, binary or not UTF-8, if the tokenizer cannot encode it, if
            ``out`` exists, or if the disk is full. No store is left behind.
    """
    out = os.path.normpath(out)  # a/../b is written where a need not exist
    _prepare(inputs, Path(out), tokenizer, vocab_size, test_fraction, text_key, progress, replace=replace)
    return TokenStore.open(out)


def prepare_shard(
    inputs: Corpus | str | Sequence[str],
    out: str | Path,
    share: Share,
    *,
    tokenizer: str | Tokenizer = DEFAULT_TOKENIZER,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    test_fraction: float = 0.0,
    text_key: str | None = None,
    progress: bool = False,
) -> Path:
    """Makes one shard of a token store, which :func:`~lightning_llm.data.shards.merge_shards` takes.

    A tokenizer that is trained here is trained by every shard, on the same text, which is not its own share.

    Args:
        inputs: As in :func:`prepare_store`, the whole of it.
        out: Folder of the store to be.
        share: Which part of the input.
        tokenizer: As in :func:`prepare_store`, as the others too.
        vocab_size: As in :func:`prepare_store`.
        test_fraction: As in :func:`prepare_store`.
        text_key: As in :func:`prepare_store`.
        progress: As in :func:`prepare_store`.

    Returns:
        The shard's folder, beside ``out``.

    Raises:
        ValueError: As :func:`prepare_store`.
    """
    if Path(out).exists():
        raise ValueError(f"{out} exists already: remove it or choose another folder")
    folder = shard_folder(Path(out), share.index, share.count)
    _prepare(inputs, folder, tokenizer, vocab_size, test_fraction, text_key, progress, share=share)
    return folder


def _prepare(
    inputs: Corpus | str | Sequence[str],
    out: Path,
    tokenizer: str | Tokenizer,
    vocab_size: int,
    test_fraction: float,
    text_key: str | None,
    progress: bool,
    *,
    replace: bool = False,
    share: Share | None = None,
) -> None:
    if not 0 <= test_fraction < 1 - VALIDATION_FRACTION:
        raise ValueError(f"test_fraction must be at least 0 and below {1 - VALIDATION_FRACTION}, got {test_fraction}")
    if not replace and out.exists():  # said before the work, not after it
        raise ValueError(f"{out} exists already: remove it or choose another folder")
    given = _check_tokenizer(tokenizer)
    if tokenizer == "bpe":
        check_bpe(vocab_size)
    if not isinstance(inputs, Corpus):
        names = [inputs] if isinstance(inputs, str) else inputs
        if share is not None and STDIN in names:
            raise ValueError("--shard cannot share the standard input among hosts: give files")
        inputs = open_corpus(names, text_key=text_key, spool_dir=out.absolute().parent)
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
        plan = make_plan(inputs, test_fraction, phase)
        kept = None if given else unfinished_tokenizer(out, key)
        trained = given or (Tokenizer(kept) if kept else train_tokenizer(str(tokenizer), vocab_size, inputs, phase))
        eos = trained.eos_token_id if plan.ends_documents else None
        with TokenStoreWriter(
            out,
            vocab_size=trained.vocab_size,
            tokenizer=trained.to_str(),
            source={**source, "eos_token_id": eos},
            replace=replace,
            key=key,
            shard=None if share is None else dataclasses.astuple(share),
        ) as writer:
            done = Cursor(*writer.resumed)
            found = segments(inputs, plan, trained, share or Share(), done, phase("encoding"))
            _write(writer, found, trained, eos)
            if share is None:
                check_splits(writer.tokens)


def _check_tokenizer(tokenizer: str | Tokenizer) -> Tokenizer | None:
    """The tokenizer that was given; ``None`` for one that is trained on the text."""
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


def _write(
    writer: TokenStoreWriter, found: Iterable[tuple[Cursor, Segment]], tokenizer: Tokenizer, eos: int | None
) -> None:
    end = np.array([] if eos is None else [eos], dtype=tokenizer.dtype)
    uncommitted = 0
    for batch, encoded in _ahead(_batches(found), tokenizer):
        by_split: dict[str, tuple[list[Any], list[int], list[int]]] = {}
        for (_, segment), ids in zip(batch, encoded, strict=True):
            arrays, sizes, ends = by_split.setdefault(segment.split, ([], [], []))
            arrays += [ids, end] if segment.ends_document else [ids]
            sizes.append(_utf8_length(segment.text))
            ends.append(segment.ends_document)
            uncommitted += len(segment.text)
        for split, (arrays, sizes, ends) in by_split.items():
            writer.write(split, np.concatenate(arrays), text_bytes=sum(sizes), documents=sum(ends))
        if uncommitted >= _COMMITTED_CHARACTERS:
            writer.commit(batch[-1][0])
            uncommitted = 0


def _ahead(
    batches: Iterable[list[tuple[Cursor, Segment]]], tokenizer: Tokenizer
) -> Iterator[tuple[list[tuple[Cursor, Segment]], list[Ids]]]:
    """Encodes in two threads: while the ids of one batch are copied, the library makes those of the next.

    The library has one pool with a thread for each core, however many callers it has.
    """
    waiting: deque[tuple[list[tuple[Cursor, Segment]], Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(_encoded, [segment for _, segment in batch], tokenizer)))
            if len(waiting) > _AHEAD:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()


def _encoded(batch: list[Segment], tokenizer: Tokenizer) -> list[Ids]:
    try:
        return tokenizer.encode_batch([segment.text for segment in batch])
    except ValueError:
        for segment in batch:  # which of them was it?
            try:
                tokenizer.encode_array(segment.text)
            except ValueError as error:
                raise ValueError(f"{segment.document}: {error}") from error
        raise


def _batches(found: Iterable[tuple[Cursor, Segment]]) -> Iterator[list[tuple[Cursor, Segment]]]:
    batch: list[tuple[Cursor, Segment]] = []
    size = 0
    for cursor, segment in found:
        batch.append((cursor, segment))
        size += len(segment.text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_SEGMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
