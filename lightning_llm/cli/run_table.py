"""Runs on the disk, what their configs differ in, and names made from that."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
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
        if _is_run(folder):
            if not any(folder.glob(file)):
                raise ValueError(f"{name}: {without}")
            found.setdefault(folder.resolve(), folder)
            continue
        below = sorted((path for path in (*folder.glob("*"), *folder.glob("*/*")) if _is_run(path)), key=_natural)
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


def run_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run, all different: what tells it from the others, else where it lies."""
    names = differences(runs)
    texts = [_fitting([f"{name}={shown(run.options[name])}" for name in names if name in run.options]) for run in runs]
    texts = [text or run.place for text, run in zip(texts, runs, strict=True)]
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


def _fitting(parts: Sequence[str]) -> str:
    """As many parts as fit into a name, and how many more there are."""
    for count in range(len(parts), 0, -1):
        text = ", ".join(parts[:count]) + (f", {len(parts) - count} more" if count < len(parts) else "")
        if len(text) <= LONGEST_NAME:
            return text
    return ""


def _with_version(text: str, run: Run, number: int) -> str:
    return f"{text} ({run.path.resolve().name})"


def _with_place(text: str, run: Run, number: int) -> str:
    return f"{text} in {run.path.resolve().parent.name}"


def _with_number(text: str, run: Run, number: int) -> str:
    return f"{text} #{number + 1}"
