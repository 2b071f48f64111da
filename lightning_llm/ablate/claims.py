"""Claims of workers on runs: files that only one process can create, on any file system, with a heartbeat.

A claim on a run is the file ``claims/RUN.N``, created with ``O_EXCL``. Its holder renews the file's time; a claim that
was not renewed for ``STALE_S`` is stale, and whoever creates ``claims/RUN.N+1`` has the run. Of several workers that
find a claim stale only one can, and no claim is ever deleted or renamed: a worker that was slow to decide cannot take
away a younger claim. A claim is given up by setting its time to 0.

Ages are judged by the file system's own clock: hosts' clocks differ. No locks are used: shared file systems lack them.
"""

import os
import re
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_llm.io.processes import is_alive
from lightning_llm.io.untrusted import read_text

STALE_S = 60.0
RENEW_S = 5.0
CLAIMS = "claims"
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # of a claim or process


class Claim:
    """A run that this process has. Made by :func:`take`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._renewed = time.monotonic()

    def renew(self) -> bool:
        """Renew it if it is time. False: another worker has the run now, since this one was found stale."""
        if time.monotonic() - self._renewed >= RENEW_S:
            os.utime(self.path)
            self._renewed = time.monotonic()
        return not _successor(self.path).exists()

    def give_up(self) -> None:
        """Others may take the run at once."""
        with suppress(OSError):
            os.utime(self.path, (0, 0))


def take(folder: Path, run: str) -> Claim | None:
    """A claim on a run, or ``None`` if another worker has it.

    Args:
        folder: Of the experiment.
        run: Its name.
    """
    newest = _newest(folder).get(run)
    if newest is not None and not _is_stale(newest):
        return None
    path = folder / CLAIMS / f"{run}.0" if newest is None else _successor(newest)
    path.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{os.getpid()} {_process_scope()}\n")
        return Claim(path)
    return None


def claimed(folder: Path, runs: Iterable[str]) -> list[str]:
    """The runs, of some, that a worker has now."""
    newest = _newest(folder)
    return [run for run in runs if run in newest and not _is_stale(newest[run])]


def _newest(folder: Path) -> dict[str, Path]:
    """The newest claim on each run."""
    numbers = dict[str, int]()
    for run, _, number in (path.name.rpartition(".") for path in (folder / CLAIMS).glob("*")):
        if _NUMBER.fullmatch(number):
            numbers[run] = max(int(number), numbers.get(run, 0))
    return {run: folder / CLAIMS / f"{run}.{number}" for run, number in numbers.items()}


def _successor(claim: Path) -> Path:
    start, _, number = claim.name.rpartition(".")
    return claim.with_name(f"{start}.{int(number) + 1}")


def _is_stale(claim: Path) -> bool:
    """Whether its holder has ended (if that can be seen from here), or has not renewed it for long."""
    renewed = claim.stat().st_mtime
    if not renewed:
        return True
    pid, _, scope = read_text(claim, 1 << 10).strip().partition(" ")
    if scope == _process_scope() and _NUMBER.fullmatch(pid) and not is_alive(int(pid)):
        return True
    return _file_system_time(claim.parent) - renewed > STALE_S


def _file_system_time(folder: Path) -> float:
    """Now, by the clock that the times of files come from."""
    with tempfile.TemporaryFile(dir=folder) as probe:  # no name of its own: process numbers repeat on other hosts
        return os.fstat(probe.fileno()).st_mtime


def _process_scope() -> str:
    """Where a process number means one process: the host since its last start, and its namespace of processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        start = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        namespace = start = ""
    return f"{socket.gethostname()} {start} {namespace}".rstrip()
