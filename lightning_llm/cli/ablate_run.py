"""Steps that the actions of ``lightning-llm ablate`` share: read an experiment, run it, write its report."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.plan import LOGS, Plan
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.progress import Display
from lightning_llm.ablate.report.from_experiment import report_of, reused_runs
from lightning_llm.ablate.report.report import show_written
from lightning_llm.ablate.results import COST, load
from lightning_llm.ablate.reuse import link_needed
from lightning_llm.ablate.run_process import last_line
from lightning_llm.ablate.runner import RUNNER, Results, Runner
from lightning_llm.ablate.slots import Slot, slots_for
from lightning_llm.ablate.slurm import submit
from lightning_llm.ablate.words import left_lines, parameter_lines, start_in_words
from lightning_llm.io.atomic import open_to_append
from lightning_llm.io.config_file import config_path
from lightning_llm.io.console import Console

if TYPE_CHECKING:
    from lightning_llm.ablate.fit.planning import FitDraft

PROG = "lightning-llm ablate"


def draft_of(
    experiment: Experiment, arguments: Sequence[str] = (), *, source: Path | None = None, quiet: bool = False
) -> "FitDraft":
    """An experiment whose variants were read and compared. Prints what that imports, and keeps.

    Args:
        experiment: What the user asks for.
        arguments: Further options of the program.
        source: The file that names its options; ``None``: the command line does.
        quiet: Print nothing: what it would print was printed before.

    Raises:
        ValueError: A variant cannot run, equals another, or cannot be compared with the baseline.
        OSError: A config cannot be read.
    """
    # before torch is imported: a typing mistake is answered without waiting for it
    for file in experiment.baseline:
        config_path(file)
    from lightning_llm.cli import ablate_fit

    return ablate_fit.draft_of(experiment, arguments, source, (lambda lines: None) if quiet else print_notes)


def print_notes(lines: Iterable[str]) -> None:
    """Print lines about what happens."""
    for line in lines:
        print(f"{PROG}: {line}", file=sys.stderr)


def run_experiment(plan: Plan, workers: int | None, slurm: Sequence[str] | None = None) -> None:
    """Start workers, wait for the verdicts, and measure the cost; or submit workers to SLURM, and leave."""
    console = Console(stderr=True)
    link_needed(plan)
    loaded = load(plan)
    console.print_lines(*left_lines(reused_runs(loaded), len(loaded.results), len(loaded.state.needed)))
    parameters = "\n".join(parameter_lines(plan)) if plan.experiment.command is None else ""
    if slurm is not None:
        console.print_lines(parameters)
        needed = len(loaded.state.needed)
        jobs = submit(plan, min(needed, workers or needed), slurm) if needed else []
        console.print(f"{plan.out}: submitted {', '.join(jobs) or 'nothing: no run is needed'}", highlight=False)
        return
    slots = slots_for(plan, workers)
    if loaded.state.needed:
        console.print_lines(start_in_words(plan, loaded.state.looks, len(slots), len(loaded.results)))
        console.print_lines(parameters)
        train(plan, slots)
    if not (plan.out / COST).exists() and (problem := _measure(plan, console)):
        console.print_lines(f"time and memory were not measured: {problem}")
    write(plan)
    program_of(plan).tidy()


def _measure(plan: Plan, console: Console) -> str:
    """Measure time and memory, if the program can; what went wrong, or nothing."""
    log = plan.out / LOGS / "measure.txt"
    process = program_of(plan).start_measuring(log)
    if process is None:
        return ""
    console.print_lines(f"measuring time and memory of a step, one variant after another: {log} says how far it is")
    try:
        return last_line(log) if process.wait() else ""
    finally:
        process.ask_to_end()
        process.await_end()


def train(plan: Plan, slots: Sequence[Slot], until: Callable[[Results], bool] | None = None) -> None:
    """Train the runs that are needed, and show how far they are. Arguments and errors as of :class:`Runner`."""
    program_of(plan).warm_up()
    log = plan.out / LOGS / RUNNER
    log.parent.mkdir(exist_ok=True)
    with open_to_append(log) as file, TextIOWrapper(file, "utf-8") as lines, Display(plan) as display:
        Runner(plan, slots, partial(print, file=lines, flush=True)).run(display.show, until)


def write(plan: Plan) -> None:
    """Write the report of an experiment, and print it."""
    show_written(report_of(load(plan)))
