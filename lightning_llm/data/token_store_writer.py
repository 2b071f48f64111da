"""Writes a token store: whole, or not at all.

The files are written into a hidden folder beside the store's, flushed to the disk, and the folder is renamed. A store
that was not finished never has the name of one; what a killed process left is removed by the next one.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from lightning_llm.data.token_store import (
    DTYPES,
    FORMAT,
    META,
    SPLITS,
    TOKENIZER,
    VERSION,
    Tokens,
    dtype_for,
    meta_checksum,
    sha256,
)


class TokenStoreWriter:
    """Writes a store; as a context manager it leaves a whole store or nothing.

    Args:
        path: Folder of the store, which must not exist yet unless ``replace`` is set.
        vocab_size: Number of ids.
        tokenizer: Content of the ``tokenizer.json``.
        source: What the text was; kept in ``meta.json``.
        replace: Put the new store in the place of an old one, once it is whole.

    Raises:
        ValueError: If the folder exists, or cannot be made; on leaving, if the disk is full.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int, tokenizer: str, source: dict[str, Any], replace: bool = False
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self._vocab_size, self._tokenizer, self._source, self._replace = vocab_size, tokenizer, source, replace
        self._dtype = dtype_for(vocab_size)
        self._partial = self.path.with_name(f".{self.path.name}.partial-{socket.gethostname()}-{os.getpid()}")
        self._files: dict[str, IO[bytes]] = {}
        self._digests = {name: hashlib.sha256() for name in SPLITS}
        self._counts = {name: {"tokens": 0, "bytes": 0, "documents": 0} for name in SPLITS}

    def __enter__(self) -> "TokenStoreWriter":
        if self.path.exists() and not self._replace:
            raise ValueError(f"{self.path} exists already: remove it or choose another folder")
        with self._no_half_store():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_left_behind()
            self._partial.mkdir()
            for name in ("train", "val"):
                self._open(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        with self._no_half_store():
            if value is not None:
                raise value
            self._finish()

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

    def _open(self, split: str) -> IO[bytes]:
        self._files[split] = open(self._partial / f"{split}.bin", "wb")  # noqa: SIM115 - closed by _finish
        return self._files[split]

    def _finish(self) -> None:
        splits = {name: {**self._counts[name], "sha256": self._digests[name].hexdigest()} for name in self._files}
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype,
            "vocab_size": self._vocab_size,
            "tokenizer_sha256": sha256(self._tokenizer.encode()),
            "splits": splits,
            "source": self._source,
        }
        described = json.dumps({**meta, "checksum": meta_checksum(meta)}, indent=2) + "\n"
        for name, content in ((TOKENIZER, self._tokenizer), (META, described)):
            self._files[name] = open(self._partial / name, "wb")  # noqa: SIM115
            self._files[name].write(content.encode())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
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
            for file in self._files.values():
                with contextlib.suppress(OSError):  # closing writes what is buffered
                    file.close()
            shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, OSError):
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                advice = "free some space or choose another folder" if full else "nothing was kept"
                raise ValueError(f"cannot write the token store {self.path}: {error.strerror}; {advice}") from error
            raise

    def _remove_left_behind(self) -> None:
        """Removes what killed runs of this machine left of the same store."""
        prefix = f".{self.path.name}.partial-{socket.gethostname()}-"
        for folder in self.path.parent.glob(f"{prefix}*"):
            number = folder.name.removeprefix(prefix).split("-")[0]
            if not number.isdigit() or not _is_running(int(number)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
