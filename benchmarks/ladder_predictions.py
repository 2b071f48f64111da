"""Are predictions of differences at a larger size right? Shapes ``coverage`` and ``held-out`` of the bench ``ladder``.

``coverage`` trains nothing: it simulates how often an extrapolated interval (``statistics.extrapolation``) holds the
truth. A ladder has a variant and a null variant at some sizes, a factor of 4 in compute apart. Differences of pairs are
normal; their standard deviation is the same at all sizes, or falls or rises by a fifth from one to the next. At a level
of 90%, ``covered`` is the interval of the mean, ``promised`` the one in which the next observed mean should be.

``held-out`` trains the ladder of ``examples/ablations/held-out.yaml`` at all of its sizes, and then at the predicted
one; interrupted, it continues. ``held-out=ladder`` is that of ``ladder.yaml``. Each prediction interval is compared
with the mean difference that was observed afterwards, and with two simpler intervals of the same level: the largest
size's difference persists, or a straight line through all sizes continues. The interval score
(Gneiting and Raftery 2007, "Strictly Proper Scoring Rules, Prediction, and Estimation", equation 43) is the width of an
interval, and 2 / (1 - level) times what it misses the observation by: lower is better.
"""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.commands import ROOT, environment
from benchmarks.harness import Request
from benchmarks.rows import Row
from lightning_llm.ablate.experiment import experiment_of
from lightning_llm.ablate.report.record import Outcome
from lightning_llm.ablate.report.report import Report
from lightning_llm.io.charts import chart
from lightning_llm.io.config_file import read_config
from lightning_llm.statistics.extrapolation import LEVEL, AtSize, Interval, SpreadBySize, fit_curve, predict

COVERAGE, HELD_OUT, EXAMPLES = "coverage", "held-out", ROOT / "examples" / "ablations"
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
NOT_SMOOTH: dict[str, Callable[[float], float]] = {
    "bends after the third size": lambda x: -0.02 + 0.01 * max(0.0, x - 2),  # flat before, and falling to zero
    "alternates by 0.02": lambda x: -0.02 + 0.01 * math.cos(math.pi * x),
}
SPREADS = (0.0, math.log(0.8), math.log(1.25))  # logarithms of the factor from one size to the next
LADDERS, PAIRS = (3, 4), (4, 8)  # numbers of sizes, and of pairs at each
BEYOND = (1, 2)  # factors of 4 from the largest size to the target
GATE = (0.88, 0.97)


# ---- predictions of simulated ladders


def coverage(request: Request) -> Iterator[Row]:
    """A row for each curve and target: shares over all designs, the lowest and the highest of one."""
    for name, curve in {**CURVES, **NOT_SMOOTH}.items():
        for beyond in BEYOND:
            rng, designs = np.random.default_rng(request.options.seed), itertools.product(LADDERS, PAIRS, SPREADS)
            found = [_covered(rng, curve, *design, beyond) for design in designs]
            covered, promised, widths = zip(*found, strict=True)
            mean = float(np.mean(covered))
            is_off = name in CURVES and not GATE[0] <= mean <= GATE[1]
            yield request.row(
                f"{name}, {4**beyond} times the compute",
                covered=mean,
                lowest=min(covered),
                highest=max(covered),
                promised=float(np.mean(promised)),
                half_width=float(np.mean(widths)),
                problems=[f"{name}, {4**beyond} times: {mean:.1%} covered"] if is_off else [],
            )


def _covered(rng: Any, curve: Callable[[float], float], sizes: int, pairs: int, slope: float, beyond: int) -> Any:
    """Shares of ladders whose intervals hold the true mean and the next observed one, and the mean half-width."""
    target, found = sizes - 1 + beyond, []
    sds = SD * np.exp(slope * np.arange(target + 1))
    for _ in range(DRAWS // len(LADDERS) // len(PAIRS) // len(SPREADS)):
        drawn = rng.standard_normal((2, sizes, pairs)) * sds[:sizes, None]  # the variant's noise, and the null's
        drawn[0] += np.array([curve(x) for x in range(sizes)])[:, None]
        each = [[AtSize(x, float(d.mean()), float(d.std(ddof=1)), pairs) for x, d in enumerate(arm)] for arm in drawn]
        prediction = predict(each[0], SpreadBySize.of([*each[0], *each[1]]), target, pairs)
        truth = curve(target)
        observed = truth + sds[target] / math.sqrt(pairs) * rng.standard_normal()
        (low, high), (least, most) = prediction.interval, prediction.prediction_interval
        found.append((low <= truth <= high, least <= observed <= most, (high - low) / 2))
    return np.mean(found, axis=0).tolist()


# ---- predictions that were checked


def held_out(request: Request, name: str = HELD_OUT) -> Iterator[Row]:
    """A row for each variant: what was predicted and observed, the interval scores. The last row is of all.

    ``hits`` of ``count`` lie in their prediction interval; ``share_low`` and ``share_high`` are the exact binomial 95%
    interval of that share. It takes variants as independent, which they are not: they share the baseline's runs.
    """
    report = _trained(EXAMPLES / f"{name}.yaml", name)
    assert report.sizes is not None
    stored = report.sizes.predictions[0]
    sizes = {
        variant: [
            AtSize(math.log(row.compute, 4), row.difference, row.sd, row.pairs)
            for row in report.of_kind("result")
            if row.variant == variant and row.compute is not None and row.compute < stored.compute
            if row.difference is not None and row.sd is not None
        ]
        for variant in stored.variants
    }
    spread = SpreadBySize.of(list(itertools.chain.from_iterable(sizes.values())))
    rows = [
        request.row(variant, **_scores(own, sizes[variant], spread, math.log(stored.compute, 4)))
        for variant, own in stored.variants.items()
        if own.is_hit is not None
    ]
    if not rows:
        raise RuntimeError(f"held-out={name}: no variant has both a prediction and an observed difference")
    yield from rows
    hits, fields = sum(row.hit for row in rows), ("score", "score_persists", "score_line")
    low, high = stats.binomtest(hits, len(rows)).proportion_ci(0.95, method="exact")
    means: dict[str, Any] = {field: float(np.mean([getattr(row, field) for row in rows])) for field in fields}
    yield request.row("all", hits=hits, count=len(rows), share_low=float(low), share_high=float(high), **means)


def predicting_ladders() -> list[str]:
    """The shipped ladders that predict a size."""
    files = {file.stem: read_config(file) for file in sorted(EXAMPLES.glob("*.yaml"))}
    return [name for name, content in files.items() if content.get("predict") is not None]


def _trained(file: Path, name: str) -> Report:
    """The report of a ladder whose target is trained too."""
    ladder = experiment_of(read_config(file), file, name)
    for words in (["run", str(file)], ["extend", ladder.folder, "--size", str(ladder.predict)]):
        command = [sys.executable, "-m", "lightning_llm", "ablate", *words]
        if status := subprocess.run(command, env=environment(), check=False).returncode:
            raise RuntimeError(f"lightning-llm ablate {' '.join(words)} ended with status {status}")
    return Report.read(ladder.folder)


def _scores(outcome: Outcome, sizes: Sequence[AtSize], spread: SpreadBySize, target: float) -> dict[str, Any]:
    """What a row has of a variant: the prediction, its two simpler rivals, and the scores of all three."""
    predicted, observed, last = outcome.predicted, outcome.observed, sizes[-1]
    assert predicted is not None
    assert observed is not None
    x, means = np.array([size.x for size in sizes]), np.array([size.mean for size in sizes])
    errors = np.array([spread.at(size.x) / math.sqrt(size.pairs) for size in sizes])
    line = fit_curve(x, means, errors, target, ratio=1.0)
    simple = {"persists": (last.mean, errors[-1] ** 2), "line": (line.mean, line.variance)}
    intervals: dict[str, Interval] = {"predicted": predicted.prediction_interval}
    for name, (mean, variance) in simple.items():
        error = math.sqrt(variance + spread.at(target) ** 2 / last.pairs)
        half = float(stats.t.isf((1 - LEVEL) / 2, spread.freedom)) * error
        intervals[name] = mean - half, mean + half
    scores = {name: interval_score(interval, observed) for name, interval in intervals.items()}
    return {
        **{"differences": means.tolist(), "observed": observed, "hit": outcome.is_hit},
        **{"answer": predicted.answer, "score": scores.pop("predicted")},
        **{name: list(interval) for name, interval in intervals.items()},
        **{f"score_{name}": score for name, score in scores.items()},
    }


def interval_score(interval: Interval, observed: float) -> float:
    """The width, and 2 / (1 - level) times the distance of an observation outside."""
    low, high = interval
    return high - low + 2 / (1 - LEVEL) * max(0.0, low - observed, observed - high)


def draw_predictions(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Of each variant the prediction interval, and what was observed."""
    rows = [row for row in rows if row.predicted is not None]
    with chart(path, title, height=1.2 + 0.3 * len(rows), **options) as axes:
        (axis,) = np.ravel(axes)
        places, (low, high) = range(len(rows)), zip(*(row.predicted for row in rows), strict=True)
        axis.hlines(places, low, high, lw=6, alpha=0.4, label=f"predicted, {LEVEL:.0%}")
        axis.plot([row.observed for row in rows], places, "o", color="C1", label="observed")
        axis.axvline(0, color=axis.xaxis.label.get_color(), lw=0.8)
        axis.set_yticks(places, [row.variant for row in rows])
        axis.set(xlabel="difference, nats")
        axis.invert_yaxis()
        axis.legend(fontsize=9)
