"""Differences between several runs, and names made from them. Needs no torch."""

from collections.abc import Collection, Sequence

from lightning_llm.io.untrusted import LONGEST_NAME, file_name
from lightning_llm.runs.find import Run
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


def descriptions(runs: Sequence[Run], leave_out: Collection[str] = ()) -> list[str]:
    """Differences of each run from the others, as ``mlp=swiglu, seed_everything=1``; else its short path.

    Where that would be long for runs of several configs, it is the name of the config and what differs among its runs.
    What still has many options has the first ones, and the number of the others.

    Args:
        runs: The runs.
        leave_out: Options to leave out.

    Returns:
        Texts that may be the same for several runs; see :func:`made_different`.
    """
    found = _distinctions(runs, leave_out)
    texts = [", ".join(parts) for parts in found]
    if any(len(parts) > MOST_OPTIONS for parts in found) or max(map(len, texts), default=0) > LONGEST_NAME:
        for folder in {run.path.resolve().parent for run in runs}:
            members = [number for number, run in enumerate(runs) if run.path.resolve().parent == folder]
            for number, parts in zip(members, _distinctions([runs[n] for n in members], leave_out), strict=True):
                texts[number] = f"{folder.name}: {_first(parts)}" if parts else folder.name
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


def distinctions(runs: Sequence[Run], leave_out: Collection[str] = ()) -> list[str]:
    """Options of each run that are not the same in all runs, as ``mlp=swiglu, seed_everything=1``."""
    return [", ".join(parts) for parts in _distinctions(runs, leave_out)]


def _distinctions(runs: Sequence[Run], leave_out: Collection[str]) -> list[list[str]]:
    columns = option_columns(runs, leave_out).items()
    return [
        [f"{name}={column[number]}" for name, column in columns if name in run.options]
        for number, run in enumerate(runs)
    ]


def _first(parts: Sequence[str]) -> str:
    """Text of as many parts as can be read at a glance, and of how many more there are."""
    more = len(parts) - MOST_OPTIONS
    return ", ".join(parts[:MOST_OPTIONS]) + (f", and {more} more" if more > 0 else "")
