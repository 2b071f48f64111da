"""Runs as copies of a worker that has imported torch once.

The import of torch and Lightning takes 6 s of CPU time, and a run of 100 steps of a small model 1.1 s. A worker of
one-thread runs on a CPU therefore imports once, and forks a child for each run, which executes the snapshot's main file
as ``python`` would. The child's leaks and crashes end with it. A process with CUDA or several threads cannot be copied:
it starts a new process for each run.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_llm.ablate.plan import CODE, MAIN, Plan
from lightning_llm.io.processes import ENDING
from lightning_llm.runs.code import PACKAGE

TASKS = Path("/proc/self/task")  # the threads of this process, on Linux


def forks_runs(plan: Plan) -> bool:
    """Whether the runs of a plan can be copies of a worker."""
    return plan.content["threads"] == 1 and plan.content["accelerator"] == "cpu" and TASKS.is_dir()


def is_prepared(plan: Plan) -> bool:
    """Whether this process executes the snapshot of the plan's code, with the plan's number of threads."""
    is_snapshot = PACKAGE.parent.resolve() == (plan.out / CODE).resolve()
    return is_snapshot and os.environ.items() >= threads_of(plan).items()


def can_fork(plan: Plan) -> bool:
    """Whether runs can be copies of this process, as it is now."""
    return forks_runs(plan) and is_prepared(plan) and len(list(TASKS.iterdir())) == 1


def threads_of(plan: Plan) -> dict[str, str]:
    """What the environment says about threads, for NumPy and torch, which read it when they are imported."""
    return {"OMP_NUM_THREADS": str(plan.content["threads"])}


def environment_of_worker(plan: Plan) -> dict[str, str]:
    """This process's environment with the plan's number of threads."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    return {**others, **threads_of(plan)}


class Fork:
    """A copy of this process that runs a command of the snapshot; to be used as a ``subprocess.Popen``.

    Args:
        main: The snapshot's main file.
        arguments: Of ``lightning-llm``.
        output: The number of the file that takes its output.
        environment: Its environment.
        folder: Where it runs.
    """

    def __init__(
        self, main: Path, arguments: Sequence[str], output: int, environment: Mapping[str, str], folder: str
    ) -> None:
        self._process = multiprocessing.get_context("fork").Process(
            target=_execute, args=(main, arguments, output, environment, folder)
        )
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until the child has handlers of its own
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self.pid = int(self._process.pid or 0)

    def poll(self) -> int | None:
        """The exit status, or minus the signal that ended it; ``None``: it still runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The same at its end.

        Raises:
            TimeoutExpired: It still runs after this many seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(MAIN, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _execute(main: Path, arguments: Sequence[str], output: int, environment: Mapping[str, str], folder: str) -> None:
    """What ``python MAIN ARGUMENTS`` does in a session, folder and environment of its own."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((null, output, output)):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    sys.argv = [str(main), *arguments]
    atexit._clear()  # the worker's
    try:
        runpy.run_path(str(main), run_name="__main__")
    finally:
        if sys.version_info < (3, 13):  # from then on, multiprocessing does it
            atexit._run_exitfuncs()
