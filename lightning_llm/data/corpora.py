"""Where text comes from, and how it is divided: inputs to files, documents to splits and segments.

:func:`open_corpus` turns what the user typed into a :class:`Corpus`: a list of files, which ``formats.py`` reads as a
stream of documents. Nothing is read or downloaded before the first document or the fingerprint is requested.

Named corpora:
    ``stdlib``: the source of the running Python's standard library without its tests; always available, offline.
    ``shakespeare``: "tiny Shakespeare", downloaded once and verified.

Splits. A single document is cut by position: the first ``int(0.9 * characters)`` characters train, the rest validates
(as in nanoGPT's ``shakespeare_char/prepare.py``). If there are several documents, each belongs to one split,
chosen by a hash of its text. So the split depends neither on other documents nor on their order, and copies of a
document belong to the same split.

Shares. The bytes of all files, concatenated, are divided into ``count`` parts of equal size. Host ``index`` takes the
documents that begin in part ``index``. If reading cannot begin within a file (plain text, or a compressed file), the
whole file belongs to the part in which it begins.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import http.client
import itertools
import os
import shutil
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lightning_llm.data.formats import DEFAULT_TEXT_KEY, Advance, Document, Phase, TextFile, format_of, ignore_progress
from lightning_llm.data.tokenizers import PIECE_CHARACTERS, Tokenizer, cut_at_newlines
from lightning_llm.io.atomic import write_text
from lightning_llm.io.untrusted import BLOBS, SNAPSHOTS, check_regular, read_bytes

NAMED_CORPORA = ("stdlib", "shakespeare")
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SIZE = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

STDIN = "-"
VALIDATION_FRACTION = 0.1
MOST_SHARES = 999_999  # a folder each
WHOLE_CHARACTERS = 1 << 18  # for tokenizers of kind 'file', which may look beyond a line

_HASHED_CHARACTERS = 1 << 16  # of a document's beginning: tells documents apart, and is within the first piece
_FEW_DOCUMENTS = 256  # 0.9^256 = 2e-12: with more documents, the validation split is practically never empty
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
        """Bytes on disk."""
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


def open_corpus(
    inputs: Sequence[str], *, text_key: str | None = None, cache_dir: Path | None = None, spool_dir: Path | None = None
) -> Corpus:
    """The documents of named corpora, files, folders (every file in them except hidden ones) and globs.

    Empty files among several are skipped. A folder may have links to its own files only: it may be somebody else's.

    Args:
        inputs: Each a name of ``NAMED_CORPORA``, a file, a folder, a glob (``**`` matches subfolders), or ``-`` for
            standard input: text, or JSON lines if a ``text_key`` is given.
        text_key: Key or column of the text in JSON lines and parquet. Default: ``text``.
        cache_dir: Folder for downloads. ``None``: ``lightning-llm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        spool_dir: Folder for standard input, which is saved in an unnamed file because it is read more than once.

    Raises:
        ValueError: If an input is missing, empty or unknown, or ``text_key`` applies to none of the inputs.
    """
    key = DEFAULT_TEXT_KEY if text_key is None else text_key
    files: list[TextFile] = []
    for given in inputs:
        if given == "stdlib":
            files += _stdlib_files()
        elif given == "shakespeare":
            locate = functools.partial(download_shakespeare, cache_dir)
            files.append(TextFile("shakespeare", SHAKESPEARE_SIZE, locate, SHAKESPEARE_SHA256))
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


def _stdlib_files() -> list[TextFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        TextFile(f"stdlib/{path.relative_to(root).as_posix()}", size, functools.partial(Path, path))
        for path in _files_below(root, skip=_NOT_IN_STDLIB)
        if path.suffix == ".py" and (size := path.stat().st_size)
    ]
    if not files:
        raise ValueError(f"corpus 'stdlib': no Python source below {root}; give a text as data.path instead")
    return files


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


# ---- splits, shares and segments


class Segment(NamedTuple):
    """A piece of a document for a split."""

    split: str
    text: str
    document: str
    ends_document: bool


class Cursor(NamedTuple):
    """How far the work has come: the current file, and how many of its segments are done."""

    file: int = 0
    segments: int = 0


@dataclasses.dataclass(frozen=True)
class Share:
    """Part ``index`` of ``count`` of the input, counted from 1.

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

    def spans(self, corpus: Corpus) -> Iterator[tuple[int, int | None] | None]:
        """For each file, the bytes in which the share's documents begin; an end of ``None`` is the end of the file.

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
class Plan:
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


def make_plan(corpus: Corpus, test_fraction: float, phase: Phase) -> Plan:
    """Reads the first documents; if there is only one, measures its length.

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
    length = sum(len(piece) for document in corpus.documents(phase("measuring")) for piece in document.pieces())
    kept = {"train": 1 - VALIDATION_FRACTION - test_fraction, "val": 1 - test_fraction}
    ends = {split: int(fraction * length) for split, fraction in kept.items()}
    return Plan({**ends, "test": length}, test_fraction=test_fraction)


def segments(
    corpus: Corpus, plan: Plan, tokenizer: Tokenizer, share: Share, done: Cursor, advance: Advance
) -> Iterator[tuple[Cursor, Segment]]:
    """The segments of a share that are not done yet, each with the cursor after it: a function of the arguments."""
    for index, (file, span) in enumerate(zip(corpus.files, share.spans(corpus), strict=True)):
        if span is None:
            continue
        if index < done.file:
            advance(file.size if span[1] is None else span[1] - span[0])
            continue
        found = (
            Segment(split, text, document.name, ends_document=not following)
            for document in file.documents(advance, *span)
            for split, texts in plan.parts(document)
            for text, following in itertools.pairwise(itertools.chain(cut_for(tokenizer, texts), [""]))
        )
        numbered = enumerate(found, start=1)
        skipped = done.segments if index == done.file else 0
        yield from ((Cursor(index, number), segment) for number, segment in numbered if number > skipped)


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


def cut_for(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterable[str]:
    """Cuts the pieces of a text again, where the tokenizer would cut too, or where it must."""
    if tokenizer.kind in ("char", "byte"):
        return texts
    return cut_at_newlines(texts, PIECE_CHARACTERS if tokenizer.kind == "bpe" else WHOLE_CHARACTERS)
