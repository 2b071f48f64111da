"""A process that runs the snapshot of an experiment's code: a worker, a fit, or a measurement. No torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lightning_llm.ablate.fork import Fork
from lightning_llm.ablate.plan import CODE, MAIN
from lightning_llm.io.atomic import open_to_append
from lightning_llm.io.untrusted import open_regular

SAVING_S = 600.0  # a fit that was asked to end saves a checkpoint first


class Child:
    """A command of the snapshot, in a session of its own: Ctrl-C reaches it through this process alone, once.

    At the end of a ``with`` block, it is ended.

    Args:
        out: The folder of the experiment.
        arguments: Of ``lightning-llm``.
        log: Its output is appended to this file; ``None``: it goes where this process's output goes.
        environment: Its environment; ``None``: that of this process.
        folder: Where it runs; ``None``: where this process does.
        ignored: Signals that it ignores from its start.
        forks: Whether it is a copy of this process, which then needs log, environment and folder.
    """

    def __init__(
        self,
        out: Path,
        arguments: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        ignored: Sequence[int] = (),
        forks: bool = False,
    ) -> None:
        if log is not None:
            log.parent.mkdir(exist_ok=True)
        log_file: Any = nullcontext() if log is None else open_to_append(log)
        main = (out / CODE / MAIN).resolve()
        self.process: subprocess.Popen[bytes] | Fork
        with log_file as output:
            if forks and environment is not None and folder is not None:
                self.process = Fork(main, arguments, output.fileno(), environment, folder)
                return
            self.process = subprocess.Popen(
                [sys.executable, str(main), *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(_ignore, ignored) if ignored else None,
            )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def status(self, wait_s: float | None = 0.0) -> int | None:
        """Its exit status, or minus the signal that killed it; ``None``: it still runs after this many seconds."""
        try:
            return self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self) -> None:
        """Send SIGTERM: a run saves first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, patience_s: float = SAVING_S) -> None:
        """Ask it to end, wait for that, and kill what has not ended by then."""
        self.ask_to_end()
        if self.status(patience_s) is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def last_line(log: Path) -> str:
    """The last line of an output."""
    with open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def _ignore(numbers: Sequence[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
