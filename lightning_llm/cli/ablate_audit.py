"""``lightning-llm ablate audit``: what the log of a keep-if-better loop can show. Nothing runs."""

import argparse
from pathlib import Path

from lightning_llm.ablate.log_audit import audit, lines_of
from lightning_llm.io.atomic import json_text
from lightning_llm.io.console import Console


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``audit``."""
    about = "log with a row for each run in their order: CSV, TSV, or JSON lines, such as results.tsv"
    parser.add_argument("file", type=Path, metavar="LOG", help=about)
    about = "column of the metric (default: the only one with numbers); higher is better with --metric -NAME"
    parser.add_argument("--metric", metavar="NAME", help=about)
    about = "standard deviation of one run, if it is known (default: that of code that ran several times)"
    parser.add_argument("--noise", type=float, metavar="SD", help=about)
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")


def audit_log(options: argparse.Namespace) -> None:
    """Print what a log shows, and what it does not."""
    found = audit(options.file, metric=options.metric, noise=options.noise)
    if options.json:
        print(json_text(found.to_dict()))
    else:
        Console().print_lines(*lines_of(found))
