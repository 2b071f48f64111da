"""Runs on the disk, what their configs differ in, and names made from that."""

import dataclasses
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.cli.yaml_files import read_config
from lightning_llm.io.printable import LONGEST_NAME, file_name
from lightning_llm.training.run_options import ABSENT, CALLBACKS, SEEDS, identity, labels, short_options

CONFIG, SUMMARY = "config.yaml", "summary.json"  # as in cli.runs; to import that would cost an import of torch
EVENTS = "events.out.tfevents*"
THREADS = "threads"  # noted in the summary; where it is not, nothing is known of it


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        path: Where it is.
        options: Its options by short names (see ``training.run_options``); empty where there is no ``config.yaml``.
    """

    path: Path
    options: Mapping[str, Any]

    @property
    def place(self) -> str:
        """The last two folders of its path."""
        whole = self.path.resolve()
        return f"{whole.parent.name}/{whole.name}".lstrip("/")

    @property
    def seed(self) -> tuple[Any, ...]:
        """The seeds of weights and data."""
        return tuple(self.options.get(name) for name in SEEDS)


def find_runs(
    given: Sequence[str], file: str = "", without: str = "", say: Callable[[str], object] = lambda line: None
) -> list[Run]:
    """The runs that a command line names.

    Args:
        given: Run directories, and folders that hold some, up to two levels down.
        file: Pattern of a file that a run must hold; empty: none.
        without: What to say of a run that does not hold it.
        say: Called with a line for each run that was found below a folder and left out for that.

    Raises:
        ValueError: A directory that does not exist, holds no run, or is a run without the file.
    """
    found: dict[Path, Path] = {}
    for name in given:
        folder = Path(name)
        if not folder.is_dir():
            raise ValueError(f"{name}: no such directory; give run directories, or a folder that holds some")
        below = sorted((path for path in (*folder.glob("*"), *folder.glob("*/*")) if _is_run(path)), key=_natural)
        if _is_run(folder):  # and does not hide those below
            below = [folder, *below]
        complete = [path for path in below if _has(path, file)]
        if not complete:
            raise ValueError(f"{name}: {without if below else 'no run in it, nor two levels below'}")
        for path in below:
            if path in complete:
                found.setdefault(path.resolve(), path)
            else:
                say(f"left out {path}: {without}")
    return [Run(path, _options(path)) for path in found.values()]


def differences(runs: Sequence[Run]) -> list[str]:
    """Short names of the options that are not the same in all runs: model, data, trainer, seeds, each as in configs.

    What only some runs can say, threads and the options of a callback, is compared among these.
    """
    known = [run.options for run in runs if run.options]

    def values(name: str) -> set[Hashable]:
        if name == THREADS or name.startswith(f"{CALLBACKS}."):
            return {identity(options[name]) for options in known if name in options}
        return {identity(options.get(name, ABSENT)) for options in known}

    names = dict.fromkeys(name for options in known for name in options)
    return sorted((name for name in names if len(values(name)) > 1), key=_section)


def descriptions(runs: Sequence[Run], leave_out: Collection[str] = ()) -> list[str]:
    """What tells each run from the others, as ``mlp=swiglu, seed_everything=1``; its place where nothing does.

    Where that would be long for runs of several configs, it is the name of the config and what differs among its runs.

    Args:
        runs: The runs.
        leave_out: Options that are not to be told.

    Returns:
        Texts that may be the same for several runs; see :func:`made_different`.
    """
    texts = _told_apart(runs, leave_out)
    if max(map(len, texts), default=0) > LONGEST_NAME:
        for folder in {run.path.resolve().parent for run in runs}:
            members = [number for number, run in enumerate(runs) if run.path.resolve().parent == folder]
            for number, text in zip(members, _told_apart([runs[n] for n in members], leave_out), strict=True):
                texts[number] = f"{folder.name}: {text}" if text else folder.name
    return [text or run.place for text, run in zip(texts, runs, strict=True)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """As :func:`descriptions`, all different, each fit for the name of a folder; a place is of one folder in another.

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
    """Texts about runs, with what tells them apart where they are the same."""
    texts = list(texts)
    for distinguish in (_with_version, _with_place, _with_number):
        texts = [
            distinguish(text, run, number) if texts.count(text) > 1 else text
            for number, (text, run) in enumerate(zip(texts, runs, strict=True))
        ]
    return texts


def _has(folder: Path, file: str) -> bool:
    return not file or any(folder.glob(file))


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or any(folder.glob(EVENTS))


def _options(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    return {CALLBACKS: [], **short_options(read_config(path))} if path.is_file() else {}


def _section(name: str) -> int:
    if name in SEEDS:
        return 3
    return {"data": 1, "trainer": 2, "keep_freed_memory": 2, THREADS: 2}.get(name.partition(".")[0], 0)


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts version_2 before version_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _told_apart(runs: Sequence[Run], leave_out: Collection[str]) -> list[str]:
    names = [name for name in differences(runs) if name not in leave_out]
    columns = {name: labels([run.options.get(name, ABSENT) for run in runs]) for name in names}
    return [
        ", ".join(f"{name}={column[number]}" for name, column in columns.items() if name in run.options)
        for number, run in enumerate(runs)
    ]


def _with_version(text: str, run: Run, number: int) -> str:
    return f"{text} ({run.path.resolve().name})"


def _with_place(text: str, run: Run, number: int) -> str:
    return f"{text} in {run.path.resolve().parent.name}"


def _with_number(text: str, run: Run, number: int) -> str:
    return f"{text} #{number + 1}"
