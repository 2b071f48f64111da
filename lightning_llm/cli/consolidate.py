"""``lightning-llm consolidate RUN --out FILE``: merge the shards of a checkpoint into one file."""

import argparse
from pathlib import Path

from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.cli.runs import find_checkpoint


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm consolidate", "Merge the shards of a checkpoint into one file.")
    parser.add_argument("checkpoint", help="a checkpoint, or a run directory (its best checkpoint, else its newest)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write; must not exist")
    return parser


@tool(build_parser)
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    # after the options are parsed: a typo is reported without waiting for torch
    from lightning_llm.checkpoints.archives import write_atomically
    from lightning_llm.checkpoints.reading import read_checkpoint

    out: Path = options.out
    if out.exists():
        raise ValueError(f"--out {out} exists: give another name, or delete it")
    checkpoint = find_checkpoint(options.checkpoint, Path("runs"))
    content = read_checkpoint(checkpoint, needs=("state_dict",))
    write_atomically(content, out)
    print(f"{checkpoint} (step {content.get('global_step', '?')}) -> {out}, {out.stat().st_size / 1e6:,.1f} MB")
