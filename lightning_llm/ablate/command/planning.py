"""From a command that a user gives to what a plan holds. No torch, unless there may be GPUs."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lightning_llm.ablate.command import revisions, template, timing
from lightning_llm.ablate.command.process import is_executable
from lightning_llm.ablate.command.program import OPTIONS, TREE, CommandProgram
from lightning_llm.ablate.command.source import code_of
from lightning_llm.ablate.command.spec import ONE_FOLDER, Command, Tree
from lightning_llm.ablate.experiment import UNCHANGED, Experiment
from lightning_llm.ablate.matching import Time, Tokens
from lightning_llm.ablate.names import BASELINE, titled
from lightning_llm.ablate.plan import PlannedVariant, code_hash, digest
from lightning_llm.ablate.planning import Draft, ResolvedDraft
from lightning_llm.ablate.reuse import Identity
from lightning_llm.ablate.slots import threads_for, visible_gpus
from lightning_llm.ablate.trees.folders import link_signature
from lightning_llm.ablate.trees.repository import Repository
from lightning_llm.io.untrusted import shown

STORE_OF_IDEA = "../../trees"  # of all ideas of a stream, from the folder of each
GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandDraft(Draft):
    """An experiment with a command.

    Attributes:
        notes: Lines that the user should read.
        is_reused: Whether runs of the same code and options may be used again.
    """

    notes: list[str]
    is_reused: bool = False

    def resolve(self, workers: int | None) -> ResolvedDraft:
        """Decide device and threads: nothing of a command can be matched before it runs."""
        gpus = visible_gpus() if any(map(os.path.exists, GPU_DEVICES)) else []
        accelerator = "cuda" if gpus else "cpu"
        command = self.experiment.command
        assert command is not None
        most = workers if command.is_isolated else 1
        threads = threads_for(accelerator, len(gpus) // command.gpus_per_run, 1, most)
        variants, configs = self._matched(threads, accelerator)
        return ResolvedDraft(
            threads=threads,
            accelerator=accelerator,
            text="",
            validation="",
            variants=variants,
            identities=self._identities(threads) if self.is_reused else {},
            configs=configs,
            most_runs=None if command.is_isolated else 1,
            gpus_per_run=command.gpus_per_run,
        )

    def _matched(self, threads: int, accelerator: str) -> tuple[dict[str, PlannedVariant], dict[str, Any]]:
        """The variants as the plan holds them, and their configs: matched by time, if that is asked."""
        experiment = self.experiment
        variants = {name: PlannedVariant() for name in self.options}
        configs = dict(self.options)
        if experiment.match != Time.name:
            return variants, configs
        option = str(experiment.solved)
        log = partial(print, file=sys.stderr)
        found = timing.scaled(experiment, self.options, threads=threads, accelerator=accelerator, log=log)
        for name, scaled in found.items():
            configs[name] = timing.with_option(configs[name], option, scaled.value)
            variants[name] = PlannedVariant(
                matched={f"{OPTIONS}.{option}": scaled.value},
                facts={"time_ratio": scaled.ratio},  # of three rounds, which have no interval
                solved=scaled.value,
            )
        return variants, configs

    def _identities(self, threads: int) -> dict[str, Identity]:
        """Known facts that decide the bits of each variant's runs."""
        command = self.experiment.command
        assert command is not None
        root = Repository.of(Path(command.folder)).root if command.trees else Path(command.folder)
        linked = link_signature(root, command.links)
        code = code_of(command)
        fixed = msgspec.to_builtins(replace(command, trees={}, store="", folder=""))
        return {
            name: Identity(
                options={**options, "program": fixed},
                code=options.get(TREE) or code_hash(code),
                data=digest(sorted(linked.items())),
                weights="",
                environment={"threads": threads},
            )
            for name, options in self.options.items()
        }


def draft_of(experiment: Experiment, stream: Path | None = None) -> CommandDraft:
    """The draft of an experiment with a command.

    Args:
        experiment: What a user asks for.
        stream: The folder of the stream that it belongs to; ``None``: to none.

    Raises:
        ValueError: It cannot run, a variant changes nothing, or something is asked that only ``fit`` can do.
    """
    command = experiment.command
    assert command is not None
    notes: list[str] = []
    if not is_executable(command.words[0], Path(command.folder)) and "{" not in command.words[0]:
        raise ValueError(f"--command: {shown(command.words[0])} is no program here: give its path, or install it")
    script = command.words[1] if "python" in command.words[0] and len(command.words) > 1 else ""
    is_fixed = script.endswith(".py") and "{" not in script and not command.trees
    if is_fixed and not (Path(command.folder) / script).is_file():
        raise ValueError(f"--command: there is no file {shown(script)} in {command.folder}: correct its path")
    _refuse_unavailable(experiment)
    options = {BASELINE: {}, **experiment.variants}
    if experiment.options or any(options.values()):
        _refuse_without_place(command, options)
    if command.trees:
        out = Path(experiment.folder)
        command, notes = revisions.resolved(command, out, [stream or out])
        experiment = replace(experiment, command=command)
    code = code_of(command)
    if not command.is_isolated:
        notes.append(ONE_FOLDER)
    asked: dict[str, Any] = {}
    for name, own in options.items():
        content = {OPTIONS: {**experiment.options, **own}, "command": list(command.words)}
        if not command.trees:
            content["code"] = code_hash(code)
        if name in command.trees:
            content[TREE] = command.trees[name].hash
        other = next((each for each in asked if asked[each] == content), None)
        if other is not None and name != UNCHANGED:
            same = ", ".join(own) or "nothing"
            advice = "give other factors" if experiment.factors else "leave it out"
            raise ValueError(f"{name} equals {titled(other)}, which has the same {same}: {advice}")
        asked[name] = content
    program = CommandProgram.name
    return CommandDraft(program=program, experiment=experiment, options=asked, code=code, notes=notes)


def first_tree(command: Command, stream: Path) -> Tree:
    """The tree of the revision that a new stream begins with. Makes the store.

    Raises:
        ValueError: There is no such repository or revision.
    """
    trees = revisions.store_of(command, stream, [stream])
    revision = command.trees[BASELINE].revision
    return Tree(hash=trees.tree_of(revision), revision=revision, commit=trees.commit_of(revision))


def working_tree(command: Command, stream: Path) -> Tree:
    """The user's files as they are now."""
    return Tree(hash=revisions.store_of(command, stream, [stream]).snapshot())


def environment(command: Command) -> dict[str, str]:
    """The environment that all runs of a stream share: the device, and the code if it is not that of trees."""
    code = {} if command.trees else {"code": code_hash(code_of(command))[:16]}
    return {"device": "cuda" if any(map(os.path.exists, GPU_DEVICES)) else "cpu", **code}


def keys_of(command: Command, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an experiment with this command, besides others."""
    read: Any = command.read or {"file": command.file, "key": command.key}
    return {**keys, "read": read, "reseed": command.reseed, "option": command.option, "delta": None}


def _refuse_without_place(command: Command, options: Mapping[str, Mapping[str, Any]]) -> None:
    if not template.has(command.words, template.OPTIONS):
        given = next(f"{name}={value}" for each in options.values() for name, value in each.items())
        raise ValueError(
            f"--command has no {{options}}, where {given} would go: put it where the program takes options"
        )


def _refuse_unavailable(experiment: Experiment) -> None:
    """Refuse what needs to know more of a program than a command tells."""
    for key, value in (("tune", experiment.tune), ("sizes", experiment.sizes)):
        if value:
            raise ValueError(f"{key} is for configs of fit: leave it out, or write a variant for each value")
    if experiment.match == Time.name and experiment.solved is None:
        raise ValueError("match time of a command needs the option that says how long it trains: time=max_iters, say")
    if experiment.match not in (Tokens.name, Time.name):
        advice = "a command runs as it says, or with time=OPTION as long as the baseline"
        raise ValueError(f"match {experiment.match} is for configs of fit: {advice}")
    if experiment.match == Time.name and experiment.command is not None:
        timing.base_value(experiment, experiment.command, str(experiment.solved))
