"""The console that everything drawn with rich is printed on: what the text holds cannot command the terminal."""

import sys
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.file_proxy import FileProxy
from rich.segment import Segment
from rich.text import Text

from lightning_llm.io.printable import printable


class Console(rich.console.Console):
    """Shows control characters as escapes, leaves ``:smile:`` as it is, and reads ``[bold]`` only if asked to.

    Args:
        markup: Whether to read markup; text that comes from a file or an option must then be escaped.
        options: As rich has them.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich's, of which it is the first step with a string: columns become as wide as the escapes."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's, for what begins as no string."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def push_render_hook(self, hook: rich.console.RenderHook) -> None:
        """As rich's, which a bar calls when it has taken over the standard streams: it would read codes in the text."""
        super().push_render_hook(hook)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, FileProxy):
                write = stream.write
                setattr(stream, "write", lambda text, write=write: write(printable(text)))  # noqa: B010 - mypy
