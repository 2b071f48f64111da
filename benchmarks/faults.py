"""``python -m benchmarks faults``: random faults in a tiny training run, and their cost.

Each round draws a fault and its moment from a seed of its own, and ends with a comparison: see ``fault_stage.py``.
A round may cost steps since the last checkpoint, which are repeated; never a saved step, never a result that differs
from an undisturbed run, never an end without a message.
"""

import contextlib
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.fault_process import Forker
from benchmarks.fault_rounds import ROUNDS
from benchmarks.fault_stage import Stage, Truth
from lightning_llm.bench.harness import Bench, Request
from lightning_llm.bench.plots import LOWER, Measure, bar_plot
from lightning_llm.bench.rows import Columns, Row, print_table
from lightning_llm.io.console import Console

FIELDS = {  # the numbers of rounds, or the most steps of one
    "rounds": "rounds",
    "injected": "injected",
    "resumed": "resumed",
    "refused": "rejected with a message",
    "repeated_steps": "steps repeated, at most",
    "lost_steps": "saved steps lost, at most",
    "wrong": "wrong",
}
COLUMNS: Columns = {heading: (field, 1, "d") for field, heading in FIELDS.items()}
_WORDS = 20  # of made-up text in a line
draw = bar_plot(Measure("repeated_steps", 1, f"steps repeated, at most{LOWER}"))


def run(request: Request) -> Iterator[Row]:
    """A row for each fault; all rounds are interleaved, and round N has the seed of the first + N.

    ``injected`` are the rounds whose fault came before the run had ended, ``resumed`` those that resumed from a
    checkpoint, ``refused`` those that ended with a message about the error, or reported the damaged file they skipped.
    ``repeated_steps`` and ``lost_steps`` (before the last checkpoint) are those of the worst round; ``wrong`` counts
    the rounds that lost something, and whose folders stay.
    """
    names, seed = request.chosen(ROUNDS), request.options.seed
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports each purge, which is what is looked for
    base = Path(tempfile.mkdtemp(prefix="bench-faults-"))
    drawn = [(names[number % len(names)], seed + number) for number in range(request.rounds)]
    rounds: dict[str, list[Stage]] = {name: [] for name, _ in drawn}
    wrong: list[str] = []
    for done, (name, number, stage) in enumerate(_stages(base, drawn), start=1):
        rounds[name].append(stage)
        if stage.problems:
            wrong.append(f"{name} {number}")
            lines = [f"seed {number}, {name}:{stage.what}", *(f"  {problem}" for problem in stage.problems)]
            for line in (*lines, f"  its folder: {stage.folder}"):
                request.status.console.print(line, highlight=False)
        request.status.update(f"round {done} of {request.rounds}: {name}, {len(wrong)} went wrong")
    failed = f"{len(wrong)} of {request.rounds} rounds went wrong (fault and seed: {', '.join(wrong[:20])}); see {base}"
    for name, group in rounds.items():
        yield request.row(
            name,
            rounds=len(group),
            injected=sum(stage.injected for stage in group),
            resumed=sum(stage.resumed > 0 for stage in group),
            refused=sum(stage.refused > 0 for stage in group),
            repeated_steps=max(stage.repeated_steps for stage in group),
            lost_steps=max(stage.lost_steps for stage in group),
            wrong=sum(bool(stage.problems) for stage in group),
            seconds=round(sum(stage.seconds for stage in group), 1),
            seed=seed,
            _failed=failed if wrong else None,
        )
    if not wrong:
        shutil.rmtree(base)


def show(rows: Sequence[Row], console: Console) -> None:
    """A line for each fault, and their total."""
    total = {name: (max if "steps" in name else sum)(getattr(row, name) for row in rows) for name in FIELDS}
    print_table([*rows, Row(variant="all", _group=rows[0]._group, **total)], console, COLUMNS)
    console.print(f"seed {rows[0].seed}")


def check(rows: Sequence[Row]) -> None:
    """Fail if a round went wrong."""
    if rows[0]._failed:
        raise RuntimeError(rows[0]._failed)


def _stages(base: Path, drawn: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, Stage]]:
    data = base / "data"
    data.mkdir()
    (data / "text.txt").write_text(made_up_text(), encoding="utf-8")
    with contextlib.closing(Forker()) as forker:
        truths = {1: _truth(Stage(forker, base / "undisturbed-1", data))}
        shutil.copytree(base / "undisturbed-1" / "store", data / "store")
        for name, seed in drawn:
            processes = 2 if name == "lost rank" else 1
            if processes not in truths:
                truths[processes] = _truth(Stage(forker, base / f"undisturbed-{processes}", data, processes))
            start, stage = time.perf_counter(), Stage(forker, base / f"round-{seed}", data, processes)
            ROUNDS[name](stage, random.Random(seed))
            stage.go_on()
            stage.compare(truths[processes])
            if stage.lost_steps:
                stage.problems.append(f"{stage.lost_steps} steps that were in a checkpoint are lost")
            if not stage.problems:
                shutil.rmtree(stage.folder)
            stage.seconds = time.perf_counter() - start
            yield name, seed, stage


def _truth(stage: Stage) -> Truth:
    stage.go_on()
    if stage.problems or not stage.saved:
        raise RuntimeError(f"the undisturbed run went wrong: {'; '.join(stage.problems) or 'no checkpoint was seen'}")
    return stage.truth()


def made_up_text() -> str:
    """400 lines of words that no language has."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(60)]
    return "".join(" ".join(rng.choices(words, k=_WORDS)) + "\n" for _ in range(400))


BENCH = Bench(
    run=run,
    shapes=[""],
    devices=("cpu",),
    dtypes=("float32",),  # a tiny model
    columns=COLUMNS,
    show=show,
    draw=draw,
    check=check,
)
