"""``python -m benchmarks stream``: which ideas of a stream the rule adopts, by simulation.

The functions are those of ``statistics.stream``. Each of 2,000 streams has 100 ideas. ``useless``: none changes
anything in the mean, with several shapes of a pair's difference, and with a proposer who varies the rejected idea that
has done best, on the seeds of the screen. ``true``: ten of them are better. Beside the rule stand the thorough one,
what would happen if ideas shared the seeds that confirm them, and whoever keeps an idea because one pair is lower.
``batch``: batches of 20 ideas that are written down together (``statistics.batch``), none or two of which are better.
Where they share the baseline's runs, the differences of one seed correlate by one half.

A run is one training: a pair of the screen takes one, since all ideas share the baseline's, and a fresh pair takes two.
The command fails if more than 5% of streams have an adoption with normal or heavy-tailed differences or with such a
proposer, or more than 22% with skewed ones (the upper bound of a 95% interval counts), or if fewer than 70% of ideas
that help by one standard deviation are adopted, or if it takes more than 9.5 runs per idea.
"""

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks import parts
from benchmarks.charts import Measure
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row
from lightning_llm.statistics.batch import LOOKS, is_decided, log_e_values
from lightning_llm.statistics.batch import adopted as adopted_of_batch
from lightning_llm.statistics.estimates import Array
from lightning_llm.statistics.stream import SCREEN, THOROUGH, StreamRule

STREAMS, IDEAS, TRUE = 2_000, 100, 10
EFFECTS = (0.5, 1.0, 1.5, 2.0)  # in standard deviations of a pair's difference
RULE, THOROUGH_RULE, SHARED, LOWER = (
    "the rule",
    "thorough",
    "confirming seeds shared",
    "keep if one pair is lower",
)
NOT_CONFIRMED = 0.5  # in standard deviations: what an idea that the screen has given up is worth less
CORRELATION = 0.8  # of a variation's differences with those of the idea that it varies
MOST_FALSE, MOST_STRESSED, LEAST_POWER, MOST_RUNS = 0.05, 0.22, 0.70, 9.5
SCREENED = SCREEN[-1][0]
BATCH, TRUE_OF_BATCH, ALPHA = 20, 2, 0.05
GRID = np.linspace(-1, 1, 4001)
PROMISED_OF_BATCH = ("normal", "Student's t, 3 degrees")  # the t e-process takes differences for normal
Draw = Callable[[np.random.Generator, int], Array]
NOISE: dict[str, Draw] = {  # with mean 0 and standard deviation 1; a negative difference is better
    "normal": lambda rng, n: rng.standard_normal(n),
    "Student's t, 3 degrees": lambda rng, n: rng.standard_t(3, n) / np.sqrt(3),
    "exponential, mostly better": lambda rng, n: rng.exponential(size=n) - 1,
    "exponential, mostly worse": lambda rng, n: 1 - rng.exponential(size=n),
    "spikes, one in ten": lambda rng, n: (rng.standard_normal(n) - 0.4 + 4 * (rng.random(n) < 0.1)) / np.sqrt(2.44),
}
STRESSED = ("exponential, mostly better", "spikes, one in ten")


class Outcome(NamedTuple):
    """What became of the ideas of a stream.

    Attributes:
        adopted: Whether each idea was.
        gains: Mean improvement of the fresh pairs of each adopted idea; else 0.
        pairs: Of all ideas together.
        runs: Likewise.
        screened: Pairs of the screens of all ideas together.
        confirmed: Number of ideas that the screen did not give up.
    """

    adopted: Array
    gains: Array
    pairs: int
    runs: int
    screened: int
    confirmed: int


def stream(rng: np.random.Generator, noise: Draw, effects: Array, way: str, *, adaptive: bool = False) -> Outcome:
    """One stream of ideas with these effects.

    Args:
        rng: Draws the differences.
        noise: Their shape.
        effects: How much better each idea is.
        way: How ideas are adopted.
        adaptive: Whether each idea varies the rejected one that has done best on the seeds that they share.
    """
    rule = StreamRule(looks=THOROUGH) if way == THOROUGH_RULE else StreamRule()
    adopted, gains = np.zeros(len(effects), bool), np.zeros(len(effects))
    pairs = runs = screened = confirmed = 0
    best: Array | None = None
    best_score = -math.inf
    for place, effect in enumerate(effects):
        drawn = noise(rng, SCREENED + rule.looks[-1])
        if best is not None:
            known = slice(None) if way == SHARED else slice(SCREENED)
            drawn[known] = CORRELATION * best[known] + np.sqrt(1 - CORRELATION**2) * drawn[known]
        screen, fresh = np.split(drawn - effect, [SCREENED])
        if way == LOWER:
            adopted[place] = screen[0] < 0
            pairs, runs = pairs + 1, runs + 1
            continue
        level = rule.level(confirmed + 1, int(adopted.sum()))
        decision = rule.next(list(screen), list(fresh), level)
        screened += decision.pairs
        pairs += decision.pairs + decision.confirming
        runs += decision.pairs + 2 * decision.confirming
        confirmed += decision.confirming > 0
        if decision.step == "adopted":
            adopted[place] = True
            gains[place] = -fresh[: decision.confirming].mean()
        score = -screen.mean()
        if way == SHARED:
            score += -fresh[: rule.looks[0]].mean() if decision.confirming else -NOT_CONFIRMED
        if adaptive and not adopted[place] and score > best_score:
            best, best_score = drawn, score
    return Outcome(adopted, gains, pairs, runs, screened, confirmed)


def bounds_of_share(hits: int, count: int) -> tuple[float, float]:
    """The lower and the upper 95% bound of a share, each by itself (Clopper and Pearson 1934)."""
    low = 0.0 if hits == 0 else float(stats.beta.ppf(0.05, hits, count - hits + 1))
    high = 1.0 if hits == count else float(stats.beta.ppf(0.95, hits + 1, count - hits))
    return low, high


def _useless(request: Request) -> Iterator[Row]:
    cases = [(name, name, way, False) for way in (RULE, THOROUGH_RULE) for name in NOISE]
    cases += [("normal, varies its best", "normal", way, True) for way in (RULE, SHARED)]
    cases.append(("normal", "normal", LOWER, False))
    for label, noise, way, adaptive in cases:
        rng = np.random.default_rng(request.options.seed)
        found = [stream(rng, NOISE[noise], np.zeros(IDEAS), way, adaptive=adaptive) for _ in range(STREAMS)]
        hits = sum(bool(outcome.adopted.any()) for outcome in found)
        most = MOST_STRESSED if noise in STRESSED else MOST_FALSE
        high = bounds_of_share(hits, STREAMS)[1]
        is_promised = way in (RULE, THOROUGH_RULE)
        problems = [f"{label}: up to {high:.1%} of streams have an adoption"] if is_promised and high > most else []
        facts: dict[str, Any] = {"any": hits / STREAMS, "any_high": high, **_cost(found)}
        yield request.row(f"{label}; {way}", **facts, problems=problems)


def _true(request: Request) -> Iterator[Row]:
    for way in (RULE, THOROUGH_RULE, LOWER):
        for effect in EFFECTS:
            rng, found, truths = np.random.default_rng(request.options.seed), [], []
            for _ in range(STREAMS):
                effects = np.zeros(IDEAS)
                effects[rng.choice(IDEAS, TRUE, replace=False)] = effect
                truths.append(effects > 0)
                found.append(stream(rng, NOISE["normal"], effects, way))
            is_true, adopted = np.array(truths), np.array([outcome.adopted for outcome in found])
            gains = np.array([outcome.gains for outcome in found])[is_true & adopted]
            hits = int((is_true & adopted).sum())
            low = bounds_of_share(hits, STREAMS * TRUE)[0]
            false = (~is_true & adopted).sum(1) / np.maximum(1, adopted.sum(1))
            facts: dict[str, Any] = {"power": hits / (STREAMS * TRUE), "false": float(false.mean()), **_cost(found)}
            facts["gain"] = None if way == LOWER else float(gains.mean()) / effect
            problems = []
            if (way, effect) == (RULE, 1.0) and (low < LEAST_POWER or facts["runs"] > MOST_RUNS):
                problems = [f"power at 1 sd is at least {low:.1%}, with {facts['runs']:.1f} runs per idea"]
            yield request.row(f"{effect:g} sd; {way}", **facts, problems=problems)


def _batches(request: Request) -> Iterator[Row]:
    """Batches of useless ideas with several shapes of noise, and with two true ideas of several sizes."""
    cases = [(f"batch: {noise}", noise, 0.0, False) for noise in NOISE]
    cases.append(("batch: normal, baselines shared", "normal", 0.0, True))
    cases += [(f"batch: {effect:g} sd, baselines shared", "normal", effect, True) for effect in EFFECTS]
    for label, noise, effect, is_shared in cases:
        rng = np.random.default_rng(request.options.seed)
        found = [_batch(rng, NOISE[noise], effect, is_shared=is_shared) for _ in range(STREAMS)]
        adopted = np.array([outcome[0] for outcome in found])
        pairs = np.array([outcome[1] for outcome in found])
        facts: dict[str, Any] = {"pairs": float(pairs.mean())}
        facts["runs"] = float((pairs.sum(1) + pairs.max(1)).mean()) / BATCH  # the baseline's with those of the longest
        if effect:
            facts["power"] = float(adopted[:, :TRUE_OF_BATCH].mean())
            shares = adopted[:, TRUE_OF_BATCH:].sum(1) / np.maximum(1, adopted.sum(1))
            facts["false"] = float(shares.mean())
            high = facts["false"] + 1.645 * float(shares.std(ddof=1)) / math.sqrt(STREAMS)
        else:
            hits = int(adopted.any(1).sum())
            high = bounds_of_share(hits, STREAMS)[1]
            facts |= {"any": hits / STREAMS, "any_high": high}
        is_false = noise in PROMISED_OF_BATCH and high > MOST_FALSE
        yield request.row(label, **facts, problems=[f"{label}: {high:.1%} false"] if is_false else [])


def _batch(rng: np.random.Generator, noise: Draw, effect: float, *, is_shared: bool) -> tuple[Array, Array]:
    """Which ideas of a batch are adopted, and how many pairs each has; the first ones are true."""
    differences = np.array([noise(rng, LOOKS[-1]) for _ in range(BATCH)])
    if is_shared:
        differences = (differences + noise(rng, LOOKS[-1])) / np.sqrt(2)
    differences[:TRUE_OF_BATCH] -= effect
    e_values: dict[str, float] = {}
    pairs = np.zeros(BATCH, int)
    left = list(range(BATCH))
    for look in LOOKS:
        own = differences[left, :look]
        u = -own.sum(1) / np.sqrt(look * (own**2).sum(1))
        logs = np.interp(u, GRID, _log_e_values_on_grid(look))
        e_values |= {str(idea): float(value) for idea, value in zip(left, np.exp(logs), strict=True)}
        pairs[left] = look
        left = [idea for idea in left if not is_decided(e_values[str(idea)], look, BATCH, ALPHA)]
    taken = adopted_of_batch(e_values, ALPHA)
    return np.array([str(idea) in taken for idea in range(BATCH)]), pairs


@functools.cache
def _log_e_values_on_grid(pairs: int) -> Array:
    """The logarithms at ``GRID``: a simulation takes a million e-values, each of which is an integral."""
    return log_e_values(GRID, pairs)


def _cost(found: list[Outcome]) -> dict[str, float]:
    """Pairs, runs, pairs of the screen, and confirmations per idea."""
    count = len(found) * IDEAS
    return {
        name: sum(getattr(each, name) for each in found) / count for name in ("pairs", "runs", "screened", "confirmed")
    }


PARTS = {"useless": _useless, "true": _true, "batch": _batches}
BENCH = Bench(
    run=lambda request: request.sizes(request),  # the rows of a part
    shapes=list(PARTS),
    parse=partial(parts.named, PARTS),
    devices=("cpu",),
    dtypes=("float32",),
    columns={
        "streams with an adoption, %": ("any", 100, ".1f"),
        "at most": ("any_high", 100, ".1f"),
        "true ones adopted, %": ("power", 100, ".0f"),
        "false of those adopted, %": ("false", 100, ".1f"),
        "gain of fresh pairs / truth": ("gain", 1, ".2f"),
        "pairs per idea": ("pairs", 1, ".1f"),
        "runs per idea": ("runs", 1, ".1f"),
    },
    draw=partial(parts.draw_bars, [Measure("any", 100, "%"), Measure("power", 100, "%")]),
    files=("lightning_llm/statistics/stream.py",),
    check=parts.check,
)
