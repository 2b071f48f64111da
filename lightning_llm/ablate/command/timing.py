"""Equal time for the variants of a command: an option that the user names, such as ``max_iters``, is scaled. No torch.

Before the plan is frozen, each variant runs a few times, interleaved with the baseline and alone. Where its time cannot
be told from the baseline's, the option stays as it is.
"""

import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec.structs import replace

from lightning_llm.ablate.command.program import OPTIONS, CommandProgram
from lightning_llm.ablate.command.source import code_of
from lightning_llm.ablate.command.spec import Command
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import CONFIGS, Plan, PlannedVariant, PlanRecord, code_hash
from lightning_llm.ablate.run_process import last_line
from lightning_llm.ablate.slots import slots_for
from lightning_llm.io.atomic import remove_path, write_text

PILOT = "pilot"  # in the folder of an experiment, while it is timed
ROUNDS = 3
FIRST_SEED = 2_000_000_000  # of these runs: no pair has them


class Scaled(NamedTuple):
    """The option of a variant that was scaled.

    Attributes:
        value: Of the option; that of the baseline if the times cannot be told apart.
        ratio: Time of a run before it was scaled, over that of the baseline: the median of the rounds.
        between: The lowest and the highest of the rounds.
    """

    value: float
    ratio: float
    between: tuple[float, float]


def scaled(
    experiment: Experiment,
    configs: Mapping[str, Any],
    *,
    threads: int,
    accelerator: str,
    log: Callable[[str], object] = lambda line: None,
) -> dict[str, Scaled]:
    """Time the variants, and scale the option that the experiment names.

    Args:
        experiment: Matched by time.
        configs: Of each variant, as its runs read them.
        threads: Of each run.
        accelerator: ``cpu`` or ``cuda``.
        log: Called with a line for each run.

    Raises:
        ValueError: A run failed.
    """
    command = experiment.command
    assert command is not None
    assert experiment.solved is not None
    base = base_value(experiment, command, experiment.solved)
    out = Path(experiment.folder) / PILOT
    remove_path(out)
    moved = replace(command, store=f"../{command.store}")
    asked = replace(experiment, out=str(out), command=moved, first_seed=FIRST_SEED)
    variants = dict.fromkeys(configs, PlannedVariant())
    record = PlanRecord(
        experiment=asked,
        variants=variants,
        program=CommandProgram.name,
        code=code_hash(code_of(command)),
        threads=threads,
        accelerator=accelerator,
        gpus_per_run=command.gpus_per_run,
    )
    plan = Plan(out, record)
    for name, config in configs.items():
        (out / CONFIGS).mkdir(parents=True, exist_ok=True)
        write_text(out / CONFIGS / f"{name}.yaml", yaml.safe_dump(config, sort_keys=False))
    try:
        seconds: dict[str, list[float]] = {name: [] for name in configs}
        for number in range(ROUNDS):
            for name in configs:
                seconds[name].append(_seconds(plan, RunKey(name, FIRST_SEED + number)))
                log(f"timing {name}, round {number + 1} of {ROUNDS}: {seconds[name][-1]:.1f} s")
    finally:
        remove_path(out)
    found: dict[str, Scaled] = {}
    for name in experiment.variants:
        ratios = [own / other for own, other in zip(seconds[name], seconds[BASELINE], strict=True)]
        between = (min(ratios), max(ratios))
        ratio = statistics.median(ratios)
        value = base if between[0] <= 1 <= between[1] else max(1.0, base / ratio)
        found[name] = Scaled(round(value) if base == round(base) else value, ratio, between)
    return found


def _seconds(plan: Plan, key: RunKey) -> float:
    """The time of a run.

    Raises:
        ValueError: It failed.
    """
    program = CommandProgram(plan)
    (slot, *_) = slots_for(plan, 1)
    run = program.run(key)
    run.log.parent.mkdir(parents=True, exist_ok=True)
    process = program.start(run, slot)
    try:
        process.wait()
    finally:
        process.ask_to_end()
        process.await_end()
    ended = program.result(run.folder)
    if ended is None or ended.failure:
        raise ValueError(f"match time: a run of {key.name} failed while it was timed: {last_line(run.log)}")
    return float(ended.summary["seconds"])


def base_value(experiment: Experiment, command: Command, option: str) -> float:
    """The value of an option of the baseline: in the options of all runs, or in the command itself.

    Raises:
        ValueError: It is nowhere, or no number.
    """
    given = experiment.options.get(option)
    if given is None:
        written = re.escape(command.option.replace("{name}", option)).replace(re.escape("{value}"), r"(\S+)")
        match = re.search(rf"(?<!\S){written}(?!\S)", command.text)
        given = None if match is None else match[1]
    try:
        return float(str(given))
    except ValueError:
        example = command.option.replace("{name}", option).replace("{value}", "500")
        raise ValueError(f"match time: {option} has no number in the command: write it, such as {example}") from None


def with_option(config: Mapping[str, Any], option: str, value: float) -> dict[str, Any]:
    """The config of a variant with another value of an option."""
    return {**config, OPTIONS: {**config[OPTIONS], option: value}}
