"""The folder of a run: what is in it, its name, and which process may write there. Needs no torch.

Each run has its own folder, ``<trainer.default_root_dir>/<name of the config>/version_<n>`` or one that its user names,
whatever its loggers are. In it are

config.yaml               every option, resolved: `lightning-llm fit --config` reads it again
checkpoints/              step-00001000.ckpt and so on, and best.ckpt: see training.callbacks.run_checkpoints
events.out.tfevents…      TensorBoard
job                       the SLURM or torchrun job that made it, if one did
memory_plan.json          what `model.memory_budget` chose, if it was given
lock                      which process writes here, or did last: see runs.lock
start_number              a number, which grows with each start of a run in the same parent: clocks may jump
status.json               how the run ended, or that it still trains: see runs.status
summary.json              the result, once the run has ended: see runs.status
windows.json              sums of blocks of validation windows, see statistics.windows

The first process of a run claims the folder by creating it, which only one of several processes can do, and holds its
lock while the run lasts. The other processes are told its name (``Trainer.run_dir``).
"""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_llm.io.atomic import write_text
from lightning_llm.io.untrusted import check_links, number_in, read_text
from lightning_llm.runs.lock import RunLock

EXPERIMENT = "run"  # without a name
PREFIX = "version_"
CHECKPOINTS = "checkpoints"
JOB = "job"
START_NUMBER = "start_number"
BEST = "best.ckpt"
CONFIG = "config.yaml"
STATUS = "status.json"
SUMMARY = "summary.json"
WINDOWS = "windows.json"
MEMORY_PLAN = "memory_plan.json"
FILES = (CONFIG, STATUS, SUMMARY, WINDOWS, MEMORY_PLAN, JOB, START_NUMBER, "hparams.yaml")  # the last is Lightning's


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
        self.root = Path(root).expanduser()
        self.experiment = experiment
        self._version = version
        self._path: Path | None = None
        self._requested_path: Path | None = None
        self._lock: RunLock | None = None

    @property
    def path(self) -> Path:
        """The folder, which the first process creates on first use; other processes guess it until they are told."""
        if self._path is None:
            parent = self.root / (EXPERIMENT if self.experiment is None else self.experiment)
            if not is_rank_zero():
                return self._requested_path or parent / f"{PREFIX}{next_number(parent)}"
            if self._requested_path is not None:
                self._path = _create(self._requested_path)
                return self._path
            try:
                self._path = claim(parent, self._version)
            except OSError as error:
                problem = f"cannot create a run directory in {parent} ({error.strerror}): give another folder"
                raise ValueError(f"trainer.default_root_dir {self.root}: {problem}") from error
        return self._path

    @property
    def place(self) -> Path:
        """Where the folder is, or will be made; nothing is made by asking."""
        return self._path or self._requested_path or self.root

    @property
    def is_open(self) -> bool:
        """Whether this process may write to it."""
        return self._lock is not None

    def request(self, path: Path) -> None:
        """Use exactly this folder, which must not exist yet."""
        self._requested_path = path.expanduser()

    def take(self, path: Path) -> None:
        """Use a folder that exists."""
        self._path = path

    def prefer(self, path: Path) -> None:
        """If no folder is claimed yet, try this one first, then others in the same parent."""
        if self._path is None and self._requested_path is None:
            self.root = path.parent.parent
            self.experiment = path.parent.name
            self._version = path.name

    def open(self) -> None:
        """In the first process: claim the folder, lock it, and give this start the next number.

        Raises:
            ValueError: Another process writes to it, or it has links that lead elsewhere.
        """
        if not self.is_open and is_rank_zero():
            check_links(self.path, replaced=".ckpt")
            for name in FILES:
                if (self.path / name).is_dir():
                    raise ValueError(f"{self.path / name} is a folder, expected a file: move it away")
            self._lock = RunLock(self.path).acquire()
            take_start_number(self.path)

    def close(self) -> None:
        """Release the lock of the run directory."""
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
        folder: Path | None = trainer.run_dir
        return folder
    return None if trainer.fast_dev_run else Path(trainer.log_dir or trainer.default_root_dir)


def is_rank_zero() -> bool:
    """Whether this is rank 0, as launchers report it before any process group exists."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only  # slow, and not needed to look for runs

    return getattr(rank_zero_only, "rank", 0) == 0


def claim(parent: Path, name: str | None = None) -> Path:
    """Create a new folder in ``parent`` for this process alone: ``name``, or the next ``version_<n>``."""
    parent.mkdir(parents=True, exist_ok=True)
    numbered = (f"{PREFIX}{number}" for number in itertools.count(next_number(parent)))
    while True:
        folder = parent / (name or next(numbered))
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        name = None


def _create(folder: Path) -> Path:
    """Create the folder that ``trainer.run_dir`` names."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        problem = f"cannot be created ({error.strerror}): give another folder"
        if isinstance(error, FileExistsError):
            problem = "exists: add --ckpt_path last to resume the run in it, or give another folder"
        raise ValueError(f"trainer.run_dir {folder} {problem}") from error
    return folder


def next_number(parent: Path) -> int:
    """One more than the highest ``version_<n>`` in a folder."""
    numbers = (number_in(path.name.removeprefix(PREFIX)) for path in parent.glob(f"{PREFIX}*"))
    return 1 + max((number for number in numbers if number is not None), default=-1)


def take_start_number(run: Path) -> None:
    """Give a start of a run a number above those of the other runs in the same parent."""
    number = 1 + max(map(start_number_of, run.parent.iterdir()), default=0)
    write_text(run / START_NUMBER, f"{number}\n")


def start_number_of(run: Path) -> int:
    """The number of a run's last start; 0 if it has none."""
    try:
        return int(read_text(run / START_NUMBER, 20))
    except (OSError, ValueError):
        return 0


def step_name(step: int) -> str:
    """The file name of the checkpoint of an optimizer step."""
    return f"step-{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """The optimizer step in the name of a checkpoint, or -1 if the run has not named it."""
    digits = path.name.removeprefix("step-").removesuffix(".ckpt")
    return int(digits) if digits.isdecimal() and path.name == step_name(int(digits)) else -1


def step_files(folder: Path) -> list[Path]:
    """The numbered checkpoints in a folder, files or folders, oldest first."""
    return sorted((path for path in folder.glob("step-*.ckpt") if step_of(path) >= 0), key=step_of)
