"""Standard streams that nobody reads any more: ``fit | head`` trains on, ``generate | head`` ends without a word."""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

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


def open_closed_streams() -> None:
    """Put the null device where a standard stream is closed from the start, or the next file would take its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process


def lasting(stream: TextIO) -> TextIO:
    """The same stream, which does not fail where its reader has left."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = _Lasting(stream.fileno(), "wb", closefd=False)
    raw.name = stream.name
    buffer: Any = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(cast(io.RawIOBase, raw))
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
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
