"""A progress bar in bytes, with the time that is left."""

import contextlib
from collections.abc import Callable, Iterator

from lightning_llm.data.formats import Advance, ignore_progress

Phase = Callable[[str], Advance]


@contextlib.contextmanager
def progress_bar(total: int, show: bool) -> Iterator[Phase]:
    """A bar on the terminal; each phase of the work counts the bytes of the input once.

    Args:
        total: Bytes.
        show: Whether to draw it, where there is a terminal: elsewhere some versions of rich leave an empty line.
    """
    if not show:
        yield lambda description: ignore_progress
        return
    from rich import progress  # where no bar is shown, it need not be loaded

    from lightning_llm.io.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda description: ignore_progress
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:

        def phase(description: str) -> Advance:
            task = bar.add_task(description, total=total)
            return lambda size: bar.advance(task, size)

        yield phase
