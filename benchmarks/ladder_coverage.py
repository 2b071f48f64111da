"""How often an extrapolated interval holds the truth, by simulation: ``python -m benchmarks ladder --shapes coverage``.

The functions are those of ``statistics.extrapolation``. A ladder has a variant and a null variant at some sizes, a
factor of 4 in compute apart. Differences of pairs are normal; their standard deviation is the same at all sizes, or
falls or rises by a fifth from one to the next. ``covered`` is the interval of the mean, ``promised`` the one in which
the next observed mean should be. Both have a level of 90%.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from lightning_llm.bench.harness import Request
from lightning_llm.bench.rows import Row
from lightning_llm.statistics.extrapolation import AtSize, Spread, predict

DRAWS = 12_000  # of each curve and target, over all designs
SD = 0.006  # of a pair's difference at the smallest size, nats
CURVES: dict[str, Callable[[float], float]] = {  # true differences, nats
    "zero": lambda x: 0.0,
    "constant": lambda x: -0.02,
    "linear": lambda x: -0.03 + 0.006 * x,
    "growing": lambda x: -0.01 - 0.004 * x,
    "changes sign": lambda x: -0.012 + 0.008 * x,
    "decays to zero by 0.7": lambda x: -0.03 * 0.7**x,
    "decays to zero by 0.5": lambda x: -0.03 * 0.5**x,
    "decays to half": lambda x: -0.015 - 0.015 * 0.5**x,
}
BEND = "bends after the third size"
SPREADS = {"equal": 0.0, "falling": math.log(0.8), "rising": math.log(1.25)}  # over sizes
SIZES, PAIRS = (3, 4), (4, 8)
BEYOND = (1, 2)  # factors of 4 from the largest size to the target
GATE = (0.88, 0.97)


def bend(x: float) -> float:
    """Flat over three sizes, and falling to zero from there."""
    return -0.02 + 0.01 * max(0.0, x - 2)


def rows(request: Request) -> Iterator[Row]:
    """A row for each curve and target: shares over all designs, the lowest and the highest of one."""
    for name, curve in {**CURVES, BEND: bend}.items():
        for beyond in BEYOND:
            rng = np.random.default_rng(request.options.seed)
            designs = list(itertools.product(SIZES, PAIRS, SPREADS.values()))
            found = [_covered(rng, curve, *design, beyond) for design in designs]
            covered, promised, widths = zip(*found, strict=True)
            mean = float(np.mean(covered))
            is_off = name != BEND and not GATE[0] <= mean <= GATE[1]
            yield request.row(
                f"{name}, {4**beyond} times the compute",
                covered=mean,
                lowest=min(covered),
                highest=max(covered),
                promised=float(np.mean(promised)),
                half_width=float(np.mean(widths)),
                problems=[f"{name}, {4**beyond} times: {mean:.1%} covered"] if is_off else [],
            )


def _covered(
    rng: np.random.Generator, curve: Callable[[float], float], sizes: int, pairs: int, slope: float, beyond: int
) -> tuple[float, float, float]:
    """Shares of ladders whose intervals hold the true mean and the next observed one, and the mean half-width."""
    target, covered, promised, half = sizes - 1 + beyond, 0, 0, 0.0
    sds = SD * np.exp(slope * np.arange(target + 1))
    for _ in range(DRAWS // len(SIZES) // len(PAIRS) // len(SPREADS)):
        drawn = rng.standard_normal((2, sizes, pairs)) * sds[:sizes, None]  # the variant's noise, and the null's
        drawn[0] += np.array([curve(x) for x in range(sizes)])[:, None]
        each = [[AtSize(x, float(d.mean()), float(d.std(ddof=1)), pairs) for x, d in enumerate(arm)] for arm in drawn]
        prediction = predict(each[0], Spread.of([*each[0], *each[1]]), target, pairs)
        truth = curve(target)
        observed = truth + sds[target] / math.sqrt(pairs) * rng.standard_normal()
        covered += prediction.interval[0] <= truth <= prediction.interval[1]
        promised += prediction.prediction_interval[0] <= observed <= prediction.prediction_interval[1]
        half += (prediction.interval[1] - prediction.interval[0]) / 2
    draws = DRAWS // len(SIZES) // len(PAIRS) // len(SPREADS)
    return covered / draws, promised / draws, half / draws
