"""Workers as an array of SLURM jobs, by ``submitit`` (the extra ``slurm``).

A job holds the path of the experiment and nothing else: what is done and what is needed is in the folder. When SLURM
takes a job's time away, ``submitit`` gets its signal: the worker stops, its run saves, and the job is queued again.
Nobody else queues it: the runs do not see that they are in a job (``run_process.environment_of_run``).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning_llm.ablate.plan import Plan
from lightning_llm.io.untrusted import file_name

FOLDER = "slurm"
MOST_TIMEOUTS = 10_000  # of a job: each is queued again
TIME = 60  # minutes: partitions have limits, and a job that has timed out is queued again
IGNORED = (signal.SIGUSR1, signal.SIGUSR2)


class WorkerJob:
    """A job of the array.

    Args:
        out: The folder of the experiment.
    """

    def __init__(self, out: str) -> None:
        self.out = out

    def __call__(self) -> None:
        """Work until nothing is needed.

        Raises:
            RuntimeError: The worker failed.
        """
        # SLURM sends its signal to all processes of the job: the worker hears of it from this one alone
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "lightning_llm", "ablate", "work", self.out],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_ignore_signals,
        )
        if status := self._worker.wait():
            raise RuntimeError(f"lightning-llm ablate work {self.out} ended with status {status}")

    def checkpoint(self) -> Any:
        """Stop the worker; what ``submitit`` queues again is the same path."""
        from submitit.helpers import DelayedSubmission

        self._worker.send_signal(signal.SIGTERM)
        with suppress(ChildProcessError):  # this interrupts the other wait, which holds the lock of Popen.wait
            os.waitid(os.P_PID, self._worker.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(WorkerJob(self.out))


def submit(plan: Plan, workers: int, settings: Sequence[str]) -> list[str]:
    """Submit an array of workers; returns the numbers of the jobs.

    Args:
        plan: Of the experiment.
        workers: How many.
        settings: ``KEY=VALUE`` for ``submitit``'s SlurmExecutor, such as ``partition=gpu`` or ``time=600`` (minutes).

    Raises:
        ValueError: ``submitit`` or SLURM is missing, or a setting is wrong.
    """
    try:
        from submitit import SlurmExecutor
    except ImportError as error:
        raise ValueError('--slurm needs submitit: python -m pip install "submitit>=1.5"') from error
    pairs = [setting.partition("=") for setting in settings]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ValueError(f"--slurm {wrong[0]} must be KEY=VALUE, such as partition=gpu")
    values: Mapping[str, Any] = {name: int(value) if value.isdecimal() else value for name, _, value in pairs}
    try:
        executor = SlurmExecutor(folder=plan.out.resolve() / FOLDER, max_num_timeout=MOST_TIMEOUTS)
        resources = {"array_parallelism": workers, "cpus_per_task": plan.record.threads, "time": TIME}
        executor.update_parameters(job_name=file_name(plan.experiment.name), **{**resources, **values})
        with executor.batch():
            jobs = [executor.submit(WorkerJob(str(plan.out.resolve()))) for _ in range(workers)]
    except Exception as error:  # of submitit: no srun, a wrong parameter, what sbatch says
        raise ValueError(f"--slurm: {' '.join(str(error).split())[:500]}") from error
    return [str(job.job_id) for job in jobs]


def _ignore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
