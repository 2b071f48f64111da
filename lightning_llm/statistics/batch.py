"""A batch of ideas that are written down together, before any of them is tried: which ones are adopted.

The evidence for an idea is the *e-value* of its pairs, by a one-sided t e-process: its expectation is at most 1 for a
useless idea, however often one looks (Wang and Ramdas 2023, arXiv 2310.03722). Its prior on an improvement is half
normal, with a width of one standard deviation of a pair's difference. Of m ideas, e-BH adopts the r with the largest
e-values, for the largest r whose e-values all reach m / (alpha r). The expected share of useless ideas among the
adopted ones is at most ``alpha``, whatever the ideas have in common, such as the baseline's runs (Wang and Ramdas 2022,
"False discovery rate control with e-values", JRSS B 84, theorem 2).

An idea is given up once its e-value is at most 1, or at the last look; one that reaches m / alpha is adopted whatever
the others do, so it needs no more pairs. The t e-process takes differences for normal: ``python -m benchmarks stream
--shapes batch`` shows what other shapes do to it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from lightning_llm.statistics.design import BETTER, NOT_SHOWN, UNDECIDED
from lightning_llm.statistics.estimates import Array
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts

LOOKS = (4, 6, 8, 10, 12, 16, 20, 24)  # pairs after which an idea may be given up
# Share of two useful ideas among twenty that are adopted, by their improvement in standard deviations of a pair
# (python -m benchmarks stream --shapes batch)
POWER = {0.5: 0.06, 1.0: 0.69, 1.5: 0.98}
_WIDEST = 8.0  # the scale is integrated up to this far above twice the pairs
_POINTS = 1600
ADOPTED, NOT_ADOPTED = "adopted", "not adopted"
FEWEST_PAIRS = 2  # that say anything


def e_value_of(differences: Sequence[float]) -> float:
    """The factor by which the differences of pairs, variant minus baseline, speak for an improvement.

    It is 1 for none, for one, or if all are 0, and 0 if one is infinite: its run failed to train.
    """
    values = np.asarray(differences, float)
    if not np.isfinite(values).all():
        return 0.0
    if len(values) < 2 or not values.any():
        return 1.0
    u = -values.sum() / math.sqrt(len(values) * (values**2).sum())
    return float(np.exp(log_e_values(np.array([u]), len(values))[0]))


def log_e_values(u: Array, pairs: int) -> Array:
    """The logarithms of e-values, by numerical integration.

    Given the effect δ, in standard deviations, the likelihood ratio of t is the mean of exp(τ δ √n u - n δ²/2) over the
    scale τ = √Σd² / σ, whose density is that of τ^(n-1) exp(-τ²/2). The mean over a half-normal δ is in closed form:
    2 / √(n + 1) · exp(b²/2) Φ(b) with b = √(n / (n + 1)) u τ.

    Args:
        u: The improvements' sum, divided by the root of ``pairs`` times their sum of squares: t / √(t² + pairs - 1).
        pairs: Their number n.
    """
    scale = np.linspace(0, _WIDEST + 2 * pairs, _POINTS + 1)[1:]
    weight = (pairs - 1) * np.log(scale) - scale**2 / 2
    weight -= special.logsumexp(weight)
    b = math.sqrt(pairs / (pairs + 1)) * np.multiply.outer(u, scale)
    inner = special.logsumexp(weight + b**2 / 2 + special.log_ndtr(b), axis=-1)
    return np.asarray(inner + math.log(2 / math.sqrt(pairs + 1)))


def threshold(rank: int, ideas: int, alpha: float) -> float:
    """The e-value that the idea of this rank needs, from 1, if it and all above it are adopted."""
    return ideas / (alpha * rank)


def is_decided(e_value: float, pairs: int, ideas: int, alpha: float) -> bool:
    """Whether an idea needs no more pairs at a look."""
    return e_value <= 1 or e_value >= threshold(1, ideas, alpha) or pairs >= LOOKS[-1]


def adopted(e_values: Mapping[str, float], alpha: float) -> set[str]:
    """The ideas of a batch that e-BH adopts."""
    ranked = sorted(e_values, key=lambda name: -e_values[name])
    reached = [rank for rank, name in enumerate(ranked, 1) if e_values[name] >= threshold(rank, len(ranked), alpha)]
    return set(ranked[: max(reached, default=0)])


def batch_verdicts(samples: Mapping[str, Sample], alpha: float) -> dict[str, Verdict]:
    """The verdict for each idea of a batch: ``better`` if it is adopted, else ``undecided``.

    The interval is that of the idea by itself, and holds at all ``LOOKS``; it decides nothing.

    Args:
        samples: Pairs of all ideas, as many as each has, which is one of ``LOOKS``.
        alpha: Expected share of useless ideas among the adopted ones.
    """
    differences = {name: _differences(sample) for name, sample in samples.items()}
    e_values = {name: e_value_of(own) for name, own in differences.items()}
    decided = {}
    for name, own in differences.items():
        looked = len(samples[name].variant)
        lacks_pairs = len(own) < FEWEST_PAIRS and looked < LOOKS[-1]  # runs of the baseline failed
        decided[name] = not lacks_pairs and is_decided(e_values[name], looked, len(samples), alpha)
    is_final = all(decided.values())
    taken = adopted(e_values, alpha) if is_final else set()
    found = {}
    for name, verdict in verdicts(samples, alpha=alpha, looks=LOOKS, variants=1).items():
        is_adopted = name in taken
        rank = min(len(samples), max(1, len(taken) + (not is_adopted)))  # of an idea that would have been adopted
        needed = threshold(rank, len(samples), alpha)
        if not is_final:
            sentence = f"{_progress(e_values[name], needed, decided[name])}, at most {needed:.3g} needed"
        else:
            each = f" by each of {rank} ideas" if rank > 1 else ""
            word = ADOPTED if is_adopted else NOT_ADOPTED
            sentence = f"{word}: e-value {e_values[name]:.3g}, {needed:.3g} needed{each}"
        has_failed_runs = bool(verdict.diverged or verdict.baseline_diverged)
        found[name] = dataclasses.replace(
            verdict,
            verdict=BETTER if is_adopted else UNDECIDED,
            direction=BETTER if is_adopted else NOT_SHOWN,
            sentence=sentence,
            has_ended=decided[name],
            p_adjusted=None,
            e_value=e_values[name],
            note=verdict.note if is_adopted or has_failed_runs else "",
            warnings=verdict.warnings if is_adopted else [],
        )
    return found


def _progress(e_value: float, needed: float, is_decided: bool) -> str:
    """The state of an idea while others still get pairs."""
    if not is_decided:
        word = "not decided yet"
    elif e_value <= 1:
        word = "given up"
    else:
        word = "enough evidence" if e_value >= needed else "out of pairs"
    return f"{word}: e-value {e_value:.3g}"


def _differences(sample: Sample) -> list[float]:
    """Differences of the pairs whose baseline trained; infinite where the variant's run failed to train."""
    pairs = zip(sample.baseline, sample.variant, strict=True)
    return [
        math.inf if own is None or not math.isfinite(own) else own - base
        for base, own in pairs
        if base is not None and math.isfinite(base)
    ]
