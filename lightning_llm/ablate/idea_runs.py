"""Runs that the comparison of an idea needs, and its state. Pure functions of plan and runs.

The rule is that of ``statistics.stream``: pairs of a screen, then fresh pairs that confirm the idea, whose seeds are
its own. Workers that are free begin pairs ahead, up to the next look; what was trained beyond the look that ends the
comparison does not count. A pair whose baseline failed to train is left out, and the next seed takes its place.
"""

import dataclasses
import math
from collections.abc import Iterator

from lightning_llm.ablate.experiment import Experiment, ScreenAndConfirm
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey, State
from lightning_llm.ablate.tuning import Losses
from lightning_llm.statistics.stream import SCREEN, Decision, StreamRule

SPARE = 2  # times as many seeds as pairs, in place of those whose baseline fails to train


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The evidence of an idea's pairs.

    Attributes:
        decision: What is next, and how many pairs count.
        differences: Variant minus baseline, of the screen's pairs that have ended in their order; infinite: its run
            failed.
        confirming: Likewise of the pairs that confirm it.
    """

    decision: Decision
    differences: list[float]
    confirming: list[float]

    @property
    def screened(self) -> list[float]:
        """The differences of the screen that count."""
        return self.differences[: self.decision.pairs]

    @property
    def confirmed(self) -> list[float]:
        """The confirming differences that count."""
        return self.confirming[: self.decision.confirming]


def evidence_of(experiment: Experiment, stop: ScreenAndConfirm, losses: Losses) -> Evidence:
    """The evidence of the pairs that have ended.

    Args:
        experiment: With one variant.
        stop: Its rule.
        losses: Of the runs that have ended.
    """
    differences = list(_differences(experiment, losses, screening_seeds(experiment)))
    confirming = list(_differences(experiment, losses, confirming_seeds(stop)))
    rule = StreamRule(looks=stop.looks, minimal_gain=stop.minimal_gain)
    return Evidence(rule.next(differences, confirming, stop.level), differences, confirming)


def screening_seeds(experiment: Experiment) -> range:
    """The seeds of the pairs that screen an idea, in their order."""
    return experiment.seeds(SPARE * SCREEN[-1][0])


def confirming_seeds(stop: ScreenAndConfirm) -> range:
    """The seeds of the pairs that confirm an idea, in their order."""
    return range(stop.first_confirming_seed, stop.first_confirming_seed + SPARE * stop.looks[-1])


def state_of_idea(experiment: Experiment, stop: ScreenAndConfirm, losses: Losses) -> State:
    """The runs that are needed next, in their order; none: there is a verdict, or all baselines failed to train."""
    (name,) = experiment.variants
    decision = evidence_of(experiment, stop, losses).decision
    runs: list[RunKey] = []
    pairs = 0
    for seed in confirming_seeds(stop) if decision.step == "confirm" else screening_seeds(experiment):
        if pairs == decision.wanted:
            break
        base = RunKey(BASELINE, seed)
        if losses.get(base, 0.0) is not None:  # one that has not ended is expected to train
            runs += [base, RunKey(name, seed)]
            pairs += 1
    needed = [run for run in runs if run not in losses]
    unfinished = [name] if needed else []
    return State(needed=needed, look=decision.wanted, verdicts={}, unfinished=unfinished, looks=list(stop.looks))


def progress_of_idea(stop: ScreenAndConfirm, state: State) -> str:
    """How many pairs have ended, in words."""
    missing_seeds = {run.seed for run in state.needed}
    if not missing_seeds:
        return "it has a verdict"
    is_confirmed = missing_seeds & {*confirming_seeds(stop)}
    what = f"fresh pairs that confirm it, at most {stop.looks[-1]}" if is_confirmed else "pairs of the screen"
    return f"{state.look - len(missing_seeds)} of {state.look} {what}"


def _differences(experiment: Experiment, losses: Losses, seeds: range) -> Iterator[float]:
    """Differences of the pairs up to the first that has not ended, without those whose baseline failed to train."""
    (name,) = experiment.variants
    for seed in seeds:
        base, variant = RunKey(BASELINE, seed), RunKey(name, seed)
        if base not in losses:
            return
        base_loss = losses[base]
        if base_loss is None:
            continue
        if variant not in losses:
            return
        loss = losses[variant]
        yield math.inf if loss is None else loss - base_loss
