"""What the tools of the command line have in common: a mistake is answered in one line, with status 2."""

import argparse
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lightning_llm.cli.failures import USER_ERROR, one_line, reports
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.pages import COMMANDS, FIRST, with_page


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
    """``data`` of ``lightning-llm data inspect``; ``bench`` of ``python -m benchmarks``."""
    return prog.split()[1] if prog.startswith("lightning-llm") else "bench"


def run_tool(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    act: Callable[[argparse.Namespace], object],
    *mistakes: type[Exception],
    when_interrupted: str = "",
) -> int:
    """Run a tool.

    Args:
        parser: Of its options.
        words: Of the command line, behind the tool's name.
        act: What it does with the options.
        mistakes: Errors that are a user's mistake, beside ``ValueError`` and ``OSError``.
        when_interrupted: What to say of Ctrl-C besides.

    Returns:
        The exit status: 0; 2 after a line about what is wrong; 130 after a line about Ctrl-C.

    Raises:
        BrokenPipeError: The reader of the output has left.
    """
    interrupts.command = command_of(parser.prog)
    try:
        options = parser.parse_args(words)
    except SystemExit as leaving:  # --help, or a wrong option
        return int(leaving.code or 0)
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *mistakes)
    try:
        act(options)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return interrupts.say(interrupts.number or signal.SIGINT, when_interrupted)
    except kinds as error:
        return reports.mistake(command_of(parser.prog), f"{parser.prog}: error: {one_line(error)}")
    return 0
