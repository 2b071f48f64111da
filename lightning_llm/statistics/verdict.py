"""The verdict rule: what the runs of a baseline and of its variants say. Everything that states a verdict asks here.

``m`` variants share a level ``alpha``. Each has one interval of its difference at level ``1 - alpha / m`` (Bonferroni),
valid at all looks. So the intervals of an experiment are simultaneous: with a probability of at least ``1 - alpha``,
all of them contain the true differences. Two answers are read off an interval (``design.py``): the *direction*, and the
*size* against ``delta``, the smallest difference that matters. Every answer is right if the interval is, so all of them
together are wrong with a probability of at most ``alpha``. A variant's answers depend on its own runs and on the number
of variants, not on what the others found.

A run that fails to train is an outcome, not a missing value: it diverged, or is no better than chance. A variant with
such a run has neither difference nor interval, and is never ``better`` or ``equivalent``. It is ``worse`` if more of
its runs fail than chance explains, by an exact test on the counts of all runs. A baseline's run that fails takes its
pair out of the differences, and counts in the same test, which may say ``better`` if the interval does not say
``worse``. The counts have a level ``alpha`` of their own, and each look spends the same share of it as of the
interval's.

Pairs that all differ by the same amount have no interval; ``no_spread.py`` says what they show.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_llm.statistics import estimates
from lightning_llm.statistics.design import (
    BETTER,
    FAILED_TO_TRAIN,
    FEWEST,
    LARGER,
    NOT_SHOWN,
    WORSE,
    Answer,
    Design,
    checked_looks,
)
from lightning_llm.statistics.estimates import Estimate
from lightning_llm.statistics.looks import OneLook, PlannedLook, Rule
from lightning_llm.statistics.no_spread import NoSpread, no_spread
from lightning_llm.statistics.robust import Robust, robust
from lightning_llm.statistics.windows import WindowError

SMALL_WINDOW_ERROR = 0.25  # of the standard deviation of a pair: with 16 pairs, it would widen an interval by 41%


@dataclasses.dataclass(frozen=True)
class Sample:
    """Values of one metric in the runs of a baseline and of a variant. NaN, infinite or ``None``: the run failed.

    Attributes:
        baseline: One value per run.
        variant: Likewise; with pairs as many, in the order of the same seeds.
        is_paired: Whether they are pairs.
        more_baseline: Further runs like the baseline's, such as the null variant's, which count where runs fail.
        has_seeds: Whether the seed is meant to change the metric. It does not change peak memory, for example: there,
            runs without any spread are no sign of a mistake.
    """

    baseline: Sequence[float | None]
    variant: Sequence[float | None]
    is_paired: bool = True
    more_baseline: Sequence[float | None] = ()
    has_seeds: bool = True


@dataclasses.dataclass(frozen=True)
class Noise:
    """How much the pairs vary, with intervals of 95%, since a few pairs say little about it.

    Attributes:
        sd_interval: Of the standard deviation of the difference.
        unpaired_sd: Standard deviation of the difference of two independent runs, ``√(s₁² + s₂²)``.
        correlation_interval: Of the correlation of the pairs; ``None`` below four pairs.
        seeds_saved: Seeds on each side that pairing saved, negative if it cost some; ``None`` below eight pairs.
        seeds_saved_interval: Of that.
    """

    sd_interval: tuple[float, float]
    unpaired_sd: float
    correlation_interval: tuple[float, float] | None
    seeds_saved: int | None
    seeds_saved_interval: tuple[int, int] | None

    @classmethod
    def of(cls, baseline: Sequence[float], variant: Sequence[float], sd: float, correlation: float | None) -> "Noise":
        """Noise, from the losses of at least two pairs."""
        saved = estimates.seeds_saved(baseline, variant)
        pairs = len(baseline)
        seeds, of_seeds = (None, None) if saved is None else (saved[0], saved[1:])
        of_correlation = None if correlation is None else estimates.correlation_interval(correlation, pairs)
        unpaired_sd = estimates.unpaired(baseline, variant).sd
        return cls(estimates.sd_interval(sd, pairs), unpaired_sd, of_correlation, seeds, of_seeds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on the runs of a variant, compared with those of the baseline.

    Attributes:
        verdict: ``better``, ``worse``, ``equivalent`` or ``undecided``: both answers in one word.
        direction: ``better``, ``worse`` or ``not shown``.
        against_delta: ``smaller`` or ``larger`` than delta, or ``not shown``; ``None`` without a delta, or if counts
            decide.
        sentence: The verdict in words, such as ``worse, by less than 0.005``.
        has_ended: Whether no more pairs are wanted.
        pairs: Number of pairs, with those of runs that failed to train; 0 if the runs are not paired.
        difference: Mean of variant minus mean of baseline; ``None`` if a run of the variant failed to train.
        interval: Of the difference, simultaneous for all variants and looks. ``None``: there is none, such as for
            pairs that all differ by the same amount.
        level: Probability with which this interval holds at all looks; ``None``: no look yet.
        critical: Half its width, in standard errors.
        p: Of the t test at this number of runs, by itself.
        p_adjusted: The smallest alpha at which the interval excludes 0: adjusted for looks and variants.
        sd: Standard deviation of the difference of one run from one other.
        correlation: Of the pairs; ``None`` for fewer than three.
        noise: How far both may be off; ``None`` without pairs, or if their differences do not vary.
        robust: Median, sign-flip test, skewness and outliers; ``None`` without pairs.
        diverged: Runs of the variant that failed to train.
        baseline_diverged: Runs of the baseline that failed to train.
        p_diverged: Of the test on these counts; ``None`` if all runs trained.
        e_value: Evidence for an improvement, of a batch of ideas that is judged by it; else ``None``.
        rule: What gives the interval: ``one look``, or which look of the plan, such as ``look 2``.
        note: What a reader must know, in a few words.
        warnings: Why the direction is not to be trusted yet.
    """

    verdict: str
    direction: str
    against_delta: str | None = None
    sentence: str
    has_ended: bool
    pairs: int
    difference: float | None = None
    interval: tuple[float, float] | None = None
    level: float | None
    critical: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    sd: float | None = None
    correlation: float | None = None
    noise: Noise | None = None
    robust: Robust | None = None
    diverged: int
    baseline_diverged: int
    p_diverged: float | None = None
    e_value: float | None = None
    rule: str | None = None
    note: str
    warnings: list[str]


def verdicts(
    samples: Mapping[str, Sample],
    *,
    delta: float | None = None,
    alpha: float = 0.05,
    looks: Sequence[int] = (),
    half_width: float | None = None,
    variants: int | None = None,
) -> dict[str, Verdict]:
    """The verdict for each variant.

    Args:
        samples: By variant: all that are compared, since they share ``alpha``.
        delta: The smallest difference that matters; ``None``: no verdict is ``equivalent``.
        alpha: Probability of a false answer, over all variants, looks and added pairs.
        looks: The planned numbers of pairs. None: as many as there are, fixed before.
        half_width: Half the width of the interval at which a comparison ends; ``None``: it ends with a verdict.
        variants: How many share ``alpha``, if there are more than these.

    Raises:
        ValueError: An argument is out of range, a pair is incomplete, or a number of pairs is no look.
    """
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be above 0 and below 0.5, got {alpha}")
    for name, value in {"delta": delta, "half_width": half_width}.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, got {value}")
    for name, sample in samples.items():
        if sample.is_paired and len(sample.baseline) != len(sample.variant):
            values = f"{len(sample.variant)} values and its baseline {len(sample.baseline)}"
            raise ValueError(f"{name} has {values}: every pair needs both")
    design = Design(alpha / max(1, variants or len(samples)), checked_looks(looks), delta, half_width)
    return {name: _Case(sample, design, alpha).verdict() for name, sample in samples.items()}


def with_window_error(found: Verdict, error: WindowError | None, delta: float | None) -> Verdict:
    """A verdict that claims to exceed ``delta`` only if it also would on other validation text of the same kind.

    The error over windows is independent of that over seeds, so the interval widens by the root of both squares. A
    direction, and an interval, remain those of the validation text that was used.

    Args:
        found: A verdict.
        error: Of its difference over the validation windows; one below ``SMALL_WINDOW_ERROR`` changes nothing.
        delta: The smallest difference that matters.
    """
    claims_more = found.against_delta == LARGER and found.critical is not None and bool(found.sd)
    if error is None or delta is None or not claims_more or error.pair <= SMALL_WINDOW_ERROR * (found.sd or 0):
        return found
    assert found.critical is not None
    assert found.sd is not None
    assert found.difference is not None
    half = found.critical * math.sqrt(found.sd**2 / (found.pairs - found.baseline_diverged) + error.mean**2)
    if abs(found.difference) - half > delta:
        return found
    sentence = Answer(found.direction, NOT_SHOWN).sentence(delta)
    note = "; ".join(filter(None, [found.note, f"by more than {delta:g} on these validation windows alone"]))
    return dataclasses.replace(found, against_delta=NOT_SHOWN, sentence=sentence, note=note)


class _Case:
    """One variant.

    Args:
        sample: Its runs and the baseline's.
        design: Of the comparison.
        alpha: Of all variants together.
    """

    def __init__(self, sample: Sample, design: Design, alpha: float) -> None:
        self.sample = sample
        self.design = design
        self.alpha = alpha
        self.counts = _Counts(sample)
        sides = [np.array(side, dtype=np.float64) for side in (sample.baseline, sample.variant)]
        is_there = np.isfinite(sides[0])
        self.sides = [sides[0][is_there], sides[1][is_there] if sample.is_paired else sides[1]]
        self.runs = min(map(len, self.sides))  # on each side; of pairs, those that the difference is of
        self.difference, self.estimate = self._estimate()
        self.no_spread: NoSpread | None = None
        self.rule: Rule | None = None
        self.interval: tuple[float, float] | None = None
        self.robust: Robust | None = None
        if self.estimate is not None:
            if sample.has_seeds:
                self.no_spread = no_spread(*self.sides, is_paired=sample.is_paired)  # type: ignore[arg-type]
            if self.no_spread is None:
                self.rule = self._rule(self.estimate)
                self.interval = self.estimate.interval(self.rule.critical(design.alpha))
            self.robust = robust(self.sides[1] - self.sides[0]) if sample.is_paired else None

    def verdict(self) -> Verdict:
        """Verdict of the runs: by the counts of those that failed to train if they decide, else by the interval."""
        answer, has_ended = self._by_interval()
        sentence = answer.sentence(self.design.delta)
        note = self._note(answer)
        warnings = self._warnings(answer)
        if self._is_by_counts(answer):
            answer = dataclasses.replace(answer, direction=self.counts.direction, size=None)
            has_ended = True
            sentence = self.counts.sentence
            note = ""
            warnings = []
        return Verdict(
            verdict=answer.word,
            direction=answer.direction,
            against_delta=answer.size,
            sentence=sentence,
            has_ended=has_ended,
            pairs=len(self.sample.variant) if self.sample.is_paired else 0,
            difference=self.difference,
            interval=self.interval,
            level=1 - self.design.alpha,
            **self._t_test(),
            **self._pairs(),
            diverged=self.counts.lost,
            baseline_diverged=_failed(self.sample.baseline),
            p_diverged=self.counts.p if self.counts.lost or self.counts.base_lost else None,
            note=note,
            warnings=warnings,
        )

    def _by_interval(self) -> tuple[Answer, bool]:
        """Answer of the interval, and whether the comparison ends with it."""
        if self.no_spread is not None:
            return self.no_spread.answer(self.design, self.runs), self.runs >= FEWEST
        if self.interval is None:
            return Answer(NOT_SHOWN, None if self.design.delta is None else NOT_SHOWN), False
        return self.design.answer(*self.interval, self.runs), self.design.ends(*self.interval, self.runs)

    def _is_by_counts(self, answer: Answer) -> bool:
        """Whether the counts of runs that failed decide; ``better`` does not if the interval says ``worse``."""
        contradicts = self.counts.direction == BETTER and answer.direction == WORSE
        is_shown = self.counts.p <= self._level_of_counts()
        return is_shown and self.counts.direction != NOT_SHOWN and not contradicts

    def _t_test(self) -> dict[str, Any]:
        """The numbers of the t test; none without an estimate, and only their ``sd`` if no difference varies."""
        if self.estimate is None:
            return {}
        if self.rule is None:
            return {"sd": self.estimate.sd}
        p_of_looks = float(self.rule.p(self.estimate.t()))
        return {
            "critical": None if self.interval is None else self.rule.critical(self.design.alpha),
            "p": self.estimate.p,
            "p_adjusted": min(1.0, p_of_looks * self.alpha / self.design.alpha),
            "sd": self.estimate.sd,
            "rule": self.rule.name,
        }

    def _pairs(self) -> dict[str, Any]:
        """Statistics of the single pairs; empty without an estimate from pairs."""
        if self.estimate is None or self.robust is None:
            return {}
        baseline, variant = (side.tolist() for side in self.sides)
        correlation = estimates.correlation(baseline, variant)
        noise = Noise.of(baseline, variant, self.estimate.sd, correlation) if self.no_spread is None else None
        return {"correlation": correlation, "noise": noise, "robust": self.robust}

    def _estimate(self) -> tuple[float | None, Estimate | None]:
        """Mean difference and estimate, if all runs of the variant trained and the values can be calculated with."""
        if self.counts.lost or not self.runs:
            return None, None
        with np.errstate(all="ignore"):
            difference = float(self.sides[1].mean() - self.sides[0].mean())
            if self.runs == 1:
                return (difference if math.isfinite(difference) else None), None
            estimate = (estimates.paired if self.sample.is_paired else estimates.unpaired)(*self.sides)  # type: ignore[arg-type]
        return (estimate.difference, estimate) if math.isfinite(estimate.error) else (None, None)

    def _rule(self, estimate: Estimate) -> Rule:
        if not self.sample.is_paired:
            return OneLook(estimate.freedom)
        return self.design.rule(self.runs, left_out=len(self.sample.variant) - self.runs)

    def _level_of_counts(self) -> float:
        runs = min(len(self.sample.baseline), len(self.sample.variant))
        if runs < FEWEST:
            return 0.0
        look = self.design.rule(runs)
        return self.design.alpha * (look.share if isinstance(look, PlannedLook) else 1.0)

    def _note(self, answer: Answer) -> str:
        sides = {"the variant": self.sample.variant, "the baseline": self.sample.baseline}
        lost = {side: _failed(values) for side, values in sides.items()}
        notes = [f"{lost[side]} of {len(sides[side])} runs of {side} {FAILED_TO_TRAIN}" for side in sides if lost[side]]
        unit, units = ("pair", "pairs") if self.sample.is_paired else ("run on one side", "runs on each side")
        if self.estimate is None and not notes:
            count = {0: "no", 1: "one"}.get(self.runs)
            notes.append("values too large for an interval" if count is None else f"{count} {unit}: no interval")
        if self.no_spread is not None:
            is_enough = self.runs >= FEWEST
            notes.append(self.no_spread.note if is_enough else "the differences do not vary: no interval")
        if self.estimate is not None and self.runs < FEWEST:
            notes.append(f"a verdict needs at least {FEWEST} {units}")
        is_early = bool(self.design.looks) and len(self.sample.variant) in self.design.looks[:-1]
        has_stopped = answer.word in (BETTER, WORSE) and self.design.half_width is None
        if self.sample.is_paired and is_early and has_stopped and self.rule is not None:
            where = f"it stopped at {self.rule.name} of {len(self.design.looks)}"
            notes.append(f"{where}, so the true difference is probably smaller")
        return "; ".join(notes)

    def _warnings(self, answer: Answer) -> list[str]:
        if self.robust is None or self.difference is None:
            return []
        doubts = [] if answer.direction == NOT_SHOWN else self.robust.doubts(self.difference, self.design.alpha)
        if count := len(self.robust.outliers):
            pairs, them = ("1 pair is an outlier", "it") if count == 1 else (f"{count} pairs are outliers", "them")
            doubts.append(f"{pairs}: without {them}, the difference is {self.robust.without_outliers:+.4f}")
        return doubts


class _Counts:
    """How many runs of each side failed to train; the null variant's runs count as the baseline's."""

    def __init__(self, sample: Sample) -> None:
        base = [*sample.baseline, *sample.more_baseline]
        self.lost = _failed(sample.variant)
        self.runs = len(sample.variant)
        self.base_lost = _failed(base)
        self.base_runs = len(base)
        self.base = "the baseline and the null variant" if sample.more_baseline else "the baseline"

    @property
    def p(self) -> float:
        return estimates.p_of_failures(self.lost, self.runs, self.base_lost, self.base_runs)

    @property
    def direction(self) -> str:
        """A variant with a run that failed to train is never better."""
        if self.lost * self.base_runs > self.base_lost * self.runs:
            return WORSE
        return NOT_SHOWN if self.lost else BETTER

    @property
    def sentence(self) -> str:
        base = f"{self.base_lost} of {self.base_runs} of {self.base}"
        return f"{self.direction}: {self.lost} of {self.runs} runs {FAILED_TO_TRAIN}, and {base}"


def _failed(side: Sequence[float | None]) -> int:
    return sum(value is None or not math.isfinite(value) for value in side)
