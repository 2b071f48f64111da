"""Validation losses during the training of an experiment's runs, and the differences of pairs there. No torch."""

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_llm.ablate.experiment import DELTA
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.ratios import StepCost, is_unknown
from lightning_llm.ablate.report.record import Curve
from lightning_llm.ablate.results import Loaded
from lightning_llm.statistics.estimates import Array, student
from lightning_llm.training.metrics import LOSSES, VAL_LOSS


class Curves(NamedTuple):
    """Validation losses during training, of the runs that did not fail to train.

    Attributes:
        steps: Of the validations of each variant.
        losses: Of each variant, shape (runs, validations).
        seeds: Of these runs.
    """

    steps: Mapping[str, Sequence[int]]
    losses: Mapping[str, Array]
    seeds: Mapping[str, Sequence[int]]

    def differences(self, name: str) -> tuple[list[int], Any]:
        """Steps of the baseline, and the differences of the pairs there; the variant's are read at equal shares.

        A share of the run is what both variants have in common if their numbers of steps differ.
        """
        common = [seed for seed in self.seeds[BASELINE] if seed in self.seeds.get(name, ())]
        steps, variant_steps = (np.array(self.steps[variant]) for variant in (BASELINE, name))
        shares = steps / steps[-1], variant_steps / variant_steps[-1]
        rows = [np.interp(*shares, self._losses_of(name, seed)) - self._losses_of(BASELINE, seed) for seed in common]
        return list(self.steps[BASELINE]), np.array(rows)

    def summaries(
        self, names: Collection[str], costs: Mapping[str, StepCost], delta: float | None, sign: int = 1
    ) -> dict[str, Curve]:
        """Means and paired differences of each variant, for a report.

        Args:
            names: The baseline and the variants; not the null variant, which would make fewer seeds common.
            costs: Of the variants whose step was measured.
            delta: The smallest difference that matters; ``None``: the default one.
            sign: -1 if the values are those of a metric with its sign changed.
        """
        if BASELINE not in self.steps:
            return {}
        shown = [name for name in self.steps if name in names]
        common = set.intersection(*(set(self.seeds[name]) for name in shown))
        curves = {}
        for name in shown:
            steps = self.steps[name]
            chosen = [n for n, seed in enumerate(self.seeds[name]) if seed in common or not common]
            losses = sign * self.losses[name][chosen]
            spread = losses.std(axis=0, ddof=1) if len(losses) > 1 else np.zeros(len(steps))
            found: dict[str, Any] = {}
            if name != BASELINE:
                shares, differences = self.differences(name)
                found = _differences(shares, sign * differences)
                timed = self.at_equal_time(name, costs, delta)
                found["at_equal_time"] = None if timed is None else sign * timed
            curves[name] = Curve(steps=list(steps), mean=losses.mean(axis=0).tolist(), sd=spread.tolist(), **found)
        return curves

    def at_equal_time(self, name: str, costs: Mapping[str, StepCost], delta: float | None = None) -> float | None:
        """Mean difference of the validation loss when the faster variant ends.

        The slower variant is then in the middle of its schedule, so the number favors the faster one. Between two
        validations, the loss is read on a line.

        Args:
            name: Of the variant.
            costs: Of the variants whose step was measured.
            delta: The smallest difference that matters; ``None``: the default one. One in bits per byte counts as one
                in nats per token, which is at most 1.44 times too lenient.

        Returns:
            ``None`` if a time or loss is not known, or if the lines may be off by more than a quarter of delta.
        """
        common_seeds = [seed for seed in self.seeds.get(BASELINE, ()) if seed in self.seeds.get(name, ())]
        if not common_seeds or BASELINE not in costs or name not in costs:
            return None
        step_s = {variant: costs[variant].step_s for variant in (BASELINE, name)}
        if is_unknown(costs[name]):
            step_s[name] = step_s[BASELINE]
        end = min(seconds * self.steps[variant][-1] for variant, seconds in step_s.items())
        if any(end < seconds * self.steps[variant][0] for variant, seconds in step_s.items()):
            return None  # no loss is known that early
        curves = {
            variant: np.mean([self._losses_of(variant, seed) for seed in common_seeds], axis=0) for variant in step_s
        }
        interpolated = {
            variant: _interpolated(end / step_s[variant], self.steps[variant], curve)
            for variant, curve in curves.items()
        }
        (base, base_error), (loss, error) = interpolated.values()
        return loss - base if base_error + error <= (delta or DELTA) / 4 else None

    def _losses_of(self, name: str, seed: int) -> Any:
        return self.losses[name][list(self.seeds[name]).index(seed)]


def _differences(shares: Sequence[int], differences: Array) -> dict[str, Any]:
    """The mean of pairs' differences at each share of the run, with half the width of its 95% interval."""
    pairs = len(differences)
    if not pairs:
        return {}
    half = np.zeros(len(shares))
    if pairs > 1:
        half = student(0.05, pairs - 1) * differences.std(axis=0, ddof=1) / np.sqrt(pairs)
    middle = differences.mean(axis=0)
    return {"pairs": pairs, "shares": list(shares), "difference": middle.tolist(), "half_width": half.tolist()}


def _interpolated(at: float, steps: Sequence[int], losses: Array) -> tuple[float, float]:
    """The loss at a step, on a line between the two validations a < b around it, and an estimate of its error.

    The error is the next term of Newton's interpolation, ``|f[a, b, c]| (at - a) (b - at)``, with the larger of both
    second divided differences to a neighbor c. It is infinite without a neighbor, and 0 at a validation.
    """
    nearest = min(range(len(steps)), key=lambda n: abs(steps[n] - at))
    if math.isclose(steps[nearest], at, rel_tol=1e-9):
        return float(losses[nearest]), 0.0
    right = bisect.bisect_left(steps, at)
    slopes = np.diff(losses) / np.diff(steps)  # slopes[n] is that from validation n to n + 1
    inner = range(max(right - 1, 1), min(right + 1, len(slopes)))  # of both validations, those with two neighbors
    bends = [abs(slopes[n] - slopes[n - 1]) / (steps[n + 1] - steps[n - 1]) for n in inner]
    error = max(bends, default=math.inf) * (at - steps[right - 1]) * (steps[right] - at)
    return float(np.interp(at, steps, losses)), float(error)


def curves_of(loaded: Loaded) -> Curves:
    """The validation losses of all pairs during training, for the baseline's tokenizer. Reading takes a while."""
    steps: dict[str, list[int]] = {}
    losses: dict[str, Array] = {}
    seeds: dict[str, list[int]] = {}
    variants = loaded.plan.variants
    metric = loaded.plan.experiment.metric
    name_of_curve = VAL_LOSS if metric in LOSSES else metric
    for name in loaded.plan.record.variants:
        if variants[name].tokenizer != variants[BASELINE].tokenizer:
            continue  # losses per token cannot be compared
        results = (result for result in loaded.results.values() if result.run.name == name and not result.has_failed)
        curves = {result.run.seed: result.curves().get(name_of_curve) for result in results}
        by_seed = {seed: curve for seed, curve in sorted(curves.items()) if curve}
        lengths = [tuple(step for step, _ in curve) for curve in by_seed.values()]
        common = max(set(lengths), key=lengths.count, default=())  # a resumed run may have validated once more
        complete = {seed: dict(curve) for seed, curve in by_seed.items() if {*common} <= {step for step, _ in curve}}
        if common and complete:
            steps[name] = list(common)
            seeds[name] = list(complete)
            losses[name] = np.array([[curve[step] for step in common] for curve in complete.values()])
    return Curves(steps, losses, seeds)
