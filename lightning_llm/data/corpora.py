"""Where text comes from: named corpora, files, folders and globs, read as a stream.

:func:`open_corpus` turns what the user typed into a :class:`Corpus`: a list of documents, each of which reads its text
in pieces of a few MiB, so that memory does not grow with the input. Nothing is read, and nothing downloaded, before
the first piece is asked for. Text is UTF-8, taken byte for byte: no newline is translated, no mark stripped.

Named corpora:
    ``stdlib``: the source of the running Python's standard library without its tests; always there, no network.
    ``shakespeare``: "tiny Shakespeare", downloaded once and checked.
"""

import codecs
import dataclasses
import functools
import glob
import hashlib
import http.client
import os
import platform
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NAMED_CORPORA = ("stdlib", "shakespeare")
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SIZE = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

PIECE_BYTES = 1 << 22
_NOT_IN_STDLIB = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: What error messages and fingerprints call it.
        size: Bytes of UTF-8.
        locate: Returns the file, downloading it where need be.
        version: Changes when the text does: time of the last change, or a checksum.
    """

    name: str
    size: int
    locate: Callable[[], Path]
    version: str = ""

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
        """The text in pieces that come from at most ``piece_bytes`` bytes each.

        Raises:
            ValueError: If the file cannot be read, or is not UTF-8 text (names the byte).
        """
        path = self.locate()
        decoder = codecs.getincrementaldecoder("utf-8")()
        done = 0
        try:
            with path.open("rb") as file:
                while block := file.read(piece_bytes):
                    if (nul := block.find(0)) >= 0:
                        raise ValueError(f"{path} is binary, not UTF-8 text: byte {done + nul} is NUL")
                    held_back = len(decoder.getstate()[0])
                    yield _decoded(decoder, block, path, done - held_back)
                    done += len(block)
            _decoded(decoder, b"", path, done - len(decoder.getstate()[0]))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error

    def text(self) -> str:
        """The whole text. Errors as in :meth:`pieces`."""
        return "".join(self.pieces())


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
        inputs: The names, files, folders and globs that it was made from.
        documents: At least one.
    """

    inputs: tuple[str, ...]
    documents: tuple[Document, ...]

    @property
    def size(self) -> int:
        """Bytes of UTF-8."""
        return sum(document.size for document in self.documents)

    @property
    def fingerprint(self) -> str:
        """Changes when a document is added, taken away or changed. Reads no text."""
        lines = [f"{document.name}\t{document.size}\t{document.version}\n" for document in self.documents]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def open_corpus(inputs: Sequence[str], *, cache_dir: Path | None = None) -> Corpus:
    """The documents of named corpora, files, folders (all that is in them, hidden files aside) and globs.

    Empty files among many are left out.

    Args:
        inputs: Each a name of ``NAMED_CORPORA``, a file, a folder or a glob (``**`` goes into folders).
        cache_dir: Where downloads are kept. ``None``: ``lightning-llm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        ValueError: If an input is missing, empty or unknown.
    """
    documents: list[Document] = []
    for given in inputs:
        if given == "stdlib":
            documents += _stdlib_documents()
        elif given == "shakespeare":
            locate = functools.partial(download_shakespeare, cache_dir)
            documents.append(Document("shakespeare", SHAKESPEARE_SIZE, locate, SHAKESPEARE_SHA256))
        else:
            documents += _file_documents(given)
    if not documents:
        raise ValueError("no input: give a corpus, a file, a folder or a glob")
    return Corpus(tuple(inputs), tuple(documents))


def download_shakespeare(cache_dir: Path | None = None, url: str = SHAKESPEARE_URL) -> Path:
    """The file of the ``shakespeare`` corpus, from the cache or from the network.

    The checksum is checked each time; a download takes its place in the cache only when it is whole.

    Raises:
        ValueError: If there is no network, or what came is not that file.
    """
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-llm"
    target = cache_dir / "tinyshakespeare.txt"
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == SHAKESPEARE_SHA256:
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
            "get the file another way and give it as data.path, or take corpus 'stdlib', which needs no network"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise ValueError(
            f"corpus 'shakespeare': {url} sent {len(content)} bytes with sha256 {found}, "
            f"not the {SHAKESPEARE_SIZE} bytes with sha256 {SHAKESPEARE_SHA256}; nothing was kept"
        )
    partial = cache_dir / f".{target.name}.{os.getpid()}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"cannot write {target}: {error.strerror}") from error
    return target


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, start: int) -> str:
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {start + error.start}: {error.reason}") from error


def _stdlib_documents() -> list[Document]:
    """Python files of the standard library, sorted by path, without tests and what was installed beside them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in _files_below(root, skip=_NOT_IN_STDLIB):
        if path.suffix == ".py" and (size := path.stat().st_size):
            name = f"stdlib/{path.relative_to(root).as_posix()}"
            documents.append(Document(name, size, functools.partial(Path, path), platform.python_version()))
    if not documents:
        raise ValueError(f"corpus 'stdlib': no Python source below {root}; give a text as data.path instead")
    return documents


def _file_documents(given: str) -> list[Document]:
    path = Path(given).expanduser()
    if path.is_dir():
        files = _files_below(path)
    elif path.exists():
        files = [path]
    else:
        files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
        if not files:
            raise ValueError(
                f"{given!r} is no file, no folder, no glob that matches a file, "
                f"and no corpus ({', '.join(NAMED_CORPORA)})"
            )
    documents = [
        Document(str(file), stat.st_size, functools.partial(Path, file), str(stat.st_mtime_ns))
        for file in files
        if (stat := file.stat()).st_size
    ]
    if not documents:
        raise ValueError(f"{given!r} is empty: no text in {'it' if files == [path] else f'its {len(files)} files'}")
    return documents


def _files_below(root: Path, skip: frozenset[str] | set[str] = frozenset()) -> list[Path]:
    """Files below a folder, hidden ones left out, sorted by path."""
    found = []
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


def _refuse(error: OSError) -> None:
    raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error
