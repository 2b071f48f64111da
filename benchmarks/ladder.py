"""``python -m benchmarks ladder``: does what is found at one size hold at another?

``transfer`` trains each size at five learning rates a factor of 1.41 apart around that of ``--size``, with two seeds,
on the characters of Python's standard library. Of each optimizer it reports the best rate in octaves above that, and
its tilt: the slope over the logarithm of the counted FLOPs to base 4, with a 95% interval. ``transfer=25k,50k`` has
other sizes. MuonAdamW has no ``mup``, which is for kinds of Adam. Its runs are in ``runs/ladder-transfer``, a process
for each core; no finished one is repeated.

``rules`` is about predictions of differences (``benchmarks.ladder_predictions``).

The command fails if the rate of MuonAdamW, the default, tilts (the interval excludes zero, and the best rate moves by
over half an octave), or if the best loss of a larger model is higher.
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from benchmarks import parts
from benchmarks.charts import LOWER
from benchmarks.commands import ROOT
from benchmarks.harness import Bench, Request
from benchmarks.ladder_predictions import RULES, draw_rules, rules
from benchmarks.rows import Row
from benchmarks.runs import fit
from lightning_llm.accounting.sizing import LR, Sizing, parse_size, sizing_for, with_options
from lightning_llm.data.find_store import find_or_prepare
from lightning_llm.io.charts import chart
from lightning_llm.io.config_file import read_config

SIZES, FACTORS, SEEDS = "25k,50k,100k,200k", [2 ** (half / 2) for half in range(-2, 3)], range(2)
CONFIG, DEFAULT = ROOT / "configs" / "shakespeare-char.yaml", "MuonAdamW"
DATA = {"data.corpus": "stdlib", "trainer.limit_val_batches": 50, "trainer.precision": "32-true"}
_ADAMW = {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.004, "weight_decay": 0.1}}
_MUP = {"model.optimizer": _ADAMW, "model.architecture.mup": {"base_width": 128, "base_head_dim": 64}}
VARIANTS: dict[str, Any] = {DEFAULT: {}, "AdamW": {"model.optimizer": _ADAMW}, "AdamW with mup": _MUP}
MOST_MOVED = 0.5  # octaves, over all sizes
DIVERGED = 5.0  # nats per character of a run whose loss is NaN: worse than guessing


def parse(text: str) -> Callable[[Request], Iterator[Row]]:
    """What yields the rows of a shape such as ``transfer=25k,50k`` or ``rules``."""
    name, _, own = text.partition("=")
    if text == RULES:
        return rules
    sizes = [parse_size(size) for size in (own or SIZES).split(",")]
    if name != "transfer" or sorted(set(sizes)) != sizes or len(sizes) < 2:
        expected = "rules, transfer, or rising sizes such as transfer=25k,50k"
        raise ValueError(f"shapes {text!r} must be {expected}")
    return partial(transfer, sizes=sizes)


def transfer(request: Request, sizes: Sequence[int]) -> Iterator[Row]:
    """A row for each variant and size: ``losses`` by factor and seed, the best of both, and on the last the tilt."""
    folder, variants = Path("runs/ladder-transfer").absolute(), request.chosen(VARIANTS)
    store = find_or_prepare(corpus="stdlib", tokenizer="char", store=str(folder / "store"))
    sizings: dict[tuple[str, int], Sizing] = {}
    for name in variants:
        base = with_options(read_config(CONFIG), {**DATA, "data.store": str(store.path), **VARIANTS[name]})
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
        known = with_options(base, {"model.architecture.vocab_size": store.vocab_size})
        sizings |= {(name, size): sizing_for(known, size) for size in sizes}

    def loss(job: tuple[tuple[str, int], float, int]) -> float:
        (name, size), factor, seed = job
        words = [f"--config={folder / f'{name}.yaml'}", f"--size={size}", f"--seed_everything={seed}"]
        words += [f"--data.seed={seed}", f"--{LR}={sizings[name, size].options[LR] * factor:.4g}"]
        return _finished([*words, *request.options.fit_options], folder / f"{name},{size},{factor:.2f},seed={seed}")

    jobs = list(itertools.product(sizings, FACTORS, SEEDS))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        losses = dict(zip(jobs, pool.map(loss, jobs), strict=True))
    for name in variants:
        best: list[list[float]] = []
        for size in sizes:
            own = [[losses[(name, size), factor, seed] for factor in FACTORS] for seed in SEEDS]
            best.append([_lowest(each) for each in own])
            means = np.mean(own, axis=0)
            fields: dict[str, Any] = {"best_lr": sizings[name, size].options[LR] * FACTORS[int(means.argmin())]}
            fields |= {"val_loss": float(means.min()), "octaves": float(np.mean(best[-1])), "losses": own}
            if size == sizes[-1]:
                fields |= _tilt([sizings[name, each] for each in sizes], best)
            yield request.row(f"{name}: {size:,}", parameters=size, flops=sizings[name, size].flops, **fields)


def _finished(words: Sequence[str], folder: Path) -> float:
    """The validation loss of a run, which is not repeated once it has ended."""
    if not (result := folder / "result.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            summary, _ = fit(words, str(folder), OMP_NUM_THREADS="1")
        except RuntimeError as error:
            if ": stopped: " not in str(error):
                raise
            summary = {"val_loss": DIVERGED}
        result.write_text(json.dumps(summary), encoding="utf-8")
    return float(json.loads(result.read_text(encoding="utf-8"))["val_loss"])


def _lowest(losses: Sequence[float]) -> float:
    """Where the parabola through the losses is lowest, in octaves above that of ``--size``; the grid's edge at most."""
    octaves = np.log2(FACTORS)
    curve, line, _ = np.polyfit(octaves, losses, 2)
    lowest = -line / (2 * curve) if curve > 0 else octaves[int(np.argmin(losses))]
    return float(np.clip(lowest, octaves[0], octaves[-1]))


def _tilt(sizings: Sequence[Sizing], best: Any) -> dict[str, float]:
    """The slope of the best rate over log4 of FLOPs, its interval, and how far it moves over all sizes.

    ``best`` is in octaves, of shape (sizes, seeds).
    """
    places = np.repeat(np.log2([sizing.flops or 0 for sizing in sizings]) / 2, len(SEEDS))
    line = stats.linregress(places, np.ravel(best))
    half = stats.t.ppf(0.975, len(places) - 2) * np.nan_to_num(line.stderr)  # NaN if all are equal
    found = (line.slope, line.slope - half, line.slope + half, line.slope * np.ptp(places))
    return dict(zip(("tilt", "tilt_low", "tilt_high", "moved"), map(float, found), strict=True))


def check(rows: Sequence[Row]) -> None:
    """Fail if the default's rate does not carry over, a larger model is worse, or intervals do not cover."""
    parts.check(rows)
    rows = [row for row in rows if row.val_loss is not None]
    for row in (row for row in rows if row.tilt is not None and row.variant.startswith(f"{DEFAULT}:")):
        if not row.tilt_low <= 0 <= row.tilt_high and abs(row.moved) > MOST_MOVED:
            raise RuntimeError(f"{row.variant}: the best rate moves by {row.moved:+.2f} octaves, expected {MOST_MOVED}")
    for first, second in itertools.pairwise(rows):
        is_same = first.variant.partition(":")[0] == second.variant.partition(":")[0]
        if is_same and second.val_loss > first.val_loss:
            raise RuntimeError(f"{second.variant}: loss {second.val_loss:.4f}, {first.variant}: {first.val_loss:.4f}")


def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Loss against the learning rate relative to that of ``--size``; or predictions and observations."""
    if rows[0].rule is not None:
        draw_rules(rows, path, title, **options)
        return
    with chart(path, title, height=4.0, **options) as axes:
        (axis,) = np.ravel(axes)
        for row in rows:
            axis.plot(FACTORS, np.mean(row.losses, axis=0), marker="o", ms=3, label=row.variant)
        axis.set(xlabel="learning rate / --size's", xscale="log", ylabel=f"validation loss, nats/character{LOWER}")
        axis.legend(fontsize=8.5)


BENCH = Bench(
    run=lambda request: request.sizes(request),  # the rows of a shape
    shapes=["transfer", RULES],
    parse=parse,
    devices=("cpu",),
    dtypes=("float32",),
    columns={
        "best rate": ("best_lr", 1, ".4f"),
        "loss there": ("val_loss", 1, ".4f"),
        "octaves above --size": ("octaves", 1, "+.2f"),
        "tilt per 4x": ("tilt", 1, "+.2f"),
        "from": ("tilt_low", 1, "+.2f"),
        "to": ("tilt_high", 1, "+.2f"),
        "hits": (lambda row: row.hits is not None and f"{row.hits} of {row.count}", 1, ""),
        "score": ("score", 1, ".3f"),
        "error": ("error", 1, ".3f"),
        "signs": (lambda row: row.signs is not None and f"{row.signs} of {row.shown}", 1, ""),
    },
    draw=draw,
    files=(
        *("lightning_llm/accounting/sizing.py", "lightning_llm/statistics/extrapolation.py", "docs/experiments"),
        *("lightning_llm/model", "lightning_llm/optim", "configs", "examples/ablations"),
    ),
    check=check,
)
