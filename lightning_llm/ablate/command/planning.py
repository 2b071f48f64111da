"""From a command that a user gives to what a plan holds. No torch, unless there may be GPUs."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lightning_llm.ablate.command import revisions, template
from lightning_llm.ablate.command.process import is_executable
from lightning_llm.ablate.command.program import OPTIONS, CommandProgram
from lightning_llm.ablate.command.settings import Command
from lightning_llm.ablate.experiment import UNCHANGED, Experiment
from lightning_llm.ablate.matching import Tokens
from lightning_llm.ablate.names import BASELINE, titled
from lightning_llm.ablate.plan import PlannedVariant
from lightning_llm.ablate.planning import Draft, Settled
from lightning_llm.ablate.slots import threads_for, visible_gpus
from lightning_llm.io.untrusted import shown

GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")
LARGEST_CODE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandDraft(Draft):
    """An experiment with a command.

    Attributes:
        notes: Lines that the user should read.
    """

    notes: list[str]

    def settle(self, workers: int | None) -> Settled:
        """Decide device and threads: nothing of a command can be matched before it runs."""
        gpus = visible_gpus() if any(map(os.path.exists, GPU_DEVICES)) else []
        accelerator = "cuda" if gpus else "cpu"
        command = self.experiment.command
        assert command is not None
        most = workers if command.is_isolated else 1
        return Settled(
            threads=threads_for(accelerator, len(gpus) // command.gpus_per_run, 1, most),
            accelerator=accelerator,
            text="",
            validation="",
            variants={name: PlannedVariant() for name in self.options},
            identities={},
            configs=self.options,
            most_runs=None if command.is_isolated else 1,
        )


def draft_of(experiment: Experiment) -> CommandDraft:
    """The draft of an experiment with a command.

    Raises:
        ValueError: It cannot run, a variant changes nothing, or something is asked that only ``fit`` can do.
    """
    command = experiment.command
    assert command is not None
    notes: list[str] = []
    if not is_executable(command.words[0], Path(command.folder)) and "{" not in command.words[0]:
        raise ValueError(f"--command: {shown(command.words[0])} is no program here: give its path, or install it")
    _refuse_unavailable(experiment)
    options = {BASELINE: {}, **experiment.variants}
    if experiment.options or any(options.values()):
        _refuse_without_place(command, options)
    if command.trees:
        command, notes = revisions.resolved(command, Path(experiment.folder))
        experiment = replace(experiment, command=command)
    asked: dict[str, Any] = {}
    for name, own in options.items():
        content = {OPTIONS: {**experiment.options, **own}, "command": list(command.words)}
        if name in command.trees:
            content["tree"] = command.trees[name].hash
        other = next((each for each in asked if asked[each] == content), None)
        if other is not None and name != UNCHANGED:
            same = ", ".join(own) or "nothing"
            raise ValueError(f"{name} equals {titled(other)}, which has the same {same}: leave it out")
        asked[name] = content
    program = CommandProgram.name
    return CommandDraft(program=program, experiment=experiment, options=asked, code=code_of(command), notes=notes)


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
    if experiment.match != Tokens.name:
        raise ValueError(f"match {experiment.match} is for configs of fit: a command runs as it says")


def code_of(command: Command) -> dict[str, Path]:
    """The files of code that a command names, by their path in its folder: a plan keeps a copy of them."""
    if command.trees:
        return {}
    folder = Path(command.folder)
    named = [Path(word) for word in command.words if not Path(word).is_absolute()]
    files = {path.as_posix(): folder / path for path in named if ".." not in path.parts}
    return {name: path for name, path in files.items() if path.is_file() and path.stat().st_size <= LARGEST_CODE}
