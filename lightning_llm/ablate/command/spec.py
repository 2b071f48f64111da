"""A command as an experiment asks for it: what is executed, and where its result is. No torch."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_llm.ablate.command import template
from lightning_llm.ablate.command.reading import Pattern
from lightning_llm.ablate.trees.problems import WORKING_TREE
from lightning_llm.io.units import duration
from lightning_llm.io.untrusted import shown

OF_REVISIONS = {"against", "revisions"}
OF_TREES = ("link", "setup", "keep_trees")  # they need one of OF_REVISIONS
KEYS = ("command", "option", "read", "reseed", "resume", "time_limit", "gpus_per_run", *OF_TREES, *OF_REVISIONS)

STORE = "trees"  # in the folder of an experiment, or of a stream
ONE_FOLDER = "Runs share one folder, so that one runs at a time: {run} in the command gives each its own."
COMMAND_LINE = "the command line"  # the source of keys that are given as options
_SHARED = {"batches": "batches", "initial_values": "initial values"}


OPTIONS_OF_FIELDS = {  # of a Command, where the option has another name
    "text": "--command",
    "words": "--command",
    "file": "--read-file",
    "links": "--link",
    "time_limit_s": "--time-limit",
    "folder": "folder to start in",
    "sources": "folders of modules in the repository",
    "interpreter": "Python or torch",
}


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """The code of a variant in a git repository.

    Attributes:
        hash: Of git's tree; empty: it is not looked up yet.
        revision: As the user named it; empty: the working tree.
        commit: Of the revision; empty: the working tree, or several merged.
        merged: Further revisions, which are merged into it.
    """

    hash: str = ""
    revision: str = ""
    commit: str = ""
    merged: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its name for a reader."""
        return f"{self.name} ({(self.commit or self.hash)[:12]})"

    @property
    def name(self) -> str:
        """The revisions that it is of, as the user named them."""
        return " + ".join([self.revision or WORKING_TREE, *self.merged])


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A training program as a command, the same for all variants.

    Attributes:
        text: As the user gave it.
        words: Of it, with placeholders (``template.PLACEHOLDERS``).
        option: How an option is written.
        read: The pattern of the metric in the output; empty: it is in a file.
        file: That file, below ``{run}``, or below the folder that the command starts in if it has no ``{run}``.
        key: Of the metric in the file.
        reseed: Whether the run's seed is added to every seed that the program itself sets.
        resume: The words of ``{resume}`` in a run that was interrupted, with placeholders; empty: such a run starts
            again with an empty ``{run}``.
        time_limit_s: Of a run; ``None``: none.
        gpus_per_run: How many a run sees.
        folder: That it starts in.
        links: Files and folders of the user's that every tree gets, relative to the top of his repository.
        setup: What is executed once in each tree, such as a compilation; empty: nothing.
        keep_trees: Whether the trees stay when the experiment has ended.
        trees: The code of each variant; empty: all run in ``folder``.
        sources: Folders of the repository that modules are imported from, relative to its top.
        interpreter: The versions of Python and torch that run it; empty: not known.
        store: Where the trees are, relative to the experiment's folder.
    """

    text: str
    words: tuple[str, ...]
    option: str = template.OPTION
    read: str = ""
    file: str = ""
    key: str = ""
    reseed: bool = False
    resume: tuple[str, ...] = ()
    time_limit_s: float | None = None
    gpus_per_run: int = 1
    folder: str = "."
    links: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    keep_trees: bool = False
    trees: dict[str, Tree] = {}
    sources: tuple[str, ...] = ()
    interpreter: str = ""
    store: str = STORE

    def notes(self, tells: Collection[str]) -> list[str]:
        """Lines about what its pairs share.

        Args:
            tells: What its output says of itself: ``batches``, ``initial_values``.
        """
        lines = []
        if self.reseed:
            lines.append("--reseed: the run's seed was added to every seed that the program sets.")
        unknown = [words for name, words in _SHARED.items() if name not in tells]
        if unknown:
            what = " and ".join(unknown)
            lines.append(
                f"Whether the two runs of a pair share {what}, the program does not tell (docs/any-program.md)."
            )
        if not self.is_isolated:
            lines.append(ONE_FOLDER)
        return lines

    def store_in(self, out: Path) -> Path:
        """The folder of its trees, for an experiment in a folder that may not be there yet."""
        return Path(os.path.normpath(out / self.store))

    @property
    def is_shared(self) -> bool:
        """Whether its trees serve other experiments too, as those of a stream do."""
        return self.store != STORE

    @property
    def is_isolated(self) -> bool:
        """Whether two runs cannot meet in one folder, so that several may run at a time."""
        return bool(self.trees) or template.has(self.words, template.RUN)


def command_of(content: Mapping[str, Any], source: object) -> tuple[Command, str]:
    """The command that a file, or the options in its place, ask for; and the name of its metric.

    Args:
        content: The keys of an experiment; their types were checked.
        source: Names it in errors.

    Raises:
        ValueError: A key is wrong, or two that exclude each other are given.
    """
    words = template.words_of(content["command"], option_named("command", source))
    option = content.get("option", template.OPTION)
    if not {"name", "value"} <= {*template.names_in(option, {"name": "", "value": ""}, option_named("option", source))}:
        raise ValueError(f"{option_named('option', source)} {shown(option)} needs {{name}} and {{value}}")
    read, file, key = _result(content, source)
    reseed = bool(content.get("reseed"))
    if not reseed and not template.has(words, template.SEED):
        advice = "put {seed} where it takes its seed, or give --reseed, which adds the run's seed to those it sets"
        raise ValueError(f"{option_named('command', source)} has no {{seed}}: {advice}")
    if reseed and template.has(words, template.SEED):
        raise ValueError(
            f"{option_named('reseed', source)} is for a command without {{seed}}, and this one has it: give one"
        )
    if not OF_REVISIONS & {*content} and (useless := next((key for key in OF_TREES if key in content), None)):
        advice = "give --against or --revisions too, or leave it out"
        raise ValueError(f"{option_named(useless, source)} is for trees of revisions, and there are none: {advice}")
    resume = _resume(content, words, source)
    limit = content.get("time_limit")
    command = Command(
        text=content["command"],
        words=tuple(words),
        option=option,
        read=read,
        file=file,
        key=key,
        reseed=reseed,
        resume=tuple(resume),
        time_limit_s=None if limit is None else duration(str(limit), option_named("time_limit", source)),
        gpus_per_run=content.get("gpus_per_run", 1),
        folder=os.getcwd(),
        links=tuple([content["link"]] if isinstance(content.get("link"), str) else content.get("link", ())),
        setup=tuple(template.words_of(content["setup"], option_named("setup", source)) if "setup" in content else ()),
        keep_trees=bool(content.get("keep_trees")),
    )
    return command, Pattern(read).name if read else key


def option_named(key: str, source: object) -> str:
    """How errors name a key of an experiment: as an option, if it was given as one."""
    option = {"variants": "vary", "factors": "factor", "unchanged": "null"}.get(key, key.replace("_", "-"))
    return f"--{option}" if source == COMMAND_LINE else f"{source}: {key}"


def _resume(content: Mapping[str, Any], words: Sequence[str], source: object) -> list[str]:
    """The words of ``{resume}``."""
    option = option_named("resume", source)
    has_place = template.has(words, template.RESUME)
    if "resume" not in content:
        if has_place:
            raise ValueError(f"{option_named('command', source)} has {{resume}}: {option} says what it becomes")
        return []
    if not has_place or not template.has(words, template.RUN):
        problem = "needs {resume} in the command, and {run}, where the program finds its checkpoint"
        raise ValueError(f"{option} {shown(content['resume'])} {problem}")
    resume = template.words_of(content["resume"], option)
    if template.has(resume, template.RESUME):
        raise ValueError(f"{option} {shown(content['resume'])} has {{resume}}, which is what it says: leave that out")
    return resume


def _result(content: Mapping[str, Any], source: object) -> tuple[str, str, str]:
    """The pattern, or the file and the key in it."""
    read = content.get("read")
    if isinstance(read, str):
        Pattern(read, option_named("read", source))
        return read, "", ""
    if not read:
        advice = "--read 'val loss {number}' finds it in the output, --read-file FILE --key KEY in a file"
        raise ValueError(
            f"{option_named('read', source)} is missing, which says where the metric of a run is: {advice}"
        )
    file = Path(read["file"])
    if file.is_absolute() or ".." in file.parts:
        problem = "must be a path below the run's folder"
        raise ValueError(f"{option_named('read_file', source)} {shown(str(file))} {problem}, such as result.json")
    return "", str(file), read["key"]
