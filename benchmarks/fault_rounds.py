"""The rounds of ``benchmarks faults``: what is drawn, how it is injected, and what must be said."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fault_stage import MICRO_BATCHES, SAVED_EVERY, STEPS, Stage, last_line

_STORE_FILES = ("train.bin", "val.bin", "meta.json", "tokenizer.json")

Round = Callable[[Stage, random.Random], None]
Damage = Callable[[bytes, random.Random], bytes]


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
    ran = stage.fit(kill=moment)
    killed, other = (ran.ended[rank] for rank in (moment["rank"], 1 - moment["rank"]))
    stage.injected = killed.status == -9
    if stage.injected and other.status != 0:
        stage.what += f"; the other ended after {other.seconds:.1f} s with {other.status}"
        stage.expect_refusal(dataclasses.replace(ran, ended=[other]), "lost", "reach")


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
        content = damage(whole[path], rng)
        path.write_bytes(content)  # in place: best.ckpt may be the same file
        stage.what += f" {word} {path.name} at {_difference(whole[path], content)} of {len(whole[path])};"
    stage.injected = True
    good = [path for path in files if path not in chosen]
    ran = stage.fit()
    if ran.resumed_step is None:
        if good:
            stage.problems.append(f"{good[-1].name} is whole and was not taken: {last_line(ran.error)}")
        stage.expect_refusal(ran, "truncated or damaged")
        for path in chosen:
            path.write_bytes(whole[path])
        return
    used = Path(ran.resumed_file).name
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
    path = stage.folder / "store" / rng.choice(_STORE_FILES)
    whole = path.read_bytes()
    content = damage(whole, rng)
    path.write_bytes(content)
    stage.what += f" {word} {path.name} at {_difference(whole, content)} of {len(whole)}"
    stage.injected = True
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


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def _flip(content: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(content)
    # half of them in the last 5%: the index of an archive stands there
    first = rng.choice([0, int(0.95 * len(content))])
    flipped[rng.randrange(first, len(content))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _difference(whole: bytes, damaged: bytes) -> int:
    return next((at for at, pair in enumerate(zip(whole, damaged, strict=False)) if pair[0] != pair[1]), len(damaged))


ROUNDS: dict[str, Round] = {
    "kill": kill,
    "full disk": full_disk,
    "truncated checkpoint": partial(damaged_checkpoint, damage=_cut, word="cut"),
    "flipped checkpoint": partial(damaged_checkpoint, damage=_flip, word="bit flipped in"),
    "truncated tokens": partial(damaged_store, damage=_cut, word="cut"),
    "flipped tokens": partial(damaged_store, damage=_flip, word="bit flipped in"),
    "nan batch": nan_batch,
    "lost rank": lost_rank,
    "clock jump": clock_jump,
}
