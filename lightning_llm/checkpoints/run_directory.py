"""The folder of a run, ``<root>/<experiment>/version_<n>``: each run has its own, whatever its loggers are.

The first process of a run claims the folder by making it, which one of several can do only, and holds its lock while
the run lasts (``training.run_lock``). The other processes are told the name (``Trainer.run_dir``).
"""

from pathlib import Path
from typing import Any

from lightning_llm.checkpoints.run_lock import RunLock
from lightning_llm.io.untrusted import read_text

EXPERIMENT = "run"  # where nothing gives a name
CHECKPOINTS, TURN, EVENTS = "checkpoints", "turn", "events.out.tfevents."
PREFIX = "version_"


class RunDirectory:
    """A run's folder: the next free one, or that of a run that goes on.

    Args:
        root: Folder that holds the folders of all runs.
        experiment: Folder in it, for runs of one kind; ``None``: to be given, or ``run``.
        version: The name wanted in that; where it is taken, and ``None``: the next free ``version_<n>``.

    Raises:
        ValueError: ``experiment`` or ``version`` leads out of ``root``.
    """

    def __init__(self, root: str | Path, experiment: str | None = None, version: str | None = None) -> None:
        for name in (Path(experiment or ""), Path(version or "")):
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"run directory {name} leads out of {root}: give the name of a folder in it")
        self.root, self.experiment = Path(root).expanduser(), experiment
        self._version = version
        self._path: Path | None = None
        self._lock: RunLock | None = None

    @property
    def path(self) -> Path:
        """The folder, which the first process makes when it first asks; in others a guess, until they are told."""
        if self._path is None:
            parent = self.root / (EXPERIMENT if self.experiment is None else self.experiment)
            if not is_first_process():
                return parent / f"{PREFIX}{next_number(parent)}"
            try:
                self._path = claim(parent, self._version)
            except OSError as error:
                raise ValueError(
                    f"trainer.default_root_dir {self.root}: no run directory can be made in {parent} "
                    f"({error.strerror}): give another folder"
                ) from error
        return self._path

    @property
    def is_open(self) -> bool:
        """Whether this process may write to it."""
        return self._lock is not None

    def take(self, path: Path) -> None:
        """Go on in a folder that exists."""
        self._path = path

    def prefer(self, path: Path) -> None:
        """Where no folder is claimed yet: try this one first, then others beside it."""
        if self._path is None:
            self.root, self.experiment, self._version = path.parent.parent, path.parent.name, path.name

    def open(self) -> None:
        """In the first process: claim the folder, lock it, and note that of the runs beside it, it was started last.

        Raises:
            ValueError: Another process writes to it.
        """
        if self.is_open or not is_first_process():
            return
        lock = RunLock(self.path)
        lock.acquire()
        self._lock = lock
        take_turn(self.path)

    def close(self) -> None:
        """Let others write to it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __getstate__(self) -> dict[str, Any]:
        """For processes that are spawned: the lock is this process's own."""
        return {**self.__dict__, "_lock": None}


def run_dir_of(trainer: Any) -> Path | None:
    """Where the files of a run go; ``None``: nowhere, as under ``fast_dev_run``. Every process must ask.

    Args:
        trainer: This project's, or Lightning's, which has no run directory: then where it logs.
    """
    if hasattr(trainer, "run_dir"):
        found: Path | None = trainer.run_dir
        return found
    return None if trainer.fast_dev_run else Path(trainer.log_dir or trainer.default_root_dir)


def is_first_process() -> bool:
    """Whether this is rank 0, as launchers tell before any process group is there."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only  # whoever only looks for runs does not wait for it

    return getattr(rank_zero_only, "rank", 0) == 0


def claim(parent: Path, wanted: str | None = None) -> Path:
    """Make a new folder in ``parent``, which no other process has made: ``wanted``, or the next ``version_<n>``."""
    parent.mkdir(parents=True, exist_ok=True)
    number = next_number(parent)
    while True:
        folder = parent / (wanted or f"{PREFIX}{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 0 if wanted else 1
            wanted = None
        else:
            return folder


def next_number(parent: Path) -> int:
    """One more than the highest ``version_<n>`` in a folder."""
    names = [path.name.removeprefix(PREFIX) for path in parent.glob(f"{PREFIX}*")]
    return 1 + max((int(name) for name in names if name.isdigit()), default=-1)


def take_turn(run: Path) -> None:
    """Note that this run, of those beside it, was started last."""
    turn = 1 + max((turn_of(other) for other in run.parent.iterdir()), default=0)
    (run / TURN).write_text(f"{turn}\n", encoding="utf-8")


def turn_of(run: Path) -> int:
    """See :func:`take_turn`; 0 where nothing is noted."""
    try:
        return int(read_text(run / TURN, 20))
    except (OSError, ValueError):
        return 0


def put_events_before(run: Path, now_s: int) -> None:
    """TensorBoard reads event files by the time in their names: those from a clock ahead of now get earlier names."""
    files = sorted(run.glob(f"{EVENTS}*"), key=lambda path: path.name)
    times = [int(path.name.removeprefix(EVENTS).partition(".")[0]) for path in files]
    if times and times[-1] > now_s:  # in one second no process ends and another starts; within one, tests do
        for place, path in enumerate(files):
            rest = path.name.removeprefix(EVENTS).partition(".")[2]
            path.rename(path.with_name(f"{EVENTS}{now_s - len(files) + place:010d}.{rest}"))
