"""Run directories: finding them, their checkpoints, and names made from what their configs differ in.

A run directory is ``<trainer.default_root_dir>/<name of the config>/version_<n>``, and in it are

config.yaml               every option, resolved: `lightning-llm fit --config` reads it again
checkpoints/              see training.callbacks.checkpoints
events.out.tfevents…      TensorBoard
job                       the SLURM or torchrun job that made it, if one did
lock                      which process writes here, or did last (see checkpoints.run_lock)
turn                      a number that grows with each start of a run in the same folder: clocks may jump
status.json               how the run stands or ended, see checkpoints.run_status
summary.json              the result, once the run has ended
windows.json              sums of blocks of validation windows, see ablate.windows

torch is imported where checkpoints are opened: ``compare`` and ``dashboard`` do not wait for it.
"""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.checkpoints.run_directory import CHECKPOINTS, CONFIG, SUMMARY, read_summary, turn_of
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.io.config_file import read_config
from lightning_llm.io.untrusted import LONGEST_NAME, file_name, number_in, read_text
from lightning_llm.training.run_options import ABSENT, CALLBACKS, SEEDS, identity, labels, short_options

if TYPE_CHECKING:
    from lightning_llm.model.transformer import Transformer

JOB = "job"
RUNS = Path("runs")  # where `last` and `best` are looked for
EXAMPLE = "runs/quickstart/version_0"
EVENTS = "events.out.tfevents*"
THREADS = "threads"  # in the summary; older ones lack it

# ---- the checkpoint or model that a command is given


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
    newest = {run.parent: run for run in sorted(runs, key=lambda run: (turn_of(run), _written(run)))}
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


def find_checkpoint(given: str, root: Path, say: Callable[[str], object] = _to_stderr) -> Path:
    """The file that ``--ckpt_path`` means.

    Args:
        given: ``last`` or ``best`` (of the newest run at or below ``root``), a run directory (its best, else its
            newest), or a checkpoint, in a file or a folder. See :func:`_newest_first` for which is the newest.
        root: Where to look for ``last`` and ``best``.
        say: Called with a line if another one is used in place of a damaged one.

    Raises:
        ValueError: There is no such checkpoint. Training from scratch instead would silently lose the run.
    """
    path = named_checkpoint(given, root)
    if given in ("last", "best"):
        return checkpoint_in(path, say, prefer_best=given == "best")
    from lightning_llm.checkpoints.sharded import is_folder

    return checkpoint_in(path, say) if path.is_dir() and not is_folder(path) else path


def named_checkpoint(given: str, root: Path) -> Path:
    """The run, or the checkpoint, that ``--ckpt_path`` names, without torch. As :func:`find_checkpoint`."""
    if given in ("last", "best"):
        if (run := newest_run(root)) is None:
            raise ValueError(f"ckpt_path {given!r}: no checkpoint in {root}: leave ckpt_path out to start from scratch")
        return run
    if "://" in given:
        raise ValueError(f"ckpt_path {given!r} is a URL: download it and give the file")
    path = Path(given)
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"ckpt_path {given!r}: no such file; give a checkpoint, a run directory, 'last' or 'best'")
    return path


def checkpoint_in(run: Path, say: Callable[[str], object] = _to_stderr, *, prefer_best: bool = True) -> Path:
    """The best or newest whole checkpoint of a run. Arguments and errors as in :func:`find_checkpoint`."""
    if not any(path.exists() for path in _files(run)):
        raise ValueError(f"{run} holds no checkpoint: give a run directory, such as {newest_run(run) or EXAMPLE}")
    from lightning_llm.checkpoints.reading import BEST, in_time, is_whole

    best, files = run / CHECKPOINTS / BEST, _newest_first(run)
    candidates = [best, *files] if prefer_best and best.exists() else files
    tried = []
    for number, path in enumerate(in_time(candidates)):
        tried.append(path.name)
        if is_whole(path):
            for damaged in candidates[:number]:
                instead = "in place of the best" if damaged == best else "the one before it"
                say(f"checkpoint {damaged} is truncated or damaged: using {path}, {instead}")
            return path
    are_all = len(tried) == len(_files(run)) - (candidates is files and best.exists())
    which = "every checkpoint" if are_all else f"each of {len(tried)} tried checkpoints"
    raise ValueError(f"{which} of {run} is truncated or damaged: {', '.join(tried)}")


def step_in(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written at: from its name, else from its content."""
    from lightning_llm.checkpoints.reading import read_outline, step_of

    step = step_of(checkpoint)
    return step if step >= 0 else int(read_outline(checkpoint).get("global_step", 0))


def _files(run: Path) -> list[Path]:
    """All checkpoints of a run: its own, and those that Lightning's ModelCheckpoint has added."""
    return [path for path in (run / CHECKPOINTS).glob("*.ckpt") if not path.name.startswith(".")]


def _newest_first(run: Path) -> list[Path]:
    """The checkpoints of a run except its best.

    The newest has the highest step of those written since the run was last started: a run that was sent back to an
    earlier step leaves later ones behind, of which its own step aside. At the same step the run's own comes first.
    Those that cannot be opened come before all others, to be reported; those with weights only, from which no run can
    resume, come last. If there are too many to open in time, the oldest files are left out.
    """
    from lightning_llm.checkpoints.reading import BEST, in_time, read_outline, step_of

    def age(path: Path) -> tuple[int, int, int, bool]:
        is_own = step_of(path) >= 0
        try:
            content = read_outline(path)
            start = content.get("callbacks", {}).get("RunCheckpoints", {}).get("turn", 0)
            return ("optimizer_states" in content), start, content["global_step"], is_own
        except (ValueError, KeyError):
            return 2, 0, step_of(path), is_own

    files = [path for path in _files(run) if path.name != BEST]
    if all(step_of(path) >= 0 for path in files):
        return sorted(files, key=step_of, reverse=True)
    ages = {path: age(path) for path in in_time(sorted(files, key=lambda path: path.lstat().st_mtime_ns, reverse=True))}
    return sorted(ages, key=ages.__getitem__, reverse=True)


MODELS = "a checkpoint, a run directory (its best checkpoint, else its newest), or an exported folder"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`open_model`."""
    parser.add_argument("checkpoint", help=MODELS)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default: cpu)")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The option without which no code runs that a checkpoint or a config names."""
    text = "import and run classes outside lightning_llm that the model names"
    parser.add_argument("--trust-code", action="store_true", help=text)


def open_model(given: str, device: str, *, trust_code: bool = False) -> tuple["Transformer", Tokenizer]:
    """The model, in evaluation mode, and its tokenizer.

    Args:
        given: One of ``MODELS``, or ``last`` or ``best`` of the runs below ``runs``.
        device: Where it goes.
        trust_code: As of ``add_trust``.

    Raises:
        ValueError: There is no such model or device, or the model cannot be read, is not trusted, or has no tokenizer.
    """
    check_device(device)
    from lightning_llm.checkpoints.reading import load_transformer
    from lightning_llm.interop.reader import is_model_folder, load_model

    content: str | None
    if is_model_folder(Path(given)):
        model, content = load_model(Path(given), device)
    else:
        model, content = load_transformer(find_checkpoint(given, RUNS), device, trust_code=trust_code)
    if content is None:
        raise ValueError(f"{given} holds no tokenizer: give a model that was trained or exported with one")
    return model, Tokenizer.from_str(content)


def check_device(given: str) -> None:
    """Refuse a device that this machine lacks, before anything is read.

    Raises:
        ValueError: It is unknown, or not available.
    """
    import torch

    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"device {given!r} is unknown: choose cpu, cuda or mps") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device {given}: this torch finds {count} CUDA devices on this machine: choose cpu")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {given}: this torch finds none on this machine: choose cpu")
    elif device.type not in ("cpu", "mps"):
        raise ValueError(f"device {given!r} is not supported: choose cpu, cuda or mps")


# ---- several runs: what their configs differ in, and names made from that


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        path: Where it is.
        options: Its options by short names (see ``training.run_options``); empty if nothing is known of them.
    """

    path: Path
    options: Mapping[str, Any]

    @property
    def place(self) -> str:
        """The last two folders of its path."""
        return "/".join(part for part in self.path.resolve().parts[-2:] if part != "/")

    @property
    def seed(self) -> tuple[Any, ...]:
        """The seeds of weights and data."""
        return tuple(self.options.get(name) for name in SEEDS)


def find_runs(
    given: Sequence[str], file: str = "", without: str = "", say: Callable[[str], object] = lambda line: None
) -> list[Run]:
    """The runs that a command line names.

    Args:
        given: Run directories, and folders that contain some, up to two levels down.
        file: Pattern of a file that a run must have; empty: none.
        without: The message about a run that does not have it.
        say: Called with a line for each run that was found below a folder and left out for that.

    Raises:
        ValueError: A directory that does not exist, contains no run, or is a run without the file.
    """
    found: dict[Path, Path] = {}
    for name in given:
        runs = run_folders(name)
        complete = [path for path in runs if not file or any(path.glob(file))]
        if not complete:
            raise ValueError(f"{name}: {without}")
        for path in runs:
            if path in complete:
                found.setdefault(path.resolve(), path)
            else:
                say(f"left out {path}: {without}")
    return [Run(path, _options(path)) for path in found.values()]


def run_folders(name: str) -> list[Path]:
    """The run directories that a word of a command line names: itself, and those up to two levels down.

    Raises:
        ValueError: There is no such directory, or no run in it.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name}: no such directory; give run directories, or a folder that contains some")
    seen, runs, level = set[str](), list[Path](), [folder]
    for _ in range(3):  # each folder once, however many links lead to it
        new = {os.path.realpath(path): path for path in sorted(level, key=_natural, reverse=True)}
        level = [path for real, path in new.items() if real not in seen and path.is_dir()]
        seen |= new.keys()
        runs += [path for path in level if any(any(path.glob(file)) for file in (CONFIG, SUMMARY, EVENTS))]
        level = [inner for path in level for inner in path.glob("*")]
    runs.sort(key=lambda path: (path != folder, _natural(path)))
    if not runs:
        raise ValueError(f"{name}: no run in it or up to two levels below")
    return runs


def differences(runs: Sequence[Run]) -> list[str]:
    """Short names of the options that are not the same in all runs: model, data, trainer, seeds, in config order.

    The number of threads and the options of a callback are compared among the runs that have them.
    """
    known = [run.options for run in runs if run.options]

    def differs(name: str) -> bool:
        is_partial = name == THREADS or name.startswith(f"{CALLBACKS}.")
        values = {identity(options.get(name, ABSENT)) for options in known if not is_partial or name in options}
        return len(values) > 1

    def section(name: str) -> int:
        first = "seed" if name in SEEDS else name.partition(".")[0]
        return {"data": 1, "trainer": 2, "keep_freed_memory": 2, THREADS: 2, "seed": 3}.get(first, 0)

    names = dict.fromkeys(name for options in known for name in options)
    return sorted(filter(differs, names), key=section)


def option_columns(runs: Sequence[Run], leave_out: Collection[str]) -> dict[str, list[str]]:
    """The options that differ, with a text for the value in each run."""
    names = [name for name in differences(runs) if name not in leave_out]
    return {name: labels([run.options.get(name, ABSENT) for run in runs]) for name in names}


def descriptions(runs: Sequence[Run], leave_out: Collection[str] = ()) -> list[str]:
    """What distinguishes each run from the others, as ``mlp=swiglu, seed_everything=1``; its place if nothing does.

    Where that would be long for runs of several configs, it is the name of the config and what differs among its runs.

    Args:
        runs: The runs.
        leave_out: Options to leave out.

    Returns:
        Texts that may be the same for several runs; see :func:`made_different`.
    """
    texts = _distinguished(runs, leave_out)
    if max(map(len, texts), default=0) > LONGEST_NAME:
        for folder in {run.path.resolve().parent for run in runs}:
            members = [number for number, run in enumerate(runs) if run.path.resolve().parent == folder]
            for number, text in zip(members, _distinguished([runs[n] for n in members], leave_out), strict=True):
                texts[number] = f"{folder.name}: {text}" if text else folder.name
    return [text or run.place for text, run in zip(texts, runs, strict=True)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """As :func:`descriptions`, all different, each valid as the name of a folder; a place is a folder in a folder.

    No name is that of a folder that another one is in: it would lead into the run of that name.
    """
    names: list[str] = []
    for text, run in zip(made_different(descriptions(runs), runs), runs, strict=True):
        name, number = "/".join(map(file_name, text.split("/"))) if text == run.place else file_name(text), 1
        while any(f"{name}/".startswith(f"{other}/") or f"{other}/".startswith(f"{name}/") for other in names):
            number += 1
            name = file_name(f"{text} #{number}")
        names.append(name)
    return names


def made_different(texts: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Texts about runs; where they are the same, with the run's folder, then its parent, then a number."""
    for ending in (" ({path.name})", " in {path.parent.name}", " #{number}"):
        texts = [
            text + (ending.format(path=run.path.resolve(), number=number) if texts.count(text) > 1 else "")
            for number, (text, run) in enumerate(zip(texts, runs, strict=True), start=1)
        ]
    return list(texts)


def _options(run: Path) -> dict[str, Any]:
    """Of its config; of a run that Python started, what its summary has."""
    options: Any = None
    if (run / CONFIG).is_file():
        options = read_config(run / CONFIG)
    elif (run / SUMMARY).is_file():
        options = read_summary(run, ()).get("options")
    return {CALLBACKS: [], **short_options(options)} if isinstance(options, Mapping) else {}


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts version_2 before version_10."""
    parts = [(number_in(part), part) for part in re.split("([0-9]+)", str(path))]
    return [(-1, part) if number is None else (number, "") for number, part in parts]


def _distinguished(runs: Sequence[Run], leave_out: Collection[str]) -> list[str]:
    columns = option_columns(runs, leave_out).items()
    return [
        ", ".join(f"{name}={column[number]}" for name, column in columns if name in run.options)
        for number, run in enumerate(runs)
    ]
