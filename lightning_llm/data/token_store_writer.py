"""Writes a token store: whole, or not at all.

The files are written into a hidden folder beside the store's, flushed to the disk, and the folder is renamed. A store
that was not finished never has the name of one. What a killed process left, the next one on the same machine goes on
with, if it has the same key: a journal says up to where the files are good. Otherwise it removes it.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from lightning_llm.data.token_store import (
    DTYPES,
    FORMAT,
    LARGEST_META,
    META,
    SHARD,
    SPLIT_COUNTS,
    SPLITS,
    TOKENIZER,
    VERSION,
    Tokens,
    dtype_for,
    meta_checksum,
    sha256,
)
from lightning_llm.data.tokenizer_checks import LARGEST_TOKENIZER
from lightning_llm.io.untrusted import TEXT, file_in, list_of, read_json, read_text, record, validate, whole

_JOURNAL = "journal.json"
_JOURNAL_KIND = record({"key": TEXT, "cursor": list_of(whole(), 2), "splits": SPLIT_COUNTS})
_BLOCK_BYTES = 1 << 24
_active: set[Path] = set()  # folders that this process is writing into


class TokenStoreWriter:
    """Writes a store; as a context manager it leaves a whole store or nothing.

    Args:
        path: Folder of the store, which must not exist yet unless ``replace`` is set.
        vocab_size: Number of ids.
        tokenizer: Content of the ``tokenizer.json``.
        source: What the text was; kept in ``meta.json``.
        replace: Put the new store in the place of an old one, once it is whole.
        key: Names everything that the ids follow from. With a key, a killed or interrupted run leaves what it
            committed, and the next with the same key goes on from there.
        shard: Number and count: what is written is not a store but that part of one.

    Attributes:
        resumed: What the run that is gone on with committed last; empty for a new one.

    Raises:
        ValueError: If the folder exists, or cannot be made; on leaving, if the disk is full.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        tokenizer: str,
        source: dict[str, Any],
        replace: bool = False,
        key: str = "",
        shard: tuple[int, int] | None = None,
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.resumed: list[int] = []
        self._vocab_size, self._tokenizer, self._source, self._replace = vocab_size, tokenizer, source, replace
        self._key, self._shard = key, shard
        self._dtype = dtype_for(vocab_size)
        self._partial = self.path.with_name(f"{_prefix(self.path)}{os.getpid()}")
        self._files: dict[str, IO[bytes]] = {}
        self._digests = {name: hashlib.sha256() for name in SPLITS}
        self._counts = {name: {"tokens": 0, "bytes": 0, "documents": 0} for name in SPLITS}

    def __enter__(self) -> "TokenStoreWriter":
        if self.path.exists() and not self._replace:
            raise ValueError(f"{self.path} exists already: remove it or choose another folder")
        with self._no_half_store():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._go_on():
                self._remove_left_behind()
                self._partial.mkdir()
                _active.add(self._partial)
                (self._partial / TOKENIZER).write_bytes(self._tokenizer.encode())
                for name in ("train", "val"):
                    self._open(name)
                self.commit([])
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        with self._no_half_store():
            if value is not None:
                raise value
            self._finish()

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens written so far, by split."""
        return {name: counts["tokens"] for name, counts in self._counts.items()}

    def write(self, split: str, ids: Tokens, *, text_bytes: int, documents: int = 0) -> None:
        """Appends ids to a split.

        Args:
            split: ``train``, ``val`` or ``test``.
            ids: Shape (tokens,), each below ``vocab_size``.
            text_bytes: Bytes of UTF-8 that they stand for.
            documents: How many documents end with them.

        Raises:
            OSError: If the disk is full; leaving the context turns it into one line.
        """
        assert not len(ids) or int(ids.max()) < self._vocab_size
        content = np.ascontiguousarray(ids, dtype=DTYPES[self._dtype])
        (self._files.get(split) or self._open(split)).write(content.data)
        self._digests[split].update(content.data)
        for field, number in (("tokens", len(ids)), ("bytes", text_bytes), ("documents", documents)):
            self._counts[split][field] += number

    def commit(self, cursor: Sequence[int]) -> None:
        """Notes that all that was written so far is good, and what of the input it stands for.

        Needs no flush to the disk: going on checks the checksums. Errors as in :meth:`write`.
        """
        if not self._key:
            return
        for file in self._files.values():
            file.flush()
        journal = {"key": self._key, "cursor": list(cursor), "splits": self._described()}
        new = self._partial / f"{_JOURNAL}.new"
        new.write_text(json.dumps(journal, allow_nan=False), encoding="utf-8")
        new.replace(self._partial / _JOURNAL)

    def _described(self) -> dict[str, dict[str, Any]]:
        return {name: {**self._counts[name], "sha256": self._digests[name].hexdigest()} for name in self._files}

    def _go_on(self) -> bool:
        """Takes over what a killed run with the same key left; the renaming settles who does."""
        for folder in _left_behind(self.path) if self._key else []:
            journal = _journal(folder)
            if journal.get("key") != self._key:
                continue
            try:
                folder.rename(self._partial)
                _active.add(self._partial)
                splits = journal["splits"]
                digests = {name: _cut_to(self._partial, name, splits[name], self._dtype) for name in splits}
            except (OSError, ValueError):  # another was faster, or the power failed: begin anew
                shutil.rmtree(self._partial, ignore_errors=True)
                continue
            self.resumed = journal["cursor"]
            self._digests.update(digests)
            for name, counts in splits.items():
                self._counts[name] = {field: counts[field] for field in self._counts[name]}
                self._files[name] = open(self._partial / f"{name}.bin", "ab")  # noqa: SIM115 - closed by _close
            return True
        return False

    def _open(self, split: str) -> IO[bytes]:
        self._files[split] = open(self._partial / f"{split}.bin", "wb")  # noqa: SIM115 - closed by _close
        return self._files[split]

    def _finish(self) -> None:
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype,
            "vocab_size": self._vocab_size,
            "tokenizer_sha256": sha256(self._tokenizer.encode()),
            "splits": self._described(),
            "source": self._source,
        }
        if self._shard:
            meta |= {"format": f"{FORMAT}, shard", "shard": list(self._shard), "key": self._key}
        described = json.dumps({**meta, "checksum": meta_checksum(meta)}, indent=2, allow_nan=False) + "\n"
        for name, content in ((TOKENIZER, self._tokenizer), (SHARD if self._shard else META, described)):
            self._files[name] = open(self._partial / name, "wb")  # noqa: SIM115
            self._files[name].write(content.encode())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._close()
        (self._partial / _JOURNAL).unlink(missing_ok=True)
        if self._replace and self.path.exists():
            old = self._partial.with_name(self._partial.name + "-old")
            self.path.rename(old)  # files that a run has mapped stay readable for it
            self._partial.rename(self.path)
            shutil.rmtree(old)
        else:
            self._partial.rename(self.path)

    @contextlib.contextmanager
    def _no_half_store(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._close()
            if not (self._key and isinstance(error, KeyboardInterrupt)):
                shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, OSError):
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                advice = "free some space or choose another folder" if full else "nothing was kept"
                raise ValueError(f"cannot write the token store {self.path}: {error.strerror}; {advice}") from error
            raise

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # closing writes what is buffered
                file.close()
        _active.discard(self._partial)

    def _remove_left_behind(self) -> None:
        """Removes what killed runs of this machine left of the same store."""
        for folder in _left_behind(self.path):
            shutil.rmtree(folder, ignore_errors=True)


def unfinished_tokenizer(path: str | Path, key: str) -> str | None:
    """Content of the ``tokenizer.json`` that a killed run with this key left, if one did."""
    for folder in _left_behind(Path(os.path.abspath(path))):
        if _journal(folder).get("key") == key:
            with contextlib.suppress(OSError, ValueError):
                return read_text(file_in(folder, TOKENIZER), LARGEST_TOKENIZER)
    return None


def _prefix(path: Path) -> str:
    return f".{path.name}.partial-{socket.gethostname()}-"


def _left_behind(path: Path) -> list[Path]:
    """Folders of killed runs of this machine; in a container the next process often has the number of the last."""
    found = []
    for folder in sorted(path.parent.glob(f"{glob.escape(_prefix(path))}*")):
        number = folder.name.removeprefix(_prefix(path)).split("-")[0]
        own = number == str(os.getpid()) and folder not in _active
        if not number.isdigit() or own or not _is_running(int(number)):
            found.append(folder)
    return found


def _journal(folder: Path) -> dict[str, Any]:
    try:
        content = read_json(file_in(folder, _JOURNAL), LARGEST_META)
        validate(content, _JOURNAL_KIND, folder, "")
    except (OSError, ValueError):
        return {}
    return content


def _cut_to(folder: Path, split: str, counts: dict[str, Any], dtype: str) -> Any:
    """Cuts off what was not committed; the digest of the rest.

    Raises:
        ValueError: If the rest is not what was committed.
    """
    file, digest = file_in(folder, f"{split}.bin"), hashlib.sha256()
    left = size = counts["tokens"] * np.dtype(DTYPES[dtype]).itemsize
    with file.open("rb") as content:
        while left and (block := content.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    if digest.hexdigest() != counts["sha256"]:
        raise ValueError(f"{file} was changed")
    os.truncate(file, size)
    return digest


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
