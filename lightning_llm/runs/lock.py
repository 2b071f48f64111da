"""The lock of a run's folder: only one process at a time writes there. Needs no torch.

The lock is the kernel's (``fcntl``, POSIX record locks): it ends with the process that holds it, even by SIGKILL, so
nothing has to be cleaned up. Neither forked data workers nor programs that the process starts hold it. It would also
end if the process opened and closed the file elsewhere: ``is_locked`` opens it only where this process has no lock.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from lightning_llm.io.untrusted import descriptor_of, number_in

LOCK = "lock"
WAIT_S = 5.0  # a requeued job may start while the previous process is still ending
POLL_S = 0.1
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_held: set[Path] = set()  # by this process, to which the kernel would give a lock twice


class RunLock:
    """The right to write to a folder. The file ``lock`` in it names the process that has it, or had it last.

    Args:
        folder: A folder that exists.
        wait_s: How long to wait for a process that has it; ``None``: a few seconds.
    """

    def __init__(self, folder: Path, wait_s: float | None = None) -> None:
        self.folder = folder
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._file = folder.resolve() / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> "RunLock":
        """Take the lock; wait for a process that has it. On a file system without locks, warn.

        Raises:
            ValueError: Another process has it, or this one elsewhere; or ``lock`` is a link, a FIFO or no file.
            OSError: The folder cannot be written to.
        """
        holder = f"{os.getpid()} {socket.gethostname()}"
        if self._file in _held:
            raise ValueError(self._refusal(holder))
        descriptor = descriptor_of(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            self._wait_for(descriptor)
        except BaseException as error:
            os.close(descriptor)
            if not isinstance(error, OSError) or error.errno not in NO_LOCKS:
                raise
            problem = f"{self.folder} is on a file system without locks ({error.strerror}): "
            print(f"{problem}a second run could write there too", file=sys.stderr)
            return self
        self._descriptor = descriptor
        _held.add(self._file)
        with suppress(OSError):  # a full disk: the name of the holder is not needed
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{holder}\n".encode())
        return self

    def release(self) -> None:
        """Give up the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self._file)

    def _wait_for(self, descriptor: int) -> None:
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() >= deadline:
                    raise ValueError(self._refusal(os.read(descriptor, 500).decode(errors="replace"))) from error
                time.sleep(POLL_S)

    def _refusal(self, holder: str) -> str:
        pid, _, host = holder.strip().partition(" ")
        who = f"process {pid} on {host}" if number_in(pid) and host else "another process"
        advice = "wait until it has ended, or stop it; without ckpt_path, a run gets a folder of its own"
        return f"{who} trains in {self.folder}: {advice}"


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of a folder; ``None``: it cannot be found out."""
    file = folder.resolve() / LOCK
    if file in _held:
        return True
    try:
        descriptor = descriptor_of(file, os.O_RDONLY | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        return False if isinstance(error, FileNotFoundError) else None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return True if isinstance(error, BlockingIOError | PermissionError) else None
    finally:
        os.close(descriptor)
