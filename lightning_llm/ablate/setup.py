"""From what a user asks for to a frozen plan: every arm is read, compared and matched before anything runs.

1. Baseline and variants are read as ``fit`` reads them, and compared (``ablate.comparability``).
2. Costs are matched (``ablate.matching``).
3. What the runs would take is counted, and estimated from a few timed steps, if that is asked for.
4. The plan is frozen with a snapshot of code and configs, or compared with the one that the folder has.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_llm.ablate.arm import BASELINE, NULL, Arm, ReadArm, titled
from lightning_llm.ablate.comparability import kept_lines, refuse_incomparable, refuse_unsuitable
from lightning_llm.ablate.cost import TrainingSteps, flops_of, parameters_of
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.history import earlier
from lightning_llm.ablate.matching import MATCHES, MAX_STEPS, Matched, facts_of
from lightning_llm.ablate.options import command_line_of, flat_options
from lightning_llm.ablate.plan import PLAN, RUNS, Plan, code_hash, digest, freeze
from lightning_llm.ablate.results import COST
from lightning_llm.ablate.reuse import REUSES, Identity, reusable
from lightning_llm.ablate.slots import runs_at_a_time, threads_for
from lightning_llm.accounting.sizing import SIZE_OPTIONS
from lightning_llm.data.mixture import fingerprint
from lightning_llm.io.config_file import read_config
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import shown
from lightning_llm.measure.timer import interleave, num_threads
from lightning_llm.model.initial_scales import one_of_each_kind, scales_of_blocks
from lightning_llm.runs.code import code_of, commit_of_package
from lightning_llm.runs.lock import RunLock
from lightning_llm.training.environment import environment_of
from lightning_llm.training.initial_weights import read_initial_weights
from lightning_llm.training.metrics import BITS, RECALL

TIMED = 10  # steps of the baseline, for the time of its runs
REDRAW = "lightning_llm.ablate.null_variant.RedrawMLP"


class Outlay(NamedTuple):
    """What the runs of an experiment take.

    Attributes:
        parameters: Of the baseline.
        steps: Of a run of the baseline.
        flops: Counted, of such a run; ``None``: it has parts that cannot be counted.
        runs: At most; with tuning more where its grid grows.
        seconds: Of all training steps, without validation.
        is_tuned: Whether some of the runs tune.
    """

    parameters: int
    steps: int
    flops: int | None
    runs: int
    seconds: float
    is_tuned: bool = False


class Setup:
    """An experiment whose arms have been read and compared.

    Args:
        experiment: What the user asks for.
        arguments: Further options of ``fit``, for all runs.
        read_arm: Reads an arm as ``fit`` does; a ValueError says what is wrong with it.
        reuse: Whose finished runs of earlier experiments are used: one of ``reuse.REUSES``.
        more: What else the plan holds: the ``promise`` of a size of a ladder, or the ``idea`` of a stream.

    Raises:
        ValueError: An arm cannot run, equals another, or cannot be compared with the baseline.
    """

    def __init__(
        self,
        experiment: Experiment,
        arguments: Sequence[str],
        read_arm: ReadArm,
        *,
        reuse: str = REUSES[0],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.experiment, self._read_arm, self._reuse = experiment, read_arm, reuse
        self._more = more or {}
        self._arguments = [*command_line_of(experiment.options), *arguments]
        self._checked_values: set[float] = set()  # values whose grid was checked
        self._matched: dict[str, Matched] = {}  # what matches a variant with the baseline
        base = self._arm(BASELINE, {})
        refuse_unsuitable(base, (experiment.metric, *experiment.secondary))
        self._check_grid(base)
        # before the modules of a variant are imported: a change of these does not change the baseline
        self._code_of_baseline = code_hash(code_of({BASELINE: base.options}))
        self.arms = {BASELINE: base}
        for name, options in experiment.variants.items():
            self.arms[name] = self._variant(name, options)
        # what decides whether a plan is of this experiment; the configs are those before anything is matched
        configs = {name: digest(arm.options) for name, arm in self.arms.items()}
        self._code = code_of({name: arm.options for name, arm in self.arms.items()})
        self.plan_identity = {**experiment.plan_fields, "asked_configs": configs, "code": code_hash(self._code)}
        self.earlier = list(earlier(Path(experiment.folder), configs[BASELINE], experiment.metric))

    def _arm(self, name: str, options: Mapping[str, Any]) -> Arm:
        return self._read_arm(name, self.experiment.baseline, [*self._arguments, *command_line_of(options)])

    def _variant(self, name: str, options: Mapping[str, Any]) -> Arm:
        arm = self._arm(name, options)
        for other in self.arms.values():
            if arm.options == other.options:
                same = ", ".join(options) or "nothing"
                raise ValueError(f"{name} equals {titled(other.name)}, which has the same {same}: leave it out")
        refuse_incomparable(self.arms[BASELINE], arm, (self.experiment.metric, *self.experiment.secondary))
        self._check_grid(arm)
        return arm

    def _check_grid(self, arm: Arm) -> None:
        """Let ``fit`` read an arm with the lowest and the highest value of the option that is tuned."""
        tune = self.experiment.tune
        if tune is None or (value := tuned_value(arm, tune["option"])) in self._checked_values:
            return
        self._checked_values.add(value)
        options = self.experiment.variants.get(arm.name, {})
        for factor in (tune["factors"][0], tune["factors"][-1]):
            try:
                self._arm(arm.name, {**options, tune["option"]: value * factor})
            except ValueError as error:
                raise ValueError(f"tune.factors: {factor:g} times {value:g} is no value: {error}") from None

    @property
    def kept_lines(self) -> list[str]:
        """What variants with another optimizer or schedule have kept of the baseline's."""
        return [line for arm in self.arms.values() for line in kept_lines(self.arms[BASELINE], arm)]

    def plan(self, workers: int | None) -> Plan:
        """The frozen plan: that of the folder, or a new one.

        Args:
            workers: The most runs at a time that the user wants.

        Raises:
            ValueError: The folder has another plan, or a variant cannot be matched.
        """
        out = Path(self.experiment.folder)
        if (out / PLAN).exists():
            return self._compared(Plan.read(out))
        if leftovers := [name for name in (RUNS, COST) if (out / name).exists()]:
            raise ValueError(f"{out} has {leftovers[0]} of an experiment without {PLAN}: give another --out")
        accelerator = self.arms[BASELINE].trainer.strategy.root_device.type
        need_bytes = TrainingSteps(self.arms[BASELINE]).run_bytes()
        threads = threads_for(accelerator, torch.cuda.device_count(), need_bytes, workers)
        self._match(threads)
        content = {**self.plan_identity, "threads": threads, "accelerator": accelerator, "folder": str(Path.cwd())}
        content["configs"] = list(self.experiment.baseline)
        identities, tune = self._identities(threads), self.experiment.tune
        arms = {name: {**facts, "identity": identities[name].hash} for name, facts in self._facts().items()}
        content |= {"sides": arms, "commit": commit_of_package(), "seen": self._seen(), **self._more}
        tuned = None if tune is None else str(tune["option"])
        first_seed = self.experiment.first_seed
        content["reused"] = reusable(out, identities, self._reuse, first_seed=first_seed, tuned=tuned)
        out.mkdir(parents=True, exist_ok=True)
        lock = RunLock(out).acquire()  # of two that begin here at the same time, one finds the plan of the other
        try:
            return self.plan(workers) if (out / PLAN).exists() else freeze(out, content, self._configs(), self._code)
        finally:
            lock.release()

    @property
    def compute(self) -> float:
        """Counted FLOPs of a run of the baseline, for a ladder.

        Raises:
            ValueError: They cannot be counted, or a variant changes what ``size`` sets.
        """
        base = self.arms[BASELINE]
        if (flops := flops_of(base)) is None:
            raise ValueError("the baseline has parts whose FLOPs cannot be counted: a ladder needs the FLOPs of a run")
        size_options = base.trainer.sizing.options
        for name, options in self.experiment.variants.items():
            if changed := [option for option in options if option in size_options]:
                raise ValueError(f"{name} changes {changed[0]}, which size sets at each size: leave it out")
        return float(flops * base.steps)

    def outlay(self, workers: int | None) -> Outlay:
        """What the runs take: counted, and from a few timed steps of the baseline."""
        runs, is_tuned = self.experiment.most_runs(), self.experiment.tune is not None
        return outlay_of(self.arms[BASELINE], runs, workers, is_tuned=is_tuned)

    def _compared(self, plan: Plan) -> Plan:
        """A plan that is of this experiment."""
        if difference := plan.differs(self.plan_identity):
            command = f"lightning-llm ablate run {shell_path(plan.out)}"
            advice = f"give another --name or --out, or finish this one as it is: {command}"
            other = "other" if difference in ("variants", "looks") else "another"
            difference = self._changed(plan) if difference == "configs" else f"{other} {difference}"
            raise ValueError(f"{plan.out} has a plan with {difference}, which makes a new experiment: {advice}")
        return plan

    def _changed(self, plan: Plan) -> str:
        """The first option of an arm that differs from the plan's, in words."""
        for name, arm in self.arms.items():
            old_options, new_options = flat_options(read_config(plan.config(name))), flat_options(arm.options)
            matched = [f"{option}." for option in plan.arms[name].get("matched", {})]
            for option in sorted(old_options.keys() | new_options.keys()):
                old, new = (shown(options.get(option)) for options in (old_options, new_options))
                is_matched = option in (MAX_STEPS, plan.experiment.solved) and name != BASELINE
                is_matched |= any(prefix.startswith(f"{option}.") for prefix in matched)  # options of a class are one
                if old != new and not is_matched:
                    return f"another {option} of {titled(name)} ({old}, now {new})"
        return "other options"

    def _match(self, threads: int) -> None:
        """Give each variant the options that match it with the baseline."""
        match = MATCHES[self.experiment.match]
        with num_threads(threads if match.is_timed else torch.get_num_threads()):
            for name, options in self.experiment.variants.items():
                matched = match.matched(self.arms[BASELINE], self.arms[name], self.experiment.solved)
                self._matched[name] = matched
                if matched.options:  # they come last, since later arguments override
                    own_options = {option: value for option, value in options.items() if option not in matched.options}
                    if match.is_solved and (sizing := self.arms[name].trainer.sizing) is not None:
                        # size would work around the solved option, with another shape: the options stay as it set them
                        own_options |= {**sizing.options, **dict.fromkeys(SIZE_OPTIONS)}
                    self.arms[name] = self._arm(name, {**own_options, **matched.options})

    def _facts(self) -> dict[str, dict[str, Any]]:
        """What the plan says of each arm; the null variant is the baseline."""
        experiment = self.experiment
        facts: dict[str, dict[str, Any]] = {}
        for name, arm in self.arms.items():
            matched = self._matched.get(name, Matched())
            facts[name] = {**facts_of(arm, matched), "tokenizer": str(arm.data.store.tokenizer_sha256)}
            own = tuned_value(arm, experiment.tune["option"]) if experiment.tune else None
            facts[name] |= {"tuned": own, "chance": chance_of(arm, experiment.metric)}
            facts[name] |= {"matched": matched.options, "solved": matched.options.get(experiment.solved or "")}
            facts[name]["scales"] = self._scales(arm)
            facts[name]["ratio"] = MATCHES[experiment.match].closeness(facts[BASELINE], facts[name])
        return {**facts, NULL: dict(facts[BASELINE])}

    def _scales(self, arm: Arm) -> dict[str, list[float]] | None:
        """The scales of the initial weights; ``None`` if these come from a file, which all arms share."""
        if getattr(arm.model, "init_from", None) is not None:
            return None
        scales = scales_of_blocks(one_of_each_kind(arm.architecture, self.experiment.first_seed), arm.architecture)
        return {role: list(scale) for role, scale in scales.items()}

    def _identities(self, threads: int) -> dict[str, Identity]:
        """What decides the bits of each arm's runs; the null variant uses what the baseline uses."""
        arms = {**self.arms, NULL: self.arms[BASELINE]}
        code = {name: code_hash(code_of({name: arm.options})) for name, arm in self.arms.items()}
        code |= dict.fromkeys((BASELINE, NULL), self._code_of_baseline)
        sources = {str(getattr(arm.model, "init_from", None) or "") for arm in arms.values()}
        weights = {source: read_initial_weights(source).fingerprint if source else "" for source in sources}
        return {
            name: Identity(
                options=options,
                code=code[name],
                data=fingerprint(arms[name].data.sources),
                weights=weights[str(getattr(arms[name].model, "init_from", None) or "")],
                environment={**environment_of(arms[name].trainer), "threads": threads},
            )
            for name, options in self._configs().items()
        }

    def _configs(self) -> dict[str, dict[str, Any]]:
        """The options of each arm; the null variant's are the baseline's with a callback."""
        configs = {name: arm.options for name, arm in self.arms.items()}
        trainer = configs[BASELINE]["trainer"]
        callbacks = trainer.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        redrawing = {**trainer, "callbacks": [*callbacks, {"class_path": REDRAW}]}
        return {**configs, NULL: {**configs[BASELINE], "trainer": redrawing}}

    def _seen(self) -> dict[str, list[int]]:
        """The planned seeds that earlier experiments with this baseline have used."""
        planned = set(self.experiment.seeds(self.experiment.looks[-1]))
        return {other.name: sorted(seeds) for other in self.earlier if (seeds := {*other.seeds} & planned)}


def chance_of(arm: Arm, metric: str) -> float | None:
    """The metric of a model that gives every token the same probability; ``None`` if it is not known or no bound."""
    if metric in RECALL:  # a model may be worse on one part of the tokens and train well
        return None
    nats = math.log(arm.architecture.vocab_size)
    if metric != BITS:
        return nats
    return None if arm.data.bytes_per_token is None else nats / math.log(2) / arm.data.bytes_per_token


def tuned_value(arm: Arm, option: str) -> float:
    """The value that an arm has of the option that is tuned.

    Raises:
        ValueError: It is no number above 0.
    """
    value: Any = arm.options
    for word in option.split("."):
        section = value if isinstance(value, dict) else {}
        value = section.get(word, (section.get("init_args") or {}).get(word))
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"tune.option {option} of {titled(arm.name)} is {value!r}, expected a number above 0")
    return float(value)


def outlay_of(arm: Arm, runs: int, workers: int | None, *, is_tuned: bool = False) -> Outlay:
    """What the runs of an experiment take.

    Args:
        arm: The baseline.
        runs: How many.
        workers: The most runs at a time that the user wants.
        is_tuned: Whether some of them tune.
    """
    accelerator = arm.trainer.strategy.root_device.type
    steps = TrainingSteps(arm)
    gpus = torch.cuda.device_count()
    threads = threads_for(accelerator, gpus, steps.run_bytes(), workers)
    with num_threads(threads):
        timing = interleave({"baseline": steps.step}, rounds=TIMED, warmup=2, device=steps.device)["baseline"]
    return Outlay(
        parameters=parameters_of(arm.architecture),
        steps=arm.steps,
        flops=None if (flops := flops_of(arm)) is None else flops * arm.steps,
        runs=runs,
        seconds=timing.median * arm.steps * runs / runs_at_a_time(threads, accelerator, gpus, workers),
        is_tuned=is_tuned,
    )
