"""Several runs: finding them, and names made from what their configs differ in. Needs no torch."""

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.io.config_file import read_config
from lightning_llm.io.untrusted import LONGEST_NAME, file_name, number_in
from lightning_llm.runs.directory import CONFIG, SUMMARY
from lightning_llm.runs.event_files import EVENT_FILES
from lightning_llm.runs.options import ABSENT, CALLBACKS, SEEDS, identity, labels, short_options
from lightning_llm.runs.status import read_summary

THREADS = "threads"  # in the summary; older ones lack it


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
    names: Sequence[str], file: str = "", message: str = "", say: Callable[[str], object] = lambda line: None
) -> list[Run]:
    """The runs that a command line names.

    Args:
        names: Run directories, and folders that contain some, up to two levels down.
        file: Pattern of a file that a run must have; empty: none.
        message: The message about a run that does not have it.
        say: Called with a line for each run that was found below a folder and left out for that.

    Raises:
        ValueError: A directory that does not exist, contains no run, or is a run without the file.
    """
    paths: dict[object, Path] = {}
    for name in names:
        runs = run_folders(name)
        complete = [path for path in runs if not file or any(path.glob(file))]
        if not complete:
            raise ValueError(f"{name}: {message}")
        for path in runs:
            if path in complete:
                paths.setdefault(identity_of(path), path)
            else:
                say(f"left out {path}: {message}")
    return [Run(path, _options(path)) for path in paths.values()]


def run_folders(name: str) -> list[Path]:
    """The run directories that a word of a command line names: itself, and those up to two levels down.

    Raises:
        ValueError: There is no such directory, or no run in it.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name}: no such directory; give run directories, or a folder that contains some")
    seen: set[str] = set()
    runs: list[Path] = []
    level = [folder]
    for _ in range(3):  # each folder once, however many links lead to it
        by_real_path = {os.path.realpath(path): path for path in sorted(level, key=_natural, reverse=True)}
        level = [path for real, path in by_real_path.items() if real not in seen and path.is_dir()]
        seen |= by_real_path.keys()
        runs += [path for path in level if any(any(path.glob(file)) for file in (CONFIG, SUMMARY, EVENT_FILES))]
        level = [inner for path in level for inner in path.glob("*")]
    runs.sort(key=lambda path: (path != folder, _natural(path)))
    if not runs:
        deeper = next(iter(sorted(folder.glob("*/*/*/*"))), None)  # such as those of an experiment
        hint = "" if deeper is None else f"; give a folder in it, such as {deeper.parents[2]}"
        raise ValueError(f"{name}: no run in it or up to two levels below{hint}")
    return runs


def identity_of(run: Path) -> object:
    """What two paths of the same run have in common: links lead to one folder, or another experiment has its files."""
    try:
        status = (run / CONFIG).stat()
    except OSError:
        return run.resolve()
    return status.st_dev, status.st_ino


def differences(runs: Sequence[Run]) -> list[str]:
    """Short names of the options that are not the same in all runs: model, data, trainer, seeds, in config order.

    The number of threads and the options of a callback are compared among the runs that have them.
    """
    options_of_runs = [run.options for run in runs if run.options]

    def differs(name: str) -> bool:
        is_partial = name == THREADS or name.startswith(f"{CALLBACKS}.")
        compared = [options for options in options_of_runs if not is_partial or name in options]
        return len({identity(options.get(name, ABSENT)) for options in compared}) > 1

    def section(name: str) -> int:
        first = "seed" if name in SEEDS else name.partition(".")[0]
        return {"data": 1, "trainer": 2, "keep_freed_memory": 2, THREADS: 2, "seed": 3}.get(first, 0)

    names = dict.fromkeys(name for options in options_of_runs for name in options)
    return sorted(filter(differs, names), key=section)


def option_columns(runs: Sequence[Run], leave_out: Collection[str]) -> dict[str, list[str]]:
    """The options that differ, with a text for the value in each run."""
    names = [name for name in differences(runs) if name not in leave_out]
    return {name: labels([run.options.get(name, ABSENT) for run in runs]) for name in names}


def descriptions(runs: Sequence[Run], leave_out: Collection[str] = ()) -> list[str]:
    """What distinguishes each run from the others, as ``mlp=swiglu, seed_everything=1``; else its short path.

    Where that would be long for runs of several configs, it is the name of the config and what differs among its runs.

    Args:
        runs: The runs.
        leave_out: Options to leave out.

    Returns:
        Texts that may be the same for several runs; see :func:`made_different`.
    """
    texts = _distinctions(runs, leave_out)
    if max(map(len, texts), default=0) > LONGEST_NAME:
        for folder in {run.path.resolve().parent for run in runs}:
            members = [number for number, run in enumerate(runs) if run.path.resolve().parent == folder]
            for number, text in zip(members, _distinctions([runs[n] for n in members], leave_out), strict=True):
                texts[number] = f"{folder.name}: {text}" if text else folder.name
    return [text or run.short_path for text, run in zip(texts, runs, strict=True)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """The :func:`descriptions`, made different and valid as names of folders; a short path is a folder in a folder.

    No name is that of a folder that another one is in: it would lead into the run of that name.
    """
    names: list[str] = []
    for text, run in zip(made_different(descriptions(runs), runs), runs, strict=True):
        name = "/".join(map(file_name, text.split("/"))) if text == run.short_path else file_name(text)
        number = 1
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


def _distinctions(runs: Sequence[Run], leave_out: Collection[str]) -> list[str]:
    columns = option_columns(runs, leave_out).items()
    return [
        ", ".join(f"{name}={column[number]}" for name, column in columns if name in run.options)
        for number, run in enumerate(runs)
    ]
