"""``lightning-llm consolidate RUN --out FILE``: the shards of a checkpoint put together into one file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.cli.parser import OneLineParser, run_tool


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser(
        "lightning-llm consolidate",
        "Put the shards of a checkpoint together into one file, which goes wherever they do.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a run directory (takes its best, else its newest)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write; must not exist")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _consolidate)


def _consolidate(options: argparse.Namespace) -> None:
    # after the options are read: a typing mistake is answered without waiting for torch
    from lightning_llm.checkpoints.archives import write_atomically
    from lightning_llm.checkpoints.reading import read_checkpoint
    from lightning_llm.cli.runs import find_checkpoint

    out: Path = options.out
    if out.exists():
        raise ValueError(f"--out {out} exists: give another name, or remove it")
    checkpoint = find_checkpoint(options.checkpoint, Path("runs"))
    content = read_checkpoint(checkpoint, needs=("state_dict",))
    write_atomically(content, out)
    print(f"{checkpoint} (step {content.get('global_step', '?')}) -> {out}, {out.stat().st_size / 1e6:,.1f} MB")
