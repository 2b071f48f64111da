"""Where text comes from: what the user named to files, and files to documents.

:func:`open_corpus` turns what the user typed into a :class:`Corpus`: a list of files, which ``formats.py`` reads as a
stream of documents. Nothing is read or downloaded before the first document or the fingerprint is requested.

Named corpora:
    ``stdlib``: the source of the running Python's standard library without its tests; always available, offline.
    ``shakespeare``: "tiny Shakespeare", downloaded once and verified.
    ``recall``: a synthetic text, see ``recall_corpus.py``; ``recall:pairs=4,seed=1`` has options.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import http.client
import os
import shutil
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from lightning_llm.data.formats import DEFAULT_TEXT_KEY, Document, TextFile, format_of
from lightning_llm.data.recall_corpus import RecallText, write_recall
from lightning_llm.io.atomic import write_text
from lightning_llm.io.progress import Advance, ignore_progress
from lightning_llm.io.untrusted import BLOBS, SNAPSHOTS, check_regular, read_bytes

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SIZE = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

RECALL = "recall"  # the only one with options
STDIN = "-"
_NOT_IN_STDLIB = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files with documents, in a fixed order.

    Attributes:
        inputs: The names, files, folders and globs that it was made from.
        files: At least one.
        text_key: Key or column of the text in JSON lines and parquet.
    """

    inputs: tuple[str, ...]
    files: tuple[TextFile, ...]
    text_key: str = DEFAULT_TEXT_KEY

    @property
    def size(self) -> int:
        """Bytes of all files on disk."""
        return sum(file.size for file in self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes if a file is added, removed, renamed or edited; modification times do not matter.

        Reads every file once, several at the same time. Errors as in :meth:`documents`.
        """
        with ThreadPoolExecutor() as pool:
            checksums = list(pool.map(TextFile.checksum, self.files))
        lines = [f"{file.name}\t{file.size}\t{sum_}\n" for file, sum_ in zip(self.files, checksums, strict=True)]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def documents(self, advance: Advance = ignore_progress) -> Iterator[Document]:
        """All documents; read each before the next one is requested. Errors as in ``TextFile.documents``."""
        return (document for file in self.files for document in file.documents(advance))


def open_corpus(inputs: Sequence[str], *, text_key: str | None = None, spool_dir: Path | None = None) -> Corpus:
    """The documents of named corpora, files, folders (every file in them except hidden ones) and globs.

    Empty files among several are skipped. A folder may have links to its own files only: it may be somebody else's.

    Args:
        inputs: Each a name of ``NAMED_CORPORA``, a file, a folder, a glob (``**`` matches subfolders), or ``-`` for
            standard input: text, or JSON lines if a ``text_key`` is given.
        text_key: Key or column of the text in JSON lines and parquet. Default: ``text``.
        spool_dir: Folder for standard input, which is saved in an unnamed file because it is read more than once.

    Raises:
        ValueError: If an input is missing, empty or unknown, or ``text_key`` applies to none of the inputs.
    """
    key = DEFAULT_TEXT_KEY if text_key is None else text_key
    files: list[TextFile] = []
    for given in inputs:
        if is_named(given):
            files += NAMED_CORPORA[given.partition(":")[0]](given)
        elif given == STDIN:
            files.append(_spool(sys.stdin.buffer, key, "text" if text_key is None else "jsonl", spool_dir))
        else:
            files += _given_files(given, key)
    if not files:
        raise ValueError("no input: give a corpus, a file, a folder or a glob")
    if text_key is not None and all(file.format == "text" for file in files):
        raise ValueError(f"--text-key {text_key!r} is for JSON lines and parquet, and no input is .jsonl or .parquet")
    return Corpus(tuple(inputs), tuple(files), key)


def _spool(stream: BinaryIO, text_key: str, kind: str, folder: Path | None = None) -> TextFile:
    """Copies a stream into an unnamed file, which the system deletes when the process ends."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            shutil.copyfileobj(stream, file)
            file.flush()
            size = file.tell()
            descriptor = os.dup(file.fileno())  # stays open until the process ends: the file has no other name
    except OSError as error:
        place = folder or tempfile.gettempdir()
        raise ValueError(f"cannot save the standard input in {place}: {error.strerror or error}") from error
    if not size:
        raise ValueError("the standard input is empty: no text in it")
    locate = functools.partial(Path, f"/dev/fd/{descriptor}")
    return TextFile("stdin", size, locate, text_key=text_key, format=kind)


def download_shakespeare(cache_dir: Path | None = None, url: str = SHAKESPEARE_URL) -> Path:
    """The file of the ``shakespeare`` corpus, from the cache or from the network.

    The checksum is verified each time. The cache never contains part of a download.

    Raises:
        ValueError: If there is no network, or the server sent another file.
    """
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-llm"
    target = cache_dir / "tinyshakespeare.txt"
    with contextlib.suppress(OSError, ValueError):
        if hashlib.sha256(read_bytes(target, SHAKESPEARE_SIZE)).hexdigest() == SHAKESPEARE_SHA256:
            return target
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read(2 * SHAKESPEARE_SIZE)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise ValueError(
            f"corpus 'shakespeare' cannot be downloaded from {url} ({reason}): "
            "get the file another way and give it as data.path, or use corpus 'stdlib', which needs no network"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise ValueError(
            f"corpus 'shakespeare': {url} sent {len(content)} bytes with sha256 {found}, "
            f"not the {SHAKESPEARE_SIZE} bytes with sha256 {SHAKESPEARE_SHA256}; nothing was saved"
        )
    try:
        write_text(target, content.decode())
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}") from error
    return target


def _recall_files(given: str) -> list[TextFile]:
    recall = RecallText.of(given.partition(":")[2])
    return [TextFile(given, recall.lines * recall.line_length, functools.partial(write_recall, recall))]


def _stdlib_files(_: str) -> list[TextFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        TextFile(f"stdlib/{path.relative_to(root).as_posix()}", size, functools.partial(Path, path))
        for path in _files_below(root, skip=_NOT_IN_STDLIB)
        if path.suffix == ".py" and (size := path.stat().st_size)
    ]
    if not files:
        raise ValueError(f"corpus 'stdlib': no Python source below {root}; give a text as data.path instead")
    return files


# The files of a name, and of its options after a colon
NAMED_CORPORA: Mapping[str, Callable[[str], list[TextFile]]] = {
    "stdlib": _stdlib_files,
    "shakespeare": lambda given: [TextFile(given, SHAKESPEARE_SIZE, download_shakespeare, SHAKESPEARE_SHA256)],
    RECALL: _recall_files,
}


def is_named(given: str) -> bool:
    """Whether this is the name of a corpus, with options if it takes some."""
    name, colon, _ = given.partition(":")
    return name in NAMED_CORPORA and (not colon or name == RECALL)


def _given_files(given: str, text_key: str) -> list[TextFile]:
    path = Path(given).expanduser()
    if path.is_dir():
        paths = _files_below(path)
        _check_links(path, paths)
    elif path.exists():
        check_regular(path)
        paths = [path]
    else:
        paths = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
        if not paths:
            corpora = ", ".join(NAMED_CORPORA)
            raise ValueError(f"{given!r} is not a file, a folder, a glob that matches a file, or a corpus ({corpora})")
    files = [
        TextFile(str(each), size, functools.partial(Path, each), "", text_key, *format_of(each.name))
        for each in paths
        if (size := each.stat().st_size)
    ]
    if not files:
        raise ValueError(f"{given!r} is empty: no text in {'it' if paths == [path] else f'its {len(paths)} files'}")
    return files


def _files_below(root: Path, skip: Collection[str] = ()) -> list[Path]:
    """Files in a folder and its subfolders, without hidden ones, sorted by path."""
    found = []
    for folder, folders, files in os.walk(root, onerror=_reject):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


def _check_links(root: Path, paths: Iterable[Path]) -> None:
    """Checks that what is in a folder comes from there, or is a blob of the Hugging Face cache that it belongs to."""
    home = Path(os.path.realpath(root))
    homes = [home, *(folder.parent / BLOBS for folder in (home, *home.parents) if folder.name == SNAPSHOTS)]
    for path in filter(Path.is_symlink, paths):
        if not any(map(Path(os.path.realpath(path)).is_relative_to, homes)):
            raise ValueError(
                f"{path} is a link that points outside {root}: to read it, give {str(root / '*')!r} or its name"
            )


def _reject(error: OSError) -> None:
    raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error
