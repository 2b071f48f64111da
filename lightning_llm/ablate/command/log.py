"""The log of a run: a program that prints without end fills no disk, since the middle is left out. No torch."""

from collections import deque
from pathlib import Path

from lightning_llm.io.atomic import open_to_append
from lightning_llm.io.untrusted import MIB

HALF = 50 * MIB  # of the beginning, and of the end


class CappedLog:
    """A file that output is appended to; the end of a long one waits in memory.

    Args:
        path: The file.
        half: How much of the beginning is kept, and of the end, in bytes.
    """

    def __init__(self, path: Path, half: int = HALF) -> None:
        self._file = open_to_append(path)
        self._half = half
        self._written = 0
        self._end = deque[bytes]()
        self._end_size = 0
        self._left_out = 0

    def write(self, data: bytes) -> None:
        """Append to it."""
        if self._written + len(data) <= self._half:
            self._file.write(data)
            self._file.flush()
            self._written += len(data)
            return
        self._written = self._half  # from here on, everything belongs to the end
        self._end.append(data)
        self._end_size += len(data)
        while self._end_size - len(self._end[0]) >= self._half:
            oldest = self._end.popleft()
            self._end_size -= len(oldest)
            self._left_out += len(oldest)

    def close(self) -> None:
        """Write the end."""
        if self._left_out:
            self._file.write(f"\n[{self._left_out:,} bytes are left out here]\n".encode())
        self._file.writelines(self._end)
        self._file.close()
