"""An idea of a stream: which runs it needs next, and when it has a verdict. Pure functions of its plan and its runs.

Its plan is that of an experiment with one variant, and has a threshold. The rule is that of ``statistics.stream``.
Pairs come in the order of their seeds; those that confirm the idea have seeds of their own. Workers that are free begin
pairs ahead; what was trained beyond the pair that ends the comparison does not count.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_llm.ablate.arm import BASELINE
from lightning_llm.ablate.experiment import LAST_SEED, Experiment
from lightning_llm.ablate.next_runs import RunKey, State
from lightning_llm.ablate.tuning import Losses
from lightning_llm.io.schema import POSITIVE, Schema, check, record, whole
from lightning_llm.statistics.stream import CONFIRMATION, LEAST, Decision, StreamRule

MOST_PAIRS_OF_IDEA = 400  # of an idea: those that confirm it have the seeds above
_BECAUSE = check(
    "at most 500 printable characters on one line",
    lambda value: isinstance(value, str) and len(value) <= 500 and (value.isprintable() or not value),
)


@dataclasses.dataclass(frozen=True)
class Idea:
    """What the plan of an idea has besides that of an experiment.

    Attributes:
        place: In its stream, from 1.
        threshold: The e-value that an adoption takes.
        most: Pairs, besides those that confirm it.
        first_confirming_seed: Of those; the others follow.
        because: Why somebody believes in it.
    """

    place: int
    threshold: float
    most: int
    first_confirming_seed: int
    because: str = ""


_FIELDS: dict[str, Schema] = {
    "place": whole(1),
    "threshold": POSITIVE,
    "most": whole(LEAST, MOST_PAIRS_OF_IDEA),
    "first_confirming_seed": whole(0, LAST_SEED),
    "because": _BECAUSE,
}
IDEA = record(_FIELDS)


@dataclasses.dataclass(frozen=True)
class Standing:
    """How an idea stands.

    Attributes:
        decision: What is next, and how many pairs count.
        differences: Variant minus baseline, of the pairs that have ended in their order; infinite: its run failed.
        confirming: Likewise of the pairs that confirm it.
    """

    decision: Decision
    differences: list[float]
    confirming: list[float]

    @property
    def counted(self) -> list[float]:
        """The differences that count."""
        return self.differences[: self.decision.pairs]


def standing(experiment: Experiment, idea: Idea, losses: Losses) -> Standing:
    """How an idea stands.

    Args:
        experiment: Its own, with one variant.
        idea: What its plan says of it.
        losses: Of the runs that have ended.
    """
    differences = _differences(experiment, losses, experiment.seeds(idea.most))
    confirming = _differences(experiment, losses, confirming_seeds(idea))
    decision = StreamRule(most=idea.most).next(differences, confirming, idea.threshold)
    return Standing(decision, differences, confirming)


def confirming_seeds(idea: Idea) -> range:
    """The seeds of the pairs that confirm an idea."""
    return range(idea.first_confirming_seed, idea.first_confirming_seed + CONFIRMATION)


def state_of_idea(experiment: Experiment, idea: Idea, losses: Losses) -> State:
    """The runs that an idea needs next, in their order; none: it has a verdict."""
    (name,) = experiment.variants
    step = standing(experiment, idea, losses).decision.step
    seeds: Mapping[str, Iterable[int]] = {"pair": experiment.seeds(idea.most), "confirm": confirming_seeds(idea)}
    runs = [RunKey(arm, seed) for seed in seeds.get(step, ()) for arm in (BASELINE, name)]
    needed = [run for run in runs if run not in losses]
    unfinished = [name] if needed else []
    return State(needed=needed, look=idea.most, verdicts={}, unfinished=unfinished, looks=[idea.most])


def idea_in_words(idea: Idea, state: State) -> str:
    """How many pairs of an idea have ended, for its progress."""
    missing_seeds, confirming = {run.seed for run in state.needed}, confirming_seeds(idea)
    if not missing_seeds:
        return "it has a verdict"
    if missing_seeds & set(confirming):
        return f"{len(confirming) - len(missing_seeds)} of {len(confirming)} pairs that confirm it"
    count = idea.most - len(missing_seeds)
    return f"{count} pair{'s' * (count != 1)}, at most {idea.most}"


def _differences(experiment: Experiment, losses: Losses, seeds: Iterable[int]) -> list[float]:
    """Of the pairs that have ended, up to the first that has not; those whose baseline failed to train are left out."""
    (name,) = experiment.variants
    differences: list[float] = []
    for seed in seeds:
        base, variant = RunKey(BASELINE, seed), RunKey(name, seed)
        if base not in losses or variant not in losses:
            break
        base_loss, loss = losses[base], losses[variant]
        if base_loss is not None:
            differences.append(math.inf if loss is None else loss - base_loss)
    return differences


def idea_of(content: Mapping[str, Any]) -> Idea | None:
    """What a plan says of an idea; ``None``: it is that of an ordinary experiment."""
    return Idea(**content["idea"]) if "idea" in content else None
