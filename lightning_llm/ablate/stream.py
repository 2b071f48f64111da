"""A stream of ideas: a journal of experiments, each with one variant, on a baseline that adopts what was shown.

``STREAM/stream.json`` holds what the stream began with, and ``first.yaml`` its baseline; they never change. Each idea
is an experiment of its own in ``STREAM/ideas/PLACE-NAME``: a screen, and fresh pairs that confirm the idea, with a
level by the number of ideas that were confirmed before. An idea that has ended has ``verdict.json`` there, which holds
no loss of a single seed of the screen: an idea must not be chosen by the seeds that will judge it. An adopted idea's
config is the baseline from then on. Baseline runs of the screen are shared by ideas until one is adopted: then seeds
are fresh, since the old baseline was lucky on the old ones. Those of confirmations are shared by no two ideas, or what
a proposer has learned of them would count twice: 19% of streams of useless ideas would adopt one, and not 3%
(``python -m benchmarks stream``). No torch.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from lightning_llm.ablate.command.spec import Command
from lightning_llm.ablate.experiment import ALPHA_RANGE, DELTA, Experiment, ScreenAndConfirm, experiment_of
from lightning_llm.ablate.idea_runs import Evidence, confirming_seeds, evidence_of, screening_seeds
from lightning_llm.ablate.names import ADOPTED, BASELINE, PLAN, STOPPED, STREAM, VERDICTS
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import CODE, Plan, code_hash, file_hash
from lightning_llm.ablate.planning import Draft
from lightning_llm.ablate.results import Result, losses_of, results_of, run_seconds, trained_here
from lightning_llm.io.atomic import write_json, write_text
from lightning_llm.io.records import read_record, write_record
from lightning_llm.io.schema import check, maybe, record, validate, whole
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import MIB, read_text
from lightning_llm.statistics.design import FAILED_TO_TRAIN
from lightning_llm.statistics.stream import HOPELESS, SCREEN, THOROUGH, StreamRule, interval_of

IDEAS = "ideas"
VERDICT = "verdict.json"
FIRST = "first.yaml"
CURRENT = "baseline.yaml"
FINAL = "final.json"  # in a stream that takes no more ideas: how many it has
MOST_IDEAS = 9_999
SET_BY_CONFIG = {"precision", "tf32"}  # of the environment: an adopted idea may change them
BLOCK = 1000  # seeds between one baseline's and the next one's
FRESH = 500  # in the block of a place: seeds above it confirm the idea
OWN = 100_000_000  # from here on, each place has a block of its own

_GAIN = check("0, or a number above it and below a million", lambda value: type(value) is float and 0 <= value < 1e6)
_SETTINGS = record({"alpha": ALPHA_RANGE, "minimal_gain": _GAIN, "workers": maybe(whole(1))})
_BECAUSE = check(
    "at most 500 printable characters on one line",
    lambda value: isinstance(value, str) and len(value) <= 500 and (value.isprintable() or not value),
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The baseline and options that a stream began with.

    Attributes:
        baseline: The hash of each config of the first baseline, by its path.
        options: Further options of ``fit``.
        command: In place of ``fit``; with trees, that of the first baseline.
        metric: Of the command.
    """

    baseline: dict[str, str] = {}
    options: list[str] = []
    command: Command | None = None
    metric: str = ""


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``stream.json``.

    Attributes:
        asked: What the stream began with.
        alpha: The share of useless ideas among the adopted ones, in expectation.
        looks: Numbers of fresh pairs after which an idea may be adopted.
        minimal_gain: An adopted idea improves the metric by more than this.
        workers: The most runs at a time that the user wants; ``None``: as many as fit.
        environment: What all runs have in common: device, versions, package, text.
    """

    asked: Asked
    alpha: float
    looks: tuple[int, ...]
    minimal_gain: float
    workers: int | None
    environment: dict[str, str]


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean difference of pairs.

    Attributes:
        difference: Variant minus baseline; ``None``: of fewer than two pairs.
        interval: Of 95%.
        pairs: How many.
        sd: The standard deviation of their differences; ``None``: fewer than two.
    """

    difference: float | None
    interval: tuple[float, float] | None
    pairs: int
    sd: float | None = None


class Confirmation(Mean, frozen=True, kw_only=True):
    """The fresh pairs of an idea, whose seeds judge no other one.

    Attributes:
        p: One-sided, that they are no improvement; ``None``: they were not enough for a look.
        median: Of their differences; ``None``: fewer than two.
        worst: The largest difference: the least improvement; ``None``: fewer than two.
    """

    p: float | None = None
    median: float | None = None
    worst: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``verdict.json``: how an idea ended.

    Attributes:
        place: In its stream, from 1.
        name: Of the idea.
        because: Why somebody believed in it.
        options: That it changes.
        match: What was equal for both.
        parameters: Of the baseline and of the idea.
        steps: Likewise.
        asked: What makes two ideas the same.
        plan: The hash of its plan.
        verdict: One of ``VERDICTS``.
        reason: In words.
        metric: That was compared.
        unit: Its unit.
        screen: What the pairs of the screen say.
        level: The p that it must not exceed.
        confirmation: What the fresh pairs say; ``None``: it has none.
        runs: That were trained for it.
        run_seconds: What these took together.
    """

    place: int
    name: str
    because: str
    options: dict[str, Any]
    match: str
    parameters: tuple[int | None, int | None]
    steps: tuple[int | None, int | None]
    asked: dict[str, str]
    plan: str
    verdict: str
    reason: str
    metric: str
    unit: str
    screen: Mean
    level: float
    confirmation: Confirmation | None
    runs: int
    run_seconds: float

    @property
    def is_adopted(self) -> bool:
        """Whether the idea is part of the baseline."""
        return self.verdict == ADOPTED


@dataclasses.dataclass(frozen=True)
class Stream:
    """A stream as it is now.

    Attributes:
        out: Its folder.
        record: The content of its ``stream.json``.
        verdicts: Of the ideas that have ended, in their order.
        unfinished: The folder of the idea that has none yet; ``None``: there is none.
    """

    out: Path
    record: StreamRecord
    verdicts: Sequence[Verdict]
    unfinished: Path | None

    @classmethod
    def read(cls, out: Path) -> "Stream":
        """The stream of a folder.

        Raises:
            ValueError: There is none, or it is of an earlier version.
        """
        if not (out / STREAM).is_file():
            raise ValueError(f"{out} holds no {STREAM}: give the folder of a stream of lightning-llm ablate")
        verdicts: list[Verdict] = []
        unfinished: Path | None = None
        for folder in sorted(path.parent for path in (out / IDEAS).glob(f"*/{PLAN}")):
            if (folder / VERDICT).exists():
                verdicts.append(read_record(folder / VERDICT, Verdict))
            else:
                unfinished = folder
        if [verdict.place for verdict in verdicts] != list(range(1, len(verdicts) + 1)):
            raise ValueError(f"{out / IDEAS}: the ideas are not numbered from 1: restore the folders that are missing")
        return cls(out, read_record(out / STREAM, StreamRecord), verdicts, unfinished)

    @property
    def is_final(self) -> bool:
        """Whether it takes no more ideas, so that its losses may be known."""
        return (self.out / FINAL).exists()

    @property
    def place(self) -> int:
        """The place of the next idea, or of the one that has no verdict yet."""
        return len(self.verdicts) + 1

    @property
    def adopted(self) -> list[Verdict]:
        """The ideas that are part of the baseline."""
        return [verdict for verdict in self.verdicts if verdict.is_adopted]

    @property
    def rule(self) -> StreamRule:
        """When an idea is adopted."""
        return StreamRule(self.record.alpha, self.record.looks, self.record.minimal_gain)

    @property
    def next_level(self) -> float:
        """The p that the next idea must not exceed, or the one that has no verdict yet."""
        confirmed = sum(verdict.confirmation is not None for verdict in self.verdicts)
        return self.rule.level(confirmed + 1, len(self.adopted))

    @property
    def pair_sd(self) -> float | None:
        """The standard deviation of a pair's difference, as the median over the ideas; ``None``: not known yet."""
        found = [verdict.screen.sd for verdict in self.verdicts if verdict.screen.sd]
        return statistics.median(found) if found else None

    @property
    def run_seconds(self) -> float:
        """Seconds that the runs of all ideas with a verdict took together."""
        return float(sum(verdict.run_seconds for verdict in self.verdicts))

    def folder(self, verdict: Verdict) -> Path:
        """The folder of an idea that has a verdict."""
        return self.out / IDEAS / folder_of(verdict.place, verdict.name)

    def baseline(self) -> Path:
        """The config of the baseline as it is now."""
        if adopted := self.adopted:
            return Plan.read(self.folder(adopted[-1])).config(adopted[-1].name)
        return self.out / FIRST

    def refuse_changed(self, environment: Mapping[str, str], code: Mapping[str, Path]) -> None:
        """Refuse another environment than that of the runs before, and other code of adopted ideas.

        Args:
            environment: Device, versions, package, and text; what the config of the baseline sets cannot change.
            code: Files of the user's own classes that the baseline has, by name.

        Raises:
            ValueError: Something differs.
        """
        old = self.record.environment
        for name in sorted((environment.keys() | old.keys()) - SET_BY_CONFIG):
            if environment.get(name) != old.get(name):
                changed = f"{name} ({old.get(name)}, now {environment.get(name)})"
                problem = f"{self.out} began with another {changed}, so its runs are no pairs with new ones"
                raise ValueError(f"{problem}: restore it, or begin another stream")
        snapshot = self.folder(self.adopted[-1]) / CODE if self.adopted else None
        for name, path in code.items():
            if snapshot and (snapshot / name).is_file() and file_hash(snapshot / name) != file_hash(path):
                raise ValueError(f"{path} has changed since it was adopted: restore it from {snapshot / name}")

    def same_as(self, asked: Mapping[str, str]) -> Verdict | None:
        """The verdict of an idea that is the same as another; ``None``: there is none.

        Args:
            asked: As of :func:`asked_of`.
        """
        return next((verdict for verdict in reversed(self.verdicts) if verdict.asked == asked), None)


def settings(
    alpha: float | None = None,
    minimal_gain: float | None = None,
    workers: int | None = None,
    *,
    is_thorough: bool = False,
) -> dict[str, Any]:
    """The settings of a new stream, as fields of its record; ``None``: the default.

    Raises:
        ValueError: One is wrong.
    """
    rule = StreamRule()
    content: dict[str, Any] = {"alpha": rule.alpha if alpha is None else alpha, "workers": workers}
    content["minimal_gain"] = rule.minimal_gain if minimal_gain is None else minimal_gain
    validate(content, _SETTINGS, "ablate try")
    return {**content, "looks": THOROUGH if is_thorough else rule.looks}


def finish(stream: Stream) -> None:
    """End a stream: no idea can be tried any more, and its report has the losses of all pairs.

    Raises:
        ValueError: An idea has no verdict yet.
    """
    if stream.unfinished is not None:
        command = f"lightning-llm ablate try {shell_path(stream.out)}"
        raise ValueError(f"{stream.unfinished.name} has no verdict yet: {command} continues it, --give-up ends it")
    write_json(stream.out / FINAL, {"ideas": len(stream.verdicts)})


def refuse_final(stream: Stream) -> None:
    """Refuse another idea for a stream that is final.

    Raises:
        ValueError: It is: whoever proposes ideas could fit them to losses that are known.
    """
    if stream.is_final:
        raise ValueError(f"{stream.out} is final, and its report has the losses of its seeds: begin another stream")


def pairs_of(stream: Stream, verdict: Verdict) -> dict[str, list[dict[str, Any]]]:
    """The losses of an idea's pairs that have ended, by seed; ``None``: the run failed to train.

    Args:
        stream: Of the idea.
        verdict: Its verdict.
    """
    plan = Plan.read(stream.folder(verdict))
    losses = losses_of(results_of(plan))
    stop = stop_of(plan)
    (name,) = plan.experiment.variants

    def of_seeds(seeds: Iterable[int]) -> list[dict[str, Any]]:
        runs = [(seed, RunKey(BASELINE, seed), RunKey(name, seed)) for seed in seeds]
        ended = [run for run in runs if run[1] in losses and run[2] in losses]
        return [{"seed": seed, "baseline": losses[base], "variant": losses[own]} for seed, base, own in ended]

    return {
        "by_seed": of_seeds(screening_seeds(plan.experiment)),
        "confirming_by_seed": of_seeds(confirming_seeds(stop)),
    }


def begin(out: Path, record: StreamRecord, baseline: Mapping[str, Any]) -> None:
    """Write what a stream begins with.

    Args:
        out: Its folder.
        record: Of ``stream.json``.
        baseline: Options of the baseline, resolved.
    """
    write_text(out / FIRST, yaml.safe_dump(dict(baseline), sort_keys=False))
    write_record(out / STREAM, record)


def set_aside(out: Path, idea: Path) -> Path:
    """Move an idea without a verdict, whose plan cannot be read, out of the way; where it is."""
    target = out / "damaged" / f"{idea.name}-{time.time_ns()}"
    target.parent.mkdir(exist_ok=True)
    idea.rename(target)
    return target


def folder_of(place: int, name: str) -> str:
    """The name of the folder of an idea."""
    return f"{place:04}-{name}"


def experiment_of_idea(
    stream: Stream,
    name: str,
    options: Mapping[str, Any],
    *,
    match: str,
    because: str,
    again: bool,
    base: Mapping[str, Any] | None = None,
) -> Experiment:
    """The next idea of a stream as an experiment, on its baseline as it is now.

    Args:
        stream: As it is now.
        name: Of the idea.
        options: That it changes.
        match: What is equal for the baseline and the idea.
        because: Why somebody believes in it.
        again: Whether it was tried before: then its seeds are its own.
        base: Keys of a command; ``None``: it is one of ``fit``.

    Raises:
        ValueError: One of them is wrong.
    """
    validate({"because": because}, record({"because": _BECAUSE}), "ablate try")
    place = stream.place
    adopted = len(stream.adopted)
    content = {
        "variants": {name: dict(options)},
        "match": match,
        "delta": DELTA,
        "seeds": {"first": first_seed(place, adopted, again=again)},
        "out": str(stream.out / IDEAS / folder_of(place, name)),
        **({"baseline": [str(stream.baseline())]} if base is None else base),
    }
    stop = ScreenAndConfirm(
        level=stream.next_level,
        looks=stream.rule.looks,
        minimal_gain=stream.rule.minimal_gain,
        first_confirming_seed=OWN + BLOCK * place + FRESH,
    )
    experiment = experiment_of(content, "ablate try", f"{stream.out.resolve().name} {place}")
    return replace(experiment, stop=stop, because=because)


def first_seed(place: int, adopted: int, *, again: bool) -> int:
    """The first seed of an idea's pairs: the baseline's block, or a block of its own for what was tried before."""
    return OWN + BLOCK * place if again else BLOCK * adopted


def place_of(plan: Plan) -> int:
    """The place of an idea in its stream."""
    return int(plan.out.name.partition("-")[0])


def asked_of(idea: Plan | Draft) -> dict[str, str]:
    """The identity of an idea: the options of both, the code that they use, and the match."""
    (name,) = idea.experiment.variants
    if isinstance(idea, Plan):
        asked: Mapping[str, str] = idea.record.asked
        code = idea.record.code
    else:
        asked = idea.asked
        code = code_hash(idea.code)
    match = "=".join(filter(None, (idea.experiment.match, idea.experiment.solved)))
    return {"baseline": asked[BASELINE], "idea": asked[name], "code": code, "match": match}


# ---- verdicts


def is_settled(plan: Plan, results: Mapping[RunKey, Result]) -> bool:
    """Whether an idea has a verdict by its runs."""
    return _evidence(plan, results).decision.step in VERDICTS


def verdict_of(plan: Plan, results: Mapping[RunKey, Result], *, stopped: str = "") -> Verdict:
    """The verdict of an idea.

    Args:
        plan: Of the idea.
        results: Of its runs.
        stopped: Why it ends, if the rule has no verdict yet.
    """
    stop = stop_of(plan)
    evidence = _evidence(plan, results)
    own_results = trained_here(plan, results)
    ((name, options),) = plan.experiment.variants.items()
    base, idea = (plan.variants[each] for each in (BASELINE, name))
    is_over = evidence.decision.step in VERDICTS
    return Verdict(
        place=place_of(plan),
        name=name,
        because=plan.experiment.because,
        options=dict(options),
        match=asked_of(plan)["match"],
        parameters=(base.facts.get("parameters"), idea.facts.get("parameters")),
        steps=(base.steps, idea.steps),
        asked=asked_of(plan),
        plan=plan.hash,
        verdict=evidence.decision.step if is_over else STOPPED,
        reason=_reason(evidence, stop) if is_over else stopped,
        metric=plan.experiment.metric,
        unit=plan.unit,
        screen=_mean(evidence.screened),
        level=stop.level,
        confirmation=_confirmation(evidence) if evidence.confirmed else None,
        runs=len(own_results),
        run_seconds=run_seconds(own_results),
    )


def stop_of(plan: Plan) -> ScreenAndConfirm:
    """When an idea's comparison stops.

    Raises:
        ValueError: The plan is that of an ordinary experiment.
    """
    stop = plan.experiment.stop
    if not isinstance(stop, ScreenAndConfirm):
        raise ValueError(f"{plan.out} is no idea of a stream: give the folder of a stream of lightning-llm ablate")
    return stop


def _evidence(plan: Plan, results: Mapping[RunKey, Result]) -> Evidence:
    return evidence_of(plan.experiment, stop_of(plan), losses_of(results))


def _reason(evidence: Evidence, stop: ScreenAndConfirm) -> str:
    """Why an idea has its verdict."""
    decision = evidence.decision
    screened, confirmed = evidence.screened, evidence.confirmed
    if not all(map(math.isfinite, [*screened, *confirmed])):
        return f"one of its runs {FAILED_TO_TRAIN}"
    if not confirmed:
        if not any(screened):
            return "its runs are bit-identical to the baseline's"
        least = dict(SCREEN)[decision.pairs]
        if decision.t is not None and decision.t >= least:
            return f"the screen of {decision.pairs} pairs excludes a gain of {stop.minimal_gain:g}"
        return f"the screen of {decision.pairs} pairs found too little: t is {decision.t:.2f}, and {least:g} is needed"
    found = f"{len(confirmed)} fresh pairs: p {decision.p:.2g}"
    if decision.step == ADOPTED:
        return f"{found}, at most its level of {stop.level:.2g}"
    if decision.confirming < stop.looks[-1]:
        return f"{found}, above {HOPELESS:g}, which ends a confirmation at its first look"
    return f"{found}, above its level of {stop.level:.2g}"


def _mean(differences: Sequence[float]) -> Mean:
    """The mean of the finite differences, and its interval."""
    values = [value for value in differences if math.isfinite(value)]
    if len(values) < 2:  # nothing of one seed
        return Mean(difference=None, interval=None, pairs=len(differences))
    return Mean(
        difference=statistics.fmean(values),
        interval=interval_of(values),
        pairs=len(differences),
        sd=statistics.stdev(values),
    )


def _confirmation(evidence: Evidence) -> Confirmation:
    values = [value for value in evidence.confirmed if math.isfinite(value)]
    own = (statistics.median(values), max(values)) if len(values) > 1 else (None, None)
    mean = msgspec.structs.asdict(_mean(evidence.confirmed))
    return Confirmation(**mean, p=evidence.decision.p, median=own[0], worst=own[1])


def store_verdict(plan: Plan, verdict: Verdict) -> None:
    """Write a verdict: from now on, the idea has ended."""
    write_record(plan.out / VERDICT, verdict)


def write_current(stream: Stream) -> None:
    """Write the config of the baseline as it is now, for people."""
    lines = ["# The baseline of this stream. Adopted, each with the difference of its confirming pairs:"]
    for idea in stream.adopted:
        lines.append(f"#   {idea.place}. {idea.name} ({gain_of(idea):+.4f})")
    lines = lines if stream.adopted else ["# The baseline of this stream. No idea was adopted yet."]
    write_text(stream.out / CURRENT, "\n".join([*lines, read_text(stream.baseline(), MIB)]))


def gain_of(verdict: Verdict) -> float:
    """The difference of the pairs that confirmed an adopted idea; 0 of any other."""
    if not verdict.is_adopted or verdict.confirmation is None:
        return 0.0
    return verdict.confirmation.difference or 0.0
