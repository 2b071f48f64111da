"""Chance in the log of a keep-if-better loop: how many keeps, and how large a gain, it makes by itself. No torch.

Such a loop runs one change after another, each once, and keeps a change if its value is below the best one so far. The
bar is a single run that was lucky, and is never measured again. Without a repeated run, nothing about a single step can
be tested; what chance does over the whole log can be calculated.

With ``n`` useless tries of any continuous noise, the try at place ``t`` is the lowest of ``t + 1`` runs with
probability ``1 / (t + 1)``, independently of the others (records: Rényi 1962). Hence the number of keeps; and the
lowest run is the smallest of ``n + 1``.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

ALPHA = 0.05
_REACH = 12.0  # standard deviations: a normal value beyond does not count
# Integrals over a normal value are sums over these points: the trapezoidal rule, exact but for rounding here.
_STEP = 1 / 64
_POINTS = np.arange(-_REACH, _REACH, _STEP)
_LOG_DENSITY = stats.norm.logpdf(_POINTS)


@dataclasses.dataclass(frozen=True)
class ChanceKeeps:
    """Keeps of ``n`` useless tries whose bar was never measured again.

    Attributes:
        mean: Expected number, ``H(n + 1) - 1``.
        most: The most in 95% of logs.
        p: Probability of at least as many as were kept.
    """

    mean: float
    most: int
    p: float


@dataclasses.dataclass(frozen=True)
class ChanceGain:
    """Apparent gain of ``n`` useless tries with normal noise, in standard deviations of one run.

    Attributes:
        mean: Expected value: that of the largest of ``n + 1`` normal values.
        low: Its 5% point: the first run less the lowest one.
        high: Its 95% point.
    """

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Noise:
    """Standard deviation of one run.

    Attributes:
        sd: The estimate.
        interval: With 95%; ``None``: the value was given.
        freedom: Degrees of freedom; ``None``: the value was given.
    """

    sd: float
    interval: tuple[float, float] | None = None
    freedom: int | None = None


def harmonic(n: int) -> float:
    """The harmonic number ``H(n)``."""
    return math.fsum(1 / place for place in range(1, n + 1))


def chance_keeps(tries: int, keeps: int) -> ChanceKeeps:
    """Keeps of chance alone: the sum of independent events with probabilities 1/2, 1/3, …, 1/(n + 1).

    Args:
        tries: Runs after the first one.
        keeps: How many of them were kept.

    Raises:
        ValueError: There is no try, or there are more keeps than tries.
    """
    if not 0 <= keeps <= tries or tries < 1:
        raise ValueError(f"keeps must be from 0 to the number of tries, at least 1, got {keeps} of {tries}")
    shares = np.array([1.0])  # of logs with 0, 1, … keeps
    for place in range(2, tries + 2):
        longer = np.zeros(len(shares) + 1)
        longer[:-1] += shares * (1 - 1 / place)
        longer[1:] += shares / place
        shares = longer
    most = int(np.searchsorted(np.cumsum(shares), 1 - ALPHA))
    return ChanceKeeps(harmonic(tries + 1) - 1, most, float(shares[keeps:].sum()))


def false_keeps_beside(true_gains: int, tries: int) -> float:
    """The bound on false keeps in a log with true gains: each sets a new bar of average luck.

    ``(K + 1) (H(n / (K + 1) + 1) - 1)``, where the true gains are spread evenly, which is the most; and no more than
    the ``n - K`` other tries.

    Args:
        true_gains: ``K``.
        tries: ``n``.
    """
    stretches = true_gains + 1
    # H(x + 1) for x that is no whole number, by the digamma function
    return min(stretches * float(np.euler_gamma + special.digamma(tries / stretches + 2) - 1), tries - true_gains)


def chance_gain(tries: int) -> ChanceGain:
    """The apparent gain of useless tries: the first run less the lowest of all.

    Args:
        tries: Runs after the first one.
    """
    log_density = math.log(tries + 1) + _LOG_DENSITY + tries * special.log_ndtr(_POINTS)  # of the largest
    mean = float((_POINTS * np.exp(log_density)).sum() * _STEP)
    return ChanceGain(mean, _gain_quantile(0.05, tries), _gain_quantile(0.95, tries))


def p_of_gain(gain: float, tries: int) -> float:
    """The probability that useless tries give at least this apparent gain, in standard deviations of one run.

    The first run is ``x``, and the lowest try is at most ``x - gain`` with probability ``1 - (1 - Φ(x - gain))ⁿ``.
    """
    if gain <= 0:
        return 1.0
    some_try = -np.expm1(tries * special.log_ndtr(gain - _POINTS))  # is that much lower than the first run
    return float((np.exp(_LOG_DENSITY) * some_try).sum() * _STEP)


def _gain_quantile(share: float, tries: int) -> float:
    """The gain that a share of logs stays below; 0 where the first run is the lowest so often."""
    if 1 / (tries + 1) >= share:
        return 0.0
    low, high = 0.0, 2 * _REACH
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if p_of_gain(middle, tries) <= 1 - share else (middle, high)
    return high


def p_of_step(step: float, sd: float) -> float:
    """A bound on the p of one step: its size against the difference of two runs.

    A bar that is itself lucky makes the true p smaller, so the bound is safe.

    Args:
        step: Best value before less the new one, above 0 if it is better.
        sd: Of one run.
    """
    return float(stats.norm.sf(step / (math.sqrt(2) * sd)))


def shown_from(tries: int, sd: float, alpha: float = ALPHA) -> float:
    """The smallest step that is shown, over all tries together (Bonferroni).

    Args:
        tries: Runs after the first one.
        sd: Of one run.
        alpha: Probability that any useless step is shown.
    """
    return math.sqrt(2) * sd * float(stats.norm.isf(alpha / tries))


def noise_of(groups: Sequence[Sequence[float]]) -> Noise | None:
    """The standard deviation of one run, from runs of the same code, pooled; ``None``: there are none that differ.

    Args:
        groups: Values of each code.
    """
    repeated = [np.array(group, dtype=np.float64) for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in repeated)
    if not freedom or squares <= 0:
        return None
    sd = math.sqrt(squares / freedom)
    low, high = stats.chi2.isf([ALPHA / 2, 1 - ALPHA / 2], freedom)
    return Noise(sd, (math.sqrt(squares / low), math.sqrt(squares / high)), freedom)
