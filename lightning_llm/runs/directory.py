"""The folder of a run: its name, its lock, and ``status.json``. Needs no torch.

Each run has its own folder, ``<root>/<experiment>/version_<n>`` or one that its user names, whatever its loggers are.
The first process of a run claims it by creating it, which only one of several processes can do, and holds its lock
while the run lasts. The other processes are told its name (``Trainer.run_dir``).

The lock is the kernel's (``fcntl``, POSIX record locks): it ends with the process that holds it, even by SIGKILL, so
nothing has to be cleaned up. Neither forked data workers nor programs that the process starts hold it. It would also
end if the process opened and closed the file elsewhere: ``is_locked`` opens it only where this process has no lock.
"""

import dataclasses
import errno
import fcntl
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_llm.io import untrusted
from lightning_llm.io.atomic import write_json, write_text
from lightning_llm.io.untrusted import NUMBER, TEXT, list_of, maybe, read_json, read_text, rule, some, validate, whole

EXPERIMENT = "run"  # without a name
CHECKPOINTS, TURN = "checkpoints", "turn"
PREFIX = "version_"

LOCK = "lock"
WAIT_S = 5.0  # a requeued job may start while the previous process is still ending
POLL_S = 0.1
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

CONFIG, STATUS, SUMMARY, WINDOWS = "config.yaml", "status.json", "summary.json", "windows.json"
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
DIVERGED = "diverged"  # failed by a loss, gradient or weight that is NaN or infinite
ENDED_EARLY = (INTERRUPTED, FAILED, DIVERGED)
KILLED = "killed"  # in words only: a killed process writes no status
_STATUS = some(
    {"status": TEXT},
    {"step": whole(), "val_loss": maybe(NUMBER), "reason": TEXT, "host": TEXT, "process": maybe(whole(1, 1 << 30))},
)

_BOOL = rule("true or false", lambda value: isinstance(value, bool))
_TEXTS = rule("texts by name", lambda value: _are_texts(value, ".*"))
_BY_STEP = rule("texts by step", lambda value: _are_texts(value, "[0-9]{1,15}"))

_held: set[Path] = set()  # by this process, to which the kernel would give a lock twice


class RunDirectory:
    """A run's folder: the next free one, or that of a resumed run.

    Args:
        root: Folder that holds the folders of all runs.
        experiment: Folder in it, for runs of one kind; ``None``: ``run``, unless it is set later.
        version: The wanted name in it; if that is taken, or ``None``: the next free ``version_<n>``.

    Raises:
        ValueError: ``experiment`` or ``version`` points outside ``root``.
    """

    def __init__(self, root: str | Path, experiment: str | None = None, version: str | None = None) -> None:
        for name in (Path(experiment or ""), Path(version or "")):
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"run directory {name} points outside {root}: give the name of a folder in it")
        self.root, self.experiment, self._version = Path(root).expanduser(), experiment, version
        self._path: Path | None = None
        self._named: Path | None = None
        self._lock: RunLock | None = None

    @property
    def path(self) -> Path:
        """The folder, which the first process creates on first use; other processes guess it until they are told."""
        if self._path is None:
            parent = self.root / (EXPERIMENT if self.experiment is None else self.experiment)
            if not is_first_process():
                return self._named or parent / f"{PREFIX}{next_number(parent)}"
            if self._named is not None:
                self._path = _made(self._named)
                return self._path
            try:
                self._path = claim(parent, self._version)
            except OSError as error:
                problem = f"cannot create a run directory in {parent} ({error.strerror}): give another folder"
                raise ValueError(f"trainer.default_root_dir {self.root}: {problem}") from error
        return self._path

    @property
    def is_open(self) -> bool:
        """Whether this process may write to it."""
        return self._lock is not None

    def name(self, path: Path) -> None:
        """Use exactly this folder, which must not exist yet."""
        self._named = path.expanduser()

    def take(self, path: Path) -> None:
        """Use a folder that exists."""
        self._path = path

    def prefer(self, path: Path) -> None:
        """If no folder is claimed yet, try this one first, then others in the same parent."""
        if self._path is None and self._named is None:
            self.root, self.experiment, self._version = path.parent.parent, path.parent.name, path.name

    def open(self) -> None:
        """In the first process: claim the folder, lock it, and give this start the next sequence number.

        Raises:
            ValueError: Another process writes to it, or it has links that lead elsewhere.
        """
        if not self.is_open and is_first_process():
            untrusted.check_links(self.path, replaced=".ckpt")
            self._lock = RunLock(self.path).acquire()
            take_turn(self.path)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __getstate__(self) -> dict[str, Any]:
        """For spawned processes: the lock stays with this process."""
        return {**self.__dict__, "_lock": None}


def run_dir_of(trainer: Any) -> Path | None:
    """The folder for the files of a run; ``None``: nowhere, as under ``fast_dev_run``. Every process must ask.

    Args:
        trainer: This project's, or Lightning's, which has no run directory: then the folder it logs to.
    """
    if hasattr(trainer, "run_dir"):
        found: Path | None = trainer.run_dir
        return found
    return None if trainer.fast_dev_run else Path(trainer.log_dir or trainer.default_root_dir)


def is_first_process() -> bool:
    """Whether this is rank 0, as launchers report it before any process group exists."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only  # slow, and not needed to look for runs

    return getattr(rank_zero_only, "rank", 0) == 0


def claim(parent: Path, wanted: str | None = None) -> Path:
    """Create a new folder in ``parent`` for this process alone: ``wanted``, or the next ``version_<n>``."""
    parent.mkdir(parents=True, exist_ok=True)
    numbered = (f"{PREFIX}{number}" for number in itertools.count(next_number(parent)))
    while True:
        folder = parent / (wanted or next(numbered))
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        wanted = None


def _made(folder: Path) -> Path:
    """Create the folder that ``trainer.run_dir`` names."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        advice = "add --ckpt_path last to resume the run in it, or give another folder"
        raise ValueError(f"trainer.run_dir {folder} exists: {advice}") from error
    except OSError as error:
        raise ValueError(
            f"trainer.run_dir {folder} cannot be created ({error.strerror}): give another folder"
        ) from error
    return folder


def next_number(parent: Path) -> int:
    """One more than the highest ``version_<n>`` in a folder."""
    numbers = (untrusted.number_in(path.name.removeprefix(PREFIX)) for path in parent.glob(f"{PREFIX}*"))
    return 1 + max((number for number in numbers if number is not None), default=-1)


def take_turn(run: Path) -> None:
    """Give a run a sequence number above those of the other runs in the same parent."""
    turn = 1 + max((turn_of(other) for other in run.parent.iterdir()), default=0)
    write_text(run / TURN, f"{turn}\n")


def turn_of(run: Path) -> int:
    """The sequence number of a run's last start; 0 if it has none."""
    try:
        return int(read_text(run / TURN, 20))
    except (OSError, ValueError):
        return 0


# ---- lock


class RunLock:
    """The right to write to a folder. The file ``lock`` in it names the process that has it, or had it last.

    Args:
        folder: A folder that exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder.resolve() / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> "RunLock":
        """Take the lock; wait a few seconds for a process that is ending. On a file system without locks, warn.

        Raises:
            ValueError: Another process has it, or this one elsewhere; or ``lock`` is a link, a FIFO or no file.
            OSError: The folder cannot be written to.
        """
        holder = f"{os.getpid()} {socket.gethostname()}"
        if self._file in _held:
            raise ValueError(self._refusal(holder))
        descriptor = untrusted.descriptor_of(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            self._wait_for(descriptor)
        except BaseException as error:
            os.close(descriptor)
            if not isinstance(error, OSError) or error.errno not in NO_LOCKS:
                raise
            words = f"{self.folder} is on a file system without locks ({error.strerror}): "
            print(f"{words}a second run could write there too", file=sys.stderr)
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
        deadline = time.monotonic() + WAIT_S
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
        who = f"process {pid} on {host}" if untrusted.number_in(pid) and host else "another process"
        advice = "wait until it has ended, or stop it; without ckpt_path, a run gets a folder of its own"
        return f"{who} trains in {self.folder}: {advice}"


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of a folder; ``None``: it cannot be found out."""
    file = folder.resolve() / LOCK
    if file in _held:
        return True
    try:
        descriptor = untrusted.descriptor_of(file, os.O_RDONLY | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        return False if isinstance(error, FileNotFoundError) else None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return True if isinstance(error, BlockingIOError | PermissionError) else None
    finally:
        os.close(descriptor)


# ---- status


@dataclasses.dataclass(frozen=True)
class RunState:
    """How a run ended, or that it still trains.

    Attributes:
        words: ``finished``, or what :func:`unfinished` begins with.
        has_ended: Whether no process can be training, as far as its status tells.
        step: The last optimizer step that is known; ``None``: none.
        val_loss: Of the last validation that the status has, in nats per token.
    """

    words: str
    has_ended: bool
    step: int | None
    val_loss: float | None


def write_status(run: Path, status: str, *, step: int, val_loss: float | None = None, reason: str = "") -> None:
    """Record the status of a run. A killed run keeps the status of its last validation.

    Args:
        run: Its directory.
        status: One of the five above.
        step: Finished optimizer steps.
        val_loss: Of the last validation, in nats per token.
        reason: Why it ended, in one line.
    """
    facts = {"status": status, "step": step, "val_loss": val_loss, **({"reason": reason} if reason else {})}
    write_json(run / STATUS, {**facts, "host": socket.gethostname(), "process": os.getpid()})


def unfinished(run: Path) -> str | None:
    """The status of a run without a result, in words; ``None`` if it has finished."""
    state = state_of(run)
    if state.words == FINISHED:
        return None
    words = state.words + ("; no checkpoint" if state.step is None else f"; step {state.step}")
    return words + ("" if state.val_loss is None else f", last validation loss {state.val_loss:.4f}")


def state_of(run: Path) -> RunState:
    """What ``status.json`` and the names of the other files say about a run."""
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = read_json(run / STATUS)
        validate(content, _STATUS, run / STATUS)
        facts = content
    is_finished = (run / SUMMARY).is_file() and facts.get("status") in (None, FINISHED)
    words = FINISHED if is_finished else _how_it_ended(facts)
    steps = [int(found[1]) for path in run.glob("checkpoints/step-*.ckpt") if (found := re.search(r"(\d+)", path.name))]
    steps += [facts["step"]] if "step" in facts else []
    has_ended = words in (FINISHED, KILLED) or facts.get("status") in ENDED_EARLY
    return RunState(words, has_ended, max(steps, default=None), facts.get("val_loss"))


def _how_it_ended(facts: dict[str, Any]) -> str:
    status, reason = facts.get("status"), facts.get("reason")
    if status in ENDED_EARLY:
        return f"{status} ({reason})" if reason else str(status)
    if status != RUNNING:
        return "has not ended yet, or was killed"
    if facts.get("host") != socket.gethostname():
        return f"still trains on {facts.get('host')}, or was killed"
    return "still trains" if _is_alive(facts.get("process")) else KILLED


def _is_alive(process: int | None) -> bool:
    if process is None:
        return False
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _are_texts(value: Any, names: str) -> bool:
    texts = value.items() if isinstance(value, dict) else [("", None)]
    return all(isinstance(each, str) and re.fullmatch(names, name, re.DOTALL) for name, each in texts)


def read_summary(run: Path, measured: Iterable[str]) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        run: The run's directory.
        measured: Fields that are numbers, or null if they were not measured.

    Raises:
        ValueError: It is damaged.
        OSError: It cannot be read.
    """
    fields = {**dict.fromkeys(measured, maybe(NUMBER)), "threads": maybe(whole()), "changed_on_resume": list_of(TEXT)}
    fields |= dict.fromkeys(("precision", "device", "torch", "numpy", "package"), maybe(TEXT))
    fields |= {"tf32": maybe(_BOOL), "initial_values": maybe(_TEXTS), "batches_at": maybe(_BY_STEP)}
    fields |= dict.fromkeys(("batches", "validation_batches"), maybe(TEXT))
    try:
        content = read_json(run / SUMMARY, nan_is_null=True)  # older ones contain Infinity
        validate(content, some({}, fields), run / SUMMARY)
    except ValueError as error:
        raise ValueError(f"{run / SUMMARY} is damaged: {error}") from error
    return content
