"""What the tools of the command line have in common: a mistake is answered in one line, with status 2."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lightning_llm.cli.pages import COMMANDS, FIRST, with_page

USER_ERROR = 2
BROKEN_PIPE = 128 + 13  # as a shell has it of a program that SIGPIPE ended


class OneLineParser(argparse.ArgumentParser):
    """``argparse`` without the whole usage in front of each error. Options are not abbreviated.

    Args:
        prog: As it is typed, such as ``lightning-llm data inspect``.
        description: What it does. Its lines stay as they are if ``options`` has a formatter that leaves them.
        options: As of ``argparse``.
    """

    def __init__(self, prog: str, description: str | None = None, **options: Any) -> None:
        options.setdefault("epilog", f"More: {COMMANDS.get(command_of(prog), FIRST)}")
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        line = f"{self.prog}: error: {message}; {self.prog} --help explains"
        self.exit(USER_ERROR, f"{with_page(command_of(self.prog), line)}\n")


def command_of(prog: str) -> str:
    """``data`` of ``lightning-llm data inspect``."""
    return prog.split()[1]


def run_tool(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    act: Callable[[argparse.Namespace], object],
    *mistakes: type[Exception],
) -> int:
    """Run a tool.

    Args:
        parser: Of its options.
        words: Of the command line, behind the tool's name.
        act: What it does with the options.
        mistakes: Errors that are a user's mistake, beside ``ValueError`` and ``OSError``.

    Returns:
        The exit status: 0; 2 after a line about what is wrong; 141 where the reader of the output has left.
    """
    try:
        options = parser.parse_args(words)
    except SystemExit as leaving:  # --help, or a wrong option
        return int(leaving.code or 0)
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *mistakes)
    try:
        act(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own last flush fails
        return BROKEN_PIPE
    except kinds as error:
        line = f"{parser.prog}: error: {' '.join(str(error).split())}"
        print(with_page(command_of(parser.prog), line), file=sys.stderr)
        return USER_ERROR
    return 0
