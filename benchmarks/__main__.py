"""``python -m benchmarks NAME``: measure, on this machine, what the documentation claims."""

import sys
from collections.abc import Sequence

from benchmarks.command_line import PROGRAM, run_bench
from lightning_llm import __main__ as command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status, as ``lightning-llm`` does."""
    return command.main(argv, run_bench, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
