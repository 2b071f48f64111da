"""How a command says what went wrong: one line, whatever it was; a traceback only in a file, or with ``--debug``.

Exit statuses: 0; 1, it failed; 2, a mistake of the user or in a file; 128 and the number of a signal.
"""

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import dropwhile

from lightning_llm.cli.pages import with_page

FAILED, USER_ERROR = 1, 2
DEBUG = "--debug"
IN_A_WORKER = "Original Traceback (most recent call last):"  # torch puts it into the message of the error


class Reports:
    """Where the lines go.

    Attributes:
        words: Of the command line.
        with_traceback: Print tracebacks too.
    """

    def __init__(self) -> None:
        self.words: Sequence[str] = ()
        self.with_traceback = False

    def begin(self, words: Sequence[str]) -> list[str]:
        """Take ``--debug`` out of the words of a command, which begins."""
        self.words, self.with_traceback = words, DEBUG in words
        return [word for word in words if word != DEBUG]

    def mistake(self, command: str, line: str) -> int:
        """Say what is wrong with the input; to be called where the error is handled. Returns the exit status."""
        print(f"{_who()}{with_page(command, line)}", file=sys.stderr)
        if self.with_traceback:
            traceback.print_exc()
        return USER_ERROR

    def unexpected(self, command: str, failure: BaseException) -> int:
        """Say that a command failed for a reason that nobody foresaw. Returns the exit status."""
        line = f"{_who()}lightning-llm {command}".strip() + f": failed: {type(failure).__name__}: {one_line(failure)}"
        trace = "".join(traceback.format_exception(failure))
        if self.with_traceback:
            print(f"{line}\n{trace}", file=sys.stderr, end="")
        else:
            print(f"{line}; {self._written(trace)}", file=sys.stderr)
        return FAILED

    def _written(self, trace: str) -> str:
        try:
            number, name = tempfile.mkstemp(prefix="lightning-llm-", suffix=".txt")
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"lightning-llm {shlex.join(self.words)}\n\n{trace}")
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


def _who() -> str:
    """Which process speaks, where several train together."""
    rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID") if name in os.environ), "0")
    with suppress(ValueError):
        return f"process {int(rank)}: " if int(rank) else ""
    return ""
