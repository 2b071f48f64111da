"""The standard streams of a command: what reaches them, whoever prints it, and what a slow import shows there.

Whatever any library prints reaches a terminal or a file without characters that a terminal obeys. ``fit | head``
continues training, ``generate | head`` ends silently.
"""

import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, TextIO, cast

from lightning_llm.io.processes import is_first_process
from lightning_llm.io.untrusted import ESCAPE, printable

# ---- slow imports

SLOW = ("torch", "lightning", "tensorboard")
PATIENCE = 1.0  # seconds before a terminal says what a command waits for


class ImportNote(MetaPathFinder):
    """Shows on a terminal that an import takes long, and erases the line when it has ended.

    It is put first among the finders of modules. It watches imports of this package and of ``SLOW``, wherever they are
    written; of nested ones the outermost.

    Args:
        program: The command, as it is typed.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._depth = 0
        self._shown = ""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Spec that the next finder finds, with a loader that is watched."""
        if self._depth or not (name in SLOW or name.startswith("lightning_llm.")):
            return None
        if (spec := PathFinder.find_spec(name, path, target)) is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._watched(load, module)  # type: ignore[method-assign]
        return spec

    def _watched(self, load: Callable[[Any], object], module: Any) -> None:
        timer = threading.Timer(PATIENCE, self._show)
        timer.daemon = True
        timer.start()
        self._depth += 1
        try:
            load(module)
        finally:
            self._depth -= 1
            timer.cancel()
            timer.join()
            if self._shown:
                self._write(f"\r{' ' * len(self._shown)}\r")
                self._shown = ""

    def _show(self) -> None:
        self._shown = f"{self._program}: importing {'PyTorch' if 'torch' in sys.modules else 'its modules'} …"
        self._write(self._shown)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # not sys.stderr, which escapes the carriage return
            os.write(2, text.encode(sys.stderr.encoding or "ascii", "replace"))


def note_imports(program: str) -> None:
    """From now on, a terminal shows which import a command waits for; pipes and files never get the line."""
    if os.isatty(2) and is_first_process():
        sys.meta_path.insert(0, ImportNote(program))


# ---- what is printed

DRAWING = ("rich", "tqdm")  # their own codes pass; what rich draws comes from our Console, which escapes the text in it
LEFT = (errno.EPIPE, errno.EIO, errno.ECONNRESET)  # a pipe, a terminal or a connection that is closed at its other end


class _Lasting(io.FileIO):
    """A file whose reader may leave: what is written after that is dropped."""

    def write(self, content: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Write as every file does, but ignore errors in ``LEFT``."""
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno not in LEFT:
                raise
            send_nowhere(self.fileno())
            return memoryview(content).nbytes


class Printable(io.TextIOWrapper):
    """A stream that escapes control characters, and characters that its encoding lacks.

    Attributes:
        is_exact: Whether it leaves control characters as they are.
    """

    is_exact = False

    def write(self, text: str) -> int:
        """Write as every stream does. Progress bars may move the cursor; nothing else may."""
        caller = sys._getframe().f_back  # none where Python itself prints an exception
        is_bar = caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] in DRAWING
        super().write(text if self.is_exact or is_bar else printable(text.replace(" \b", "")))  # jsonargparse's help
        return len(text)


def print_data() -> None:
    """Mark what this command prints from now on as data: exact in a file or a pipe."""
    if isinstance(sys.stdout, Printable):
        sys.stdout.is_exact = not sys.stdout.isatty()


def open_streams(*, outlive_reader: bool) -> None:
    """Make the outputs printable, after opening the null device for each standard stream that was closed at the start.

    The next file would take the number of a closed stream.

    Args:
        outlive_reader: Whether the command continues when the reader of its output has left.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process runs
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python 3.14 colors the text of --help, which would be escaped
    sys.stdout = _printable(sys.stdout, _Lasting if outlive_reader else io.FileIO)
    sys.stderr = lasting(sys.stderr)


def lasting(stream: TextIO) -> TextIO:
    """The same stream, which does not fail after its reader has left."""
    return _printable(stream, _Lasting)


def _printable(stream: TextIO, file_class: type[io.FileIO]) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw: Any = file_class(stream.fileno(), "wb", closefd=False)
    raw.name = stream.name
    buffer: Any = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(cast(io.RawIOBase, raw))
    settings = {name: getattr(stream, name) for name in ("encoding", "line_buffering", "write_through")}
    return Printable(buffer, errors=ESCAPE, **settings)


def send_nowhere(number: int) -> None:
    """Drop what goes to this file from now on, and what a buffer still holds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def drop_output() -> None:
    """Nobody reads the standard output any more: without this, the interpreter's last flush would report it."""
    with suppress(OSError, ValueError):  # a test's has no number
        send_nowhere(sys.stdout.fileno())
