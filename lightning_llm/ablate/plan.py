"""The frozen plan of an experiment, and the snapshot of code and configs that its runs use. No torch.

``OUT/plan.json`` is written before the first run and never changes; its hash is in every report. It holds the hashes of
``OUT/configs/ARM.yaml``, the options of each arm's runs, and of ``OUT/code``: this package and the files of the
user's own classes. ``OUT/added.json`` has the pairs that ``extend`` adds, which the verdicts treat as such.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.ablate.arm import AGAIN, BASELINE, NULL
from lightning_llm.ablate.experiment import MOST_PAIRS, PLAN_FIELDS, SECONDARY_METRICS, Experiment
from lightning_llm.ablate.idea import IDEA, Idea, idea_of, state_of_idea
from lightning_llm.ablate.matching import FACTS
from lightning_llm.ablate.next_runs import Added, RunKey, State, state_of
from lightning_llm.ablate.tuning import Losses, Tune
from lightning_llm.io.atomic import atomic_path, remove_path, write_json, write_text
from lightning_llm.io.schema import (
    BOOL,
    NUMBER,
    POSITIVE,
    SHA256,
    TEXT,
    Schema,
    by_name,
    check,
    list_of,
    maybe,
    open_record,
    record,
    validate,
    whole,
)
from lightning_llm.io.untrusted import MIB, file_in, read_bytes, read_json, shown
from lightning_llm.runs.code import code_in

PLAN, ADDED, CONFIGS, CODE, RUNS, REPORT = "plan.json", "added.json", "configs", "code", "runs", "report.json"
REUSED_FROM = "reused_from"  # in the folder of a run whose files are links: the name of the experiment that has it
MAIN = "fit.py"  # in the code: what a run executes. Its folder comes first in the path of imports
_MAIN = "import sys\n\nfrom lightning_llm.__main__ import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
LARGEST_CODE = 256 * MIB  # of all files of a snapshot; this package has 2
MOST_ADDED = 200  # times that pairs are added

_ARM = open_record(
    {"steps": whole(1), "tokenizer": TEXT, "config": SHA256},
    {
        "identity": SHA256,
        **{name: maybe(schema) for name, schema in FACTS.items()},
        **dict.fromkeys(("tuned", "chance", "ratio"), maybe(POSITIVE)),
        "scales": maybe(by_name(list_of(NUMBER), min_fields=0)),
        **{"solved": maybe(whole(1)), "matched": check("options", lambda value: isinstance(value, dict))},
    },
)
_FROZEN = {"asked_configs": by_name(SHA256, min_fields=0), "code": SHA256}
_FROZEN |= {"threads": whole(1), "accelerator": TEXT, "folder": TEXT, "sides": by_name(_ARM)}
_FROZEN |= {"commit": maybe(TEXT), "seen": by_name(list_of(whole(), MOST_PAIRS), min_fields=0)}
_REPLAY = record({"difference": NUMBER, "source": TEXT})
_REUSED = record({"runs": by_name(TEXT, min_fields=0), "replay": maybe(_REPLAY), "variants": BOOL})
_OPTIONAL = {"configs": list_of(TEXT), "reused": _REUSED, "promise": SHA256, "idea": IDEA}
_OPTIONAL |= {"secondary": SECONDARY_METRICS}
_PLAN = record({**PLAN_FIELDS, **_FROZEN, "hash": SHA256}, _OPTIONAL)
_VARIANTS = maybe(list_of(TEXT))
_ADDED = record({"added": list_of(record({"pairs": whole(1, MOST_PAIRS), "variants": _VARIANTS}), MOST_ADDED)})


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan that was frozen.

    Attributes:
        out: The folder of the experiment.
        content: Of ``plan.json``: what it holds of the experiment, and for each arm, under ``sides``, the hash of its
            config, its steps, parameters and FLOPs, and how closely the quantity that is matched agrees with the
            baseline's. ``seen`` has the seeds that earlier experiments with the same baseline have used, by name;
            ``commit`` is that of the package, if it is a git checkout; ``configs`` are the baseline's, by path;
            ``reused`` are the runs of earlier experiments that this one may use.
        experiment: What was asked for.
    """

    out: Path
    content: Mapping[str, Any]
    experiment: Experiment

    @classmethod
    def read(cls, out: Path) -> "Plan":
        """The plan of an experiment, checked against its snapshot.

        Raises:
            ValueError: There is none, or plan or snapshot were changed after the start.
        """
        content = read_hashed(out / PLAN, _PLAN, "an experiment")
        experiment = Experiment.in_plan(content, out / PLAN)
        names = [BASELINE, NULL, *experiment.variants]
        if differing := sorted({*names} ^ content["sides"].keys()):
            raise ValueError(f"{out / PLAN}: sides and variants differ in {shown(differing[0])}")
        tuned_values = {name: content["sides"][name].get("tuned") for name in names if name != NULL}
        if experiment.tune and (wrong := [name for name, value in tuned_values.items() if value is None]):
            raise ValueError(f"{out / PLAN}: sides.{wrong[0]}.tuned is no number")
        changed = [] if code_hash(code_in(out / CODE)) == content["code"] else [out / CODE]
        for name, arm in content["sides"].items():
            config = file_in(out / CONFIGS, f"{name}.yaml")
            with suppress(FileNotFoundError):
                if file_hash(config) == arm["config"]:
                    continue
            changed.append(config)
        if changed:
            raise ValueError(was_changed(changed[0], "an experiment"))
        return cls(out, content, experiment)

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
    def arms(self) -> Mapping[str, Mapping[str, Any]]:
        """What it says of each arm; the baseline again is the baseline."""
        return {**self.content["sides"], AGAIN: self.content["sides"][BASELINE]}

    @property
    def tune(self) -> Tune | None:
        """What is tuned; ``None``: nothing."""
        if self.experiment.tune is None:
            return None
        values = {name: arm.get("tuned", math.nan) for name, arm in self.arms.items()}
        return Tune(**self.experiment.tune, values=values)

    @property
    def reused(self) -> Mapping[str, Any]:
        """What this experiment may use of others; :meth:`is_reused` says whether it did.

        Returns:
            For each of the ``runs`` the name of the experiment; the ``difference`` and the ``source`` of a ``replay``,
            if one is known; and whether runs of ``variants`` are among them.
        """
        return {"runs": {}, "replay": None, "variants": False, **self.content.get("reused", {})}

    @property
    def idea(self) -> Idea | None:
        """What it says of an idea of a stream; ``None``: it is an ordinary experiment."""
        return idea_of(self.content)

    def state(self, losses: Losses) -> State:
        """How far the experiment is, by the losses of the runs that have ended."""
        if self.idea is not None:
            return state_of_idea(self.experiment, self.idea, losses)
        first = self.experiment.first_seed
        if self.reused["replay"] is not None and self.is_reused(RunKey(BASELINE, first)):
            losses = {RunKey(AGAIN, first): None, **losses}  # what the baseline again would say is known
        return state_of(self.experiment, losses, added=self.added, tune=self.tune)

    def arm(self, name: str) -> str | None:
        """The arm that runs of this name belong to, tuned or not; ``None``: they are no runs of this plan."""
        arm, comma, option = name.partition(",")
        is_tuned = self.tune is not None and option.startswith(f"{self.tune.word}=")
        return arm if arm in self.arms and (not comma or is_tuned) else None

    def options(self, name: str) -> list[str]:
        """The options of fit that runs of this name have besides those of their arm."""
        _, comma, option = name.partition(",")
        return [f"--{self.tune.option}={option.partition('=')[2]}"] if comma and self.tune is not None else []

    @property
    def added(self) -> list[Added]:
        """Pairs that were added after the last look, in this order."""
        if not (self.out / ADDED).is_file():
            return []
        content = read_json(self.out / ADDED)
        validate(content, _ADDED, self.out / ADDED)
        added = [Added(**pairs) for pairs in content["added"]]
        if unknown := {name for pairs in added for name in pairs.variants or ()} - self.experiment.variants.keys():
            raise ValueError(f"{self.out / ADDED}: the plan has no variant {sorted(unknown)[0]}")
        return added

    def add(self, added: Added) -> None:
        """Add pairs after the last look."""
        write_json(self.out / ADDED, {"added": [pairs._asdict() for pairs in (*self.added, added)]})

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

    def config(self, name: str) -> Path:
        """The config of a run's arm; the baseline that runs again has the baseline's."""
        arm = self.arm(name)
        return file_in(self.out / CONFIGS, f"{BASELINE if arm == AGAIN else arm}.yaml").resolve()

    def differs(self, asked: Mapping[str, Any]) -> str:
        """The first thing that is not as it is asked for now, in words; empty if nothing is."""
        for field, new in asked.items():
            if (old := self.content.get(field, [])) != new:  # secondary: a plan of an earlier version has none
                is_short = len(f"{old}{new}") < 100 and field not in ("code", "asked_configs")
                return f"{field} ({old}, now {new})" if is_short else field.removeprefix("asked_")
        return ""


def freeze(out: Path, content: Mapping[str, Any], configs: Mapping[str, Any], code: Mapping[str, Path]) -> Plan:
    """Write the snapshot, and the plan last.

    Args:
        out: A folder without a plan.
        content: The plan, without its hash and those of the configs.
        configs: The options of each arm.
        code: As of ``runs.code.code_of``.

    Raises:
        ValueError: The code is no longer that of the content.
    """
    remove_path(out / CODE)
    with atomic_path(out / CODE) as temporary:
        for name, path in code.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, temporary / name)
        write_text(temporary / MAIN, _MAIN)
        if code_hash(code_in(temporary)) != content["code"]:
            raise ValueError(f"{out}: the code was edited while it was copied: give the same command again")
    (out / CONFIGS).mkdir(exist_ok=True)
    arms = {name: dict(arm) for name, arm in content["sides"].items()}
    for name, options in configs.items():
        config = out / CONFIGS / f"{name}.yaml"
        write_text(config, yaml.safe_dump(options, sort_keys=False))
        arms[name]["config"] = file_hash(config)
    write_hashed(out / PLAN, {**content, "sides": arms})
    return Plan.read(out)


def digest(content: object) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_hashed(path: Path, content: Mapping[str, Any]) -> str:
    """Write JSON with its own hash, by which :func:`read_hashed` sees that it was changed; the hash."""
    content_hash = digest(content)
    write_json(path, {**content, "hash": content_hash})
    return content_hash


def read_hashed(path: Path, schema: Schema, noun: str) -> dict[str, Any]:
    """The content of a file of :func:`write_hashed`, with its ``hash``.

    Args:
        path: The file.
        schema: Of its content.
        noun: Of what it describes, such as ``a ladder``, for messages.

    Raises:
        ValueError: There is none, or it was changed.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no {path.name}: give the folder of {noun} of lightning-llm ablate")
    content: dict[str, Any] = read_json(path)
    validate(content, schema, path)
    if digest({key: value for key, value in content.items() if key != "hash"}) != content["hash"]:
        raise ValueError(was_changed(path, noun))
    return content


def was_changed(path: Path, noun: str) -> str:
    """The error of a file that is not as it was frozen."""
    return f"{path} was changed after the start: restore it, or begin {noun} in another folder"


def file_hash(path: Path) -> str:
    """The SHA-256 of a file of code or of a config."""
    return hashlib.sha256(read_bytes(path, LARGEST_CODE)).hexdigest()


def code_hash(code: Mapping[str, Path]) -> str:
    """The SHA-256 of all files of a snapshot, with their names; ``MAIN`` is added where it is not there yet.

    Raises:
        ValueError: They are too large together.
    """
    if (size := sum(path.stat().st_size for path in code.values())) > LARGEST_CODE:
        raise ValueError(f"the code of the runs has {size} bytes, expected at most {LARGEST_CODE}")
    main = hashlib.sha256(_MAIN.encode()).hexdigest()
    return digest({MAIN: main, **{name: file_hash(path) for name, path in code.items()}})
