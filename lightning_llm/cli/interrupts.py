"""Signals of a terminal or a system, and what they do to a command, outside of training.

Ctrl-C, SIGTERM and SIGHUP end a command with one line and status 128 plus the signal's number. The first signal raises
``KeyboardInterrupt``, so that cleanup runs. In a process of the command's own, two cases leave at once: a second
signal, and one during an import, where libraries swallow exceptions or print them. A signal that the parent ignores,
as ``nohup`` and background jobs of scripts do, stays ignored.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from lightning_llm.io.processes import ENDING, is_first_process

PROGRAM = "lightning-llm"


class Interrupts:
    """Handler of the signals to a command.

    Attributes:
        number: The newest signal, 0 before any.
        command: The command's name, for the line.
        program: What stands before it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.command = ""
        self.program = PROGRAM
        self._process: int | None = None  # if it is the command's own
        self._status: int | None = None
        self._taken: dict[int, Any] = {}

    @property
    def is_own_process(self) -> bool:
        """Whether this process was started for the command, and is not a child that holds a copy of this."""
        return self._process == os.getpid()

    def own_process(self, command: str) -> None:
        """From now until the process ends: take SIGINT, and leave where Python would swallow the interruption."""
        self.command = command
        self._process = os.getpid()
        self._take([signal.SIGINT])
        sys.unraisablehook = self._swallowed
        atexit.register(self.ignore_signals)  # the last handler of all: Python's own shutdown prints nothing

    @contextmanager
    def handling(self, command: str) -> Iterator[None]:
        """Take all of ``ENDING`` while a command runs; in a process of its own, until the process ends."""
        before, outer, self._taken = self._taken, self.command, {}
        self.command = command
        self.number = 0
        self._take(ENDING)
        try:
            yield
        finally:
            if not self.is_own_process:
                for number, handler in self._taken.items():
                    signal.signal(number, handler)
            self._taken = before | self._taken if self.is_own_process else before
            self.command = outer if before else command  # one command may run inside of another

    def ignore_signals(self) -> None:
        """Ignore further signals while the command, or Python, ends."""
        if threading.current_thread() is threading.main_thread():
            for number in self._taken:
                signal.signal(number, signal.SIG_IGN)

    def exit_on_signal(self, status: int) -> None:
        """The result is printed: in a process of its own, a signal now leaves with this status."""
        self._status = status
        for number in self._taken:
            signal.signal(number, self._handle)

    def print_interruption(self, number: int, note: str = "") -> int:
        """Print the line, if this is the first of all processes; returns the exit status."""
        if is_first_process():
            print(self._line(number, note), file=sys.stderr)
        return 128 + number

    def _leave(self, number: int) -> NoReturn:
        if is_first_process():
            with suppress(OSError):  # sys.stderr may be in the middle of a line, and would fail
                os.write(2, f"{self._line(number)}\n".encode())
        os._exit(128 + number)

    def _line(self, number: int, note: str = "") -> str:
        start = "\n" if os.isatty(2) else ""  # after the terminal's ^C
        by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        return f"{start}{f'{self.program} {self.command}'.strip()}: interrupted{by}{note}"

    def _take(self, numbers: Sequence[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._taken[number] = handler
                    signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._status is not None:
            os._exit(self._status)
        again, self.number = self.number, number
        if self.is_own_process and (again or _is_importing(frame)):
            self._leave(number)
        raise KeyboardInterrupt

    def _swallowed(self, failure: Any) -> None:
        if isinstance(failure.exc_value, KeyboardInterrupt) and self.is_own_process and self.number:
            self._leave(self.number)
        sys.__unraisablehook__(failure)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


interrupts = Interrupts()
