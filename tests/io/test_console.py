"""What the console prints is no code for a terminal."""

import io
import re
import sys
from pathlib import Path

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import lightning_llm
from lightning_llm.io.console import Console


def test_text_in_what_rich_draws_is_no_code_and_no_markup():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, highlight=False)
    table = Table("\x1b[35m[red]name")
    table.add_row("[link=http://x]\x9b35m")
    console.print(table)
    console.print("\x1b]0;title :smile: [/]", style="bold")
    console.print(Text("\x1b[35mtext that rich has taken already"))
    parts = (r"\x1b[35m[red]name", r"[link=http://x]\u009b35m", ":smile: [/]", r"\x1b[35mtext")
    assert all(part in out.getvalue() for part in parts)
    assert not re.search("\x1b[]]|\x1b\\[35m|\x9b|\x1b]8", out.getvalue())


def test_what_is_printed_under_a_bar_is_no_code(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    with Progress(console=Console(stderr=True, force_terminal=True, width=60), auto_refresh=False):
        print("\x1b[38;5;201m\x1b]8;;http://x\x1b\\printed")
        print("\x1b[38;5;201mwarned", file=sys.stderr)
    assert "\x1b[38" not in out.getvalue()
    assert "http://x\x1b" not in out.getvalue()
    assert out.getvalue().count(r"\x1b[38;5;201m") == 2


def test_no_other_console_is_used():
    package = Path(lightning_llm.__file__).parent
    files = [
        path for path in package.rglob("*.py") if re.search(r"rich\.console|rich import .*print", path.read_text())
    ]
    assert files == [package / "io" / "console.py"]
