"""Runs on the disk, what their configs differ in, and names made from that."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.training.run_options import SEEDS, short_options, shown

CONFIG, SUMMARY = "config.yaml", "summary.json"  # as in cli.runs; to import that would cost an import of torch
EVENTS = "events.out.tfevents*"
LONGEST_NAME = 120  # characters; a name becomes the name of a folder
ABSENT = "absent"


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
    given: Sequence[str], file: str, without: str, say: Callable[[str], object] = lambda line: None
) -> list[Run]:
    """The runs that a command line names.

    Args:
        given: Run directories, and folders that hold some, up to two levels down.
        file: Pattern of a file that a run must hold.
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
        complete = [path for path in below if any(path.glob(file))]
        if not complete:
            raise ValueError(f"{name}: {without if below else 'no run in it, nor two levels below'}")
        for path in below:
            if path in complete:
                found.setdefault(path.resolve(), path)
            else:
                say(f"left out {path}: {without}")
    return [Run(path, _options(path)) for path in found.values()]


def differences(runs: Sequence[Run]) -> list[str]:
    """Short names of the options that are not the same in all runs: model, data, trainer, seeds, each as in configs."""
    known = [run.options for run in runs if run.options]
    names = dict.fromkeys(name for options in known for name in options)
    differing = [name for name in names if any(o.get(name, ABSENT) != known[0].get(name, ABSENT) for o in known)]
    return sorted(differing, key=_section)


def descriptions(runs: Sequence[Run], leave_out: Collection[str] = ()) -> list[str]:
    """What tells each run from the others, as ``mlp=swiglu, seed_everything=1``; its place where nothing does.

    Where that would be long for runs of several configs, it is the name of the config and what differs among its runs.

    Args:
        runs: The runs.
        leave_out: Options that are not to be told.
    """
    texts = _told_apart(runs, leave_out)
    if max(map(len, texts), default=0) > LONGEST_NAME:
        for folder in {run.path.resolve().parent for run in runs}:
            members = [number for number, run in enumerate(runs) if run.path.resolve().parent == folder]
            for number, text in zip(members, _told_apart([runs[n] for n in members], leave_out), strict=True):
                texts[number] = f"{folder.name}: {text}" if text else folder.name
    return [_cut(text) or run.place for text, run in zip(texts, runs, strict=True)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """As :func:`descriptions`, made different where they are the same, and fit for the name of a folder."""
    texts = descriptions(runs)
    for distinguish in (_with_version, _with_place, _with_number):
        texts = [
            distinguish(text, run, number) if texts.count(text) > 1 else text
            for number, (text, run) in enumerate(zip(texts, runs, strict=True))
        ]
    return texts


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or any(folder.glob(EVENTS))


def _options(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold options by name, got {content!r}")
    return short_options(content)


def _section(name: str) -> int:
    if name in SEEDS:
        return 3
    return {"data": 1, "trainer": 2, "keep_freed_memory": 2}.get(name.partition(".")[0], 0)


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts version_2 before version_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _told_apart(runs: Sequence[Run], leave_out: Collection[str]) -> list[str]:
    names = [name for name in differences(runs) if name not in leave_out]
    return [", ".join(f"{name}={shown(run.options[name])}" for name in names if name in run.options) for run in runs]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def _with_version(text: str, run: Run, number: int) -> str:
    return f"{text} ({run.path.resolve().name})"


def _with_place(text: str, run: Run, number: int) -> str:
    return f"{text} in {run.path.resolve().parent.name}"


def _with_number(text: str, run: Run, number: int) -> str:
    return f"{text} #{number + 1}"
