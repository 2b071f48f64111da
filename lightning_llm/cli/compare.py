"""``lightning-llm compare RUNS``: compare loss, time and peak memory across runs.

Each text has its own report. Each group of runs is compared with the first one, or that of ``--baseline``, by the rule
of ``statistics.verdict``; ``ablate.report.from_runs`` says which runs are a group, and how two of them differ.
"""

import argparse
import sys

from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.from_runs import compare_runs, experiment_in
from lightning_llm.ablate.report.report import add_format, print_reports
from lightning_llm.ablate.results import load_experiment
from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.io.console import Console

WIDE = 200  # columns for a file or a pipe


def _options(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that contain runs")
    text = "smallest difference in validation loss that matters; sets when the verdict is `equivalent`"
    about = "compare the other groups with this run's group (default: the first run's)"
    parser.add_argument("--baseline", metavar="RUN", help=about)
    parser.add_argument("--delta", type=float, metavar="NATS", help=text)
    parser.add_argument("--paired", action="store_true", help="fail unless all groups can be compared in pairs of runs")
    add_format(parser)


@subcommand(_options)
def run_compare(options: argparse.Namespace) -> None:
    """Compare loss, time, and peak memory across finished runs, grouped by the options that differ.

    The first run's group is the baseline. Each other group on the same text gets a difference with its 95% interval,
    and a verdict: better, worse, equivalent, or undecided. Runs with the same seeds are compared in pairs. Runs that
    have not finished are listed. Where MemoryProfiler sampled the same step of two groups, its memory is compared by
    category and module. For the folder of an experiment, the pairs and numbers of its report are printed.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    experiment = next(filter(None, map(experiment_in, options.runs)), None)
    if experiment is None:
        reports = compare_runs(options.runs, options.baseline, options.delta, must_pair=options.paired)
    elif len(options.runs) > 1 or options.baseline or options.delta is not None:
        problem = "its plan has the baseline and delta: compare it alone, without --baseline and --delta"
        raise ValueError(f"{experiment} is an experiment, and {problem}")
    else:
        reports = [report_of(load_experiment(experiment))]
    print_reports(reports, options.format, console)
