"""The supervisor of a run, seen from the runner that starts it (``command.supervise``). No torch."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lightning_llm.ablate.command.descendants import GRACE_S
from lightning_llm.ablate.command.supervise import Job
from lightning_llm.io.atomic import open_to_append
from lightning_llm.runs.code import PACKAGE

MODULE = "lightning_llm.ablate.command.supervise"


class SupervisedProcess:
    """A run whose supervisor was started.

    Args:
        job: What it runs.
    """

    def __init__(self, job: Job) -> None:
        log_path = Path(job.log)
        log_path.parent.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
        with open_to_append(log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=os.sep,  # python -m looks for modules in the current folder first: the user's may have such names
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it through the runner
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as file:  # it may have been killed: then closing fails too
            file.write(msgspec.json.encode(replace(job, parent=os.getpid())))
        self.pid = self._process.pid
        self._sentinel = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    @property
    def sentinel(self) -> int | None:
        """Ready when it has ended; ``None``: nothing tells."""
        return self._sentinel

    def status(self, wait_s: float = 0.0) -> int | None:
        """Its exit status, or minus the signal that ended it; ``None``: it still runs after so many seconds."""
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        if self._sentinel is not None:
            os.close(self._sentinel)
            self._sentinel = None
        return status

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        while (status := self.status(60.0)) is None:
            pass
        return status

    def ask_to_end(self) -> None:
        """Send SIGTERM: it ends the program."""
        if self.status() is None:
            self._process.send_signal(signal.SIGTERM)

    def await_end(self) -> None:
        """Wait until it has ended; it is killed if it has not long after the program was."""
        if self.status(6 * GRACE_S) is None:
            self._process.kill()
            self.wait()


def is_executable(word: str, folder: Path) -> bool:
    """Whether the first word of a command names a program."""
    return shutil.which(word) is not None or os.access(folder / word, os.X_OK)
