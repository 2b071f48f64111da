"""Workers on this machine, and what is shown while they work.

A slot is a GPU, or a set of cores. Small models train best with one core each: on two cores, two one-thread runs take
32.7 s together where one two-thread run takes 22 s alone. All runs of an experiment have one number of threads, since
it changes their bits.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from lightning_llm.ablate.arm import BASELINE
from lightning_llm.ablate.child import SAVING_S, Child, last_line
from lightning_llm.ablate.fork import environment_of_worker
from lightning_llm.ablate.idea import idea_in_words
from lightning_llm.ablate.next_runs import RunKey, State
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import Result, losses_of, results_of
from lightning_llm.ablate.worker import LOGS, MOST_KILLS
from lightning_llm.io.console import Console
from lightning_llm.io.units import shown_duration
from lightning_llm.measure.gauges import host_memory

POLL_S = 0.5
ENDING_S = 60.0  # a worker ends so long after its run
VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY_SHARE = 0.8  # of the host's memory, for all runs together


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_gpus() -> list[str]:
    """The GPUs that workers may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    visible = os.environ.get(VISIBLE)
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


def threads_for(accelerator: str, num_gpus: int, need_bytes: int, max_runs: int | None) -> int:
    """Threads of each run: the cores that a slot gets. On CPUs a slot is one core, or more if memory is short.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        num_gpus: How many there are.
        need_bytes: Host memory of a run.
        max_runs: The most runs at a time that the user wants.
    """
    available = len(cores())
    threads = available // runs_at_a_time(1, accelerator, num_gpus, max_runs)
    if accelerator == "cuda" or (memory := host_memory()) is None:
        return max(1, threads)
    fitting = max(1, int(MEMORY_SHARE * memory) // need_bytes)
    return max(threads, math.ceil(available / fitting))


def runs_at_a_time(threads: int, accelerator: str, num_gpus: int, max_runs: int | None) -> int:
    """How many runs of so many threads each have a slot; other arguments as in :func:`threads_for`."""
    count = num_gpus if accelerator == "cuda" else len(cores()) // threads
    return max(1, min(count, max_runs or count))


def slots(plan: Plan, gpus: Sequence[str], max_runs: int | None) -> list[dict[str, str]]:
    """The environment of each worker, and under ``cores`` the cores that it is bound to.

    Raises:
        ValueError: The plan needs a GPU, and there is none.
    """
    threads, available = int(plan.content["threads"]), cores()
    count = runs_at_a_time(threads, plan.content["accelerator"], len(gpus), max_runs)
    sets = [available[number * threads : (number + 1) * threads] or available for number in range(count)]
    bound = [{"cores": ",".join(map(str, numbers))} for numbers in sets]
    if plan.content["accelerator"] == "cuda":
        if not gpus:
            raise ValueError(f"{plan.out} was planned for GPUs, and none is visible here: continue it where one is")
        return [{**environment, VISIBLE: gpu} for environment, gpu in zip(bound, gpus, strict=False)]
    return bound


def bind(numbers: str) -> None:
    """Bind this process, and those that it starts, to cores such as ``0,1``."""
    if numbers and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in numbers.split(",")})


def run_workers(
    plan: Plan, slots: Sequence[Mapping[str, str]], *, until: Callable[[Mapping[RunKey, Result]], bool] | None = None
) -> None:
    """Start a worker in each place, and wait until they have ended. One that is killed is started again.

    Args:
        plan: Of the experiment.
        slots: As of :func:`slots`.
        until: By the runs that have ended, whether to stop before.

    Raises:
        ValueError: One of them failed. The others are stopped.
    """
    workers = [Worker(plan, slot, plan.out / LOGS / f"worker-{number}.txt") for number, slot in enumerate(slots)]
    results: dict[RunKey, Result] = {}
    try:
        with Display(plan) as display:
            while True:
                plan.refuse_gone()
                is_running = [worker.is_running() for worker in workers]
                results = results_of(plan, results)
                display.show(results)
                if not any(is_running) or (until is not None and until(results)):
                    return
                time.sleep(POLL_S)
    finally:
        for worker in workers:
            worker.child.ask_to_end()
        for worker in workers:
            worker.child.end(SAVING_S + ENDING_S)


class Worker:
    """A worker in a process of its own, which runs the snapshot of the code.

    Args:
        plan: Of the experiment.
        slot: As of :func:`slots`.
        log: Its output.
    """

    def __init__(self, plan: Plan, slot: Mapping[str, str], log: Path) -> None:
        arguments = ["ablate", "work", str(plan.out), "--cores", slot["cores"], "--parent", str(os.getpid())]
        environment = environment_of_worker(plan) | {name: value for name, value in slot.items() if name != "cores"}
        self._start = partial(Child, plan.out, arguments, log=log, environment=environment)
        self._log, self._kills = log, 0
        self.child = self._start()

    def is_running(self) -> bool:
        """Whether it has not ended; if it was killed, it is started again.

        Raises:
            ValueError: It failed.
        """
        status = self.child.status()
        if status is not None and status < 0 and self._kills < MOST_KILLS:
            self._kills += 1
            self.child, status = self._start(), None
        if status:
            problem = last_line(self._log).rpartition("error: ")[2]
            raise ValueError(problem if status > 0 else f"a worker was killed: {self._log}")
        return status is None


class Display:
    """How far the runs are: a bar on a terminal, else a line for each run that ends.

    Args:
        plan: Of the experiment.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._console = plan, Console(stderr=True)
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
        new, self._shown_runs = results.keys() - (self._shown_runs or self._ended_before), set(results)
        state = self._plan.state(losses_of(results))
        ended = len(results) - len(self._ended_before)
        left_s = (time.monotonic() - self._start_s) / ended * len(state.needed) if ended else None
        total = len(results) + len(state.needed)
        progress = progress_in_words(self._plan, state, left_s)
        self._bar.update(self._task, completed=len(results), total=total, description=progress)
        if not self._console.is_terminal:
            for number, run in enumerate(sorted(new), len(results) - len(new) + 1):
                line = f"run {number}/{total}  {run_in_words(self._plan, run, results, progress)}"
                self._console.say(line)


def run_in_words(plan: Plan, run: RunKey, results: Mapping[RunKey, Result], progress: str) -> str:
    """Such as ``gelu seed 0  val_loss 2.9933 (baseline 2.8784, 1 of 4 pairs, about 3 min left)``.

    Of an idea of a stream without its loss: ideas must not be chosen by the seeds that will judge them.
    """
    if plan.idea is not None:
        return f"{run.name.replace(',', ' ')} seed {run.seed}  ended ({progress})"
    loss, base = results[run].loss, results.get(RunKey(BASELINE, run.seed))
    outcome = results[run].failure.partition(":")[0] if loss is None else f"{plan.experiment.metric} {loss:.4f}"
    is_pair = base is not None and base.loss is not None and plan.arm(run.name) != BASELINE and "," not in run.name
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
    words = [f"{pairs} of {state.look} pairs" if plan.idea is None else idea_in_words(plan.idea, state)]
    if any("," in run.name for run in state.needed):
        words.append(f"{len(state.needed)} runs of tuned sides to go")
    if left_s is not None and state.needed:
        words.append(f"{'about' if plan.idea is None else 'at most'} {shown_duration(left_s)} left")
    return ", ".join(words)
