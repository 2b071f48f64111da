"""``python -m benchmarks faults``: random faults in a tiny training run, and their cost.

Each round draws a fault and its moment from a seed of its own, and ends with a comparison: see ``fault_stage.py``.
A round may cost steps since the last checkpoint, which are repeated; never a saved step, never a result that differs
from an undisturbed run, never an end without a message.
"""

import logging
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.charts import LOWER, Measure, bar_plot
from benchmarks.commands import last_line
from benchmarks.fault_process import forker
from benchmarks.fault_stage import MICRO_BATCHES, SAVED_EVERY, STEPS, Stage, Truth
from benchmarks.harness import Bench, Request
from benchmarks.rows import Columns, Row, print_table
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
Round = Callable[[Stage, random.Random], None]
Damage = Callable[[bytes, random.Random], bytes]


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
    went_wrong = 0
    for done, (name, number, stage) in enumerate(_stages(base, drawn), start=1):
        rounds[name].append(stage)
        if stage.problems:
            went_wrong += 1
            lines = [f"seed {number}, {name}:{stage.what}", *(f"  {problem}" for problem in stage.problems)]
            for line in (*lines, f"  its folder: {stage.folder}"):
                request.status.console.print(line, highlight=False)
        request.status.update(f"round {done} of {request.rounds}: {name}, {went_wrong} went wrong")
    for name, group in rounds.items():
        wrong = [f"{name}: see {stage.folder}" for stage in group if stage.problems]
        yield request.row(
            name,
            rounds=len(group),
            **{field: sum(getattr(one, field) > 0 for one in group) for field in ("injected", "resumed", "refused")},
            **{field: max(getattr(one, field) for one in group) for field in ("repeated_steps", "lost_steps")},
            wrong=len(wrong),
            problems=wrong,
            seconds=round(sum(stage.seconds for stage in group), 1),
            seed=seed,
        )
    if not went_wrong:
        shutil.rmtree(base)


def show(rows: Sequence[Row], console: Console) -> None:
    """A line for each fault, and their total."""
    total = {name: (max if "steps" in name else sum)(getattr(row, name) for row in rows) for name in FIELDS}
    print_table([*rows, Row(variant="all", _group=rows[0]._group, **total)], console, COLUMNS)
    console.print(f"seed {rows[0].seed}")


def _stages(base: Path, drawn: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, Stage]]:
    data = base / "data"
    data.mkdir()
    (data / "text.txt").write_text(made_up_text(), encoding="utf-8")
    with forker() as run_children:
        truths = dict[int, Truth]()
        for name, seed in drawn:
            processes = 2 if name == "lost rank" else 1
            for each in sorted({1, processes} - truths.keys()):
                truths[each] = _undisturbed(Stage(run_children, base / f"undisturbed-{each}", data, each), data)
            start, stage = time.perf_counter(), Stage(run_children, base / f"round-{seed}", data, processes)
            ROUNDS[name](stage, random.Random(seed))
            stage.go_on()
            stage.compare(truths[processes])
            if stage.lost_steps:
                stage.problems.append(f"{stage.lost_steps} steps that were in a checkpoint are lost")
            if not stage.problems:
                shutil.rmtree(stage.folder)
            stage.seconds = time.perf_counter() - start
            yield name, seed, stage


def _undisturbed(stage: Stage, data: Path) -> Truth:
    stage.go_on()
    if stage.problems or not stage.saved:
        raise RuntimeError(f"the undisturbed run went wrong: {'; '.join(stage.problems) or 'no checkpoint was seen'}")
    shutil.copytree(stage.folder / "store", data / "store", dirs_exist_ok=True)
    return stage.truth()


def made_up_text() -> str:
    """400 lines of words that no language has."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(60)]
    return "".join(" ".join(rng.choices(words, k=20)) + "\n" for _ in range(400))


def kill(stage: Stage, rng: random.Random) -> None:
    """One or two kills, each in a step, while a file is written or renamed, or before the first step."""
    for _ in range(rng.randint(1, 2)):
        moment = _draw_moment(rng, stage)
        stage.what += f" SIGKILL {_said(moment)};"
        ran = stage.fit(kill=moment)
        stage.injected |= ran.status == -9
        if ran.status not in (-9, 0):
            stage.problems.append(f"run {stage.runs} ended with {ran.status}: {last_line(ran.error)}")


def full_disk(stage: Stage, rng: random.Random) -> None:
    """From some step on, or from the start, no file grows beyond some size."""
    batch = rng.randrange(MICRO_BATCHES * STEPS)
    size = rng.choice([0, rng.randint(1, 5_000), rng.randint(5_000, 300_000)])
    stage.what = f"no file beyond {size} bytes from micro-batch {batch} on"
    if not batch:
        shutil.rmtree(stage.folder / "store")  # it is prepared on the full disk
    ran = stage.fit(full_disk={"batch": batch, "bytes": size})
    if ran.status:
        stage.injected = True
        stage.expect_refusal(ran, "File too large", "cannot ")


def nan_batch(stage: Stage, rng: random.Random) -> None:
    """The loss of one micro-batch is NaN or infinite, once."""
    micro_batch, value = rng.randrange(MICRO_BATCHES * STEPS), rng.choice(["nan", "inf"])
    stage.what, stage.injected = f"loss {value} in micro-batch {micro_batch + 1}", True
    ran = stage.fit(poison={"batch": micro_batch + 1, "value": value})
    step, within = divmod(micro_batch, MICRO_BATCHES)
    stage.expect_refusal(ran, f"train_loss is {value} in step {step + 1}, micro-batch {within}")


def lost_rank(stage: Stage, rng: random.Random) -> None:
    """One of two processes is killed; the other must say so and end."""
    moment = {**_draw_moment(rng, stage), "rank": rng.randrange(2)}
    if moment["rank"] and moment["on"] in ("save", "rename"):
        moment["on"] = "micro-batch"  # only the first process writes
    stage.what = f"SIGKILL to process {moment['rank']}, {_said(moment)}"
    stage.fit(kill=moment)
    killed, other = (stage.ended[rank] for rank in (moment["rank"], 1 - moment["rank"]))
    stage.injected = killed.status == -9
    if stage.injected and other.status != 0:
        stage.what += f"; the other ended after {other.seconds:.1f} s with {other.status}"
        stage.expect_refusal(other, "lost", "reach")


def clock_jump(stage: Stage, rng: random.Random) -> None:
    """The clock jumps by up to two days within a run that is killed later; an older run may lie beside it."""
    hours = rng.uniform(-48, 48)
    stage.what, stage.injected = f"clock {hours:+.1f} h", True
    if rng.random() < 0.5:
        older = rng.uniform(-48, 48)
        stage.what += f", beside an older run with {older:+.1f} h"
        stage.fit("--trainer.max_steps=4", clock={"batch": 0, "seconds": 3600 * older})
    batch = rng.randint(0, MICRO_BATCHES * STEPS // 2)
    moment = _in_some_step(rng, batch)
    stage.fit(afresh=True, clock={"batch": batch, "seconds": 3600 * hours}, kill=moment)
    if rng.random() < 0.5:
        hours = rng.uniform(-48, 48)
        stage.what += f", then {hours:+.1f} h"
        stage.fit(clock={"batch": 0, "seconds": 3600 * hours})


def _said(moment: dict[str, Any]) -> str:
    return f"{moment['after_s'] * 1e3:.1f} ms after {moment['on']} {moment['count']}"


def damaged_checkpoint(stage: Stage, rng: random.Random, damage: Damage, word: str) -> None:
    """A kill, and the newest checkpoint, or each of them, is damaged: in tensors, headers or the index."""
    stage.fit(kill=_in_some_step(rng))
    files = stage.checkpoints
    whole = {path: path.read_bytes() for path in files}
    chosen = files if rng.random() < 0.25 else files[-1:]
    for path in chosen:
        _spoil(stage, path, whole[path], damage, word, rng)
    good = [path for path in files if path not in chosen]
    ran = stage.fit()
    if not stage.resumed_file:
        if good:
            stage.problems.append(f"{good[-1].name} is whole and was not taken: {last_line(ran.error)}")
        stage.expect_refusal(ran, "truncated or damaged")
        for path in chosen:
            path.write_bytes(whole[path])
        return
    used = Path(stage.resumed_file).name
    if good and used == good[-1].name:
        # what was saved behind the file that was taken is damaged, not lost; the message is what must not be missing
        stage.lost_steps = 0
        if f"{chosen[-1].name} is truncated or damaged" not in ran.error:
            stage.problems.append(f"{used} was taken instead of {chosen[-1].name} without a message")
        stage.refused += 1
    elif word == "cut":
        stage.problems.append(f"{used} is cut short and the run resumed from it")


def damaged_store(stage: Stage, rng: random.Random, damage: Damage, word: str) -> None:
    """A file of the token store is damaged, before the run or after a kill in it."""
    if rng.random() < 0.5:
        stage.fit(kill=_in_some_step(rng))
    path = stage.folder / "store" / rng.choice(("train.bin", "val.bin", "meta.json", "tokenizer.json"))
    whole = path.read_bytes()
    _spoil(stage, path, whole, damage, word, rng)
    ran = stage.fit()
    if ran.status != 0 or path.suffix == ".bin":  # else: it may have been white space, and the result will tell
        stage.expect_refusal(ran, "token store store: ", "error: store/")
    path.write_bytes(whole)


def _in_some_step(rng: random.Random, after: int = 0) -> dict[str, Any]:
    """In a micro-batch behind the first checkpoint that follows ``after`` micro-batches."""
    count = rng.randint(after + MICRO_BATCHES * SAVED_EVERY + 1, MICRO_BATCHES * STEPS)
    return {"on": "micro-batch", "count": count, "after_s": 0.0}


def _draw_moment(rng: random.Random, stage: Stage) -> dict[str, Any]:
    left = STEPS - stage.saved
    on = rng.choice(["start", "micro-batch", "micro-batch", "save", "rename"])
    most = {"start": 1, "micro-batch": MICRO_BATCHES * max(1, left)}.get(on, max(1, left // 2))
    after = rng.uniform(0, 1.0) if on == "start" else rng.uniform(0, 0.006)
    return {"on": on, "count": rng.randint(1, most), "after_s": after}


def _flip(content: bytes, rng: random.Random) -> bytes:
    first = rng.choice([0, int(0.95 * len(content))])  # the index of an archive is in its last 5%
    place = rng.randrange(first, len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _spoil(stage: Stage, path: Path, whole: bytes, damage: Damage, word: str, rng: random.Random) -> None:
    damaged = damage(whole, rng)
    path.write_bytes(damaged)  # in place: best.ckpt may be the same file
    place = next((at for at, pair in enumerate(zip(whole, damaged, strict=False)) if pair[0] != pair[1]), len(damaged))
    stage.what += f" {word} {path.name} at {place} of {len(whole)};"
    stage.injected = True


CUT: dict[str, Any] = {"damage": lambda content, rng: content[: rng.randrange(len(content))], "word": "cut"}
FLIPPED: dict[str, Any] = {"damage": _flip, "word": "bit flipped in"}
ROUNDS: dict[str, Round] = {
    "kill": kill,
    "full disk": full_disk,
    "truncated checkpoint": partial(damaged_checkpoint, **CUT),
    "flipped checkpoint": partial(damaged_checkpoint, **FLIPPED),
    "truncated tokens": partial(damaged_store, **CUT),
    "flipped tokens": partial(damaged_store, **FLIPPED),
    "nan batch": nan_batch,
    "lost rank": lost_rank,
    "clock jump": clock_jump,
}

BENCH = Bench(
    run=run,
    shapes=[""],
    devices=("cpu",),
    dtypes=("float32",),  # a tiny model
    columns=COLUMNS,
    show=show,
    draw=bar_plot(Measure("repeated_steps", 1, f"steps repeated, at most{LOWER}")),
    check=parts.check,
)
