"""Run directories: ``<trainer.default_root_dir>/<name of the config>/version_<n>``, and what is in them.

config.yaml               every option, resolved: `lightning-llm fit --config` takes it again
checkpoints/              see training.callbacks.checkpoints
events.out.tfevents…      TensorBoard
job                       the SLURM or torchrun job that made it, where one did
lock                      which process writes here, or did last (see checkpoints.run_directory)
turn                      a number that grows with each start of a run beside others: clocks may jump
status.json               how the run stands or ended, see checkpoints.run_directory
summary.json              the result, once the run has ended
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_llm.checkpoints.reading import BEST, is_whole, read_outline, step_of
from lightning_llm.checkpoints.run_directory import CHECKPOINTS as CHECKPOINTS
from lightning_llm.checkpoints.run_directory import put_events_before as put_events_before
from lightning_llm.checkpoints.run_directory import take_turn as take_turn
from lightning_llm.checkpoints.run_directory import turn_of
from lightning_llm.checkpoints.sharded import is_folder
from lightning_llm.io.untrusted import read_text

CONFIG, SUMMARY, JOB = "config.yaml", "summary.json", "job"
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
    runs = [folder for folder in folders if _files(folder)]
    if job is not None:
        runs = [run for run in runs if (run / JOB).is_file() and read_text(run / JOB, 1 << 10).strip() == job]
    # within an experiment by turns, which no clock can change; between experiments by the time of the newest file
    newest = {run.parent: run for run in sorted(runs, key=lambda run: (turn_of(run), _written(run)))}
    return max(newest.values(), key=_written, default=None)


def _written(run: Path) -> int:
    """When the newest of its files was written: of a link the link itself, which may lead nowhere."""
    times = [0]
    for path in _files(run):
        with suppress(FileNotFoundError):  # a run that trains clears its old ones away
            times.append(path.lstat().st_mtime_ns)
    return max(times)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def find_checkpoint(given: str, root: Path, say: Callable[[str], object] = _to_stderr) -> Path:
    """The file that ``--ckpt_path`` means.

    Args:
        given: ``last`` or ``best`` (of the newest run at or below ``root``), a run directory (its best, else its
            newest), or a checkpoint, in a file or a folder. See :func:`_newest_first` for which is the newest.
        root: Where to look for ``last`` and ``best``.
        say: Called with a line where a damaged one gives way to another.

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


def last_of(run: Path, say: Callable[[str], object] = _to_stderr) -> Path:
    """The newest whole checkpoint of a run. Arguments and errors as in :func:`find_checkpoint`."""
    return _in_run(run, say, prefer_best=False)


def step_in(checkpoint: Path) -> int:
    """The optimiser step that a checkpoint was written at: by its name, else by what it holds."""
    step = step_of(checkpoint)
    return step if step >= 0 else int(read_outline(checkpoint).get("global_step", 0))


def _in_run(run: Path, say: Callable[[str], object], *, prefer_best: bool) -> Path:
    best, files = run / CHECKPOINTS / BEST, _newest_first(run)
    if not files and not best.exists():
        raise ValueError(f"{run} holds no checkpoint: give a run directory, such as {newest_run(run) or EXAMPLE}")
    damaged: list[Path] = []
    for path in [best, *files] if prefer_best and best.exists() else files:
        if is_whole(path):
            for each in damaged:
                instead = "in place of the best" if each == best else "the one before it"
                say(f"checkpoint {each} is cut short or damaged: using {path}, {instead}")
            return path
        damaged.append(path)
    raise ValueError(f"every checkpoint of {run} is cut short or damaged: {', '.join(path.name for path in damaged)}")


def _files(run: Path) -> list[Path]:
    """All checkpoints of a run: its own, and those that Lightning's ModelCheckpoint has put beside them."""
    return [path for path in (run / CHECKPOINTS).glob("*.ckpt") if not path.name.startswith(".")]


def _newest_first(run: Path) -> list[Path]:
    """The checkpoints of a run but for its best.

    The newest has the highest step of those written since the run was last started: a run that was sent back to an
    earlier step leaves later ones behind, of which its own step aside. At the same step the run's own comes first.
    Those that cannot be opened come before all others, to be reported; those of weights alone, from which no run can
    go on, come last.
    """
    files = [path for path in _files(run) if path.name != BEST]
    if all(step_of(path) >= 0 for path in files):
        return sorted(files, key=step_of, reverse=True)
    return sorted(files, key=_age, reverse=True)


def _age(path: Path) -> tuple[int, int, int, bool]:
    is_own = step_of(path) >= 0
    try:
        content = read_outline(path)
        turn = content.get("callbacks", {}).get("RunCheckpoints", {}).get("turn", 0)
        return ("optimizer_states" in content), turn, content["global_step"], is_own
    except (ValueError, KeyError):
        return 2, 0, step_of(path), is_own
