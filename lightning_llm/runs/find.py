"""Which run, checkpoint and model a command means by a word such as ``last``, ``best`` or a path.

torch is imported where checkpoints are opened: ``compare`` and ``dashboard`` do not wait for it.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_llm.checkpoints.names import BEST, step_of
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.io.untrusted import read_text
from lightning_llm.runs.directory import CHECKPOINTS, CONFIG, JOB, sequence_number_of

if TYPE_CHECKING:
    from lightning_llm.model.transformer import Transformer

RUNS = Path("runs")  # where `last` and `best` are looked for
EXAMPLE = "runs/quickstart/version_0"


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint is in, or ``None`` if it is elsewhere."""
    run = checkpoint.parent.parent
    return run if checkpoint.parent.name == CHECKPOINTS and (run / CONFIG).is_file() else None


def newest_run(root: Path, job: str | None = None) -> Path | None:
    """The run directory at or below ``root`` (two levels) whose newest checkpoint was written last.

    Args:
        root: Where to look.
        job: Only runs of this job, as ``jobs.this_job`` names it.
    """
    runs = [folder for folder in (root, *root.glob("*"), *root.glob("*/*")) if _files(folder)]
    if job is not None:
        runs = [run for run in runs if (run / JOB).is_file() and read_text(run / JOB, 1 << 10).strip() == job]
    # within an experiment by number, which no clock can change; between experiments by the time of the newest file
    newest = {run.parent: run for run in sorted(runs, key=lambda run: (sequence_number_of(run), _written(run)))}
    return max(newest.values(), key=_written, default=None)


def _written(run: Path) -> int:
    """When the newest of its files was written: of a link the link itself, which may be broken."""
    times = [0]
    for path in _files(run):
        with suppress(FileNotFoundError):  # a run in training deletes its old ones
            times.append(path.lstat().st_mtime_ns)
    return max(times)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def find_checkpoint(name: str, root: Path, say: Callable[[str], object] = _to_stderr) -> Path:
    """The file that ``--ckpt_path`` means.

    Args:
        name: ``last`` or ``best`` (of the newest run at or below ``root``), a run directory (its best, else its
            newest), or a checkpoint, in a file or a folder. See :func:`_newest_first` for which is the newest.
        root: Where to look for ``last`` and ``best``.
        say: Called with a line if another one is used in place of a damaged one.

    Raises:
        ValueError: There is no such checkpoint. Training from scratch instead would silently lose the run.
    """
    path = named_checkpoint(name, root)
    if name in ("last", "best"):
        return checkpoint_in(path, say, prefer_best=name == "best")
    from lightning_llm.checkpoints.sharded import is_folder

    return checkpoint_in(path, say) if path.is_dir() and not is_folder(path) else path


def named_checkpoint(name: str, root: Path) -> Path:
    """The run, or the checkpoint, that ``--ckpt_path`` names, without torch. As :func:`find_checkpoint`."""
    if name in ("last", "best"):
        if (run := newest_run(root)) is None:
            raise ValueError(f"ckpt_path {name!r}: no checkpoint in {root}: leave ckpt_path out to start from scratch")
        return run
    if "://" in name:
        raise ValueError(f"ckpt_path {name!r} is a URL: download it and give the file")
    path = Path(name)
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"ckpt_path {name!r}: no such file; give a checkpoint, a run directory, 'last' or 'best'")
    return path


def checkpoint_in(run: Path, say: Callable[[str], object] = _to_stderr, *, prefer_best: bool = True) -> Path:
    """The best or newest whole checkpoint of a run. Arguments and errors as in :func:`find_checkpoint`."""
    if not any(path.exists() for path in _files(run)):
        raise ValueError(f"{run} holds no checkpoint: give a run directory, such as {newest_run(run) or EXAMPLE}")
    from lightning_llm.checkpoints.reading import in_time, is_intact

    best, files = run / CHECKPOINTS / BEST, _newest_first(run)
    candidates = [best, *files] if prefer_best and best.exists() else files
    if not candidates:
        raise ValueError(f"{run} holds {BEST} alone, which is not the last state of a run: give ckpt_path 'best'")
    names = []
    for number, path in enumerate(in_time(candidates)):
        names.append(path.name)
        if is_intact(path):
            for damaged in candidates[:number]:
                instead = "in place of the best" if damaged == best else "the one before it"
                say(f"checkpoint {damaged} is truncated or damaged: using {path}, {instead}")
            return path
    if len(names) == len(_files(run)) - (candidates is files and best.exists()):
        raise ValueError(f"every checkpoint of {run} is truncated or damaged: {', '.join(names)}")
    raise ValueError(f"each of {len(names)} tried checkpoints of {run} is truncated or damaged: {', '.join(names)}")


def step_in(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written at: from its name, else from its content."""
    from lightning_llm.checkpoints.reading import read_outline

    step = step_of(checkpoint)
    return step if step >= 0 else int(read_outline(checkpoint).get("global_step", 0))


def _files(run: Path) -> list[Path]:
    """All checkpoints of a run: its own, and those that Lightning's ModelCheckpoint has added."""
    return [path for path in (run / CHECKPOINTS).glob("*.ckpt") if not path.name.startswith(".")]


def _newest_first(run: Path) -> list[Path]:
    """The checkpoints of a run except its best.

    The newest has the highest step of those written since the run was last started: a run that was sent back to an
    earlier step leaves later ones behind (it renames its own to ``.aside``, those of others stay). At the same step the
    run's own comes first.
    Those that cannot be opened come before all others, to be reported; those with weights only, from which no run can
    resume, come last. If there are too many to open in time, the oldest files are left out.
    """
    from lightning_llm.checkpoints.reading import in_time, read_outline

    def recency(path: Path) -> tuple[int, int, int, bool]:
        is_named_by_run = step_of(path) >= 0
        try:
            outline = read_outline(path)
            start = outline.get("callbacks", {}).get("RunCheckpoints", {}).get("turn", 0)
            return ("optimizer_states" in outline), start, outline["global_step"], is_named_by_run
        except (ValueError, KeyError):
            return 2, 0, step_of(path), is_named_by_run

    files = [path for path in _files(run) if path.name != BEST]
    if all(step_of(path) >= 0 for path in files):
        return sorted(files, key=step_of, reverse=True)
    written_last = sorted(files, key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    recencies = {path: recency(path) for path in in_time(written_last)}
    return sorted(recencies, key=recencies.__getitem__, reverse=True)


def open_model(name: str, device: str, *, trust_code: bool = False) -> tuple["Transformer", Tokenizer]:
    """The model, in evaluation mode, and its tokenizer.

    Args:
        name: A checkpoint, a run directory, an exported folder, or ``last`` or ``best`` of the runs below ``runs``.
        device: Where it goes.
        trust_code: Whether it may name classes outside lightning_llm.

    Raises:
        ValueError: There is no such model or device, or the model cannot be read, is not trusted, or has no tokenizer.
    """
    check_device(device)
    from lightning_llm.checkpoints.reading import load_transformer
    from lightning_llm.interop.reader import is_model_folder, load_model

    tokenizer: str | None
    if is_model_folder(Path(name)):
        model, tokenizer = load_model(Path(name), device)
    else:
        model, tokenizer = load_transformer(find_checkpoint(name, RUNS), device, trust_code=trust_code)
    if tokenizer is None:
        raise ValueError(f"{name} holds no tokenizer: give a model that was trained or exported with one")
    return model, Tokenizer.from_str(tokenizer)


def check_device(name: str) -> None:
    """Refuse a device that this machine lacks, before anything is read.

    Raises:
        ValueError: It is unknown, or not available.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown: choose cpu, cuda or mps") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device {name}: this torch finds {count} CUDA devices on this machine: choose cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {name}: this torch finds none on this machine: choose cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device {name!r} is not supported: choose cpu, cuda or mps")
