"""A bar on a terminal, and nothing elsewhere."""

import io

import pytest

from lightning_llm.io import console
from lightning_llm.io.progress import progress_bar


def drawn(monkeypatch, *, show, is_terminal):
    """What is written while half of a file of 100 bytes is read."""
    made, file = console.Console, io.StringIO()

    def on_file(**options):
        assert options == {"stderr": True}  # what a command prints to a pipe has no bar in it
        return made(file=file, force_terminal=is_terminal, width=120)

    monkeypatch.setattr(console, "Console", on_file)
    with progress_bar(100, show) as phase:
        advance = phase("counting words")
        advance(20)
        advance(30)
    return file.getvalue()


def test_a_terminal_shows_the_bytes_that_were_read(monkeypatch):
    text = drawn(monkeypatch, show=True, is_terminal=True)
    assert "50/100 bytes" in text
    assert "counting words" in text


@pytest.mark.parametrize(("show", "is_terminal"), [(False, True), (False, False), (True, False)])
def test_elsewhere_nothing_is_written(monkeypatch, show, is_terminal):
    assert drawn(monkeypatch, show=show, is_terminal=is_terminal) == ""
