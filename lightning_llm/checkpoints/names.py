"""The names of a run's checkpoints: ``step-00001000.ckpt``, a file or a folder, and ``best.ckpt``. Needs no torch."""

from pathlib import Path

BEST = "best.ckpt"


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
