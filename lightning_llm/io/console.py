"""The rich console that all commands print with: control characters in text cannot reach the terminal."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import rich.console
from rich.file_proxy import FileProxy
from rich.segment import Segment
from rich.text import Text

from lightning_llm.io.untrusted import printable


class Console(rich.console.Console):
    """Prints control characters as escapes and ``:smile:`` unchanged, and interprets ``[bold]`` only on request.

    Args:
        markup: Whether to interpret markup; text from a file or an option must then be escaped.
        options: Of ``rich.console.Console``.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a string first, so that columns become as wide as the escapes."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape text that other renderables produce."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print_lines(self, *lines: str) -> None:
        """Print lines as they are: a file or a pipe gets them whole, and nothing in them is colored."""
        for line in lines:
            self.print(line, soft_wrap=True, highlight=False)

    def push_render_hook(self, hook: rich.console.RenderHook) -> None:
        """Escape what a progress bar captures from the standard streams: it would interpret codes in the text."""
        super().push_render_hook(hook)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, FileProxy):
                write = stream.write
                setattr(stream, "write", lambda text, write=write: write(printable(text)))  # noqa: B010 - mypy


def room(width: int, columns: Iterable[Sequence[str]]) -> int:
    """Width left for the first column of a table with ``SIMPLE_HEAD``; ``columns`` are the texts of the others."""
    return width - 2 - sum(3 + max(map(len, column)) for column in columns)


def folded(text: str, width: int) -> str:
    """A name in lines of at most this width that end at a sign or space, so that no word is cut; a longer word is."""
    lines = [""]
    for word in re.findall(r"[^\s_=./,-]*[\s_=./,-]?", text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > max(width, 1):
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)
