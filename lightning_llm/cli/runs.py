"""Run directories: ``<trainer.default_root_dir>/<name of the config>/version_<n>``, and what is in them.

config.yaml               every option, resolved: `lightning-llm fit --config` takes it again
checkpoints/              see training.callbacks.checkpoints
events.out.tfevents…      TensorBoard
job                       the SLURM or torchrun job that made it, where one did
turn                      a number that grows with each start of a run beside others: clocks may jump
status.json               how the run stands or ended, see training.run_status
summary.json              the result, once the run has ended
"""

from collections.abc import Callable
from pathlib import Path

from lightning_llm.training.checkpointing import BEST, is_whole, read_checkpoint, step_files, step_of
from lightning_llm.training.sharded_files import is_folder

CONFIG, CHECKPOINTS, SUMMARY, JOB = "config.yaml", "checkpoints", "summary.json", "job"
TURN, EVENTS = "turn", "events.out.tfevents."
EXAMPLE = "runs/quickstart/version_0"


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, or ``None`` if it lies elsewhere."""
    run = checkpoint.parent.parent
    return run if checkpoint.parent.name == CHECKPOINTS and (run / CONFIG).is_file() else None


def newest_run(root: Path, job: str | None = None) -> Path | None:
    """The run directory at or below ``root`` (two levels) whose newest checkpoint was written last.

    Args:
        root: Where to look.
        job: Only runs of this job, as ``jobs.this_job`` names it.
    """
    folders = [root, *root.glob("*"), *root.glob("*/*")]
    runs = [folder for folder in folders if step_files(folder / CHECKPOINTS)]
    if job is not None:
        runs = [run for run in runs if (run / JOB).is_file() and (run / JOB).read_text().strip() == job]
    # within an experiment by turns, which no clock can change; between experiments by the time of the newest file
    newest = {run.parent: run for run in sorted(runs, key=lambda run: (turn_of(run), _written(run)))}
    return max(newest.values(), key=_written, default=None)


def take_turn(run: Path) -> None:
    """Note that this run, of those beside it, was started last."""
    turn = 1 + max((turn_of(other) for other in run.parent.iterdir()), default=0)
    (run / TURN).write_text(f"{turn}\n", encoding="utf-8")


def turn_of(run: Path) -> int:
    """See :func:`take_turn`; 0 where nothing is noted."""
    try:
        return int((run / TURN).read_text(encoding="utf-8"))
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


def _written(run: Path) -> int:
    return step_files(run / CHECKPOINTS)[-1].stat().st_mtime_ns


def find_checkpoint(given: str, root: Path, say: Callable[[str], object] = lambda line: None) -> Path:
    """The file that ``--ckpt_path`` means.

    Args:
        given: ``last`` or ``best`` (of the newest run at or below ``root``), a run directory (its best, else its
            newest), or a checkpoint, in a file or a folder.
        root: Where to look for ``last`` and ``best``.
        say: Called with a line where the newest is damaged and one before it is taken.

    Raises:
        ValueError: There is no such checkpoint. A fresh start in its place would be a silent loss.
    """
    if given in ("last", "best"):
        run = newest_run(root)
        if run is None:
            raise ValueError(f"ckpt_path {given!r}: no checkpoint in {root}: leave ckpt_path out to start afresh")
        return _in_run(run, say, prefer_best=given == "best")
    path = Path(given)
    if is_folder(path):
        return path
    if path.is_dir():
        return _in_run(path, say, prefer_best=True)
    if "://" in given:
        raise ValueError(f"ckpt_path {given!r} is a URL: download it and give the file")
    if not path.is_file():
        raise ValueError(f"ckpt_path {given!r}: no such file; give a checkpoint, a run directory, 'last' or 'best'")
    return path


def last_of(run: Path, say: Callable[[str], object] = lambda line: None) -> Path:
    """The newest whole checkpoint of a run. Arguments and errors as in :func:`find_checkpoint`."""
    return _in_run(run, say, prefer_best=False)


def step_in(checkpoint: Path) -> int:
    """The optimiser step that a checkpoint was written at: by its name, else by what it holds."""
    step = step_of(checkpoint)
    return step if step >= 0 else int(read_checkpoint(checkpoint, mmap=True).get("global_step", 0))


def _in_run(run: Path, say: Callable[[str], object], *, prefer_best: bool) -> Path:
    best, steps = run / CHECKPOINTS / BEST, step_files(run / CHECKPOINTS)
    if prefer_best and best.exists():
        return best
    if not steps:
        raise ValueError(f"{run} holds no checkpoint: give a run directory, such as {newest_run(run) or EXAMPLE}")
    damaged: list[Path] = []
    for path in reversed(steps):
        if is_whole(path):
            for each in damaged:
                say(f"checkpoint {each} is cut short or damaged: using {path}, the one before it")
            return path
        damaged.append(path)
    raise ValueError(f"every checkpoint of {run} is cut short or damaged: {', '.join(path.name for path in steps)}")
