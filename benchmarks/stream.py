"""``python -m benchmarks stream``: which ideas of a stream the rule adopts, by simulation.

The functions are those of ``statistics.stream``. Each of 200 streams has 100 ideas. ``useless``: none changes anything
in the mean, with several shapes of a pair's difference, and with a proposer who varies the best rejected idea on the
same seeds. ``true``: ten of them are better. Beside the rule stand the rule without its confirmation, and whoever keeps
an idea because one pair is lower.

The command fails if more than 5% of streams of normal differences have an adoption, or more than 10% of the others.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks import parts
from benchmarks.charts import Measure
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row
from lightning_llm.statistics.estimates import Array
from lightning_llm.statistics.stream import CONFIRMATION, StreamRule

STREAMS, IDEAS, TRUE = 200, 100, 10
EFFECTS = (1.0, 1.5, 2.0)  # in standard deviations of a pair's difference
RULE, PLAIN, LOWER = "the rule", "without the confirmation", "keep if one pair is lower"
CORRELATION = 0.8  # of a variation's differences with those of the idea that it varies
Draw = Callable[[np.random.Generator, int], Array]
NOISE: dict[str, Draw] = {  # with mean 0 and standard deviation 1; a negative difference is better
    "normal": lambda rng, n: rng.standard_normal(n),
    "Student's t, 3 degrees": lambda rng, n: rng.standard_t(3, n) / np.sqrt(3),
    "exponential, mostly better": lambda rng, n: rng.exponential(size=n) - 1,
    "exponential, mostly worse": lambda rng, n: 1 - rng.exponential(size=n),
    "spikes, one in ten": lambda rng, n: (rng.standard_normal(n) - 0.4 + 4 * (rng.random(n) < 0.1)) / np.sqrt(2.44),
}


def judged(way: str, rule: StreamRule, threshold: float, differences: Any, fresh: Any) -> tuple[bool, int]:
    """Whether a way adopts an idea, and the pairs that it takes."""
    if way == LOWER:
        return differences[0] < 0, 1
    step, pairs = rule.next(differences, [], threshold)
    if step != "confirm":
        return False, pairs
    is_adopted = way == PLAIN or rule.next(differences, fresh, threshold).step == "adopted"
    return is_adopted, pairs + CONFIRMATION * (way == RULE)


def stream(rng: np.random.Generator, noise: Draw, effects: Array, way: str, *, adaptive: bool = False) -> Any:
    """Whether each idea of a stream is adopted, and the pairs of all.

    An adaptive proposer varies the rejected idea with the lowest mean.
    """
    rule, adopted, spent = StreamRule(), list[bool](), 0
    best: Array | None = None
    for place, effect in enumerate(effects, 1):
        drawn = noise(rng, rule.most + CONFIRMATION)
        if adaptive and best is not None:
            drawn[: rule.most] = CORRELATION * best + np.sqrt(1 - CORRELATION**2) * drawn[: rule.most]
        differences, fresh = np.split(drawn - effect, [rule.most])
        is_adopted, pairs = judged(way, rule, rule.threshold(place, sum(adopted)), list(differences), list(fresh))
        if adaptive and not is_adopted and (best is None or differences[:4].mean() < best[:4].mean()):
            best = differences
        adopted.append(is_adopted)
        spent += pairs
    return adopted, spent


def _useless(request: Request) -> Iterator[Row]:
    cases = [(name, name, way, False) for name in NOISE for way in (RULE, PLAIN)]
    cases += [("normal, varies its best", "normal", way, True) for way in (RULE, PLAIN)]
    cases.append(("normal", "normal", LOWER, False))
    for label, noise, way, adaptive in cases:
        rng = np.random.default_rng(request.options.seed)
        streams = [stream(rng, NOISE[noise], np.zeros(IDEAS), way, adaptive=adaptive) for _ in range(STREAMS)]
        adopted, pairs = map(np.array, zip(*streams, strict=True))
        share = float(adopted.any(1).mean())
        most = 0.05 if noise == "normal" and not adaptive else 0.10
        problems = [f"{label}: {share:.1%} of streams have an adoption"] if way == RULE and share > most else []
        yield request.row(f"{label}; {way}", any=share, pairs=float(pairs.mean()) / IDEAS, problems=problems)


def _true(request: Request) -> Iterator[Row]:
    for effect, way in product(EFFECTS, (RULE, PLAIN, LOWER)):
        rng, streams = np.random.default_rng(request.options.seed), []
        for _ in range(STREAMS):
            effects = np.zeros(IDEAS)
            effects[rng.choice(IDEAS, TRUE, replace=False)] = effect
            streams.append((effects > 0, *stream(rng, NOISE["normal"], effects, way)))
        is_true, adopted, pairs = map(np.array, zip(*streams, strict=True))
        hits = int((is_true & adopted).sum())
        facts: dict[str, Any] = {"power": hits / (STREAMS * TRUE), "false": 1 - hits / max(1, int(adopted.sum()))}
        yield request.row(f"{effect:g} sd; {way}", **facts, pairs=float(pairs.mean()) / IDEAS)


PARTS = {"useless": _useless, "true": _true}
BENCH = Bench(
    run=lambda request: request.sizes(request),  # the rows of a part
    shapes=list(PARTS),
    parse=partial(parts.named, PARTS),
    devices=("cpu",),
    dtypes=("float32",),
    columns={
        "streams with an adoption, %": ("any", 100, ".1f"),
        "true ones adopted, %": ("power", 100, ".0f"),
        "false of those adopted, %": ("false", 100, ".1f"),
        "pairs per idea": ("pairs", 1, ".1f"),
    },
    draw=partial(parts.draw_bars, [Measure("any", 100, "%"), Measure("power", 100, "%")]),
    files=("lightning_llm/statistics/stream.py",),
    check=parts.check,
)
