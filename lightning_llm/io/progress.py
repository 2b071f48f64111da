"""The progress of work that reads its input once or several times, in bytes, and a bar that shows it."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

Advance = Callable[[int], object]  # called with bytes read from disk
StartPhase = Callable[[str], Advance]  # starts a phase of the work, which reads the input once


def ignore_progress(size: int) -> None:
    """An ``Advance`` that shows nothing."""


@contextlib.contextmanager
def progress_bar(total: int, show: bool) -> Iterator[StartPhase]:
    """A progress bar of ``total`` bytes with the remaining time, if ``show`` is set and there is a terminal."""
    if show:  # importing rich takes time
        from rich import progress

        from lightning_llm.io.console import Console

        console = Console(stderr=True)
    if not show or not console.is_terminal:  # elsewhere some versions of rich print an empty line
        yield lambda description: ignore_progress
        return
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    texts = (progress.TextColumn("{task.description}"), progress.TimeRemainingColumn())
    with progress.Progress(texts[0], *columns, texts[1], console=console, transient=True) as bar:
        yield lambda description: partial(bar.advance, bar.add_task(description, total=total))
