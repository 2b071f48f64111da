"""``lightning-llm ablate verdict``: a verdict on a table of losses, whatever program they are from. Nothing runs."""

import argparse
from pathlib import Path

from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.report.from_table import verdict_of
from lightning_llm.ablate.report.report import add_format, print_reports
from lightning_llm.ablate.table import read_table
from lightning_llm.io.console import Console


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verdict``."""
    about = "CSV, TSV, or JSON lines: columns variant, seed, and metric; or a column per variant"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    about = f"variant that the others are compared with (default: {BASELINE})"
    parser.add_argument("--baseline", default=BASELINE, metavar="NAME", help=about)
    about = "column to compare (default: the only one); lower is better, or higher with --metric -NAME"
    parser.add_argument("--metric", metavar="NAME", help=about)
    about = "smallest difference that matters (default: none, so no variant is equivalent)"
    parser.add_argument("--delta", type=float, metavar="NUMBER", help=about)
    about = "probability that an interval misses its true difference, over all variants (default: 0.05)"
    parser.add_argument("--alpha", type=float, default=0.05, metavar="NUMBER", help=about)
    about = "compare without pairs (Welch's t test); only if it was planned before any loss was seen"
    parser.add_argument("--unpaired", action="store_true", help=about)
    add_format(parser)


def reach_verdict(options: argparse.Namespace) -> None:
    """Print the verdicts on the variants in a file."""
    losses = read_table(options.file).losses(options.metric)
    settings = {name: getattr(options, name) for name in ("baseline", "delta", "alpha", "unpaired")}
    print_reports([verdict_of(losses, **settings)], options.format, Console())
