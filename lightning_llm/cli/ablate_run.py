"""What every action of ``lightning-llm ablate`` does with an experiment: set it up, carry it out, write its report."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.page import write_report
from lightning_llm.ablate.plan import CODE, MAIN, Plan
from lightning_llm.ablate.progress import Display
from lightning_llm.ablate.report import report_of
from lightning_llm.ablate.results import COST, load
from lightning_llm.ablate.reuse import REUSES, take_needed
from lightning_llm.ablate.run_process import RunProcess, last_line, start_server
from lightning_llm.ablate.runner import LOGS, RUNNER, Results, Runner
from lightning_llm.ablate.screen import show_report
from lightning_llm.ablate.slots import Slot, slots_for
from lightning_llm.ablate.slurm import submit
from lightning_llm.ablate.words import left_lines, parameter_lines, start_in_words
from lightning_llm.io.atomic import open_to_append
from lightning_llm.io.config_file import config_path
from lightning_llm.io.console import Console

if TYPE_CHECKING:
    from lightning_llm.ablate.setup import Setup

PROG = "lightning-llm ablate"


def set_up(
    experiment: Experiment,
    arguments: Sequence[str],
    *,
    source: Path | None = None,
    reuse: str = REUSES[0],
    more: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> "Setup":
    """An experiment as ``ablate.setup.Setup``: its arms are read and compared. Prints what it imports, and keeps.

    Args:
        experiment: What the user asks for.
        arguments: Further options of ``fit``.
        source: The file that names its options; ``None``: the command line does.
        reuse: As of ``Setup``.
        more: As of ``Setup``.
        quiet: Print nothing: what it would print was printed before.

    Raises:
        ValueError: As ``Setup``.
        OSError: A config cannot be read.
    """
    # before torch is imported: a typing mistake is answered without waiting for it
    for file in experiment.baseline:
        config_path(file)
    from lightning_llm.ablate.setup import Setup
    from lightning_llm.cli.ablate_arm import read_arm
    from lightning_llm.cli.parsing import check_configs
    from lightning_llm.io.trust import trust_printed

    lines = [] if source is None else trust_printed(source, [experiment.options, experiment.variants])
    lines.append(f"checking the baseline and {', '.join(experiment.variants)}")
    lines += check_configs(["check", *(f"--config={file}" for file in experiment.baseline)])
    say([] if quiet else lines)
    setup = Setup(experiment, arguments, read_arm, reuse=reuse, more=more)
    say([] if quiet else setup.kept_lines)
    return setup


def say(lines: Iterable[str]) -> None:
    """Print lines about what happens."""
    for line in lines:
        print(f"{PROG}: {line}", file=sys.stderr)


def carry_out(plan: Plan, workers: int | None, slurm: Sequence[str] | None = None) -> None:
    """Start workers, wait for the verdicts, and measure the cost; or submit workers to SLURM, and leave."""
    console = Console(stderr=True)
    take_needed(plan)
    loaded = load(plan)
    console.say(*left_lines(report_of(loaded)["reused"]["runs"], len(loaded.results), len(loaded.state.needed)))
    parameters = "\n".join(parameter_lines(plan))
    if slurm is not None:
        console.say(parameters)
        needed = len(load(plan).state.needed)
        jobs = submit(plan, min(needed, workers or needed), slurm) if needed else []
        console.print(f"{plan.out}: submitted {', '.join(jobs) or 'nothing: no run is needed'}", highlight=False)
        return
    slots = slots_for(plan, workers)
    if (state := load(plan).state).needed:
        console.say(start_in_words(plan, state.looks, len(slots)))
        console.say(parameters)
        train(plan, slots)
    if not (plan.out / COST).exists() and (problem := _measured_by_snapshot(plan, console)):
        console.say(f"time and memory were not measured: {problem}")
    write(plan)


def _measured_by_snapshot(plan: Plan, console: Console) -> str:
    """Measure the cost in a process of the snapshot's code; what went wrong, or nothing."""
    log = plan.out / LOGS / "measure.txt"
    console.say(f"measuring time and memory of a step, one variant after another: {log} says how far it is")
    words = ["ablate", "measure", str(plan.out.resolve())]
    process = RunProcess(plan.out / CODE / MAIN, words, log=log, threads=plan.content["threads"])
    try:
        return last_line(log) if process.wait() else ""
    finally:
        process.end()


def train(plan: Plan, slots: Sequence[Slot], until: Callable[[Results], bool] | None = None) -> None:
    """Train the runs that are needed, and show how far they are. Arguments and errors as of :class:`Runner`."""
    start_server(plan.content["threads"])
    log = plan.out / LOGS / RUNNER
    log.parent.mkdir(exist_ok=True)
    with open_to_append(log) as file, TextIOWrapper(file, "utf-8") as lines, Display(plan) as display:
        Runner(plan, slots, partial(print, file=lines, flush=True)).run(display.show, until)


def write(plan: Plan) -> None:
    """Write the report of an experiment, and print it."""
    report, page = write_report(load(plan))
    console = Console()
    show_report(report, console)
    console.say(f"Written: {page}")
