"""Errors of the command line, each in one line that ends with the page to read; exit statuses and tracebacks.

Exit statuses: 0; 1 if a command failed; 2 for a mistake in an option or a file; 128 plus the number of a signal.
A traceback is printed with ``--debug`` only; without it, it goes to a file.
"""

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from itertools import dropwhile
from traceback import walk_tb
from typing import Any

from lightning_llm.cli.commands import with_page
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.io.shell import shell_command
from lightning_llm.io.trust import TRUSTED

FAILED, USER_ERROR = 1, 2
DEBUG = "--debug"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
IN_A_WORKER = "Original Traceback (most recent call last):"  # torch puts it into the message of the error


class Reports:
    """Prints errors to stderr.

    Attributes:
        words: The command line.
        with_traceback: Whether to print tracebacks too.
    """

    words: Sequence[str] = ()
    with_traceback = False

    def begin(self, words: Sequence[str]) -> list[str]:
        """Take ``--debug`` out of the words of a command that starts."""
        self.words = words
        self.with_traceback = DEBUG in words
        return [word for word in words if word != DEBUG]

    def mistake(self, command: str, line: str) -> int:
        """Report a mistake in the input. Call it inside the ``except`` clause. Returns the exit status."""
        print(f"{_rank_prefix()}{with_page(command, line)}", file=sys.stderr)
        if self.with_traceback:
            traceback.print_exc()
        return USER_ERROR

    def unexpected(self, command: str, failure: BaseException) -> int:
        """Report an error that no code handles. Returns the exit status."""
        name = f"{_rank_prefix()}{interrupts.program} {command}".strip()
        trace = "".join(traceback.format_exception(failure))
        rest = f"\n{trace.rstrip()}" if self.with_traceback else f"; {self._written(trace)}"
        print(f"{name}: failed: {named(failure)}{_place(failure)}{rest}", file=sys.stderr)
        return FAILED

    def _written(self, trace: str) -> str:
        try:
            number, name = tempfile.mkstemp(prefix="lightning-llm-", suffix=".txt")
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{interrupts.program} {shell_command(*self.words)}\n\n{trace}")
        except OSError:
            return f"{DEBUG} shows where"
        return f"where: {name} ({DEBUG} shows it)"


reports = Reports()


def one_line(failure: BaseException) -> str:
    """The message of an error, without the traceback that torch puts into those of its data workers."""
    text = str(failure)
    if IN_A_WORKER in text:
        lines = text.rpartition("Traceback (most recent call last):")[2].strip("\n").splitlines()
        text = "\n".join(dropwhile(lambda line: line.startswith(" "), lines)).partition(": ")[2]
    return " ".join(text.split())


def named(failure: BaseException) -> str:
    """The class of an error, and its message in one line."""
    return ": ".join(filter(None, [type(failure).__name__, one_line(failure)]))


def local_in(failure: BaseException, name: str) -> Any:
    """The innermost local variable of this name in the functions that an error has left; ``None``: there is none.

    Libraries do not say in an error what they were doing when it was raised.
    """
    values = [frame.f_locals[name] for frame, _ in walk_tb(failure.__traceback__) if name in frame.f_locals]
    return values[-1] if values else None


def _place(failure: BaseException) -> str:
    """Where the user's own code failed, if it did: the line nearest to the error in a module of a trusted path."""
    theirs = {path.partition(".")[0] for path in TRUSTED} - {"torch", "lightning"}
    place = ""
    for frame, line in walk_tb(failure.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in theirs:
            place = f", in {frame.f_code.co_filename}, line {line}"
    return place


def reason_of(error: BaseException) -> str:
    """Text of :func:`one_line`; for an error of the system, its reason and the file. Never empty."""
    if isinstance(error, MemoryError) and not str(error):
        return "the system gives this process no more"
    if not isinstance(error, OSError) or not error.strerror:
        return one_line(error) or type(error).__name__
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def _rank_prefix() -> str:
    """Prefix that says which process prints, where several train together; empty for the first."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return f"process {int(rank)}: " if rank.isdecimal() and int(rank) else ""
