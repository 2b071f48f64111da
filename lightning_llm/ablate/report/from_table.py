"""The report of a table of losses that somebody has already: the same rows and sentences, without runs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lightning_llm.ablate.names import NEGATED
from lightning_llm.ablate.report.record import VERSION, Mean, Pair, Variant, row_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.table import LOSS, BySeed, Losses, Seed, listed, losses_of, number_of, table_of
from lightning_llm.io.untrusted import shown
from lightning_llm.statistics import verdict as rule
from lightning_llm.statistics.design import FEWEST
from lightning_llm.statistics.verdict import Sample, Verdict

# The sign-flip test takes a millisecond per pair from 21 pairs on.
MOST_RUNS = 10_000
FIXED = "The intervals hold if the number of seeds was fixed before any loss was seen."
UNPAIRED = "Planned as unpaired (Welch's t test). Choosing it after seeing the losses makes false findings more likely."
SOURCE = "losses"  # in messages about an argument


class Frame(Protocol):
    """A data frame, such as one of pandas: a table with named columns."""

    @property
    def columns(self) -> Any:
        """Their names."""

    def to_dict(self, orient: Any) -> Any:
        """Its rows, for ``records``."""


def verdict(
    losses: Mapping[str, Any] | Frame,
    *,
    baseline: str = "baseline",
    metric: str | None = None,
    delta: float | None = None,
    alpha: float = 0.05,
    unpaired: bool = False,
) -> Report:
    """Compare variants with a baseline by the losses of their runs: is each one better, and how certain is that?

    Runs with the same seed are pairs, and the t test is paired, whatever their correlation. The variants share
    ``alpha`` (Bonferroni), so that all intervals hold together. The number of seeds must have been fixed before any
    loss was seen; ``lightning-llm ablate run`` can stop earlier, since it plans its looks.

    Args:
        losses: Losses of each variant, of which lower is better. A sequence has one number per seed, in the same order
            for all variants; a mapping has them by seed. Or a data frame of pandas with the columns ``variant``,
            ``seed``, and the metric, or with one column per variant. NaN, infinite, or ``None``: the run failed.
        baseline: The name of the baseline.
        metric: The column of a data frame; otherwise, what the losses are called. With a minus before it, such as
            ``-accuracy``, higher is better, and the numbers are negated.
        delta: The smallest difference that matters; ``None``: no variant is ``equivalent``.
        alpha: Probability that an interval misses its true difference, over all variants.
        unpaired: Compare without pairs (Welch's t test). Set it only if that was planned, since choosing afterwards
            makes false findings more frequent.

    Raises:
        ValueError: A run has no counterpart, a value is no number, an option is out of range, or a side has one run.
    """
    if isinstance(losses, Mapping):
        given = _of_mapping(losses, metric)
    elif hasattr(losses, "columns") and hasattr(losses, "to_dict"):
        given = _of_frame(losses, metric)
    else:
        raise ValueError(f"losses must be numbers by variant or a data frame, got {shown(losses)}")
    return verdict_of(given, baseline=baseline, delta=delta, alpha=alpha, unpaired=unpaired)


def verdict_of(
    losses: Losses,
    *,
    baseline: str = "baseline",
    delta: float | None = None,
    alpha: float = 0.05,
    unpaired: bool = False,
) -> Report:
    """Compare the variants of a table of losses. Arguments and errors as of :func:`verdict`."""
    seeds, sides = _sides(losses, baseline, unpaired)
    base = sides.pop(baseline)
    samples = {name: Sample(base, side, is_paired=not unpaired) for name, side in sides.items()}
    found = rule.verdicts(samples, delta=delta, alpha=alpha)
    metric = losses.metric.removeprefix(NEGATED)
    higher_is_better = metric != losses.metric
    rows = []
    for name, each in found.items():
        pairs = [] if unpaired else [Pair(*pair) for pair in zip(seeds, _known(base), _known(sides[name]), strict=True)]
        rows.append(
            row_of(
                each,
                by_seed=pairs,
                higher_is_better=higher_is_better,
                variant=name,
                baseline=baseline,
                metric=metric,
                unit=metric,
                baseline_mean=_mean(base),
                mean=_mean(sides[name]),
                runs_of_sides=(len(base), len(sides[name])) if unpaired else None,
            )
        )
    title = f"{metric} of {listed(found)}, compared with {baseline}"
    sign = -1 if higher_is_better else 1
    return Report(
        version=VERSION,
        kind="table",
        name=title if losses.source == SOURCE else f"{losses.source}: {title}",
        metric=metric,
        unit=metric,
        higher_is_better=higher_is_better,
        baseline=baseline,
        delta=delta,
        alpha=alpha,
        level=1 - alpha / len(found),
        rows=rows,
        variants={name: _variant(side, metric, sign) for name, side in {baseline: base, **sides}.items()},
        notes=[*_constant_lines({baseline: base, **sides}, found), UNPAIRED if unpaired else FIXED],
    )


def _known(side: Sequence[float]) -> list[float | None]:
    """Values with ``None`` where a run failed to train."""
    return [value if math.isfinite(value) else None for value in side]


def _mean(side: Sequence[float]) -> float | None:
    known = [value for value in side if math.isfinite(value)]
    return float(np.mean(known)) if known else None


def _variant(side: Sequence[float], metric: str, sign: int) -> Variant:
    known = [value for value in side if math.isfinite(value)]
    mean = _mean(side)
    sd = float(np.std(known, ddof=1)) if len(known) > 1 else None
    return Variant(runs=len(known), seeds=len(known), means={} if mean is None else {metric: Mean(sign * mean, sd)})


def _of_mapping(losses: Mapping[str, Any], metric: str | None) -> Losses:
    """Losses by variant, as a sequence or by seed."""
    by_variant: dict[str, BySeed] = {}
    has_seeds = any(isinstance(values, Mapping) for values in losses.values())
    for name, values in losses.items():
        if has_seeds and not isinstance(values, Mapping):
            raise ValueError(
                f"{SOURCE}: {shown(name)} has no seeds, and another variant has: give seeds for all or none"
            )
        if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
            raise ValueError(f"{SOURCE}: {shown(name)} must have one number per seed, got {shown(values)}")
        by_seed: BySeed = {}
        for seed, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            try:
                by_seed[seed if isinstance(seed, int) else str(seed)] = number_of(value)
            except ValueError as error:
                raise ValueError(f"{SOURCE}: {shown(name)}, seed {shown(seed)}: {error}") from None
        by_variant[str(name)] = by_seed
    return losses_of(by_variant, metric or LOSS, SOURCE, has_seeds=has_seeds)


def _of_frame(frame: Any, metric: str | None) -> Losses:
    """The losses in a data frame; a named index is a column too."""
    names = getattr(getattr(frame, "index", None), "names", ())
    if any(name is not None for name in names):
        frame = frame.reset_index()
    records = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
    places = [f"row {number}" for number in range(len(records))]
    return table_of(records, SOURCE, places, null=math.nan).losses(metric)


def _counts(values: Sequence[float]) -> bool:
    """Whether numbers are whole and each is one more than the one before, as those of runs are."""
    steps = {b - a for a, b in itertools.pairwise(values)}
    return len(values) > 2 and steps == {1.0} and float(values[0]).is_integer()


def _sides(losses: Losses, baseline: str, unpaired: bool) -> tuple[list[Seed], dict[str, list[float]]]:
    """The seeds of the pairs, none without pairs, and the losses of each variant in their order; checked."""
    source, by_variant = losses.source, losses.by_variant
    if baseline not in by_variant:
        names = listed(by_variant) or "its variants, and it has none"
        raise ValueError(f"baseline (--baseline) must be one of {names}: {source} has no variant {shown(baseline)}")
    if len(by_variant) == 1:
        raise ValueError(f"{source} has only {shown(baseline)}: it needs the losses of a variant too")
    for name, runs in by_variant.items():
        if not runs:
            raise ValueError(f"{source} has no run of {shown(name)}")
        if len(runs) > MOST_RUNS:
            raise ValueError(f"{source} has {len(runs)} runs of {shown(name)}, expected at most {MOST_RUNS}")
    counters = [name for name, runs in by_variant.items() if name != baseline and _counts([*runs.values()])]
    if counters and not losses.has_seeds:
        counter = counters[0]
        first, *_, last = by_variant[counter].values()
        found = f"{shown(counter)} counts its rows, from {first:g} to {last:g}"
        raise ValueError(f"{source}: {found}, so these are no losses: call this column seed, or leave it out")
    seeds: list[Seed] = []
    if unpaired:
        sides = {name: list(runs.values()) for name, runs in by_variant.items()}
    else:
        for name, runs in by_variant.items():
            _check_pairs(losses, baseline, name, runs)
        seeds = sorted(by_variant[baseline], key=lambda seed: (isinstance(seed, str), seed))
        sides = {name: [runs[seed] for seed in seeds] for name, runs in by_variant.items()}
    single = next((name for name, side in sides.items() if len(side) == 1), None)
    if single is not None:
        found = "one seed per variant" if not unpaired else f"one run of {shown(single)}"
        advice = f"train each variant with {FEWEST} seeds or more; lightning-llm ablate power shows how many"
        raise ValueError(f"{source} has {found}, which does not tell how much runs differ by chance: {advice}")
    return seeds, sides


def _check_pairs(losses: Losses, baseline: str, name: str, runs: BySeed) -> None:
    """Check that a variant and the baseline have the same seeds."""
    seeds = losses.by_variant[baseline]
    if runs.keys() == seeds.keys():
        return
    advice = "write nan for a run that failed; unpaired (--unpaired) is for variants that were planned with other seeds"
    if not losses.has_seeds:
        counts = f"{len(runs)} run{'s' * (len(runs) != 1)} of {shown(name)} and {len(seeds)} of {shown(baseline)}"
        raise ValueError(f"{losses.source} has {counts}, and every pair needs both: {advice}")
    without, with_it = (name, baseline) if seeds.keys() - runs.keys() else (baseline, name)
    missing = [seed for seed in losses.by_variant[with_it] if seed not in losses.by_variant[without]]
    which = f"seed{'s' * (len(missing) > 1)} {listed(missing)}"
    raise ValueError(f"{losses.source} has no run of {shown(without)} with {which}, and {shown(with_it)} has: {advice}")


def _constant_lines(sides: Mapping[str, Sequence[float]], found: Mapping[str, Verdict]) -> list[str]:
    """Lines about sides whose runs are all alike, in comparisons that have an interval."""
    compared = {name for name, each in found.items() if each.interval is not None}
    constant = [name for name, side in sides.items() if np.ptp(side) == 0 and (name in compared or name not in found)]
    doubt = "have the same result. Does the seed reach the program? If not, the intervals lack this noise"
    return [f"All {len(sides[name])} runs of {name} {doubt}." for name in constant if compared]
