"""Trains the runs that an experiment needs, each once, until none is needed.

Any number of runners, on any number of hosts that share the folder, do each run once (``ablate.claims``). A run that
was interrupted is continued if its program can do that. How a run starts, and where its result is, its program knows.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from lightning_llm.ablate import claims
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import LOGS, RUNS, Plan
from lightning_llm.ablate.program import Process, log_of
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.results import Result, losses_of, results_of
from lightning_llm.ablate.reuse import link
from lightning_llm.ablate.run_process import last_line, wait_for_one
from lightning_llm.ablate.slots import Slot
from lightning_llm.io.atomic import remove_path
from lightning_llm.runs.lock import is_locked

POLL_S = 0.5  # other runners may have ended a run
RUNNER = "runner.txt"  # among the logs: which runs were started
MOST_KILLS = 5  # of one run by a signal, in a row, before the runner gives up
ENDED_BY_SIGNAL = (129, 130, 143)
Results = Mapping[RunKey, Result]


class Running(NamedTuple):
    """A run that trains here."""

    run: RunKey
    claim: claims.Claim
    process: Process


class Runner:
    """Trains runs of an experiment in the slots of this machine.

    Args:
        plan: Of the experiment.
        slots: As of ``slots_for``.
        log: Called with a line for each run that starts.
    """

    def __init__(self, plan: Plan, slots: Sequence[Slot], log: Callable[[str], object] = lambda line: None) -> None:
        self._plan = plan
        self._program = program_of(plan)
        self._slots = slots
        self._log = log
        self._running: dict[int, Running] = {}  # by the number of the slot
        self._begun: set[RunKey] = set()  # without a result so far
        self._results: Results = {}
        self._kills = Counter[RunKey]()

    def run(
        self, show: Callable[[Results], object] = lambda results: None, until: Callable[[Results], bool] | None = None
    ) -> None:
        """Train until no run is needed. What still trains when this ends is asked to save, and to end.

        Args:
            show: Called with the runs that have ended, whenever that is looked at.
            until: By these runs, whether to stop before.

        Raises:
            ValueError: A run failed, with the last line of its log; pairs are none; or the experiment is gone.
        """
        try:
            while True:
                self._plan.refuse_gone()
                self._results = results_of(self._plan, self._results)
                show(self._results)
                needed = self._program.in_order(self._plan.state(losses_of(self._results)).needed)
                if (not needed and not self._running) or (until is not None and until(self._results)):
                    return
                if not self._fill_slots(needed):
                    self._wait()
        finally:
            self._stop()
            if self._plan.is_gone():
                self._remove_rest()

    def _fill_slots(self, needed: Sequence[RunKey]) -> bool:
        """Start the first runs that nobody has. Whether one was taken from another experiment: less may be needed."""
        trains_here = {running.run for running in self._running.values()}
        left = [run for run in needed if run not in trains_here]
        for number, slot in enumerate(self._slots):
            while number not in self._running and left:
                run = left.pop(0)
                claim = self._claim(run)
                if claim is None:
                    continue
                if link(self._plan, run):
                    claim.give_up()
                    self._log(f"{run}: from {self._plan.record.reused.runs[str(run)]}")
                    return True
                self._begun.add(run)
                try:
                    process = self._start(run, slot)
                except BaseException:
                    claim.give_up()
                    raise
                self._running[number] = Running(run, claim, process)
        return False

    def _claim(self, run: RunKey) -> claims.Claim | None:
        """A claim on a run; ``None``: somebody has it, or has just ended it."""
        folder = self._plan.run_dir(run)
        if is_locked(folder):  # its runner was killed, and it still trains
            return None
        claim = claims.take(self._plan.out, str(run))
        if claim is not None and (is_locked(folder) or run in results_of(self._plan, self._results)):
            claim.give_up()
            return None
        return claim

    def _start(self, key: RunKey, slot: Slot) -> Process:
        run = self._program.run(key)
        resumes = self._program.promises.resumes and self._program.can_resume(run.folder)
        self._log(f"{key}: {'resuming' if resumes else 'starting'}")
        if not resumes:  # killed before it saved anything: a new run needs a new folder
            remove_path(run.folder)
        return self._program.start(run, slot)

    def _wait(self) -> None:
        """Wait until a run has ended, or for a moment."""
        if not self._running:
            time.sleep(POLL_S)  # others train what is needed
            return
        wait_for_one([running.process for running in self._running.values()], POLL_S)
        for number, (run, claim, process) in list(self._running.items()):
            if (status := process.status()) is not None:
                del self._running[number]
                claim.give_up()
                self._take_result(run, status)
            elif not claim.renew():  # this runner was found stale, and another one has the run
                del self._running[number]
                process.ask_to_end()
                process.await_end()

    def _take_result(self, run: RunKey, status: int) -> None:
        """Look at a run whose process has ended.

        Raises:
            ValueError: It failed.
        """
        plan = self._plan
        log = log_of(self._plan, run)
        plan.refuse_gone()
        if status and is_locked(plan.run_dir(run)):  # another process trains it
            return
        self._results = results_of(plan, self._results)
        if run in self._results:
            self._begun.discard(run)
            return
        if status == 0 and not plan.run_dir(run).exists():  # one that was killed may not have made it yet
            raise ValueError(f"{run}: its folder is gone: the same command again trains it from the start")
        self._kills[run] += 1
        if not (status < 0 or status in ENDED_BY_SIGNAL):
            raise ValueError(f"{run} failed: {last_line(log)}; see {log}")
        if self._kills[run] >= MOST_KILLS:
            raise ValueError(f"{run} was ended by signal {abs(status) % 128} {MOST_KILLS} times: see {log}")

    def _stop(self) -> None:
        for running in self._running.values():
            running.process.ask_to_end()
        for running in self._running.values():
            running.process.await_end()
            running.claim.give_up()

    def _remove_rest(self) -> None:
        """Remove what runs have written after somebody deleted the folder of the experiment."""
        out = self._plan.out
        for folder in map(self._plan.run_dir, self._begun):
            with suppress(OSError):
                remove_path(folder)
        for parent in (out / RUNS, out / LOGS, out / claims.CLAIMS, out):
            with suppress(OSError):  # something else is in it
                parent.rmdir()
