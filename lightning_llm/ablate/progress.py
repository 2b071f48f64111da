"""Progress of an experiment, shown while its runs train."""

import time
from collections.abc import Mapping

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from lightning_llm.ablate.experiment import ScreenAndConfirm
from lightning_llm.ablate.idea_runs import progress_of_idea
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey, State
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import Result, losses_of
from lightning_llm.io.console import Console
from lightning_llm.io.units import shown_duration


class Display:
    """How far the runs are: a bar on a terminal, else a line for each run that ends.

    Args:
        plan: Of the experiment.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._console = Console(stderr=True)
        self._ended_before: set[RunKey] = set()  # ended before this start
        self._shown_runs: set[RunKey] | None = None
        self._start_s = time.monotonic()
        columns: list[ProgressColumn] = [TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        columns.append(TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, results: Mapping[RunKey, Result]) -> None:
        """Draw what is new."""
        if self._shown_runs is None:
            self._ended_before = set(results)
        elif results.keys() == self._shown_runs:
            return
        new = results.keys() - (self._shown_runs or self._ended_before)
        self._shown_runs = set(results)
        state = self._plan.state(losses_of(results))
        ended = len(results) - len(self._ended_before)
        left_s = (time.monotonic() - self._start_s) / ended * len(state.needed) if ended else None
        total = len(results) + len(state.needed)
        progress = progress_in_words(self._plan, state, left_s)
        self._bar.update(self._task, completed=len(results), total=total, description=progress)
        if not self._console.is_terminal:
            for number, run in enumerate(sorted(new), len(results) - len(new) + 1):
                line = f"run {number}/{total}  {run_in_words(self._plan, run, results, progress)}"
                self._console.print_lines(line)


def run_in_words(plan: Plan, run: RunKey, results: Mapping[RunKey, Result], progress: str) -> str:
    """Such as ``gelu seed 0  val_loss 2.9933 (baseline 2.8784, 1 of 4 pairs, about 3 min left)``.

    Of an idea of a stream without its loss: ideas must not be chosen by the seeds that will judge them.
    """
    if plan.is_blind:
        return f"{run.name.replace(',', ' ')} seed {run.seed}  ended ({progress})"
    loss = results[run].loss
    base = results.get(RunKey(BASELINE, run.seed))
    outcome = results[run].failure.partition(":")[0] if loss is None else f"{plan.experiment.metric} {loss:.4f}"
    is_pair = (
        base is not None and base.loss is not None and plan.variant_of(run.name) != BASELINE and "," not in run.name
    )
    about = [f"baseline {base.loss:.4f}"] if is_pair and base is not None else []
    return f"{run.name.replace(',', ' ')} seed {run.seed}  {outcome} ({', '.join([*about, progress])})"


def progress_in_words(plan: Plan, state: State, left_s: float | None) -> str:
    """Pairs of the present look, and the time that its runs still take.

    Args:
        plan: Of the experiment.
        state: Of the experiment.
        left_s: Seconds until the runs that are needed have ended; ``None``: not known yet.
    """
    open_seeds = {run.seed for run in state.needed if run.name in (BASELINE, *plan.experiment.variants)}
    pairs = sum(seed not in open_seeds for seed in plan.experiment.seeds(state.look))
    stop = plan.experiment.stop
    is_idea = isinstance(stop, ScreenAndConfirm)
    words = [progress_of_idea(stop, state) if isinstance(stop, ScreenAndConfirm) else f"{pairs} of {state.look} pairs"]
    if any("," in run.name for run in state.needed):
        words.append(f"{len(state.needed)} runs of tuned variants to go")
    if left_s is not None and state.needed:
        words.append(f"{'at most' if is_idea else 'about'} {shown_duration(left_s)} left")
    return ", ".join(words)
