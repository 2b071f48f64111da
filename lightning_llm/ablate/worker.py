"""A worker: takes the next run that nobody has, trains it with ``fit`` in a process of its own, until none is left.

Any number of workers, on any number of hosts that share the folder, do each run once. A run that was interrupted is
resumed from its last checkpoint. The fits use the snapshot of the code. No torch: only the fits import it, and the
workers that fork them (``ablate.fork``).
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lightning_llm.ablate import claims
from lightning_llm.ablate.child import Child, last_line
from lightning_llm.ablate.fork import can_fork, environment_of_worker
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import Result, losses_of, results_of
from lightning_llm.ablate.reuse import link
from lightning_llm.io.atomic import remove_path
from lightning_llm.runs.directory import CHECKPOINTS
from lightning_llm.runs.lock import is_locked

POLL_S = 0.5
LOGS = "logs"
MOST_KILLS = 5  # of one run by a signal, in a row, before a worker gives up
ENDED_BY_SIGNAL = (129, 130, 143)


class Stopped(Exception):
    """The process that started this worker has ended."""


def work(out: Path, *, parent: int | None = None, say: Callable[[str], object] = print) -> None:
    """Take runs until none is needed.

    Args:
        out: The folder of the experiment.
        parent: The process to end with.
        say: Called with a line for each run.

    Raises:
        ValueError: A run failed, with the last line of its log; or pairs are none.
    """
    plan = Plan.read(out)
    results: dict[RunKey, Result] = {}
    kills: dict[RunKey, int] = {}
    while True:
        results = results_of(plan, results)
        state = plan.state(losses_of(results))
        if not state.needed:
            return
        if not any(_try(plan, run, results, kills, parent, say) for run in state.needed):
            _check_parent(parent)
            time.sleep(POLL_S)


def _try(
    plan: Plan,
    run: RunKey,
    results: Mapping[RunKey, Result],
    kills: dict[RunKey, int],
    parent: int | None,
    say: Callable[[str], object],
) -> bool:
    """Train a run if nobody has it. False: somebody has."""
    if is_locked(plan.run_dir(run)):  # a fit whose worker was killed still trains there
        return False
    plan.refuse_gone()  # a claim would make its folder again
    claim = claims.take(plan.out, str(run))
    if claim is None:
        return False
    try:
        Plan.read(plan.out)  # edited since this worker began?
        # another worker may have begun or ended it just now
        if is_locked(plan.run_dir(run)) or run in results_of(plan, results):
            return False
        if link(plan, run):
            say(f"{run}: from {plan.reused['runs'][str(run)]}")
            return True
        say(f"{run}: {'resuming' if _has_checkpoint(plan.run_dir(run)) else 'starting'}")
        status = _fit(plan, run, claim, parent)
    finally:
        claim.give_up()
        if plan.is_gone():
            _remove_rest(plan, run)
    plan.refuse_gone()
    if status is None or (status and is_locked(plan.run_dir(run))):
        return False
    if run in results_of(plan, results):
        return True
    if status == 0 and not plan.run_dir(run).exists():  # one that was killed may not have made it yet
        raise ValueError(f"{run}: its folder is gone: the same command again trains it from the start")
    kills[run] = kills.get(run, 0) + 1
    if status < 0 or status in ENDED_BY_SIGNAL:
        if kills[run] < MOST_KILLS:
            return True
        raise ValueError(f"{run} was ended by signal {abs(status) % 128} {MOST_KILLS} times: see {_log(plan, run)}")
    raise ValueError(f"{run} failed: {last_line(_log(plan, run))}; see {_log(plan, run)}")


def _fit(plan: Plan, run: RunKey, claim: claims.Claim, parent: int | None) -> int | None:
    """The exit status of a fit; ``None``: another worker has taken the run."""
    folder = plan.run_dir(run).resolve()
    arguments = [f"--config={plan.config(run.name)}", f"--seed_everything={run.seed}", f"--data.seed={run.seed}"]
    arguments += [*plan.options(run.name), f"--trainer.run_dir={folder}"]
    if _has_checkpoint(folder):
        arguments.append("--ckpt_path=last")
    else:  # killed before its first checkpoint: a new run needs a new folder
        remove_path(folder)
    settings = {"environment": environment(plan), "folder": plan.content["folder"], "forks": can_fork(plan)}
    with Child(plan.out, ["fit", *arguments], log=_log(plan, run), **settings) as child:
        while (status := child.status(POLL_S)) is None:
            if plan.is_gone() or not claim.renew():
                return None
            _check_parent(parent)
    return status


def _remove_rest(plan: Plan, run: RunKey) -> None:
    """Remove what a fit has written after somebody deleted the folder of the experiment."""
    folder = plan.run_dir(run)
    with suppress(OSError):
        remove_path(folder)
    for parent in (folder.parent, plan.out / LOGS, plan.out / claims.CLAIMS, plan.out):
        with suppress(OSError):  # another run's rest is in it
            parent.rmdir()


def environment(plan: Plan) -> dict[str, str]:
    """Of a fit: that of its worker without a trace of SLURM, which belongs to the worker alone.

    Otherwise Lightning in each fit would take the job's signals for its own, and queue the job a second time.
    """
    return {name: value for name, value in environment_of_worker(plan).items() if not name.startswith("SLURM_")}


def _check_parent(parent: int | None) -> None:
    if parent is not None and os.getppid() != parent:
        raise Stopped


def _has_checkpoint(folder: Path) -> bool:
    return any(not path.name.startswith(".") for path in (folder / CHECKPOINTS).glob("*.ckpt"))


def _log(plan: Plan, run: RunKey) -> Path:
    return plan.out / LOGS / f"{run}.txt"
