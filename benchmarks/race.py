"""``python -m benchmarks race``: loops that keep changes, replayed on trained runs, where the truth is known.

``bank`` trains a small transformer again and again at two sizes, on the characters of Python's standard library: for
each seed of the data, several draws of the initial values. A draw is taken for what a change does that changes nothing:
it may disturb more than many of these do. Its rows
have the losses; ``--shapes bank --json docs/benchmarks/race-bank-cpu.json`` stores them. The runs are in ``runs/race``;
no finished one is repeated.

The other shapes replay loops on the stored losses. A loss is taken apart into the mean of its seed and what the draw
adds (the residual, times √(k / (k - 1)) for k draws). A run of a recipe has the part of its seed, a residual from the
bank, and minus the gains of what the recipe has adopted: so pairs share their seed, and effects are known and add up.
Residuals are drawn with a little normal noise added, at the same variance (the smoothed bootstrap: Silverman and Young
1987), since the best of a thousand runs must be able to be luckier than the best of a hundred.
(Every loop compares runs of one seed, so the parts of seeds decide nothing.)
Of the ideas, one in ten helps, three in ten harm as much, and six do nothing. All loops of a race get the same ideas.
``endless`` gives each loop as many of them as 1,000 runs last for; what an idea's runs beyond that would say does not
count. ``list`` has 100 ideas, however many runs these take. After an adoption, the baseline is trained again. The
loops:

- *keep if lower*: one run of an idea, with one seed for all; kept if its loss is below the best kept one.
- *keep if lower by a floor*: the same, if it is lower by a standard deviation of a pair.
- *t-test after three seeds*: three pairs on three seeds, which the ideas on one baseline share; kept if the one-sided p
  is at most 0.05.
- *a gate for each decision*: a group-sequential test of each idea at 0.05, with looks at 4, 8, 12, 16, and 20 pairs,
  which gives up if the mean is on the wrong side at a look. Ideas share the baseline's runs.
- *try*: ``lightning-llm ablate try`` (``statistics.stream``).
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import parts
from benchmarks.commands import ROOT
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row, read_rows
from lightning_llm.io.charts import chart
from lightning_llm.statistics.estimates import Array
from lightning_llm.statistics.looks import PlannedLook, spending
from lightning_llm.statistics.stream import StreamRule

BANK = ROOT / "docs" / "benchmarks" / "race-bank-cpu.json"
SIZES = {"25k": (6, 24), "50k": (6, 12)}  # draws, and seeds of the data
RACES, BUDGET, LISTED = 200, 1_000, 100  # races of each row, runs, ideas
HELPS, HARMS = 0.1, 0.3  # shares of the ideas
EFFECTS = (0.5, 1.0, 2.0)  # in standard deviations of a pair's difference
ALPHA, GATE_LOOKS = 0.05, (4, 8, 12, 16, 20)
T_OF_THREE = float(stats.t.isf(ALPHA, 2))
SHARED_SEEDS = 64  # of a baseline, before they are fresh


# ---- the bank


def bank(request: Request) -> Iterator[Row]:
    """A row for each size: ``losses`` by seed of the data and draw."""
    jobs = [
        (size, draw, seed) for size, (draws, seeds) in SIZES.items() for seed in range(seeds) for draw in range(draws)
    ]
    folder = str(Path("runs/race").absolute())
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        words = list(request.options.fit_options)
        losses = dict(zip(jobs, pool.map(partial(_loss, folder, words), jobs), strict=True))
    for size, (draws, seeds) in SIZES.items():
        own = [[losses[size, draw, seed] for draw in range(draws)] for seed in range(seeds)]
        facts: dict[str, Any] = {"runs": draws * seeds, **_facts(np.array(own))}
        yield request.row(size, losses=own, **facts)


def _loss(folder: str, words: Sequence[str], job: tuple[str, int, int]) -> float:
    """The validation loss of a run on one thread."""
    import torch

    from lightning_llm.cli.train import cli_main

    size, draw, seed = job
    run = Path(folder, f"{size},draw={draw},seed={seed}")
    if not (run / "summary.json").exists():
        torch.set_num_threads(1)
        options = ["--data.path=null", "--data.corpus=stdlib", "--data.tokenizer=char", f"--data.store={folder}/store"]
        options += [f"--size={size}", "--tokens_per_parameter=10", "--trainer.limit_val_batches=20", *words]
        seeds = [f"--seed_everything={1000 * (draw + 1) + seed}", f"--data.seed={seed}", f"--trainer.run_dir={run}"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cli_main(["fit", f"--config={ROOT / 'configs' / 'shakespeare-char.yaml'}", *options, *seeds])
    return float(json.loads((run / "summary.json").read_text(encoding="utf-8"))["val_loss"])


def _facts(losses: Array) -> dict[str, float]:
    """The standard deviation of a pair's difference, of a run, and the correlation of a pair."""
    noise = Noise.of(losses)
    pair = float(np.sqrt(2) * noise.residuals.std())
    run = float(np.hypot(noise.seed_sd, noise.residuals.std()))
    return {"pair_sd": pair, "run_sd": run, "correlation": 1 - pair**2 / (2 * run**2)}


# ---- the track


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise of trained runs.

    Attributes:
        seeds: What each seed adds to the loss.
        residuals: What a draw adds to that.
    """

    seeds: Array
    residuals: Array

    @classmethod
    def of(cls, losses: Array) -> "Noise":
        """Of losses of shape (seeds, draws)."""
        draws = losses.shape[1]
        means = losses.mean(1)
        residuals = (losses - means[:, None]) * np.sqrt(draws / (draws - 1))
        return cls(means - means.mean(), residuals.ravel())

    def draw(self, rng: np.random.Generator) -> float:
        """A residual, smoothed."""
        residual = self.residuals[rng.integers(len(self.residuals))]
        return float((residual + self._width * rng.standard_normal()) / self._inflation)

    @functools.cached_property
    def _width(self) -> float:
        """Silverman's rule of thumb."""
        return float(0.9 * self.residuals.std() * len(self.residuals) ** -0.2)

    @functools.cached_property
    def _inflation(self) -> float:
        return float(np.hypot(1, self._width / self.residuals.std()))

    @property
    def seed_sd(self) -> float:
        """The standard deviation of what seeds add, without that of the draws in their means."""
        draws = len(self.residuals) // len(self.seeds)
        return float(np.sqrt(max(0.0, self.seeds.var() - self.residuals.var() / draws)))


class Track:
    """Ideas one after another, and runs of recipes.

    Args:
        ideas: Draws the ideas.
        rng: Draws the noise.
        noise: Of runs.
        effect: How much an idea helps or harms, in standard deviations of a pair.
    """

    def __init__(self, ideas: np.random.Generator, rng: np.random.Generator, noise: Noise, effect: float) -> None:
        self._ideas = ideas
        self.pair_sd = float(np.sqrt(2) * noise.residuals.std())
        self._rng = rng
        self._noise = noise
        self._effect = effect * self.pair_sd
        self._of_seed: dict[int, float] = {}
        self._baseline: dict[int, float] = {}
        self._next_fresh = SHARED_SEEDS
        self._first_shared = 0
        self.runs = 0
        self.truth = 0.0  # the loss of what was adopted, without noise; 0 at the start
        self.tried = {"helps": 0, "harms": 0, "idle": 0}
        self.adopted = {"helps": 0, "harms": 0, "idle": 0}

    def idea(self) -> tuple[str, float]:
        """The kind of the next idea, and what it adds to the loss."""
        drawn = self._ideas.random()
        kind = "helps" if drawn < HELPS else "harms" if drawn < HELPS + HARMS else "idle"
        self.tried[kind] += 1
        return kind, {"helps": -self._effect, "harms": self._effect, "idle": 0.0}[kind]

    def adopt(self, kind: str, added: float) -> None:
        """Make an idea part of the baseline, whose seeds are fresh from then on."""
        self.adopted[kind] += 1
        self.truth += added
        self._first_shared = self.fresh(SHARED_SEEDS)[0]

    def fresh(self, count: int) -> range:
        """Seeds that nothing has used."""
        first = self._next_fresh
        self._next_fresh += count
        return range(first, first + count)

    def run(self, seed: int, added: float = 0.0) -> float:
        """The loss of a new run of the baseline, or of an idea on it."""
        self.runs += 1
        if seed not in self._of_seed:
            self._of_seed[seed] = float(self._noise.seeds[self._rng.integers(len(self._noise.seeds))])
        return self.truth + added + self._of_seed[seed] + self._noise.draw(self._rng)

    def pair(self, place: int, added: float) -> float:
        """The difference of a pair on a shared seed, whose baseline runs once."""
        seed = self._first_shared + place
        if seed not in self._baseline:
            self._baseline[seed] = self.run(seed)
        return self.run(seed, added) - self._baseline[seed]

    def fresh_pair(self, seed: int, added: float) -> float:
        """The difference of a pair whose baseline runs for it alone."""
        return self.run(seed, added) - self.run(seed)


# ---- the loops: each decides about one idea, and returns the gain that its log claims, or None


class KeepIfLower:
    """One run of each idea, against the best kept run.

    Args:
        track: Of the race.
        floor: By how much it must be lower, in standard deviations of a pair.
    """

    def __init__(self, track: Track, floor: float) -> None:
        self._track = track
        self._floor = floor * track.pair_sd
        self._best = track.run(0)

    def decide(self, added: float) -> float | None:
        """One run, kept or not."""
        loss = self._track.run(0, added)
        if loss >= self._best - self._floor:
            return None
        gain, self._best = self._best - loss, loss
        return gain


def t_of(differences: Sequence[float]) -> float:
    """The t of an improvement; 0 if no difference varies."""
    sd = statistics.stdev(differences)
    return -statistics.fmean(differences) / (sd / len(differences) ** 0.5) if sd else 0.0


class ThreeSeeds:
    """A t test after three pairs."""

    def __init__(self, track: Track) -> None:
        self._track = track

    def decide(self, added: float) -> float | None:
        """Three pairs, and a test."""
        differences = [self._track.pair(place, added) for place in range(3)]
        return -statistics.fmean(differences) if t_of(differences) >= T_OF_THREE else None


class Gate:
    """A group-sequential test of each idea by itself."""

    def __init__(self, track: Track) -> None:
        self._track = track

    def decide(self, added: float) -> float | None:
        """Pairs up to a look that ends it."""
        differences: list[float] = []
        for number, look in enumerate(GATE_LOOKS):
            differences += [self._track.pair(place, added) for place in range(len(differences), look)]
            t = t_of(differences)
            if t <= 0:
                return None
            if t >= _critical(number):
                return -statistics.fmean(differences)
        return None


@functools.cache
def _critical(number: int) -> float:
    """The t that a look of the gate needs, one-sided."""
    return float(PlannedLook(GATE_LOOKS, number, spending(GATE_LOOKS, reserve=0.0)).critical(2 * ALPHA))


class Try:
    """The rule of ``ablate try``."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._rule = StreamRule()
        self._confirmed = 0
        self._adopted = 0

    def decide(self, added: float) -> float | None:
        """A screen, and fresh pairs."""
        level = self._rule.level(self._confirmed + 1, self._adopted)
        screen: list[float] = []
        fresh: list[float] = []
        seeds = self._track.fresh(self._rule.looks[-1])
        while True:
            decision = self._rule.next(screen, fresh, level)
            if decision.step == "screen":
                screen += [self._track.pair(place, added) for place in range(len(screen), decision.wanted)]
            elif decision.step == "confirm":
                fresh += [self._track.fresh_pair(seeds[place], added) for place in range(len(fresh), decision.wanted)]
            else:
                break
        self._confirmed += bool(fresh)
        if decision.step != "adopted":
            return None
        self._adopted += 1
        return -statistics.fmean(fresh[: decision.confirming])


LOOPS: dict[str, Callable[[Track], Any]] = {
    "keep if lower": partial(KeepIfLower, floor=0.0),
    "keep if lower by a floor": partial(KeepIfLower, floor=1.0),
    "t-test after three seeds": ThreeSeeds,
    "a gate for each decision": Gate,
    "try": Try,
}


# ---- races


def race(track: Track, make: Callable[[Track], Any], *, is_list: bool) -> dict[str, float]:
    """One loop, up to the end of its budget or of its list: counts, and gains in standard deviations of a pair."""
    loop, apparent, ideas = make(track), 0.0, 0
    while ideas < LISTED if is_list else track.runs < BUDGET:
        kind, added = track.idea()
        gain = loop.decide(added)
        ideas += 1
        if gain is not None and (is_list or track.runs <= BUDGET):
            apparent += gain
            track.adopt(kind, added)
    helps = track.tried["helps"]
    kept = sum(track.adopted.values())
    return {
        "ideas": ideas,
        "runs": track.runs,
        "kept": kept,
        "false": 1 - track.adopted["helps"] / kept if kept else 0.0,
        "missed": 1 - track.adopted["helps"] / helps if helps else 0.0,
        "apparent": apparent / track.pair_sd,
        "true": -track.truth / track.pair_sd,
    }


def track_of(seed: int, number: int, noise: Noise, effect: float) -> Track:
    """The track of a race, whose ideas are the same for all loops."""
    ideas, rng = (np.random.default_rng([seed, number, stream]) for stream in range(2))
    return Track(ideas, rng, noise, effect)


def _races(request: Request, *, is_list: bool) -> Iterator[Row]:
    for bank_row in read_rows(BANK):
        noise = Noise.of(np.array(bank_row.losses))
        for effect in EFFECTS:
            for name, make in LOOPS.items():
                tracks = (track_of(request.options.seed, number, noise, effect) for number in range(RACES))
                found = [race(track, make, is_list=is_list) for track in tracks]
                means: dict[str, Any] = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
                low, high = np.quantile([each["true"] for each in found], (0.05, 0.95))
                title = f"{bank_row.variant}, {effect:g} sd: {name}"
                facts = {"size": bank_row.variant, "effect": effect, "loop": name, **means}
                yield request.row(title, true_low=float(low), true_high=float(high), **facts)


def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """What each loop claims, and what it has gained; of the bank, the residuals."""
    if rows[0].loop is None:
        with chart(path, title, columns=len(rows), height=2.6, **options) as axes:
            for axis, row in zip(np.ravel(axes), rows, strict=True):
                axis.hist(Noise.of(np.array(row.losses)).residuals, bins=20)
                axis.set(title=row.variant, xlabel="what a draw adds, nats per character")
        return
    rows = [row for row in rows if row.shape == rows[0].shape]
    cases = list(dict.fromkeys((row.size, row.effect) for row in rows))
    with chart(path, title, columns=len(EFFECTS), rows=len(cases) // len(EFFECTS), height=2.6, **options) as axes:
        for number, (axis, case) in enumerate(zip(np.ravel(axes), cases, strict=True)):
            own = [row for row in rows if (row.size, row.effect) == case]
            places = np.arange(len(own))
            axis.barh(places + 0.2, [row.apparent for row in own], 0.4, color="C0", alpha=0.45, label="claimed")
            errors = [
                [max(0.0, row.true - row.true_low) for row in own],
                [max(0.0, row.true_high - row.true) for row in own],
            ]
            axis.barh(places - 0.2, [row.true for row in own], 0.4, xerr=errors, color="C1", label="true")
            axis.set_yticks(places, ["" if number % len(EFFECTS) else row.loop for row in own])
            axis.invert_yaxis()
            axis.axvline(0, color=axis.xaxis.label.get_color(), lw=0.8)
            axis.set(title=f"{case[0]}, ideas of {case[1]:g} sd", xlabel="gain, sd of a pair")
        np.ravel(axes)[1].legend(fontsize=8, loc="lower right")


PARTS = {
    "bank": bank,
    "endless": partial(_races, is_list=False),
    "list": partial(_races, is_list=True),
}
BENCH = Bench(
    run=lambda request: request.sizes(request),
    shapes=["endless", "list"],
    parse=partial(parts.named, PARTS),
    devices=("cpu",),
    dtypes=("float32",),
    columns={
        "sd of a pair": ("pair_sd", 1, ".4f"),
        "of a run": ("run_sd", 1, ".4f"),
        "correlation": ("correlation", 1, ".2f"),
        "ideas": ("ideas", 1, ".0f"),
        "runs": ("runs", 1, ".0f"),
        "kept": ("kept", 1, ".1f"),
        "false, %": ("false", 100, ".0f"),
        "missed, %": ("missed", 100, ".0f"),
        "claimed": ("apparent", 1, ".1f"),
        "true": ("true", 1, ".1f"),
    },
    draw=draw,
    files=("lightning_llm/statistics/stream.py", "lightning_llm/statistics/looks.py", "benchmarks/race.py"),
)
