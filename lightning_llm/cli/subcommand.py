"""Subcommands: every one but those of the Trainer. A function with the decorator :func:`subcommand` is one."""

import argparse
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_llm.cli.commands import nearest, page_of, with_page
from lightning_llm.cli.errors import USER_ERROR, reason_of, reports
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.io.units import byte_size

Action = Callable[[argparse.Namespace], object]
AddOptions = Callable[["OneLineParser"], object]


class OneLineParser(argparse.ArgumentParser):
    """``argparse`` without the usage text before each error. Options cannot be abbreviated.

    Args:
        prog: As it is typed, such as ``lightning-llm data inspect``.
        description: What the command does.
        options: As in ``argparse``.
    """

    def __init__(self, prog: str, description: str | None = None, **options: Any) -> None:
        page = page_of(self._command(prog))
        super().__init__(prog=prog, description=description, allow_abbrev=False, epilog=f"More: {page}", **options)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
        advice = nearest(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        if unknown := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            advice = nearest(unknown[1], set(re.findall(r"(?<!\S)--[\w-]+", self.format_help())))
        line = f"{self.prog}: error: {message}{advice or f'; {self.prog} --help explains'}"
        self.exit(USER_ERROR, f"{with_page(self._command(self.prog), line)}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and reject unknown words: the parser of an action knows its options, the one above it does not."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    @staticmethod
    def _command(prog: str) -> str:
        """The command with its action, without the name of the program."""
        return " ".join(prog.split()[1:3])


class Subcommand:
    """A command of its own: call it with the words behind its name.

    Calling it returns the exit status: 0, or what the action returns; 2 after a line about what is wrong; 130 after a
    line about Ctrl-C. It raises ``BrokenPipeError`` if nobody reads the output any more.

    Args:
        act: What it does with the options; a number is the exit status. Its docstring is shown by ``--help``.
        prog: As it is typed, such as ``lightning-llm data``.
        add_options: Adds its options to a parser.
        mistakes: Errors that are a user's mistake, besides ``ValueError`` and ``OSError``.
        when_interrupted: Added to the line about Ctrl-C.
    """

    def __init__(
        self, act: Action, prog: str, add_options: AddOptions, *mistakes: type[Exception], when_interrupted: str = ""
    ) -> None:
        self.parser = OneLineParser(prog, act.__doc__)
        add_options(self.parser)
        self._act = act
        self._when_interrupted = when_interrupted
        self._mistakes: tuple[type[Exception], ...] = (ValueError, OSError, *mistakes)

    def __call__(self, words: Sequence[str]) -> int:
        """Run the subcommand with the words behind its name; returns the exit status."""
        command = self.parser.prog.split()[1]
        if command != "-m":  # of python -m benchmarks
            interrupts.command = command
        try:
            options = self.parser.parse_args(words)
        except SystemExit as leaving:  # --help, or a wrong option
            return int(leaving.code or 0)
        try:
            status = self._act(options)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            return interrupts.print_interruption(interrupts.number or signal.SIGINT, self._when_interrupted)
        except self._mistakes as error:
            action = getattr(options, "action", "")
            return reports.mistake(f"{command} {action}", f"{self.parser.prog}: error: {reason_of(error)}")
        return status if isinstance(status, int) else 0


def subcommand(add_options: AddOptions, *mistakes: type[Exception], **options: str) -> Callable[[Action], Subcommand]:
    """Make a subcommand ``lightning-llm NAME`` of a function ``run_NAME``. Arguments as for :class:`Subcommand`."""

    def made(act: Any) -> Subcommand:
        return Subcommand(act, f"lightning-llm {act.__name__.removeprefix('run_')}", add_options, *mistakes, **options)

    return made


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is the name of no file")
    return Path(text)


def size_option(text: str) -> int:
    """A size in bytes, for ``argparse``."""
    try:
        return byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
