"""The program whose runs an experiment compares: what starts a run, and what says how it ended.

A program is a subclass of :class:`Program` and an entry in ``programs.PROGRAMS``. It knows the folder that its code is
read from, how a run starts, what a run that has ended says, and what it promises. Everything else (pairs, looks,
verdicts, workers, reports) is the same for all programs. ``fit`` is one.
"""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import CODE, LOGS, Plan
from lightning_llm.ablate.slots import Slot


class Promises(NamedTuple):
    """Promises that hold for all runs of a program.

    Attributes:
        same_batches: Runs with the same seed use the same batches, and their summaries have hashes of them.
        same_initial_values: They start from the same values, and their summaries have hashes of these.
        measured_cost: Time and memory of a step can be measured, by :meth:`Program.start_measuring`.
        resumes: A run that was interrupted continues from what it has saved.
    """

    same_batches: bool = False
    same_initial_values: bool = False
    measured_cost: bool = False
    resumes: bool = False


class Run(NamedTuple):
    """A run that is to be started.

    Attributes:
        key: The name of its variant, with the value that is tuned if there is one, and its seed.
        config: The file with the options of its variant.
        options: Further options, by dotted name.
        folder: Its own; it exists only if the run was interrupted and continues.
        log: The file that its output is appended to.
    """

    key: RunKey
    config: Path
    options: Mapping[str, Any]
    folder: Path
    log: Path


class Ended(NamedTuple):
    """The result of a run that has ended.

    Attributes:
        summary: Metrics, ``seconds``, and whatever else the run directory's ``summary.json`` has.
        failure: How and why it failed to train; empty: it trained.
    """

    summary: Mapping[str, Any]
    failure: str = ""


class Process(Protocol):
    """A run that was started: :class:`ablate.run_process.RunProcess` is one."""

    @property
    def sentinel(self) -> int | None:
        """Ready when it has ended, for ``multiprocessing.connection.wait``; ``None``: nothing tells."""

    def status(self, wait_s: float = 0.0) -> int | None:
        """Its exit status, or minus the signal that ended it; ``None``: it still runs after so many seconds."""

    def wait(self) -> int:
        """Its exit status, once it has ended."""

    def ask_to_end(self) -> None:
        """Let it save, and end."""

    def await_end(self) -> None:
        """Wait until it has ended."""


class Program(abc.ABC):
    """A program whose runs are compared.

    Args:
        plan: Of the experiment.
    """

    promises: ClassVar[Promises] = Promises()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def tree(self) -> Path:
        """The folder that the code of its runs is read from: a copy that was made when the plan was frozen."""
        return self.plan.out / CODE

    @property
    def measures(self) -> bool:
        """Whether time and memory of a step can be measured apart from the runs."""
        return self.promises.measured_cost

    @abc.abstractmethod
    def start(self, run: Run, slot: Slot) -> Process:
        """Start a run."""

    @abc.abstractmethod
    def result(self, folder: Path) -> Ended | None:
        """The result of the run of a folder; ``None``: it has not ended."""

    def can_resume(self, folder: Path) -> bool:
        """Whether the run of a folder, which was interrupted, has saved what it continues from."""
        return False

    def curves(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        """Losses during a run, by their names: (step, value). Reading them may take a while."""
        return {}

    def windows(self, folder: Path) -> Mapping[str, Any] | None:
        """The sums of blocks of validation windows at a run's end, as ``statistics.windows`` takes them."""
        return None

    def problem(self, results: Mapping[RunKey, Any]) -> str:
        """Why results show that a comparison would say nothing; empty if they do not.

        Args:
            results: Of the runs that have ended (``results.Result``).
        """
        return ""

    def warm_up(self) -> None:
        """Begin what the first run would wait for."""
        return

    def keep_record(self) -> None:
        """Write what a reader wants to see of the variants, once the plan is frozen."""
        return

    def tidy(self) -> None:
        """Remove what no run needs any more, once the experiment has ended."""
        return

    def in_order(self, needed: Sequence[RunKey]) -> Sequence[RunKey]:
        """The runs that are needed, in the order in which they start."""
        return needed

    def notes(self, results: Mapping[RunKey, Any]) -> list[str]:
        """Lines that a reader of the report needs about the runs."""
        return []

    def start_measuring(self, log: Path) -> Process | None:
        """Start measuring time and memory of each variant's step, into ``cost.json``; ``None``: it cannot."""
        return None

    def run(self, key: RunKey) -> Run:
        """A run of the plan."""
        plan = self.plan
        folder = plan.run_dir(key).resolve()
        return Run(key, plan.config(key.name), plan.options(key.name), folder, log_of(plan, key))


def log_of(plan: Plan, key: RunKey) -> Path:
    """The output of a run."""
    return plan.out / LOGS / f"{key}.txt"
