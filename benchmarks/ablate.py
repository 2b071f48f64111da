"""``python -m benchmarks ablate``: does ``lightning-llm ablate`` say what is true, whatever happens to its processes?

``null`` and ``power`` train a pool of pairs, baseline and null variant, and draw comparisons from it: differences of
the pool with random signs, to which ``power`` adds a known one. The product's verdict rule judges them. The other parts
run whole experiments by the product's command: ``tuning`` plants a learning rate that is too low, ``kills`` kills
processes at random moments, ``workers`` counts who did which run. ``throughput`` counts runs per hour
(``benchmarks.ablate_throughput``).

The parts of ``benchmarks.ablate_command`` run experiments on commands.

The parts of ``benchmarks.ablate_looks`` train nothing: they simulate what planned looks cost and say.

The command fails if a share differs from its prediction by more than its tolerance, if a verdict is not the planted
one, if a report differs from that of an undisturbed experiment, or if runs take longer than they should.
"""

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from benchmarks import ablate_command, ablate_looks, parts
from benchmarks.ablate_experiments import TEXT, Experiment, killed, workplace
from benchmarks.ablate_throughput import throughput
from benchmarks.charts import Measure
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row
from lightning_llm.ablate.experiment import ALPHA, LOOKS
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.report.report import Report
from lightning_llm.cli.train import cli_main
from lightning_llm.measure.timer import num_threads
from lightning_llm.statistics.design import BETTER, UNDECIDED, Design
from lightning_llm.statistics.estimates import Array, correlation
from lightning_llm.statistics.pairing import NULL_VALUES, mismatch
from lightning_llm.statistics.verdict import Sample, verdicts

REDRAW = "--trainer.callbacks+=lightning_llm.ablate.fit.null_variant.RedrawMLP"
SEEDS, NULLS, PLANTED, PATHS = 64, 4000, 1000, 100_000  # of the pool, null, each effect of power, and a prediction
EFFECTS = (0.5, 0.75, 1.0, 1.5, 2.0)  # in standard deviations of a difference
NULL_TOLERANCE, POWER_TOLERANCE = 0.01, 0.10
KILLS, PAIRS = 20, 4  # of the experiments that are killed or shared
LR, LOW_LR = "model.optimizer.init_args.lr", 0.01
STEPS, INTERVAL = "trainer.max_steps", "trainer.val_check_interval"
MLPS = {"relu": {"model.architecture.mlp": "relu"}, "gelu": {"model.architecture.mlp": "gelu"}}
NORM = {"layernorm": {"model.architecture.norm": "layernorm"}}
SHOWN = {"found": "share of verdicts", "sd": "sd of a pair", "runs_per_hour": "runs per hour", "runs": "runs"}
SAVING = {STEPS: 400, INTERVAL: 40}  # a kill may hit training and saving


class Way(NamedTuple):
    """How a comparison is judged: at which numbers of pairs, and which of them were planned."""

    at: Sequence[int]
    looks: tuple[int, ...] = ()


PLANNED = Design(ALPHA, LOOKS)
MOST, PEEKING = PLANNED.further[1], "plain t test at each look"  # what a plan of looks is for
WAYS = {
    "one look": Way([LOOKS[-1]]),
    "planned looks": Way(LOOKS, LOOKS),
    "planned looks, then two further ones": Way((*LOOKS, *PLANNED.further[:2]), LOOKS),
    PEEKING: Way(LOOKS),
}


@cache
def pool() -> Array:
    """Losses of the baseline and of its null variant, shape (seeds, 2)."""
    losses = []
    with num_threads(1), workplace() as folder:
        for seed in range(SEEDS):
            base, null = _fit(folder / f"baseline,seed={seed}", seed), _fit(folder / f"null,seed={seed}", seed, REDRAW)
            if problem := mismatch(base, null, [NULL_VALUES]):
                raise RuntimeError(f"seed {seed} is no pair: {problem}")
            losses.append([base["val_loss"], null["val_loss"]])
    return np.array(losses)


def _fit(out: Path, seed: int, *options: str) -> dict[str, Any]:
    """The summary of a run, in this process."""
    data = [f"--data.path={out.parent / TEXT}", f"--data.store={out.parent / 'store'}", "--trainer.logger=false"]
    seeds = [f"--seed_everything={seed}", f"--data.seed={seed}", f"--trainer.run_dir={out}"]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        cli_main(["fit", f"--config={out.parent / 'base.yaml'}", *data, *seeds, *options])
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def judged(way: Way, baseline: Sequence[float], variant: Sequence[float]) -> tuple[str, int]:
    """The product's verdict, and the number of pairs that it took."""
    for pairs in way.at:
        sample = Sample(baseline[:pairs], variant[:pairs])
        verdict_of_pairs = verdicts({"": sample}, alpha=ALPHA, looks=way.looks)[""].verdict
        if verdict_of_pairs != UNDECIDED:
            break
    return verdict_of_pairs, pairs


def predicted(way: Way, effect: float) -> float:
    """The probability of ``better`` at an effect in standard deviations; of any verdict at an effect of 0.

    For one look, it is that of the noncentral t distribution; for several, the share of seeded normal paths.
    """
    design, last = Design(ALPHA, way.looks), way.at[-1]
    critical = [design.rule(pairs).critical(ALPHA) for pairs in way.at]
    if len(way.at) == 1:
        upper, lower = (special.nctdtr(last - 1, sign * effect * math.sqrt(last), -critical[0]) for sign in (-1, 1))
        return float(upper if effect else upper + lower)
    paths = ablate_looks.Paths.of(ablate_looks.draws("normal", PATHS, last), way.at)
    return float(np.mean(ablate_looks.judged(paths, np.array(critical), effect).has_right_direction(effect)))


def drawn(losses: Array, count: int, effect: float) -> Iterator[tuple[list[float], list[float]]]:
    """Comparisons: seeds of the pool in random order, with random signs of their differences, and an effect."""
    rng, differences = np.random.default_rng(1), losses[:, 1] - losses[:, 0]
    shift = effect * math.sqrt(float(np.mean(differences**2)))  # with random signs, their mean is 0
    for _ in range(count):
        chosen = rng.permutation(len(losses))[:MOST]
        variant = losses[chosen, 0] + rng.choice([-1, 1], MOST) * differences[chosen] - shift
        yield list(losses[chosen, 0]), list(variant)


def _shares(request: Request, effects: Sequence[float], count: int, tolerance: float) -> Iterator[Row]:
    losses = pool()
    facts: dict[str, Any] = {"sd": float(np.std(losses[:, 1] - losses[:, 0], ddof=1)), "seeds": len(losses)}
    facts["correlation"] = correlation(list(losses[:, 0]), list(losses[:, 1])) or 0.0
    for effect, name in [(effect, name) for effect in effects for name in WAYS if name != PEEKING or not effect]:
        way, label = WAYS[name], f"{name}, {effect:g} sd" if effect else name
        ended = [judged(way, *both) for both in drawn(losses, count, effect)]
        share = sum(word == BETTER if effect else word != UNDECIDED for word, _ in ended) / count
        shares: dict[str, Any] = {"found": share, "predicted": predicted(way, effect)}
        goal = shares["predicted"] if effect or way.looks else ALPHA
        is_off = abs(share - goal) > tolerance and name != PEEKING
        shares["problems"] = [f"{label}: {share:.1%} found, {goal:.1%} expected"] if is_off else []
        pairs = sum(pairs for _, pairs in ended) / count
        yield request.row(label, **shares, pairs=pairs, effect=effect, comparisons=count, **facts)


def _tuning(request: Request) -> Iterator[Row]:
    """The baseline's learning rate is too low. The variant has four times that rate, and a quarter of the MLP's width.

    A smaller MLP is no improvement: whatever makes the variant better is the rate.
    """
    variant = {LR: 4 * LOW_LR, "model.architecture.intermediate_size": 16}
    content = {"variants": {"variant": variant}, "options": {LR: LOW_LR}, "looks": [4], "delta": 0.02}
    with workplace() as folder:
        one = Experiment(folder, "rate", {**content, "tune": {"option": LR, "factors": [0.5, 1, 2], "seeds": 2}})
        report = one.report(one.start())
    assert report.tuning is not None
    untuned, tuned = report.row("variant"), report.row("variant", "tuned")
    for name, row, rate, is_right in (
        ("untuned", untuned, "untuned", untuned.verdict == BETTER),
        ("tuned", tuned, "best", tuned.verdict != BETTER),
    ):
        facts = {field: getattr(row, field) for field in ("verdict", "difference", "interval", "p_adjusted", "pairs")}
        rates = ", ".join(f"{getattr(report.tuning.variants[side], rate):g}" for side in ("baseline", "variant"))
        problems = [] if is_right else [f"{name}: {row.verdict}"]
        yield request.row(name, **facts, rates=rates, runs=_runs(report), problems=problems)


def _runs(report: Report) -> int:
    """Number of runs that an experiment trained."""
    assert report.spent is not None
    return report.spent.runs


def _kills(request: Request) -> Iterator[Row]:
    rng, done, resumed, runs, number, compared = random.Random(request.options.seed), 0, 0, 0, 0, 0
    with workplace() as folder:
        whole = Experiment(folder, "mlps", {"variants": MLPS, "options": SAVING, "looks": [PAIRS]})
        truth = whole.report(whole.start())
        while done < KILLS:
            one, number = Experiment(folder, "mlps", out=f"killed-{number}"), number + 1
            process, kills = killed(one, KILLS - done, rng)
            compared += one.check(one.report(process), truth)
            done, runs = done + kills, runs + _runs(truth)
            resumed += sum(one.count("resuming").values())
        yield request.row("killed", kills=done, runs=runs, resumed=resumed, experiments=number, compared=compared)
        both = [Experiment(folder, "mlps", out="same"), Experiment(folder, "norm", {"variants": NORM, "looks": [2]})]
        reports = [one.report(process) for one, process in [(one, one.start()) for one in both]]
        compared = both[0].check(reports[0], truth)
        each_runs = [_runs(each) for each in reports]
        other = Experiment(folder, "norm", out="same")
        status, line = other.start().wait(), other.last_line()
        if each_runs != [_runs(truth), 7] or status != 2 or "has a plan with another" not in line:
            raise RuntimeError(f"{each_runs} runs, then status {status}, {line}: see {folder}")
        yield request.row("two experiments at once", kills=0, runs=sum(each_runs), experiments=2, compared=compared)


def _workers(request: Request) -> Iterator[Row]:
    with workplace() as folder:
        one = Experiment(folder, "mlps", {"variants": MLPS, "looks": [PAIRS]})
        first = one.start("--workers", "2")
        while not (one.out / PLAN).is_file() and first.poll() is None:
            time.sleep(0.05)
        others = [one.work(number) for number in (2, 3)]
        runs, ends = _runs(one.report(first)), [each.wait() for each in others]
        started, resumed = one.count("starting"), one.count("resuming")
        if ends != [0, 0] or resumed or len(started) != runs or set(started.values()) != {1}:
            raise RuntimeError(f"{started}, resumed {resumed}, {runs} runs, status {ends}: see {folder}")
        yield request.row("four workers", runs=runs, workers=sum(one.taken()), experiments=1)


PARTS = {
    "null": lambda request: _shares(request, [0.0], NULLS, NULL_TOLERANCE),
    "power": lambda request: _shares(request, EFFECTS, PLANTED, POWER_TOLERANCE),
    **{"tuning": _tuning, "kills": _kills, "workers": _workers, "throughput": throughput, **ablate_looks.PARTS},
    **{"aa": ablate_command.false_directions, "planted": ablate_command.planted, "pairing": ablate_command.pairing},
}
BENCH = Bench(
    run=lambda request: request.sizes(request),  # the rows of a part
    shapes=list(PARTS),
    parse=partial(parts.named, PARTS),
    devices=("cpu",),
    dtypes=("float32",),  # the precision is that of fit
    columns={
        **{"found, %": ("found", 100, ".1f"), "predicted, %": ("predicted", 100, ".1f"), "pairs": ("pairs", 1, ".1f")},
        **{"difference": ("difference", 1, "+.4f"), "verdict": ("verdict", 1, ""), "learning rates": ("rates", 1, "")},
        **{"kills": ("kills", 1, "d"), "runs": ("runs", 1, "d"), "resumed": ("resumed", 1, "d")},
        **{"s": ("total_s", 1, ".2f"), "runs/hour": ("runs_per_hour", 1, ".0f"), "x loop": ("speedup", 1, ".1f")},
        **{"sd": ("sd", 1, ".4f"), "correlation": ("correlation", 1, ".2f"), "seeds saved": ("saved", 1, "d")},
        **{"training, %": ("share", 100, ".0f"), "matmuls, s": ("matmuls_s", 1, ".2f")},
    },
    draw=partial(parts.draw_bars, [Measure(field, 1, label) for field, label in SHOWN.items()]),
    files=("lightning_llm/ablate", "lightning_llm/cli/ablate.py", "lightning_llm/cli/ablate_fit.py"),
    check=parts.check,
)
