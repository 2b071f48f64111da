"""One process at a time writes to a run's folder.

The lock is the kernel's (``fcntl``, POSIX record locks): it ends with the process that holds it, however that ends, so
nothing is left to clear up after SIGKILL. It belongs to that process alone: neither workers forked for the data nor
programs it starts hold it. It ends, too, when the process closes the file by any other way: nothing else opens it.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

LOCK = "lock"
WAIT_S = 5.0  # a requeued job may start while the process before it still dies
POLL_S = 0.1
HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_held: set[Path] = set()  # by this process, which the kernel would give a lock twice


class RunLock:
    """The right to write to a folder. The file ``lock`` in it says which process has it, or had it last.

    Args:
        folder: A folder that exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder.resolve() / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; wait a few seconds for a process that is ending. Where there are no locks, say so and go on.

        Raises:
            ValueError: Another process has it, or this one elsewhere.
            OSError: The folder cannot be written to.
        """
        if self._file in _held:
            raise ValueError(self._refusal(f"{os.getpid()} {socket.gethostname()}"))
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            locked = self._wait_for(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if not locked:
            os.close(descriptor)
            return
        self._descriptor = descriptor
        _held.add(self._file)
        with suppress(OSError):  # a full disk: who holds it is only told, not needed
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Give it back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self._file)

    def _wait_for(self, descriptor: int) -> bool:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in NO_LOCKS:
                    print(
                        f"{self.folder} is on a file system without locks ({error.strerror}): "
                        "nothing keeps a second run from writing there",
                        file=sys.stderr,
                    )
                    return False
                if error.errno not in HELD_BY_OTHERS:
                    raise
                if time.monotonic() >= deadline:
                    raise ValueError(self._refusal(os.read(descriptor, 500).decode(errors="replace"))) from error
                time.sleep(POLL_S)
            else:
                return True

    def _refusal(self, holder: str) -> str:
        pid, _, host = holder.strip().partition(" ")
        who = f"process {pid} on {host}" if pid.isdigit() and host else "another process"
        return (
            f"{who} trains in {self.folder}: wait until it has ended, or stop it; "
            "without ckpt_path, a run gets a folder of its own"
        )
