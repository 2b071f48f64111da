"""What the looks of ``ablate`` cost and say, by simulation: the parts of ``python -m benchmarks ablate`` without runs.

``looks`` compares planned looks, ways to spend alpha, and parts of alpha held back for added pairs. ``default-looks``
has the default ones for several shapes of noise. ``equivalence`` and ``pooled`` are two rules that ``ablate`` does not
use: two one-sided tests, and a variance pooled over variants. ``added-pairs`` continues with further looks, and
``tuned`` has two families of differences.

Differences are in standard deviations of a pair's difference. All candidates judge the same paths.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from benchmarks.harness import Request
from benchmarks.rows import Row
from lightning_llm.statistics.estimates import Array
from lightning_llm.statistics.looks import RESERVE, RHO, PlannedLook, further_looks, spending

PATHS, LONG_PATHS = 100_000, 200_000  # up to the last planned look; with added pairs
ALPHA, MOST = 0.05, 16
LOOKS = ((4, 6, 8, 12, 16), (6, 8, 12, 16), (8, 12, 16), (6, 10, 16), (8, 16))
RHOS, HELD = (1.0, 2.0, 3.0), (0.0, 0.2)  # of the spending; parts of alpha that are held back
VARIANTS = (1, 3, 5)
EFFECTS = (0.0, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
DELTAS = (0.6, 1.0, 2.0)
FEWEST = 200  # verdicts that make a mean or a median
UNDECIDED, BETTER, WORSE, EQUIVALENT = 0, -1, 1, 2
UNSTABLE_EFFECT = 0.5  # a typical run is 1 better, and the mean is worse by this
CORRELATIONS, TUNED_VARIANTS = (0.0, 0.8), (1, 2, 4)  # of a variant's two differences, tuned and untuned
RATIOS = (1.0, 2.0, 0.5)  # of the standard deviation of one variant to the others'
POOLED_EFFECT = 1.5
TESTED = 3  # variants, and the null variant, whose variance is pooled with theirs


class Candidate(NamedTuple):
    """Planned looks, the exponent of their spending, and the part of alpha that is held back for added pairs."""

    looks: tuple[int, ...]
    rho: float
    held: float

    @property
    def label(self) -> str:
        """Such as ``6, 8, 12, 16; rho 2; 20% held back``."""
        return f"{', '.join(map(str, self.looks))}; rho {self.rho:g}; {self.held:.0%} held back"

    def critical(self, share: float, further: Sequence[int] = ()) -> Array:
        """The critical value at each look, and at further ones, for a variant whose share of alpha is this."""
        looks, spent = (*self.looks, *further), spending(self.looks, self.rho, len(further), self.held)
        return np.array([PlannedLook(looks, number, spent).critical(share) for number in range(len(looks))])


CHOSEN = Candidate((8, 12, 16), RHO, RESERVE)
EXTENDED = (CHOSEN, *(CHOSEN._replace(looks=looks) for looks in ((4, 6, 8, 12, 16), (4, 6), (4,))))
UNTIL, MOST_ADDED = (36, 81, 200), 200  # pairs
ADDED_EFFECT = 0.5
NOISES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(0, 1, shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape) / math.sqrt(3),
    "exponential": lambda rng, shape: rng.exponential(1, shape) - 1,
    # one in ten is 5 standard deviations higher
    "spikes": lambda rng, n: (rng.normal(0, 1, n) + 5 * (rng.random(n) < 0.1) - 0.5) / math.sqrt(1 + 25 * 0.09),
    # one in ten is 15 higher, and the unit is the standard deviation of the others
    "unstable": lambda rng, shape: rng.normal(0, 1, shape) + 15 * (rng.random(shape) < 0.1) - 1.5,
}


def draws(noise: str, paths: int, pairs: int = MOST, seed: int = 0) -> Array:
    """Differences without a true one, shape (paths, pairs), with a standard deviation of 1."""
    return NOISES[noise](np.random.default_rng(seed), (paths, pairs))


class Paths(NamedTuple):
    """Means and standard errors at some numbers of pairs, each of shape (numbers, paths)."""

    means: Array
    errors: Array

    @classmethod
    def of(cls, differences: Array, at: Sequence[int]) -> "Paths":
        """Those of the first so many differences of each row."""
        number = np.array(at)
        totals, squares = (np.cumsum(each, 1)[:, number - 1].T for each in (differences, differences**2))
        means, number = totals / number[:, None], number[:, None]
        errors = np.sqrt((squares / number - means**2) / (number - 1))
        return cls(means, errors)


@functools.lru_cache(maxsize=10)
def paths_of(noise: str, at: tuple[int, ...], paths: int) -> Paths:
    """The paths of a shape of noise, the same for each candidate."""
    return Paths.of(draws(noise, paths), at)


class Stops(NamedTuple):
    """What each path said at the look that ended it, or at the last one."""

    word: Array
    look: Array  # from 0
    estimate: Array
    half: Array  # of the interval

    def has_right_direction(self, effect: float) -> Array:
        """Whether each path has the direction of the effect; without one: whether it has any, which is false."""
        return np.asarray(self.word == WORSE if effect else self.word != UNDECIDED)


def judged(
    paths: Paths, critical: Array, effect: float = 0.0, delta: float | None = None, size: Array | None = None
) -> Stops:
    """The rule of ``ablate``: everything is read off one interval, and the first word but ``undecided`` ends a path.

    The paths have no true difference: the effect is added. A path is equivalent within ``delta``, if that is given, by
    the same interval or by another one with the critical values ``size``.
    """
    estimates, half = paths.means + effect, critical[:, None] * paths.errors
    verdicts = np.where(np.abs(estimates) > half, np.sign(estimates), UNDECIDED)
    if delta is not None:
        other = half if size is None else size[:, None] * paths.errors
        verdicts[np.abs(estimates) + other < delta] = EQUIVALENT
    ended = verdicts != UNDECIDED
    look = np.where(ended.any(0), ended.argmax(0), len(critical) - 1)
    at = (look, np.arange(len(look)))
    return Stops(verdicts[at], look, estimates[at], half[at])


def family(rate: float, variants: int) -> float:
    """The probability of an event in any of several independent variants."""
    return 1 - (1 - rate) ** variants


def summary(candidate: Candidate, variants: int, noise: str) -> Any:
    """The fields of a row; lists have a value for each of ``EFFECTS``, or of ``DELTAS``.

    ``direction`` is the share of paths with the right one (at no difference: with any, which is false), and ``first``
    that at the first look. ``wrong`` is the share with the wrong one. ``relative_half`` is the median half-width of the
    interval over the estimate, and ``exaggeration`` the mean estimate over the truth, both of the paths with the right
    direction. ``coverage`` is the share of intervals that hold the truth where their path ended.
    """
    paths, critical = paths_of(noise, candidate.looks, PATHS), candidate.critical(ALPHA / variants)
    facts: dict[str, Any] = {"variants": variants, "noise": noise, "effects": EFFECTS, "deltas": DELTAS}
    facts |= {"critical": critical.tolist(), "looks": candidate.looks, "rho": candidate.rho, "held": candidate.held}
    rows = [_at(judged(paths, critical, effect), effect, candidate.looks) for effect in EFFECTS]
    facts |= {name: [row[name] for row in rows] for name in rows[0]}
    facts["family"] = family(facts["direction"][0], variants)
    for name, true in (("equivalent", [0.0] * len(DELTAS)), ("falsely_equivalent", DELTAS)):
        cases = [judged(paths, critical, effect, delta) for effect, delta in zip(true, DELTAS, strict=True)]
        facts[name] = [_share(case.word == EQUIVALENT) for case in cases]
    return _rounded(facts)


def _at(stops: Stops, effect: float, looks: Sequence[int]) -> dict[str, Any]:
    right, holds = stops.has_right_direction(effect), np.abs(stops.estimate - effect) <= stops.half
    early = right & (stops.look == 0)
    return {
        "direction": _share(right),
        "wrong": _share(stops.word == BETTER) if effect else None,
        "mean_pairs": float(np.array(looks)[stops.look].mean()),
        "first": _share(early),
        "relative_half": _middle(np.median, (stops.half / np.abs(stops.estimate))[right]),
        "exaggeration_first": _middle(np.mean, stops.estimate[early] / effect) if effect else None,
        "exaggeration": _middle(np.mean, stops.estimate[right] / effect) if effect else None,
        "coverage": _share(holds),
        "coverage_first": _middle(np.mean, holds[early]) if effect else None,
    }


def _share(which: Any) -> float:
    return float(np.mean(which))


def _middle(function: Any, values: Array) -> float | None:
    return float(function(values)) if len(values) >= FEWEST else None


def _many(variants: int) -> str:
    return f"{variants} variant{'s' if variants > 1 else ''}"


def _rounded(value: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _looks(request: Request) -> Iterator[Row]:
    """A row for each candidate, at the middle number of variants; ``shapes`` has its chances with other noise."""
    variants = VARIANTS[len(VARIANTS) // 2]
    for candidate in itertools.starmap(Candidate, itertools.product(LOOKS, RHOS, HELD)):
        facts = summary(candidate, variants, "normal")
        facts["is_chosen"] = candidate == CHOSEN
        facts["shapes"] = {name: _chances(candidate, variants, name) for name in list(NOISES)[1:]}
        yield _row(request, candidate.label, facts)


def _chances(candidate: Candidate, variants: int, noise: str) -> dict[str, Any]:
    """Of a false direction, in any variant too; the rest at a difference of 1, or of the unstable variant."""
    facts, at = summary(candidate, variants, noise), EFFECTS.index(UNSTABLE_EFFECT if noise == "unstable" else 1.0)
    shares = {"false": facts["direction"][0], "family": facts["family"]}
    return {**shares, **{name: facts[name][at] for name in ("wrong", "direction", "coverage")}}


def _default(request: Request) -> Iterator[Row]:
    for variants, noise in itertools.product(VARIANTS, NOISES):
        yield _row(request, f"{noise}, {_many(variants)}", summary(CHOSEN, variants, noise))


def _row(request: Request, name: str, found: dict[str, Any]) -> Row:
    at = EFFECTS.index(1.0)
    return request.row(name, **found, found=found["direction"][at], pairs=found["mean_pairs"][at], paths=PATHS)


def _equivalence(request: Request) -> Iterator[Row]:
    """``equivalent`` by the interval of the verdict, and by two one-sided tests that spend twice as much."""
    paths = paths_of("normal", CHOSEN.looks, PATHS)
    for variants, delta in itertools.product(VARIANTS, DELTAS):
        critical, size = (CHOSEN.critical(times * ALPHA / variants) for times in (1, 2))
        both = {"one": None, "two": size}
        shares = {
            f"{name}_{where}": _share(judged(paths, critical, effect, delta, other).word == EQUIVALENT)
            for name, other in both.items()
            for where, effect in (("equal", 0.0), ("delta", delta))
        }
        row = _rounded({**shares, "variants": variants, "delta": delta, "found": shares["one_equal"]})
        yield request.row(f"{_many(variants)}, delta {delta:g} sd", **row, paths=PATHS)


def _pooled(request: Request) -> Iterator[Row]:
    """False directions at a first look by each variant's own variance, a pooled one, and one by empirical Bayes.

    The level is what the chosen looks would spend there. ``shared`` says whether the differences share their baseline,
    so that they correlate by one half.
    """
    for pairs, ratio, is_shared in itertools.product((4, 6, 8), RATIOS, (False, True)):
        level = (1 - CHOSEN.held) * ALPHA / TESTED * (pairs / MOST) ** CHOSEN.rho
        rng, sds = np.random.default_rng(1), np.array([ratio] + [1.0] * TESTED)
        own = rng.normal(0, 1, (PATHS, TESTED + 1, pairs))
        if is_shared:
            own = (own + rng.normal(0, 1, (PATHS, 1, pairs))) / math.sqrt(2)
        own *= sds[:, None]
        means, variances = own.mean(2), own.var(2, ddof=1)
        known: dict[str, Any] = {"pairs": pairs, "sd_ratio": ratio, "is_shared": is_shared, "level": level}
        for name, (variance, freedom) in {
            "own": (variances, pairs - 1.0),
            "pooled": (variances.mean(1, keepdims=True), (TESTED + 1) * (pairs - 1.0)),
            "moderated": moderated(variances, pairs - 1),
        }.items():
            critical = np.broadcast_to(-special.stdtrit(freedom, level / 2) * np.sqrt(variance / pairs), means.shape)
            rejected = (np.abs(means) >= critical)[:, :TESTED]  # the null variant is not tested
            known[f"{name}_odd"], known[f"{name}_any"] = _share(rejected[:, 0]), _share(rejected.any(1))
            known[f"{name}_power"] = _share((means + POOLED_EFFECT >= critical)[:, 1])
        label = f"{pairs} pairs, sd {ratio:g}, {'one baseline' if is_shared else 'independent'}"
        yield request.row(label, **_rounded(known), found=known["moderated_any"], paths=PATHS)


def moderated(variances: Array, freedom: float) -> tuple[Array, Array]:
    """Variances shrunk to a common one, shape (paths, variants), and their degrees of freedom, shape (paths, 1).

    The common variance and its weight are fitted to the logarithms of those found (Smyth 2004, "Linear models and
    empirical Bayes methods for assessing differential expression", section 6.2). Where these differ by no more than
    chance, the weight is infinite.
    """
    half, many = freedom / 2, variances.shape[1]
    logs = np.log(variances) - special.digamma(half) + math.log(half)
    excess = logs.var(1, ddof=1, keepdims=True) - special.polygamma(1, half)
    is_finite = excess > 1e-6
    target = np.where(is_finite, excess, 1.0)
    halves = 0.5 + 1 / target
    for _ in range(10):  # Newton's steps for the inverse of the trigamma function
        value = special.polygamma(1, halves)
        halves = halves + value * (1 - value / target) / special.polygamma(2, halves)
    prior = np.where(is_finite, 2 * halves, 1e12)
    offset = np.where(is_finite, special.digamma(prior / 2) - np.log(prior / 2), 0.0)
    common = np.exp(logs.mean(1, keepdims=True) + offset)
    return (prior * common + freedom * variances) / (prior + freedom), np.minimum(prior + freedom, many * freedom)


def _added(request: Request) -> Iterator[Row]:
    """Directions where whoever finds nothing at the planned looks continues with the further ones."""
    for case, variants in itertools.product(EXTENDED, VARIANTS):
        further = [pairs for pairs in further_looks(case.looks[-1]) if pairs <= MOST_ADDED]
        critical, at = case.critical(ALPHA / variants, further), np.array([*case.looks, *further])
        known = {"looks": case.looks, "rho": case.rho, "held": case.held, "variants": variants, "further": further}
        paths = long_paths(tuple(at.tolist()), LONG_PATHS)
        for name, effect in (("false", 0.0), ("power", ADDED_EFFECT)):
            stops = judged(paths, critical, effect)
            pairs = np.where(stops.word == UNDECIDED, np.inf, at[stops.look])
            for until in (case.looks[-1], *UNTIL):
                rate = _share(pairs <= until)
                field = f"{name}_{'planned' if until == case.looks[-1] else until}"
                known[field] = rate if effect else family(rate, variants)
        label = f"{case.label}; {_many(variants)}"
        yield request.row(label, **_rounded(known), found=known[f"false_{UNTIL[-1]}"], paths=LONG_PATHS)


@functools.lru_cache(maxsize=1)
def long_paths(at: tuple[int, ...], paths: int) -> Paths:
    """Normal paths up to any number of pairs.

    Between two of them, sums are normal and sums of squared deviations chi-squared, so no single difference is needed.
    """
    rng, total, squares = np.random.default_rng(2), np.zeros(paths), np.zeros(paths)
    means, errors = np.empty((2, len(at), paths))
    for row, added in enumerate(np.diff(at, prepend=0)):
        step = rng.normal(0, math.sqrt(added), paths)
        squares += step**2 / added + (rng.chisquare(added - 1, paths) if added > 1 else 0.0)
        total += step
        means[row] = total / at[row]
        errors[row] = np.sqrt((squares / at[row] - means[row] ** 2) / (at[row] - 1))
    return Paths(means, errors)


def _tuned(request: Request) -> Iterator[Row]:
    """Any false direction where the tuned and the untuned differences have an alpha each."""
    first, other = (draws("normal", PATHS, seed=seed) for seed in (0, 1))
    for correlation in CORRELATIONS:
        second = correlation * first + math.sqrt(1 - correlation**2) * other
        both = [Paths.of(each, CHOSEN.looks) for each in (first, second)]
        for held, variants in itertools.product(HELD, TUNED_VARIANTS):
            critical = CHOSEN._replace(held=held).critical(ALPHA / variants)
            untuned, tuned = (judged(paths, critical).word != UNDECIDED for paths in both)
            rates = {"untuned": untuned, "tuned": tuned, "found": untuned | tuned}
            rates_of_error = {name: family(_share(which), variants) for name, which in rates.items()}
            known: dict[str, Any] = {"correlation": correlation, "held": held, "variants": variants, "paths": PATHS}
            label = f"{_many(variants)}, correlation {correlation:g}; {held:.0%} held back"
            yield request.row(label, **known, **_rounded(rates_of_error))


PARTS = {"looks": _looks, "default-looks": _default, "equivalence": _equivalence, "pooled": _pooled}
PARTS |= {"added-pairs": _added, "tuned": _tuned}
