"""``lightning-llm check``: what ``fit`` looks at before its first step, alone.

The options are those of ``fit``, so this is another command of ``cli/train.py``; here is what it prints.
"""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from lightning_llm.io.console import Console
from lightning_llm.training.preflight import Check, refuse


def report(checks: Sequence[Check]) -> None:
    """Print a table of all checks.

    Raises:
        ValueError: With every fault, if there is one.
    """
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row("[red]fault[/]" if check.fault else "ok", f"[bold]{check.name}", escape(check.finding))
    Console(markup=True, soft_wrap=True, highlight=False).print(table)
    refuse(check.fault for check in checks if check.fault)
    print("ok")
