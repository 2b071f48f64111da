"""Runs that a comparison with an e-process needs, and its state. Pure functions of plan and runs.

It has one variant: an idea of a stream. The rule is that of ``statistics.stream``. Pairs come in the order of their
seeds; those that confirm the idea have seeds of their own. Workers that are free begin pairs ahead; what was trained
beyond the pair that ends the comparison does not count.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from lightning_llm.ablate.experiment import EProcess, Experiment
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey, State
from lightning_llm.ablate.tuning import Losses
from lightning_llm.statistics.stream import CONFIRMATION, Decision, StreamRule


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The evidence of an idea's pairs.

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


def evidence_of(experiment: Experiment, stop: EProcess, losses: Losses) -> Evidence:
    """The evidence of the pairs that have ended.

    Args:
        experiment: With one variant.
        stop: Its rule.
        losses: Of the runs that have ended.
    """
    differences = _differences(experiment, losses, experiment.seeds(stop.most))
    confirming = _differences(experiment, losses, confirming_seeds(stop))
    decision = StreamRule(most=stop.most).next(differences, confirming, stop.threshold)
    return Evidence(decision, differences, confirming)


def confirming_seeds(stop: EProcess) -> range:
    """The seeds of the pairs that confirm an idea."""
    return range(stop.first_confirming_seed, stop.first_confirming_seed + CONFIRMATION)


def state_of_e_process(experiment: Experiment, stop: EProcess, losses: Losses) -> State:
    """The runs that are needed next, in their order; none: there is a verdict."""
    (name,) = experiment.variants
    step = evidence_of(experiment, stop, losses).decision.step
    seeds: Mapping[str, Iterable[int]] = {"pair": experiment.seeds(stop.most), "confirm": confirming_seeds(stop)}
    runs = [RunKey(variant, seed) for seed in seeds.get(step, ()) for variant in (BASELINE, name)]
    needed = [run for run in runs if run not in losses]
    unfinished = [name] if needed else []
    return State(needed=needed, look=stop.most, verdicts={}, unfinished=unfinished, looks=[stop.most])


def progress_of_e_process(stop: EProcess, state: State) -> str:
    """How many pairs have ended, in words."""
    missing_seeds = {run.seed for run in state.needed}
    confirming = confirming_seeds(stop)
    if not missing_seeds:
        return "it has a verdict"
    if missing_seeds & set(confirming):
        return f"{len(confirming) - len(missing_seeds)} of {len(confirming)} pairs that confirm it"
    count = stop.most - len(missing_seeds)
    return f"{count} pair{'s' * (count != 1)}, at most {stop.most}"


def _differences(experiment: Experiment, losses: Losses, seeds: Iterable[int]) -> list[float]:
    """Differences of the pairs up to the first that has not ended, without those whose baseline failed to train."""
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
