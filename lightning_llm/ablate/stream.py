"""A stream of ideas: a folder, in which each idea is compared with the baseline as it is by then. No torch.

``STREAM/stream.json`` holds what the stream began with, and ``first.yaml`` its baseline; they never change. Each idea
is an experiment of its own in ``STREAM/ideas/PLACE-NAME``, whose plan has its place and threshold. An idea that has
ended has ``verdict.json`` there, which holds no loss of a single seed: an idea must not be chosen by the seeds that
will judge it. An adopted idea's config is the baseline from then on. Baseline runs are shared by ideas until one is
adopted: then seeds are fresh, since the old baseline was lucky on the old ones.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.ablate.arm import BASELINE
from lightning_llm.ablate.experiment import DELTA, PLAN_FIELDS, Experiment, experiment_of
from lightning_llm.ablate.idea import MOST_PAIRS_OF_IDEA, Idea, Standing, confirming_seeds, standing
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import CODE, PLAN, Plan, file_hash, read_hashed, was_changed, write_hashed
from lightning_llm.ablate.ratios import INTERVAL
from lightning_llm.ablate.results import Result, losses_of, results_of, run_seconds, trained_here
from lightning_llm.ablate.words import bounds
from lightning_llm.io.atomic import write_json, write_text
from lightning_llm.io.schema import (
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
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import MIB, file_in, read_text, shown
from lightning_llm.statistics.design import FAILED_TO_TRAIN
from lightning_llm.statistics.stream import LEAST, StreamRule, e_value_of, interval_of

STREAM, IDEAS, VERDICT, FIRST, CURRENT = "stream.json", "ideas", "verdict.json", "first.yaml", "baseline.yaml"
ADOPTED, REJECTED, OUT_OF_PAIRS, STOPPED = VERDICTS = ("adopted", "rejected", "out of pairs", "stopped")
FINAL = "final.json"  # in a stream that takes no more ideas: how many it has
MOST_IDEAS = 9_999
SET_BY_CONFIG = {"precision", "tf32"}  # of the environment: an adopted idea may change them
BLOCK = 1000  # seeds between one baseline's and the next one's
OWN = 100_000_000  # from here on, each place has a block of its own

_SETTINGS: dict[str, Schema] = {"alpha": PLAN_FIELDS["alpha"], "most": whole(LEAST, MOST_PAIRS_OF_IDEA)}
_SETTINGS["workers"] = maybe(whole(1))
_ASKED = record({"baseline": by_name(SHA256), "options": list_of(TEXT)})
_FILE = record({"asked": _ASKED, **_SETTINGS, "environment": by_name(TEXT), "first": SHA256, "hash": SHA256})
_PAIR = check("two values", lambda value: isinstance(value, list) and len(value) == 2)
_MEAN: dict[str, Schema] = {"difference": maybe(NUMBER), "interval": maybe(INTERVAL), "pairs": whole()}
_VERDICT = record(
    {
        "place": whole(1),
        "name": TEXT,
        "because": TEXT,
        "options": open_record({}, {}),
        "match": TEXT,
        "parameters": _PAIR,
        "steps": _PAIR,
        "asked": by_name(TEXT),
        "plan": SHA256,
        "verdict": check("a verdict", lambda value: value in VERDICTS),
        "reason": TEXT,
        "metric": TEXT,
        **_MEAN,
        "e_value": NUMBER,
        "threshold": POSITIVE,
        "confirmation": maybe(record(_MEAN)),
        "runs": whole(),
        "run_seconds": NUMBER,
        "hash": SHA256,
    }
)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A stream as it is now.

    Attributes:
        out: Its folder.
        content: Of ``stream.json``: what was ``asked`` for (configs of the baseline with their hashes, and further
            options), ``alpha``, ``most``, ``workers``, and the ``environment`` of its runs.
        verdicts: Of the ideas that have ended, in their order.
        unfinished: The folder of the idea that has none yet; ``None``: there is none.
    """

    out: Path
    content: Mapping[str, Any]
    verdicts: Sequence[Mapping[str, Any]]
    unfinished: Path | None

    @classmethod
    def read(cls, out: Path) -> "Stream":
        """The stream of a folder.

        Raises:
            ValueError: There is none, or it was changed.
        """
        content = read_hashed(out / STREAM, _FILE, "a stream")
        verdicts: list[dict[str, Any]] = []
        unfinished: Path | None = None
        for folder in sorted((out / IDEAS).glob(f"*/{PLAN}")):
            if (folder.parent / VERDICT).exists():
                verdicts.append(_read_verdict(folder.parent))
            else:
                unfinished = folder.parent
        if [verdict["place"] for verdict in verdicts] != list(range(1, len(verdicts) + 1)):
            raise ValueError(f"{out / IDEAS}: the ideas are not numbered from 1: restore the folders that are missing")
        return cls(out, content, verdicts, unfinished)

    @property
    def is_final(self) -> bool:
        """Whether it takes no more ideas, so that its losses may be known."""
        return (self.out / FINAL).exists()

    @property
    def place(self) -> int:
        """Of the next idea, or of the one that has no verdict yet."""
        return len(self.verdicts) + 1

    @property
    def adopted(self) -> list[Mapping[str, Any]]:
        """The ideas that are part of the baseline."""
        return [verdict for verdict in self.verdicts if verdict["verdict"] == ADOPTED]

    @property
    def rule(self) -> StreamRule:
        """When an idea is adopted."""
        return StreamRule(self.content["alpha"], self.content["most"])

    @property
    def run_seconds(self) -> float:
        """What the runs of all ideas with a verdict took together."""
        return float(sum(verdict["run_seconds"] for verdict in self.verdicts))

    def folder(self, verdict: Mapping[str, Any]) -> Path:
        """Of an idea that has a verdict."""
        return file_in(self.out / IDEAS, folder_of(verdict["place"], verdict["name"]))

    def baseline(self) -> Path:
        """The config of the baseline as it is now.

        Raises:
            ValueError: It was changed.
        """
        if adopted := self.adopted:
            return Plan.read(self.folder(adopted[-1])).config(adopted[-1]["name"])
        if file_hash(self.out / FIRST) != self.content["first"]:
            raise ValueError(was_changed(self.out / FIRST, "a stream"))
        return self.out / FIRST

    def refuse_changed(self, environment: Mapping[str, str], code: Mapping[str, Path]) -> None:
        """Refuse another environment than that of the runs before, and other code of adopted ideas.

        Args:
            environment: Device, versions, package, and text; what the config of the baseline sets cannot change.
            code: Files of the user's own classes that the baseline has, by name.

        Raises:
            ValueError: Something differs.
        """
        old = self.content["environment"]
        for name in sorted((environment.keys() | old.keys()) - SET_BY_CONFIG):
            if environment.get(name) != old.get(name):
                changed = f"{name} ({old.get(name)}, now {environment.get(name)})"
                problem = f"{self.out} began with another {changed}, so its runs are no pairs with new ones"
                raise ValueError(f"{problem}: restore it, or begin another stream")
        snapshot = self.folder(self.adopted[-1]) / CODE if self.adopted else None
        for name, path in code.items():
            if snapshot and (snapshot / name).is_file() and file_hash(snapshot / name) != file_hash(path):
                raise ValueError(f"{path} has changed since it was adopted: restore it from {snapshot / name}")

    def same_as(self, asked: Mapping[str, str]) -> Mapping[str, Any] | None:
        """The verdict of an idea that is the same as another; ``None``: there is none.

        Args:
            asked: As of :func:`asked_of`.
        """
        return next((verdict for verdict in reversed(self.verdicts) if verdict["asked"] == dict(asked)), None)


def settings(alpha: float | None, most: int | None, workers: int | None) -> dict[str, Any]:
    """What ``stream.json`` holds of the settings of a new stream; ``None``: the default.

    Raises:
        ValueError: One is wrong.
    """
    rule = StreamRule()
    content: dict[str, Any] = {"alpha": rule.alpha if alpha is None else alpha, "workers": workers}
    content["most"] = rule.most if most is None else most
    validate(content, record(_SETTINGS), "ablate try")
    return content


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


def pairs_of(stream: Stream, verdict: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The losses of an idea's pairs that have ended, by seed; ``None``: the run failed to train.

    Args:
        stream: Of the idea.
        verdict: Its verdict.
    """
    plan = Plan.read(stream.folder(verdict))
    losses, idea = losses_of(results_of(plan)), idea_in(plan)
    (name,) = plan.experiment.variants

    def of_seeds(seeds: Iterable[int]) -> list[dict[str, Any]]:
        runs = [(seed, RunKey(BASELINE, seed), RunKey(name, seed)) for seed in seeds]
        ended = [run for run in runs if run[1] in losses and run[2] in losses]
        return [{"seed": seed, "baseline": losses[base], "variant": losses[own]} for seed, base, own in ended]

    return {
        "by_seed": of_seeds(plan.experiment.seeds(idea.most)),
        "confirming_by_seed": of_seeds(confirming_seeds(idea)),
    }


def begin(out: Path, content: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Write what a stream begins with.

    Args:
        out: Its folder.
        content: Of ``stream.json``.
        baseline: Options of the baseline, resolved.
    """
    write_text(out / FIRST, yaml.safe_dump(dict(baseline), sort_keys=False))
    write_hashed(out / STREAM, {**content, "first": file_hash(out / FIRST)})


def _read_verdict(folder: Path) -> dict[str, Any]:
    verdict = read_hashed(folder / VERDICT, _VERDICT, "a stream")
    if folder.name != folder_of(verdict["place"], verdict["name"]):
        raise ValueError(f"{folder / VERDICT} is that of {shown(verdict['name'])}: restore it")
    if verdict["verdict"] == ADOPTED and (verdict["confirmation"] or {}).get("difference") is None:
        raise ValueError(f"{folder / VERDICT}: confirmation is missing")
    return verdict


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
    out: Path,
    place: int,
    files: Sequence[str],
    name: str,
    options: Mapping[str, Any],
    match: str,
    *,
    first: int,
    most: int,
) -> Experiment:
    """An idea as an experiment.

    Args:
        out: The folder of the stream.
        place: Of the idea.
        files: Configs of the baseline.
        name: Of the idea.
        options: That it changes.
        match: What is equal on both sides.
        first: Its first seed.
        most: Pairs.
    """
    content = {"baseline": list(files), "variants": {name: dict(options)}, "match": match, "delta": DELTA}
    content |= {"looks": [most], "seeds": {"first": first}}
    content["out"] = str(out / IDEAS / folder_of(place, name))
    return experiment_of(content, "ablate try", f"{out.resolve().name} {place}")


def first_seed(place: int, adopted: int, *, again: bool) -> int:
    """The first seed of an idea's pairs: the baseline's block, or a block of its own for what was tried before."""
    return OWN + BLOCK * place if again else BLOCK * adopted


def idea_at(rule: StreamRule, place: int, adopted: int, because: str) -> Idea:
    """What the plan of an idea holds."""
    return Idea(
        place=place,
        threshold=rule.threshold(place, adopted),
        most=rule.most,
        first_confirming_seed=OWN + BLOCK * place + MOST_PAIRS_OF_IDEA,  # after those of its own pairs
        because=because,
    )


def asked_of(content: Mapping[str, Any]) -> dict[str, str]:
    """What makes two ideas the same: the options of both sides, the code that they use, and the match.

    Args:
        content: Of a plan, or of what a plan is made from.
    """
    configs = content["asked_configs"]
    (idea,) = (configs[name] for name in configs if name != BASELINE)
    match = "=".join(filter(None, (content["match"], content["solved"])))
    return {"baseline": configs[BASELINE], "idea": idea, "code": content["code"], "match": match}


# ---- verdicts


def is_settled(plan: Plan, results: Mapping[RunKey, Result]) -> bool:
    """Whether an idea has a verdict by its runs."""
    return _standing(plan, results).decision.step in VERDICTS


def verdict_of(plan: Plan, results: Mapping[RunKey, Result], *, stopped: str = "") -> dict[str, Any]:
    """The verdict of an idea, as ``verdict.json`` holds it.

    Args:
        plan: Of the idea.
        results: Of its runs.
        stopped: Why it ends, if the rule has no verdict yet.
    """
    idea, stand = idea_in(plan), _standing(plan, results)
    own_results = trained_here(plan, results)
    ((name, options),) = plan.experiment.variants.items()
    is_over = stand.decision.step in VERDICTS
    e_value = e_value_of([value for value in stand.counted if math.isfinite(value)])
    return {
        "place": idea.place,
        "name": name,
        "because": idea.because,
        "options": dict(options),
        "match": asked_of(plan.content)["match"],
        **{field: [plan.arms[arm].get(field) for arm in (BASELINE, name)] for field in ("parameters", "steps")},
        "asked": asked_of(plan.content),
        "plan": plan.content["hash"],
        "verdict": stand.decision.step if is_over else STOPPED,
        "reason": _reason(stand, e_value >= idea.threshold) if is_over else stopped,
        "metric": plan.experiment.metric,
        **_mean(stand.counted),
        "e_value": e_value,
        "threshold": idea.threshold,
        "confirmation": _mean(stand.confirming) if stand.confirming else None,
        "runs": len(own_results),
        "run_seconds": run_seconds(own_results),
    }


def idea_in(plan: Plan) -> Idea:
    """The idea of a plan.

    Raises:
        ValueError: It is that of an ordinary experiment.
    """
    if plan.idea is None:
        raise ValueError(f"{plan.out} is no idea of a stream: give the folder of a stream of lightning-llm ablate")
    return plan.idea


def _standing(plan: Plan, results: Mapping[RunKey, Result]) -> Standing:
    return standing(plan.experiment, idea_in(plan), losses_of(results))


def _reason(stand: Standing, is_at_threshold: bool) -> str:
    """Why an idea has its verdict."""
    step, counted, confirming = stand.decision.step, stand.counted, stand.confirming
    if not all(map(math.isfinite, [*counted, *confirming])):
        return f"one of its runs {FAILED_TO_TRAIN}"
    if step == OUT_OF_PAIRS:
        return f"{len(counted)} pairs have not reached the threshold"
    if not is_at_threshold:
        return "the e-value is below 1" if any(counted) else "its runs are bit-identical to the baseline's"
    where = "lies below 0" if step == ADOPTED else "reaches 0"
    return f"{len(confirming)} fresh pairs: the interval {bounds(interval_of(confirming))} {where}"


def _mean(differences: Sequence[float]) -> dict[str, Any]:
    """The mean of the finite differences, and its interval."""
    values = [value for value in differences if math.isfinite(value)]
    interval = interval_of(values)
    return {
        "difference": None if interval is None else statistics.fmean(values),  # not that of one seed
        "interval": None if interval is None else list(interval),
        "pairs": len(differences),
    }


def store_verdict(plan: Plan, verdict: Mapping[str, Any]) -> None:
    """Write a verdict: from now on, the idea has ended."""
    write_hashed(plan.out / VERDICT, verdict)


def write_current(stream: Stream) -> None:
    """Write the config of the baseline as it is now, for people."""
    lines = ["# The baseline of this stream. Adopted, each with the difference of its confirming pairs:"]
    for idea in stream.adopted:
        lines.append(f"#   {idea['place']}. {idea['name']} ({idea['confirmation']['difference']:+.4f})")
    lines = lines if stream.adopted else ["# The baseline of this stream. No idea was adopted yet."]
    write_text(stream.out / CURRENT, "\n".join([*lines, read_text(stream.baseline(), MIB)]))
