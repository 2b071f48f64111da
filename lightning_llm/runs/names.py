"""Differences between several runs, and names made from them. Needs no torch."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lightning_llm.io.untrusted import LONGEST_NAME, file_name
from lightning_llm.runs.find import Run, experiment_of
from lightning_llm.runs.options import ABSENT, CALLBACKS, SEEDS, ClassPath, identity, labels

THREADS = "threads"  # in the summary; older ones lack it
MOST_OPTIONS = 4  # in a name: TensorBoard lists names in a narrow column


def differences(runs: Sequence[Run]) -> list[str]:
    """Short names of the options that are not the same in all runs: model, data, trainer, seeds, in config order.

    The number of threads, the options of a callback, and those of a class that differs too are compared among the runs
    that have them: others have no such option.
    """
    options_of_runs = [run.options for run in runs if run.options]
    owners: tuple[str, ...] = (f"{CALLBACKS}.",)

    def differs(name: str) -> bool:
        is_partial = name == THREADS or name.startswith(owners)
        compared = [options for options in options_of_runs if not is_partial or name in options]
        return len({identity(options.get(name, ABSENT)) for options in compared}) > 1

    classes = {name for options in options_of_runs for name, value in options.items() if isinstance(value, ClassPath)}
    owners += tuple(f"{name}." for name in classes if differs(name))

    def section(name: str) -> int:
        first = "seed" if name in SEEDS else name.partition(".")[0]
        return {"data": 1, "trainer": 2, "keep_freed_memory": 2, THREADS: 2, "seed": 3}.get(first, 0)

    names = dict.fromkeys(name for options in options_of_runs for name in options)
    return sorted(filter(differs, names), key=section)


def option_columns(runs: Sequence[Run], leave_out: Collection[str]) -> dict[str, list[str]]:
    """The options that differ, with a text for the value in each run."""
    names = [name for name in differences(runs) if name not in leave_out]
    return {name: labels([run.options.get(name, ABSENT) for run in runs]) for name in names}


def descriptions(runs: Sequence[Run], leave_out: Collection[str] = (), *, is_short: bool = False) -> list[str]:
    """Differences of each run from the others, as ``mlp=swiglu, seed_everything=1``; else its short path.

    Where that would be long for runs of several configs, it is the name of the config and what differs among its runs.
    What still has many options has the first ones, and the number of the others.

    Args:
        runs: The runs.
        leave_out: Options to leave out.
        is_short: Whether to give each option by its last word if no other one ends with it.

    Returns:
        Texts that may be the same for several runs; see :func:`made_different`.
    """
    found = _distinctions(runs, leave_out, is_short=is_short)
    texts = [", ".join(parts) for parts in found]
    if any(len(parts) > MOST_OPTIONS for parts in found) or max(map(len, texts), default=0) > LONGEST_NAME:
        for folder in {run.path.resolve().parent for run in runs}:
            members = [number for number, run in enumerate(runs) if run.path.resolve().parent == folder]
            parts_of_members = _distinctions([runs[n] for n in members], leave_out, is_short=is_short)
            for number, parts in zip(members, parts_of_members, strict=True):
                texts[number] = f"{folder.name}: {_first(parts)}" if parts else folder.name
    return [text or run.short_path for text, run in zip(texts, runs, strict=True)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """Short names of runs, all different, and valid as names of folders.

    A run of an experiment has the name of its folder: the variant and the seed. The experiment's name comes before it
    unless all runs are of one experiment. Other runs have their :func:`descriptions`, with each option by its last word
    if that is enough. A short path is a folder in a folder. No name is that of a folder that another one is in: it
    would lead into the run of that name.
    """
    in_experiments = _names_in_experiments(runs)
    others = [run for number, run in enumerate(runs) if number not in in_experiments]
    described = iter(made_different(descriptions(others, is_short=True), others))
    names: dict[str, None] = {}
    folders: set[str] = set()  # that a name is in
    for number, run in enumerate(runs):
        text = in_experiments.get(number) or next(described)
        has_folders = number in in_experiments or text == run.short_path
        name = "/".join(map(file_name, text.split("/"))) if has_folders else file_name(text)
        repeats = 1
        while name in names or name in folders or not names.keys().isdisjoint(_folders_of(name)):
            repeats += 1
            name = file_name(f"{text} #{repeats}")
        names[name] = None
        folders.update(_folders_of(name))
    return list(names)


def _names_in_experiments(runs: Sequence[Run]) -> dict[int, str]:
    """By the number of each run of an experiment: its folder, after the shortest different path of the experiment."""
    found = {number: experiment_of(run.path) for number, run in enumerate(runs)}
    experiments = {number: str(folder.resolve()) for number, folder in found.items() if folder is not None}
    titles = dict(zip(experiments.values(), labels(list(experiments.values())), strict=True))
    is_one = len(titles) == 1 and len(experiments) == len(runs)
    folder_names = {number: Path(os.path.abspath(runs[number].path)).name for number in experiments}
    return {
        number: name if is_one else f"{titles[experiments[number]]}/{name}" for number, name in folder_names.items()
    }


def _folders_of(name: str) -> list[str]:
    return ["/".join(name.split("/")[:depth]) for depth in range(1, name.count("/") + 1)]


def made_different(texts: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Texts about runs; where they are the same, with the run's folder, then its parent, then a number."""
    for ending in (" ({path.name})", " in {path.parent.name}", " #{number}"):
        count = Counter(texts)
        texts = [
            text + (ending.format(path=run.path.resolve(), number=number) if count[text] > 1 else "")
            for number, (text, run) in enumerate(zip(texts, runs, strict=True), start=1)
        ]
    return list(texts)


def distinctions(runs: Sequence[Run], leave_out: Collection[str] = ()) -> list[str]:
    """Options of each run that are not the same in all runs, as ``mlp=swiglu, seed_everything=1``."""
    return [", ".join(parts) for parts in _distinctions(runs, leave_out)]


def _distinctions(runs: Sequence[Run], leave_out: Collection[str], *, is_short: bool = False) -> list[list[str]]:
    columns = option_columns(runs, leave_out)
    titles = _last_words(columns) if is_short else {name: name for name in columns}
    return [
        [
            f"{titles[name]}={column[number]}"
            for name, column in columns.items()
            if name in run.options and name in titles
        ]
        for number, run in enumerate(runs)
    ]


def _last_words(columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The last word of each option, or all of them where two options have the same; seeds that are equal are one."""
    words = {name: name.rpartition(".")[2] for name in columns}
    count = Counter(words.values())
    titles = {name: word if count[word] == 1 else name for name, word in words.items()}
    weights, data = SEEDS
    if columns.get(weights) == columns.get(data):
        titles.pop(data, None)
    if data in titles:
        titles[data] = data  # its last word means the seed of all
    elif weights in titles:
        titles[weights] = "seed"
    return titles


def _first(parts: Sequence[str]) -> str:
    """Text of as many parts as can be read at a glance, and of how many more there are."""
    more = len(parts) - MOST_OPTIONS
    return ", ".join(parts[:MOST_OPTIONS]) + (f", and {more} more" if more > 0 else "")
