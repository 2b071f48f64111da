"""The standard streams of a process of the command's own: what they print, and what if nobody reads it any more.

Whatever is printed, by whomever, reaches a terminal or a file without a character that a terminal obeys. ``fit | head``
trains on, ``generate | head`` ends without a word.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

from lightning_llm.io.printable import ESCAPE, printable

DRAWING = ("rich", "tqdm")  # their own codes pass; what rich draws comes from our Console, which escapes the text in it
LEFT = (errno.EPIPE, errno.EIO, errno.ECONNRESET)  # a pipe, a terminal or a connection that is closed at its other end


class _Lasting(io.FileIO):
    """A file whose reader may leave: what comes after that goes nowhere."""

    def write(self, content: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """As every file's, but for ``LEFT``."""
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno not in LEFT:
                raise
            send_nowhere(self.fileno())
            return memoryview(content).nbytes


class Printable(io.TextIOWrapper):
    """A stream that escapes control characters, and what its encoding lacks.

    Attributes:
        is_exact: Whether it leaves control characters as they are.
    """

    is_exact = False

    def write(self, text: str) -> int:
        """As every stream's. Bars move the cursor; whatever else is written does not."""
        caller = sys._getframe().f_back  # none where Python itself prints an exception
        is_bar = caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] in DRAWING
        super().write(text if self.is_exact or is_bar else printable(text))
        return len(text)


def print_data() -> None:
    """What this command prints from now on is data: exact in a file or a pipe."""
    if isinstance(sys.stdout, Printable):
        sys.stdout.is_exact = not sys.stdout.isatty()


def open_closed_streams() -> None:
    """Make the outputs printable.

    First put the null device where a standard stream is closed from the start, or the next file would take its number.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python 3.14 colors the text of --help, which would be escaped
    sys.stdout, sys.stderr = (_printable(stream, io.FileIO) for stream in (sys.stdout, sys.stderr))


def lasting(stream: TextIO) -> TextIO:
    """The same stream, which does not fail where its reader has left."""
    return _printable(stream, _Lasting)


def _printable(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw: Any = kind(stream.fileno(), "wb", closefd=False)
    raw.name = stream.name
    buffer: Any = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(cast(io.RawIOBase, raw))
    return Printable(
        buffer,
        encoding=stream.encoding,
        errors=ESCAPE,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def send_nowhere(number: int) -> None:
    """What goes to this file from now on is dropped, what a buffer still holds as well."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def drop_output() -> None:
    """Whoever read the standard output has left: without this, the interpreter's last flush would say so."""
    with suppress(OSError, ValueError):  # a test's has no number
        send_nowhere(sys.stdout.fileno())
