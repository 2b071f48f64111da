"""The frozen plan of an experiment, and the copies of code and configs that its runs use. No torch.

``OUT/plan.json`` is written before the first run and never changes; its hash is in every report. ``OUT/configs`` has
the options of each variant's runs, and ``OUT/code`` the code that they execute, so that yours can be edited meanwhile.
``OUT/extensions.json`` has the pairs that ``extend`` adds, which the verdicts treat as such.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import yaml

from lightning_llm.ablate.experiment import Experiment, ScreenAndConfirm
from lightning_llm.ablate.idea_runs import state_of_idea
from lightning_llm.ablate.names import AGAIN, BASELINE, NULL, PLAN, STREAM
from lightning_llm.ablate.next_runs import Extension, RunKey, State, state_of
from lightning_llm.ablate.tuning import Losses, Tune
from lightning_llm.io.atomic import atomic_path, remove_path, write_text
from lightning_llm.io.records import read_record, version_of, write_record
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import MIB, read_bytes
from lightning_llm.runs.code import code_in

EXTENSIONS = "extensions.json"
CONFIGS = "configs"
CODE = "code"
RUNS = "runs"
LOGS = "logs"
REPORT = "report.json"
DIFFS = "diffs"  # what each variant changes, if they are revisions of a repository
REUSED_FROM = "reused_from"  # in the folder of a run whose files are links: the name of the experiment that has it
LARGEST_FILE = 256 * MIB  # of code
VERSION = 2  # of plan.json; folders of version 1 have fields without types


class PlannedVariant(msgspec.Struct, frozen=True, kw_only=True):
    """A variant, or the baseline, in a plan.

    Attributes:
        steps: Optimizer steps of its runs; ``None``: not known.
        tokenizer: The hash of its tokenizer; losses per token are compared only between equal ones.
        identity: The hash of what decides the bits of its runs, besides the seed; empty: they are never reused.
        facts: What matching rules compare (``matching.FACTS``); of a rule that its program does not know, nothing.
        matched: Options that match it with the baseline.
        solved: The value of the option that was solved for, if one was.
        ratio: How closely the quantity that is matched agrees with the baseline's.
        tuned: Its own value of the option that is tuned, if one is.
        chance: The metric of guessing at random; ``None``: not known, or no bound.
        scales: Those of its initial weights, by role.
        excused: Fields of summaries in which its runs may differ from the baseline's, because of what it changes.
        unshared: What its pairs do not share, in words; empty: nothing.
        is_known: Whether it trains a ``LanguageModel`` on token data: then its steps can be measured apart from runs,
            and a run that was interrupted continues with the same batches.
    """

    steps: int | None = None
    tokenizer: str = ""
    identity: str = ""
    facts: dict[str, Any] = {}
    matched: dict[str, Any] = {}
    solved: float | None = None
    ratio: float | None = None
    tuned: float | None = None
    chance: float | None = None
    scales: dict[str, tuple[float, int]] | None = None
    excused: tuple[str, ...] = ()
    unshared: str = ""
    is_known: bool = True


class Replay(msgspec.Struct, frozen=True):
    """The same seed twice.

    Attributes:
        difference: The largest of curves and losses.
        source: The other experiment that has trained them; empty: this one.
    """

    difference: float
    source: str = ""


class Reused(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of others that an experiment may use; :meth:`Plan.is_reused` says whether it did.

    Attributes:
        runs: For each run the name of the experiment that has it.
        replay: What the same seed twice has shown there; ``None``: not known.
        variants: Whether runs of variants are among them.
    """

    runs: dict[str, str] = {}
    replay: Replay | None = None
    variants: bool = False


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``plan.json``.

    Attributes:
        experiment: What was asked for.
        variants: The baseline, the variants, and the null variant if the program can make one.
        program: Whose runs are compared: a name in ``programs.PROGRAMS``.
        asked: The hash of what each variant was before anything was matched.
        code: The hash of the code.
        threads: Of each run.
        accelerator: ``cpu`` or ``cuda``.
        most_runs: How many runs may train at a time; ``None``: as many as have a slot.
        gpus_per_run: How many each run sees, if it uses any.
        start_folder: Where the runs start; paths in their options are relative to it.
        text: What they train on; empty: not known.
        validation: How much of the validation text each run's metric is of; empty: not known.
        commit: Of this package, if it is a git checkout.
        seen: The seeds that earlier experiments with the same baseline have used, by their names.
        reused: What may be used of other experiments.
        prediction: The hash of what was predicted of it; empty: nothing was.
        version: Of this record.
    """

    experiment: Experiment
    variants: dict[str, PlannedVariant]
    program: str
    asked: dict[str, str] = {}
    code: str = ""
    threads: int = 1
    accelerator: str = "cpu"
    most_runs: int | None = None
    gpus_per_run: int = 1
    start_folder: str = "."
    text: str = ""
    validation: str = ""
    commit: str | None = None
    seen: dict[str, list[int]] = {}
    reused: Reused = Reused()
    prediction: str = ""
    version: int = VERSION


@dataclass(frozen=True)
class Plan:
    """A plan that was frozen.

    Attributes:
        out: The folder of the experiment.
        record: The content of its ``plan.json``.
    """

    out: Path
    record: PlanRecord

    @classmethod
    def read(cls, out: Path) -> "Plan":
        """The plan of an experiment.

        Raises:
            ValueError: There is none, or it is of an earlier version.
        """
        path = out / PLAN
        if (out / STREAM).is_file():
            command = f"lightning-llm ablate try {shell_path(out)}"
            raise ValueError(f"{out} is a stream of ideas: {command} tries the next one, status and report show it")
        if not path.is_file():
            raise ValueError(f"{out} holds no {PLAN}: give the folder of an experiment of lightning-llm ablate")
        if (version := version_of(path)) != VERSION:
            problem = f"{path} has version {version}, and this lightning-llm reads version {VERSION}"
            own = f"python {shell_path(out / CODE / 'fit.py')} ablate run {shell_path(out)}"
            raise ValueError(f"{problem}: its own copy of the code continues it ({own}), or begin another folder")
        return cls(out, read_record(path, PlanRecord))

    @property
    def experiment(self) -> Experiment:
        """The experiment that was asked for."""
        return self.record.experiment

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of its content, which every report has."""
        return digest(msgspec.to_builtins(self.record))

    def is_gone(self) -> bool:
        """Whether somebody has deleted or moved the experiment since it was read."""
        return not (self.out / PLAN).exists()

    def refuse_gone(self) -> None:
        """Refuse to continue an experiment that is gone.

        Raises:
            ValueError: It is.
        """
        if self.is_gone():
            raise ValueError(f"{self.out} is gone: its folder was deleted or moved while its runs trained")

    @cached_property
    def variants(self) -> Mapping[str, PlannedVariant]:
        """The planned variants by name; the baseline again is the baseline."""
        return {**self.record.variants, AGAIN: self.record.variants[BASELINE]}

    @property
    def is_plain(self) -> bool:
        """Whether ``fit`` trains a plain LightningModule, whose parts no null variant can draw again."""
        return self.experiment.command is None and NULL not in self.record.variants

    @property
    def unit(self) -> str:
        """The unit of the metric; what a plain LightningModule logs is known by its name alone."""
        return self.experiment.metric_name if self.is_plain else self.experiment.unit

    @property
    def tune(self) -> Tune | None:
        """The tuning that was asked for; ``None``: nothing is tuned."""
        if self.experiment.tune is None:
            return None
        values = {name: variant.tuned for name, variant in self.variants.items() if variant.tuned is not None}
        return Tune(self.experiment.tune, values)

    @property
    def is_blind(self) -> bool:
        """Whether losses of single seeds are not shown: more ideas will be judged by the same seeds."""
        return isinstance(self.experiment.stop, ScreenAndConfirm)

    def state(self, losses: Losses) -> State:
        """How far the experiment is, by the losses of the runs that have ended."""
        if isinstance(self.experiment.stop, ScreenAndConfirm):
            return state_of_idea(self.experiment, self.experiment.stop, losses)
        first = self.experiment.first_seed
        if self.record.reused.replay is not None and self.is_reused(RunKey(BASELINE, first)):
            losses = {RunKey(AGAIN, first): None, **losses}  # what the baseline again would say is known
        has_null = NULL in self.record.variants
        return state_of(self.experiment, losses, extensions=self.extensions, tune=self.tune, has_null=has_null)

    def variant_of(self, run_name: str) -> str | None:
        """The variant that runs of this name belong to, tuned or not; ``None``: they are no runs of this plan."""
        name, comma, option = run_name.partition(",")
        is_tuned = self.tune is not None and option.startswith(f"{self.tune.word}=")
        return name if name in self.variants and (not comma or is_tuned) else None

    def options(self, run_name: str) -> dict[str, str]:
        """The options that runs of this name have besides those of their variant."""
        _, comma, option = run_name.partition(",")
        return {self.tune.option: option.partition("=")[2]} if comma and self.tune is not None else {}

    @property
    def extensions(self) -> list[Extension]:
        """Pairs that were added after the last look, in this order."""
        path = self.out / EXTENSIONS
        return read_record(path, list[Extension]) if path.is_file() else []

    def extend(self, extension: Extension) -> None:
        """Add pairs after the last look."""
        write_record(self.out / EXTENSIONS, [*self.extensions, extension])

    def run_dir(self, run: RunKey) -> Path:
        """The run directory of a run."""
        return self.out / RUNS / str(run)

    def run_folders(self) -> Iterator[tuple[RunKey, Path]]:
        """The runs that have a folder, in the order of their names, and that folder."""
        folders = sorted((self.out / RUNS).iterdir()) if (self.out / RUNS).is_dir() else []
        for folder in folders:
            name, _, seed = folder.name.rpartition(",seed=")
            if seed.isdecimal():
                yield RunKey(name, int(seed)), folder

    def is_reused(self, run: RunKey) -> bool:
        """Whether the files of a run are those of another experiment."""
        return (self.run_dir(run) / REUSED_FROM).is_file()

    def config(self, run_name: str) -> Path:
        """The options of a run's variant; the baseline that runs again has the baseline's."""
        name = self.variant_of(run_name)
        return (self.out / CONFIGS / f"{BASELINE if name == AGAIN else name}.yaml").resolve()


def freeze(out: Path, record: PlanRecord, configs: Mapping[str, Any], code: Mapping[str, Path]) -> Plan:
    """Copy code and configs, and write the plan last.

    Args:
        out: A folder without a plan.
        record: The plan.
        configs: The options of each variant.
        code: The files of the code, by their path in ``OUT/code``.

    Raises:
        ValueError: The code is no longer that of the plan.
    """
    remove_path(out / CODE)
    with atomic_path(out / CODE) as temporary:
        temporary.mkdir()
        for name, path in code.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, temporary / name)
        if code_hash(code_in(temporary)) != record.code:
            raise ValueError(f"{out}: the code was edited while it was copied: give the same command again")
    (out / CONFIGS).mkdir(exist_ok=True)
    for name, options in configs.items():
        write_text(out / CONFIGS / f"{name}.yaml", yaml.safe_dump(options, sort_keys=False))
    write_record(out / PLAN, record)
    return Plan.read(out)


def digest(content: object) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def code_hash(code: Mapping[str, Path]) -> str:
    """The SHA-256 over the names and contents of files."""
    return digest({name: file_hash(path) for name, path in code.items()})


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(read_bytes(path, LARGEST_FILE)).hexdigest()
