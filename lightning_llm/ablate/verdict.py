"""The verdict rule: what the runs of a baseline and of its variants say. Everything that states a verdict asks here.

With ``m`` variants, a level ``alpha`` over all of them, and the smallest difference that matters, ``delta``:

1. A variant is ``better`` or ``worse`` if its adjusted p is at most ``alpha``. That is the p of its rule (see
   ``ablate.sequential``: one look, a planned look, or the e-process), adjusted for the number of variants by Holm.
2. Otherwise it is ``equivalent`` if the interval of level ``1 - 2 alpha / m`` by the same rule is inside ``±delta``.
   At one look, these are two one-sided t tests (Schuirmann 1987). At planned looks, the rule spends ``2 alpha / m`` as
   it would ``alpha / m``. So for a true difference of ``delta`` or more, the probability of ``equivalent`` at any of
   the looks is at most ``alpha / m``: half of the paths that leave the interval leave it on this side.
3. Otherwise it is ``undecided``.

The interval that is reported has level ``1 - alpha / m`` (Bonferroni), so all intervals hold together, at all looks. An
interval without 0 always means ``better`` or ``worse``. With several variants, Holm may find a difference whose
interval still has 0 in it.

A run that diverged is an outcome, not a missing value: its variant has neither difference nor interval, and is never
``better`` or ``equivalent``.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_llm.ablate import statistics
from lightning_llm.ablate.sequential import AnyLook, OneLook, Rule, rule_at
from lightning_llm.ablate.statistics import POWER, Estimate

BETTER, WORSE, EQUIVALENT, UNDECIDED = "better", "worse", "equivalent", "undecided"


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one metric was in the runs of a baseline and of a variant. NaN, infinite or ``None``: the run diverged.

    Attributes:
        baseline: One value per run.
        variant: Likewise; with pairs as many, in the order of the same seeds.
        is_paired: Whether they are pairs.
    """

    baseline: Sequence[float | None]
    variant: Sequence[float | None]
    is_paired: bool = True


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the runs of a variant say, compared with those of the baseline.

    Attributes:
        verdict: ``better``, ``worse``, ``equivalent`` or ``undecided``.
        pairs: Number of pairs, with those of diverged runs; 0 if the runs are not paired.
        difference: Mean of variant minus mean of baseline; ``None`` if a run diverged.
        interval: Of the difference, for all variants and looks together; ``None`` if there is none.
        p: Of the t test at this number of runs, by itself.
        p_adjusted: Adjusted for the looks and the number of variants: decides between the verdicts.
        sd: Standard deviation of the difference of one run from one other.
        correlation: Of the pairs; ``None`` for fewer than three.
        seeds_saved: Seeds on each side that pairing saved, negative if it cost some.
        diverged: Runs of the variant that diverged.
        baseline_diverged: Runs of the baseline that diverged.
        further_pairs: If undecided: about how many more pairs decide with a probability of 80 %, if the true difference
            is the one found; ``None`` if that is unknown or takes more than a thousand pairs.
        rule: What decides: ``one look``, ``look 2 of 5``, ``e-process``.
        note: What a reader must know, in a few words.
    """

    verdict: str
    pairs: int
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    p_adjusted: float | None
    sd: float | None
    correlation: float | None
    seeds_saved: int | None
    diverged: int
    baseline_diverged: int
    further_pairs: int | None
    rule: str | None
    note: str


def verdicts(
    samples: Mapping[str, Sample],
    *,
    delta: float | None = None,
    alpha: float = 0.05,
    looks: Sequence[int] = (),
    is_extended: bool = False,
) -> dict[str, Verdict]:
    """The verdict for each variant.

    Args:
        samples: By variant: all that are compared, since they share ``alpha``.
        delta: The smallest difference that matters; ``None``: no verdict is ``equivalent``.
        alpha: Probability of a false ``better`` or ``worse``, over all variants and looks.
        looks: The planned numbers of pairs. None: as many as there are, fixed before.
        is_extended: Whether pairs were added to those of the plan. By itself, the e-process is wrong with a probability
            of at most ``alpha``. After planned looks that found nothing, it is a second chance: looks at 4, 6, 8, 12
            and 16 pairs, and then at each number up to 64, reject 5.7 % of true nulls at an alpha of 5 %.

    Raises:
        ValueError: An argument is out of range, or a pair is incomplete.
    """
    _check(samples, delta, alpha, looks)
    cases = {name: _Case.of(sample, looks, is_extended) for name, sample in samples.items()}
    # a variant without a p counts in their number: leaving it out would help the others
    adjusted = statistics.holm([1.0 if case.p is None else case.p for case in cases.values()])
    share = alpha / max(1, len(cases))
    return {
        name: case.verdict(case.p if case.p is None else p, alpha, share, delta)
        for (name, case), p in zip(cases.items(), adjusted, strict=True)
    }


def _check(samples: Mapping[str, Sample], delta: float | None, alpha: float, looks: Sequence[int]) -> None:
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be above 0 and below 0.5, got {alpha}")
    if delta is not None and not 0 < delta < math.inf:
        raise ValueError(f"delta must be above 0, got {delta}")
    if looks and (looks[0] < 2 or sorted(set(looks)) != list(looks)):
        raise ValueError(f"looks must be increasing numbers of pairs from 2 on, got {list(looks)}")
    for name, sample in samples.items():
        if sample.is_paired and len(sample.baseline) != len(sample.variant):
            values = f"{len(sample.variant)} values and its baseline {len(sample.baseline)}"
            raise ValueError(f"{name} has {values}: every pair needs both")


@dataclasses.dataclass(frozen=True)
class _Case:
    """One variant, before the number of others counts."""

    sample: Sample
    looks: tuple[int, ...]
    is_extended: bool
    difference: float | None
    estimate: Estimate | None
    rule: Rule | None
    p: float | None  # by the rule

    @classmethod
    def of(cls, sample: Sample, looks: Sequence[int], is_extended: bool) -> "_Case":
        sides = [np.array(side, dtype=np.float64) for side in (sample.baseline, sample.variant)]
        difference, estimate, rule = None, None, None
        with np.errstate(all="ignore"):
            if all(side.size and np.isfinite(side).all() for side in sides):
                difference = float(sides[1].mean() - sides[0].mean())
            if difference is not None and min(map(len, sides)) > 1:
                estimate = (statistics.paired if sample.is_paired else statistics.unpaired)(*sides)  # type: ignore[arg-type]
                rule = rule_at(len(sides[0]), looks, is_extended=is_extended)
                rule = rule if sample.is_paired else OneLook(estimate.freedom)
        if difference is not None and not math.isfinite(difference if estimate is None else estimate.error):
            difference, estimate, rule = None, None, None  # values that are too large to calculate with
        p = None if estimate is None or rule is None else float(rule.p(estimate.t()))
        return cls(sample, tuple(looks), is_extended, difference, estimate, rule, p)

    def verdict(self, p_adjusted: float | None, alpha: float, share: float, delta: float | None) -> Verdict:
        sample, estimate, rule = self.sample, self.estimate, self.rule
        pairs = len(sample.variant) if sample.is_paired else 0
        word, interval, further = UNDECIDED, None, None
        if estimate is not None and rule is not None:
            assert p_adjusted is not None
            interval = estimate.interval(rule.critical(share))
            if p_adjusted <= alpha:
                word = BETTER if estimate.difference < 0 else WORSE
            elif delta is not None and _is_within(estimate, rule, delta, share):
                word = EQUIVALENT
            elif pairs:
                further = self._further(estimate, share, delta)
        is_whole = estimate is not None and bool(pairs)
        return Verdict(
            verdict=word,
            pairs=pairs,
            difference=self.difference if estimate is None else estimate.difference,
            interval=interval,
            p=None if estimate is None else estimate.p,
            p_adjusted=p_adjusted,
            sd=None if estimate is None else estimate.sd,
            correlation=statistics.correlation(sample.baseline, sample.variant) if is_whole else None,  # type: ignore[arg-type]
            seeds_saved=statistics.seeds_saved(sample.baseline, sample.variant) if is_whole else None,  # type: ignore[arg-type]
            diverged=_diverged(sample.variant),
            baseline_diverged=_diverged(sample.baseline),
            further_pairs=further,
            rule=None if rule is None else rule.name,
            note=self._note(interval),
        )

    def _note(self, interval: tuple[float, float] | None) -> str:
        sample, pairs = self.sample, len(self.sample.variant)
        sides = {"the variant": sample.variant, "the baseline": sample.baseline}
        lost = [f"{_diverged(side)} of {len(side)} runs of {who}" for who, side in sides.items() if _diverged(side)]
        if lost:
            return f"{' and '.join(lost)} diverged"
        if self.estimate is None:
            fewest = min(len(sample.baseline), pairs)
            many, of = "one" if fewest else "no", "pair" if sample.is_paired else "run on one side"
            return "values too large for an interval" if fewest > 1 else f"{many} {of}: no interval"
        if isinstance(self.rule, AnyLook):
            why = "pairs were added to the plan" if self.is_extended else f"{pairs} pairs are no planned look"
            return why + ("" if interval else ": too few for an interval")
        return ""

    def _further(self, estimate: Estimate, share: float, delta: float | None) -> int | None:
        if not estimate.sd:
            return None
        now, effect = len(self.sample.variant), abs(estimate.difference) / estimate.sd
        margin = None if delta is None else delta / estimate.sd
        # a comparison without a plan is one look of any size; a plan continues with its looks, then with any number
        has_plan = bool(self.looks) or self.is_extended

        def enough(pairs: int) -> bool:
            rule = rule_at(pairs, self.looks, is_extended=self.is_extended) if has_plan else OneLook(pairs - 1)
            if statistics.power(pairs, effect, rule.critical(share)) >= POWER:
                return True
            critical = rule.critical(2 * share)
            return margin is not None and statistics.equivalence_power(pairs, effect, margin, critical) >= POWER

        planned = [look for look in self.looks if look > now and not self.is_extended]
        if (look := next(filter(enough, planned), None)) is not None:
            return look - now
        found = statistics.fewest_pairs(enough, max([now, *planned]) + 1)
        return None if found is None else found - now


def _is_within(estimate: Estimate, rule: Rule, delta: float, share: float) -> bool:
    interval = estimate.interval(rule.critical(2 * share))
    return interval is not None and -delta < interval[0] and interval[1] < delta


def _diverged(side: Sequence[float | None]) -> int:
    return sum(each is None or not math.isfinite(each) for each in side)
