"""From a draft to the frozen plan of an experiment: what earlier experiments offer is looked up, and all is written.

A program reads and compares the variants that a user asks for, and hands them on as a :class:`Draft`. If the folder
has a plan already, it must be of the same experiment.
"""

import abc
import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightning_llm.ablate import claims
from lightning_llm.ablate.command.spec import OPTIONS_OF_FIELDS
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.history import Earlier, earlier
from lightning_llm.ablate.names import BASELINE, PLAN, titled
from lightning_llm.ablate.options import flat_options
from lightning_llm.ablate.plan import (
    EXTENSIONS,
    RUNS,
    Plan,
    PlannedVariant,
    PlanRecord,
    code_hash,
    digest,
    freeze,
)
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.results import COST
from lightning_llm.ablate.reuse import REUSES, Identity, reusable
from lightning_llm.io.atomic import remove_path
from lightning_llm.io.config_file import read_config
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import shown
from lightning_llm.runs.code import commit_of_package
from lightning_llm.runs.lock import RunLock, is_locked

# Fields of an experiment that two commands may have different and still ask for the same: the options of all variants
# (and the baseline's configs with them) are compared as they were read
_READ = ("baseline", "options", "out", "because")


class ResolvedDraft(NamedTuple):
    """A program's part of the plan, once the variants are matched.

    Attributes:
        threads: Of each run.
        accelerator: ``cpu`` or ``cuda``.
        text: What the runs train on; empty: not known.
        validation: How much of the validation text each run's metric is of; empty: not known.
        variants: With the null variant, if the program can make one.
        identities: What decides the bits of their runs; none for variants whose runs are never reused.
        configs: The options of each.
        most_runs: How many may train at a time; ``None``: as many as have a slot.
        gpus_per_run: How many each run sees, if it uses any.
    """

    threads: int
    accelerator: str
    text: str
    validation: str
    variants: Mapping[str, PlannedVariant]
    identities: Mapping[str, Identity]
    configs: Mapping[str, Any]
    most_runs: int | None = None
    gpus_per_run: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft(abc.ABC):
    """An experiment whose variants a program has read and compared; no run has started.

    Attributes:
        program: A name in ``programs.PROGRAMS``.
        experiment: What a user asks for.
        options: Of each variant and of the baseline, as it was read: nothing is matched yet.
        code: The files of the code that runs execute, by their path in its folder.
    """

    program: str
    experiment: Experiment
    options: Mapping[str, Any]
    code: Mapping[str, Path]

    @abc.abstractmethod
    def resolve(self, workers: int | None) -> ResolvedDraft:
        """Decide the threads, match the variants, and say what the plan holds of each; it may train a step of them.

        Args:
            workers: The most runs at a time that the user wants.

        Raises:
            ValueError: A variant cannot be matched.
        """

    def moved(self, experiment: Experiment) -> "Draft":
        """The draft of the same experiment in another folder."""
        return dataclasses.replace(self, experiment=experiment)

    @cached_property
    def asked(self) -> dict[str, str]:
        """The hash of what each variant is."""
        return {name: digest(options) for name, options in self.options.items()}

    @cached_property
    def earlier(self) -> list[Earlier]:
        """The experiments beside it that have the same baseline and metric."""
        return list(earlier(Path(self.experiment.folder), self.asked[BASELINE], self.experiment.metric))


def plan_of(draft: Draft, workers: int | None, *, reuse: str = REUSES[0], prediction: str = "") -> Plan:
    """The frozen plan of a draft: that of its folder, or a new one.

    Args:
        draft: The experiment.
        workers: The most runs at a time that the user wants.
        reuse: Whose finished runs of earlier experiments are used: one of ``reuse.REUSES``.
        prediction: The hash of what was predicted of it; empty: nothing was.

    Raises:
        ValueError: The folder has another plan, or a variant cannot be matched.
    """
    out = Path(draft.experiment.folder)
    if (plan := _kept(out, draft)) is not None:
        return plan
    if not (out / PLAN).exists() and (leftovers := [name for name in (RUNS, COST) if (out / name).exists()]):
        raise ValueError(f"{out} has {leftovers[0]} of an experiment without {PLAN}: give another --out")
    resolved = draft.resolve(workers)
    record = _record_of(draft, resolved, reuse, prediction)
    out.mkdir(parents=True, exist_ok=True)
    lock = RunLock(out).acquire()  # of two that begin here at the same time, one finds the plan of the other
    try:
        if (plan := _kept(out, draft)) is not None:
            return plan
        for name in (RUNS, claims.CLAIMS, EXTENSIONS, PLAN):  # of a plan that nothing has come of
            remove_path(out / name)
        return freeze(out, record, resolved.configs, draft.code)
    finally:
        lock.release()


def _record_of(draft: Draft, resolved: ResolvedDraft, reuse: str, prediction: str) -> PlanRecord:
    experiment = draft.experiment
    hashes = {name: identity.hash for name, identity in resolved.identities.items()}
    planned_seeds = set(experiment.seeds(experiment.looks[-1]))
    seen = {other.name: sorted(planned_seeds & {*other.seeds}) for other in draft.earlier}
    tuned = None if experiment.tune is None else experiment.tune.option
    out = Path(experiment.folder)
    return PlanRecord(
        experiment=experiment,
        variants={
            name: msgspec.structs.replace(variant, identity=hashes.get(name, ""))
            for name, variant in resolved.variants.items()
        },
        program=draft.program,
        asked=draft.asked,
        code=code_hash(draft.code),
        threads=resolved.threads,
        accelerator=resolved.accelerator,
        most_runs=resolved.most_runs,
        gpus_per_run=resolved.gpus_per_run,
        start_folder=str(Path.cwd()),
        text=resolved.text,
        validation=resolved.validation,
        commit=commit_of_package(),
        seen={name: seeds for name, seeds in seen.items() if seeds},
        reused=reusable(out, resolved.identities, reuse, first_seed=experiment.first_seed, tuned=tuned),
        prediction=prediction,
    )


# ---- a plan that is there


def _kept(out: Path, draft: Draft) -> Plan | None:
    """The plan of a folder, which is of this experiment. ``None``: there is none, or nothing has come of it.

    A command that was mistyped leaves such a plan: what is asked now is in place of it.

    Raises:
        ValueError: It is of another experiment.
    """
    if not (out / PLAN).exists():
        return None
    plan = Plan.read(out)
    if difference := _difference(plan, draft):
        if not _has_begun(plan):
            return None
        command = f"lightning-llm ablate run {shell_path(plan.out)}"
        advice = f"give another --name or --out, or finish this one as it is: {command}"
        raise ValueError(f"{plan.out} has a plan with {difference}, which makes a new experiment: {advice}")
    return plan


def _has_begun(plan: Plan) -> bool:
    """Whether a run of a plan trains, has ended, or has saved something."""
    program = program_of(plan)
    folders = [folder for _, folder in plan.run_folders()]
    return any(is_locked(each) or program.result(each) is not None or program.can_resume(each) for each in folders)


def _difference(plan: Plan, draft: Draft) -> str:
    """The first thing that is not as it is asked for now, in words; empty if nothing is."""
    old_fields, new_fields = (_fields(each) for each in (plan.experiment, draft.experiment))
    for field, old in old_fields.items():
        new = new_fields.get(field)
        if old != new:
            if field == "command" and old and new:
                return _changed_of_command(old, new)
            other = "other" if field in ("variants", "looks") else "another"
            values = f" ({old}, now {new})" if len(f"{old}{new}") < 100 else ""
            return f"{other} {field}{values}"
    if plan.record.asked != draft.asked:
        return _changed_option(plan, draft)
    return "another code" if plan.record.code != code_hash(draft.code) else ""


def _changed_of_command(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first thing about a command that differs, in words."""
    field = next(name for name, value in old.items() if new.get(name) != value)
    if field == "trees":
        return "other code of its revisions"
    option = OPTIONS_OF_FIELDS.get(field, f"--{field.replace('_', '-')}")
    values = (shown(" ".join(each[field]) if isinstance(each[field], list) else each[field]) for each in (old, new))
    return "another {} ({}, now {})".format(option, *values)


def _fields(experiment: Experiment) -> dict[str, Any]:
    """The fields that make an experiment another one, by the names that a file has for it."""
    fields: dict[str, Any] = msgspec.to_builtins(experiment)
    stop = fields.pop("stop")
    stop["looks"] = stop.pop("pairs", None)
    return {name: value for name, value in {**fields, **stop}.items() if name not in _READ}


def _changed_option(plan: Plan, draft: Draft) -> str:
    """The first option of a variant that differs from the plan's, in words."""
    for name, options in draft.options.items():
        old_options = flat_options(read_config(plan.config(name)))
        new_options = flat_options(options)
        matched = [f"{option}." for option in plan.variants[name].matched]
        for option in sorted(old_options.keys() | new_options.keys()):
            old, new = (shown(each.get(option)) for each in (old_options, new_options))
            is_matched = any(prefix.startswith(f"{option}.") for prefix in matched)  # options of a class are one
            if old != new and not is_matched:
                return f"another {option} of {titled(name)} ({old}, now {new})"
    return "other options"
