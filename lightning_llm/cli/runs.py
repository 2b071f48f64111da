"""Run directories: ``<trainer.default_root_dir>/<name of the config>/version_<n>``, and what is in them.

config.yaml               every option, resolved: `lightning-llm fit --config` takes it again
checkpoints/              see training.callbacks.checkpoints
events.out.tfevents…      TensorBoard
summary.json              the result, once the run has ended
"""

from pathlib import Path

from lightning_llm.training.checkpointing import BEST, step_files

CONFIG, CHECKPOINTS, SUMMARY = "config.yaml", "checkpoints", "summary.json"


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, or ``None`` if it lies elsewhere."""
    run = checkpoint.parent.parent
    return run if checkpoint.parent.name == CHECKPOINTS and (run / CONFIG).is_file() else None


def newest_run(root: Path) -> Path | None:
    """The run directory at or below ``root`` (two levels) whose newest checkpoint was written last."""
    folders = [root, *root.glob("*"), *root.glob("*/*")]
    runs = [folder for folder in folders if step_files(folder / CHECKPOINTS)]
    return max(runs, key=lambda run: step_files(run / CHECKPOINTS)[-1].stat().st_mtime_ns, default=None)


def find_checkpoint(given: str, root: Path) -> Path:
    """The file that ``--ckpt_path`` means.

    Args:
        given: ``last`` or ``best`` (of the newest run at or below ``root``), a run directory (its best, else its
            newest), or a file.
        root: Where to look for ``last`` and ``best``.

    Raises:
        ValueError: There is no such checkpoint. A fresh start in its place would be a silent loss.
    """
    if given in ("last", "best"):
        run = newest_run(root)
        if run is None:
            raise ValueError(f"ckpt_path {given!r}: no checkpoint in {root}: leave ckpt_path out to start afresh")
        return _in_run(run, prefer_best=given == "best")
    path = Path(given)
    if path.is_dir():
        return _in_run(path, prefer_best=True)
    if "://" in given:
        raise ValueError(f"ckpt_path {given!r} is a URL: download it and give the file")
    if not path.is_file():
        raise ValueError(f"ckpt_path {given!r}: no such file; give a checkpoint, a run directory, 'last' or 'best'")
    return path


def _in_run(run: Path, *, prefer_best: bool) -> Path:
    best, steps = run / CHECKPOINTS / BEST, step_files(run / CHECKPOINTS)
    if prefer_best and best.is_file():
        return best
    if not steps:
        raise ValueError(f"{run} holds no checkpoint")
    return steps[-1]
