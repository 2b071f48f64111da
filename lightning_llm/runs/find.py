"""Runs, checkpoint and model that a command means by a word: a folder, ``last``, ``best`` or a path.

torch is imported where checkpoints are opened: ``compare`` and ``dashboard`` do not wait for it.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.io.config_file import read_config
from lightning_llm.io.untrusted import number_in, read_text
from lightning_llm.runs.directory import BEST, CHECKPOINTS, CONFIG, JOB, SUMMARY, start_number_of, step_of
from lightning_llm.runs.event_files import EVENT_FILES
from lightning_llm.runs.options import CALLBACKS, SEEDS, short_options
from lightning_llm.runs.status import read_summary

if TYPE_CHECKING:
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.model.transformer import Transformer

RUNS = Path("runs")  # where `last` and `best` are looked for
EXAMPLE = "runs/quickstart/version_0"
PLAN = "plan.json"  # of an experiment, in the folder above its runs
# A file that marks a folder of ``ablate``, and the folder in it that has its runs, ideas or sizes
INSIDE = {PLAN: "runs", "stream.json": "ideas", "ladder.json": "sizes"}
DEEPEST = 3  # a stream or ladder, its experiments, their runs


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        path: Where it is.
        options: Its options by short names (see ``runs.options``); empty if nothing is known of them.
    """

    path: Path
    options: Mapping[str, Any]

    @property
    def short_path(self) -> str:
        """The last two folders of its path."""
        return "/".join(part for part in self.path.resolve().parts[-2:] if part != "/")

    @property
    def seed(self) -> tuple[Any, ...]:
        """The seeds of weights and data."""
        return tuple(self.options.get(name) for name in SEEDS)


def find_runs(
    names: Sequence[str],
    file: str = "",
    message: str = "",
    log: Callable[[str], object] = lambda line: None,
    *,
    with_experiments: bool = False,
) -> list[Run]:
    """The runs that a command line names.

    Args:
        names: Run directories, and folders that contain some, up to two levels down.
        file: Pattern of a file that a run must have; empty: none.
        message: The message about a run that does not have it.
        log: Called with a line for each run that was found below a folder and left out for that.
        with_experiments: As in :func:`run_folders`.

    Raises:
        ValueError: A directory that does not exist, contains no run, or is a run without the file.
    """
    paths: dict[object, Path] = {}
    for name in names:
        runs = run_folders(name, with_experiments=with_experiments)
        complete = {path for path in runs if not file or any(path.glob(file))}
        if not complete:
            raise ValueError(f"{name}: {message}")
        for path in runs:
            if path in complete:
                paths.setdefault(identity_of(path), path)
            else:
                log(f"left out {path}: {message}")
    return [Run(path, _options(path)) for path in paths.values()]


def run_folders(name: str, *, with_experiments: bool = False) -> list[Path]:
    """The run directories that a word of a command line names: itself, and those up to two levels down.

    Args:
        name: The word.
        with_experiments: Whether to add the runs of the experiments, streams and ladders in these folders, which are
            deeper.

    Raises:
        ValueError: There is no such directory, or no run in it.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name}: no such directory; give run directories, or a folder that contains some")
    seen: set[str] = set()
    runs: list[Path] = []
    level = [folder]

    def new_folders(paths: Sequence[Path]) -> list[Path]:
        """Each folder once, however many links lead to it."""
        by_real_path = {os.path.realpath(path): path for path in sorted(paths, key=_natural, reverse=True)}
        folders = [path for real, path in by_real_path.items() if real not in seen and path.is_dir()]
        seen.update(by_real_path)
        runs.extend(path for path in folders if any(any(path.glob(file)) for file in (CONFIG, SUMMARY, EVENT_FILES)))
        return folders

    searched: list[Path] = []
    for _ in range(3):
        level = new_folders(level)
        searched += level
        level = [inner for path in level for inner in path.glob("*")]
    for _ in range(DEEPEST if with_experiments else 0):
        searched = new_folders([inner for path in searched for inner in _inside(path)])
    runs.sort(key=lambda path: (path != folder, _natural(path)))
    if not runs:
        deeper = next(iter(sorted(folder.glob("*/*/*/*"))), None)  # such as those of an experiment
        hint = "" if deeper is None else f"; give a folder in it, such as {deeper.parents[2]}"
        raise ValueError(f"{name}: no run in it or up to two levels below{hint}")
    return runs


def experiment_of(run: Path) -> Path | None:
    """The folder of the experiment that a run belongs to."""
    folder = Path(os.path.abspath(run)).parent
    return folder.parent if folder.name == INSIDE[PLAN] and (folder.parent / PLAN).is_file() else None


def _inside(folder: Path) -> list[Path]:
    """The runs of an experiment, the ideas of a stream, or the sizes of a ladder."""
    inner = [folder / name for mark, name in INSIDE.items() if (folder / mark).is_file()]
    return [path for parent in inner for path in parent.glob("*")]


def identity_of(run: Path) -> object:
    """Identity of a run under all of its paths: links lead to one folder, or another experiment has its files."""
    try:
        status = (run / CONFIG).stat()
    except OSError:
        return run.resolve()
    return status.st_dev, status.st_ino


def _options(run: Path) -> dict[str, Any]:
    """The options in its config; of a run that Python started, those in its summary."""
    options: Any = None
    if (run / CONFIG).is_file():
        options = read_config(run / CONFIG)
    elif (run / SUMMARY).is_file():
        options = read_summary(run, ()).get("options")
    return {CALLBACKS: [], **short_options(options)} if isinstance(options, Mapping) else {}


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts version_2 before version_10."""
    pieces = [(number_in(piece), piece) for piece in re.split("([0-9]+)", str(path))]
    return [(-1, piece) if number is None else (number, "") for number, piece in pieces]


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
    newest = {run.parent: run for run in sorted(runs, key=lambda run: (start_number_of(run), _written(run)))}
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


def find_checkpoint(name: str, root: Path, log: Callable[[str], object] = _to_stderr) -> Path:
    """The file that ``--ckpt_path`` means.

    Args:
        name: ``last`` or ``best`` (of the newest run at or below ``root``), a run directory (its best, else its
            newest), or a checkpoint, in a file or a folder. See :func:`_newest_first` for which is the newest.
        root: Where to look for ``last`` and ``best``.
        log: Called with a line if another one is used in place of a damaged one.

    Raises:
        ValueError: There is no such checkpoint. Training from scratch instead would silently lose the run.
    """
    path = named_checkpoint(name, root)
    if name in ("last", "best"):
        return checkpoint_in(path, log, prefer_best=name == "best")
    from lightning_llm.checkpoints.sharded import is_folder

    return checkpoint_in(path, log) if path.is_dir() and not is_folder(path) else path


def named_checkpoint(name: str, root: Path) -> Path:
    """The run, or the checkpoint, that ``--ckpt_path`` names, without torch. As :func:`find_checkpoint`."""
    if name in ("last", "best"):
        if (run := newest_run(root)) is None:
            other = None if root.parent == Path() else newest_run(root.parent)
            where = root if other is None else f"{root} (the newest run beside it is {other}: give its path)"
            raise ValueError(f"ckpt_path {name!r}: no checkpoint in {where}: leave ckpt_path out to start from scratch")
        return run
    if "://" in name:
        raise ValueError(f"ckpt_path {name!r} is a URL: download it and give the file")
    path = Path(name)
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"ckpt_path {name!r}: no such file; give a checkpoint, a run directory, 'last' or 'best'")
    return path


def checkpoint_in(run: Path, log: Callable[[str], object] = _to_stderr, *, prefer_best: bool = True) -> Path:
    """The best or newest whole checkpoint of a run. Arguments and errors as in :func:`find_checkpoint`."""
    if not any(path.exists() for path in _files(run)):
        raise ValueError(f"{run} holds no checkpoint: give a run directory, such as {newest_run(run) or EXAMPLE}")
    from lightning_llm.checkpoints.reading import is_intact

    best = run / CHECKPOINTS / BEST
    files = _newest_first(run)
    candidates = [best, *files] if prefer_best and best.exists() else files
    if not candidates:
        raise ValueError(f"{run} holds {BEST} alone, which is not the last state of a run: give ckpt_path 'best'")
    for number, path in enumerate(candidates):
        if is_intact(path):
            for damaged in candidates[:number]:
                instead = "in place of the best" if damaged == best else "the one before it"
                log(f"checkpoint {damaged} is truncated or damaged: using {path}, {instead}")
            return path
    names = ", ".join(path.name for path in candidates)
    raise ValueError(f"every checkpoint of {run} is truncated or damaged: {names}")


def check_resumable(checkpoint: Path, **of_model: bool) -> dict[str, Any]:
    """Check by ``checkpoints.reading.check_run_checkpoint``; the error names the newest that can be resumed.

    Args:
        checkpoint: Its path.
        of_model: Arguments of the check.
    """
    from lightning_llm.checkpoints.reading import check_run_checkpoint

    try:
        return check_run_checkpoint(checkpoint, **of_model)
    except ValueError as error:
        problem = error
    others: list[Path] = []
    if checkpoint.parent.name == CHECKPOINTS:
        best = checkpoint.with_name(BEST)  # which may be older than all others
        others = [*_newest_first(checkpoint.parent.parent), *([best] if best.exists() else [])]
    for other in others:
        if other == checkpoint:
            continue
        try:
            check_run_checkpoint(other, **of_model)
        except ValueError:
            continue
        raise ValueError(f"{problem}; the newest that can be resumed: --ckpt_path {other}") from problem
    raise problem


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
    resume, come last.
    """
    from lightning_llm.checkpoints.reading import read_outline

    def recency(path: Path) -> tuple[int, int, int, bool]:
        is_named_by_run = step_of(path) >= 0
        try:
            outline = read_outline(path)
            start = outline.get("callbacks", {}).get("RunCheckpoints", {}).get("start_number", 0)
            return ("optimizer_states" in outline), start, outline["global_step"], is_named_by_run
        except (ValueError, KeyError):
            return 2, 0, step_of(path), is_named_by_run

    files = [path for path in _files(run) if path.name != BEST]
    if all(step_of(path) >= 0 for path in files):
        return sorted(files, key=step_of, reverse=True)
    written_last = sorted(files, key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    return sorted(written_last, key=recency, reverse=True)


def open_model(name: str, device: str, *, trust_code: bool = False) -> tuple["Transformer", "Tokenizer"]:
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
    from lightning_llm.data.tokenizers import Tokenizer
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
