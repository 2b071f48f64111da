"""A stream of ideas: a folder, in which each idea is compared with the baseline as it is by then. No torch.

``STREAM/stream.json`` holds what the stream began with, and ``first.yaml`` its baseline; they never change. Each idea
is an experiment of its own in ``STREAM/ideas/PLACE-NAME``, whose plan has its place and bar. An idea that has ended
has ``verdict.json`` there, which holds no loss of a single seed: an idea must not be chosen by the seeds that will
judge it. An adopted idea's config is the baseline from then on. Baseline runs are shared by ideas until one is adopted:
then seeds are fresh, since the old baseline was lucky on the old ones.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_llm.ablate.arm import BASELINE
from lightning_llm.ablate.experiment import DELTA, Experiment, experiment_of
from lightning_llm.ablate.idea import MOST_PAIRS, Idea, standing
from lightning_llm.ablate.plan import PLAN, Plan, file_hash, read_hashed, write_hashed
from lightning_llm.ablate.results import Result, losses_of
from lightning_llm.io.atomic import write_text
from lightning_llm.io.schema import (
    NUMBER,
    POSITIVE,
    SHA256,
    TEXT,
    by_name,
    check,
    list_of,
    maybe,
    open_record,
    record,
    validate,
    whole,
)
from lightning_llm.io.untrusted import file_in
from lightning_llm.statistics.estimates import student
from lightning_llm.statistics.stream import CONFIDENCE, StreamRule, evidence_of

STREAM, IDEAS, VERDICT, FIRST, CURRENT = "stream.json", "ideas", "verdict.json", "first.yaml", "baseline.yaml"
ADOPTED, REJECTED, OUT_OF_PAIRS = "adopted", "rejected", "out of pairs"
MOST_IDEAS, LONGEST_NAME = 10_000, 60
BLOCK = 1000  # seeds between one baseline's and the next one's
OWN = 1_000_000  # from here on, each place has a block of its own
_CONFIRMING = MOST_PAIRS  # in the block of a place, the seeds of the pairs that confirm follow those of its own pairs

_ASKED = {"baseline": by_name(SHA256), "options": list_of(TEXT)}
_SETTINGS = {"alpha": check("a number above 0 and below 0.5", lambda value: type(value) is float and 0 < value < 0.5)}
_SETTINGS |= {"most": whole(4, MOST_PAIRS), "workers": maybe(whole(1))}
_FILE = record({"asked": record(_ASKED), **_SETTINGS, "environment": by_name(TEXT), "first": SHA256, "hash": SHA256})
_PAIR = check("two values", lambda value: isinstance(value, list) and len(value) == 2)
_MEAN = {"difference": maybe(NUMBER), "interval": maybe(_PAIR), "pairs": whole()}
_VERDICT = record(
    {
        **{"place": whole(1), "name": TEXT, "because": TEXT, "options": open_record({}, {}), "match": TEXT},
        **{"verdict": check("a verdict", lambda value: value in (ADOPTED, REJECTED, OUT_OF_PAIRS)), "reason": TEXT},
        **{"metric": TEXT, **_MEAN, "evidence": NUMBER, "bar": POSITIVE, "confirmation": maybe(record(_MEAN))},
        **{"parameters": _PAIR, "steps": _PAIR, "runs": whole(), "run_seconds": NUMBER, "asked": by_name(TEXT)},
        **{"plan": SHA256, "hash": SHA256},
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
        content = read_hashed(out / STREAM, _FILE, "stream")
        verdicts: list[dict[str, Any]] = []
        unfinished: Path | None = None
        for folder in sorted((out / IDEAS).glob(f"*/{PLAN}")):
            if (folder.parent / VERDICT).exists():
                verdicts.append(read_hashed(folder.parent / VERDICT, _VERDICT, "stream"))
            else:
                unfinished = folder.parent
        if [verdict["place"] for verdict in verdicts] != list(range(1, len(verdicts) + 1)):
            raise ValueError(f"{out / IDEAS}: the ideas are not numbered from 1: restore the folders that are missing")
        return cls(out, content, verdicts, unfinished)

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
            raise ValueError(f"{self.out / FIRST} was changed after the start: restore it, or begin another stream")
        return self.out / FIRST

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


def begin(out: Path, content: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Write what a stream begins with.

    Args:
        out: Its folder.
        content: Of ``stream.json``.
        baseline: Options of the baseline, resolved.
    """
    write_text(out / FIRST, yaml.safe_dump(dict(baseline), sort_keys=False))
    write_hashed(out / STREAM, {**content, "first": file_hash(out / FIRST)})


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
    return experiment_of(content, "ablate try", f"{out.name} {place}")


def first_seed(place: int, adopted: int, *, again: bool) -> int:
    """The first seed of an idea's pairs: the baseline's block, or a block of its own for what was tried before."""
    return OWN + BLOCK * place if again else BLOCK * adopted


def idea_at(stream_rule: StreamRule, place: int, adopted: int, because: str) -> Idea:
    """What the plan of an idea holds."""
    bar = stream_rule.bar(place, adopted)
    return Idea(place, bar, stream_rule.most, OWN + BLOCK * place + _CONFIRMING, because)


def asked_of(content: Mapping[str, Any]) -> dict[str, str]:
    """What makes two ideas the same: the options of both sides, the code that they use, and the match.

    Args:
        content: Of a plan, or of what a plan is made from.
    """
    configs = content["asked_configs"]
    (idea,) = (configs[name] for name in configs if name != BASELINE)
    solved = content["solved"] or ""
    return {"baseline": configs[BASELINE], "idea": idea, "code": content["code"], "match": content["match"] + solved}


# ---- verdicts


def is_settled(plan: Plan, results: Mapping[Any, Result]) -> bool:
    """Whether an idea has a verdict by its runs."""
    assert plan.idea is not None
    step = standing(plan.experiment, plan.idea, losses_of(results)).decision.step
    return step not in ("pair", "confirm")


def verdict_of(plan: Plan, results: Mapping[Any, Result], *, stopped: str = "") -> dict[str, Any]:
    """The verdict of an idea, as ``verdict.json`` holds it.

    Args:
        plan: Of the idea.
        results: Of its runs.
        stopped: Why it ends, if the rule has no verdict yet.
    """
    idea, experiment = plan.idea, plan.experiment
    assert idea is not None
    stand = standing(experiment, idea, losses_of(results))
    ((name, options),) = experiment.variants.items()
    arms = [plan.arms[BASELINE], plan.arms[name]]
    evidence = evidence_of([value for value in stand.counted if math.isfinite(value)])
    step = stand.decision.step
    return {
        **{"place": idea.place, "name": name, "because": idea.because, "options": dict(options)},
        **{"match": asked_of(plan.content)["match"], "metric": experiment.metric},
        "verdict": step if is_settled(plan, results) else OUT_OF_PAIRS,
        "reason": _reason(plan, results, evidence) if is_settled(plan, results) else stopped,
        **_mean(stand.counted),
        **{"evidence": evidence, "bar": idea.bar},
        "confirmation": _mean(stand.confirming) if stand.confirming else None,
        **{key: [arm.get(key) for arm in arms] for key in ("parameters", "steps")},
        "runs": len(_trained(plan, results)),
        "run_seconds": run_seconds(plan, results),
        **{"asked": asked_of(plan.content), "plan": plan.content["hash"]},
    }


def run_seconds(plan: Plan, results: Mapping[Any, Result]) -> float:
    """What the runs of an idea took together, without those that another idea has trained."""
    return float(sum(result.summary.get("seconds") or 0.0 for result in _trained(plan, results)))


def _trained(plan: Plan, results: Mapping[Any, Result]) -> list[Result]:
    return [result for run, result in results.items() if not plan.is_reused(run)]


def store_verdict(stream: Stream, plan: Plan, verdict: Mapping[str, Any]) -> None:
    """Write a verdict, and for people the config of the baseline as it is from now on."""
    write_hashed(plan.out / VERDICT, verdict)
    now = Stream.read(stream.out)
    lines = ["# The baseline of this stream. Adopted, each with the difference of its confirming pairs:"]
    for idea in now.adopted:
        lines.append(f"#   {idea['place']}. {idea['name']} ({idea['confirmation']['difference']:+.4f})")
    lines = lines if now.adopted else ["# The baseline of this stream. No idea was adopted yet."]
    write_text(stream.out / CURRENT, "\n".join([*lines, now.baseline().read_text(encoding="utf-8")]))


def _reason(plan: Plan, results: Mapping[Any, Result], evidence: float) -> str:
    assert plan.idea is not None
    stand = standing(plan.experiment, plan.idea, losses_of(results))
    step, counted = stand.decision.step, stand.counted
    if not all(map(math.isfinite, [*counted, *stand.confirming])):
        return "a run of it diverged"
    if step == OUT_OF_PAIRS:
        return f"{len(counted)} pairs have not reached the bar"
    if evidence < plan.idea.bar:
        return "its runs are bit-identical to the baseline's" if not any(counted) else "the evidence is below 1"
    low, high = _mean(stand.confirming)["interval"] or (math.nan, math.nan)
    whole_line = "lies below 0" if step == ADOPTED else "reaches above 0"
    return f"{len(stand.confirming)} fresh pairs: the interval {low:+.4f} to {high:+.4f} {whole_line}"


def _mean(differences: Sequence[float]) -> dict[str, Any]:
    """The mean difference, and its interval as of a t test: of ``1 - 2 (1 - CONFIDENCE)``, 90%."""
    values = np.array([value for value in differences if math.isfinite(value)])
    count = len(values)
    if count < 2:
        return {"difference": float(values.mean()) if count else None, "interval": None, "pairs": len(differences)}
    mean = float(values.mean())
    half = float(student(2 * (1 - CONFIDENCE), count - 1) * values.std(ddof=1) / math.sqrt(count))
    return {"difference": mean, "interval": [mean - half, mean + half], "pairs": len(differences)}
