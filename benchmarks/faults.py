"""``lightning-llm bench faults``: random faults in a tiny training run, and what they cost.

Each round draws a fault and its moment from a seed of its own, and ends with a comparison: see ``fault_stage.py``.
What a round may cost is steps since the last checkpoint, which are done again; never a saved step, never a result that
differs from an undisturbed run, never an end without a message.
"""

import contextlib
import dataclasses
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from benchmarks.fault_process import Forker
from benchmarks.fault_rounds import ROUNDS
from benchmarks.fault_stage import Stage, Truth
from lightning_llm.bench.harness import chosen_names, describe_machine
from lightning_llm.training.text_files import write_json

_KEPT = 20  # words of made-up text in a line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One round.

    Attributes:
        fault: Its name.
        seed: Draws the same round again.
        what: What was drawn.
        injected: Whether the fault came before the run had ended.
        resumed: How often a run went on from a checkpoint.
        refused: How often a run ended with a message about what is wrong, or said which damaged file it passed over.
        repeated_steps: Steps that were done again, at most, when a run went on.
        lost_steps: Steps before the last checkpoint that were missing, at most, when a run went on.
        problems: What went wrong; empty where nothing did.
        seconds: How long it took.
        folder: Where everything lies, if something went wrong.
    """

    fault: str
    seed: int
    what: str
    injected: bool
    resumed: int
    refused: int
    repeated_steps: int
    lost_steps: int
    problems: tuple[str, ...]
    seconds: float
    folder: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultRow:
    """All rounds of one fault: numbers of rounds, and steps at most."""

    variant: str
    rounds: int
    injected: int
    resumed: int
    refused: int
    repeated_steps: int
    lost_steps: int
    wrong: int
    seconds: float
    seed: int
    bench: str = "faults"
    torch: str = torch.__version__
    machine: str = ""


def measure(
    rounds: int, variants: Sequence[str] | None, *, seed: int, json_path: Path | None, console: Console
) -> list[Outcome]:
    """Run the rounds, the faults by turns; print a table, and write the rows if a path is given.

    Args:
        rounds: How many in all.
        variants: Only these faults; ``None``: all.
        seed: Of the first round; the next has the next number.
        json_path: Where the rows go.
        console: Where the table and what went wrong are printed.

    Raises:
        ValueError: A fault that there is not, or no round.
        RuntimeError: Something was lost; the folders of those rounds are kept.
    """
    names = chosen_names(list(ROUNDS), variants)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each purge, which is what is looked for
    base, outcomes = Path(tempfile.mkdtemp(prefix="bench-faults-")), []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=rounds)
        for outcome in _outcomes(base, [(names[i % len(names)], seed + i) for i in range(rounds)]):
            outcomes.append(outcome)
            wrong = sum(bool(each.problems) for each in outcomes)
            progress.update(task, advance=1, description=f"{outcome.fault}, {wrong} of {len(outcomes)} went wrong")
            if outcome.problems:
                progress.console.print(f"seed {outcome.seed}, {outcome.fault}:{outcome.what}", highlight=False)
                for problem in outcome.problems:
                    progress.console.print(f"  {problem}", highlight=False)
                progress.console.print(f"  its folder: {outcome.folder}", highlight=False)
    rows = summarise(outcomes, seed)
    print_table(rows, console)
    console.print(f"{rows[0].machine}, torch {rows[0].torch}, seed {seed}")
    if json_path is not None:
        write_json(json_path, [dataclasses.asdict(row) for row in rows], indent=1)
        console.print(f"written: {json_path}")
    if failed := [outcome for outcome in outcomes if outcome.problems]:
        seeds = ", ".join(f"{each.fault} {each.seed}" for each in failed[:20])
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} rounds went wrong (fault and seed: {seeds}); see {base}")
    shutil.rmtree(base)
    return outcomes


def summarise(outcomes: Sequence[Outcome], seed: int) -> list[FaultRow]:
    """A row for each fault."""
    rows = []
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.fault == name]
        rows.append(
            FaultRow(
                variant=name,
                rounds=len(group),
                injected=sum(each.injected for each in group),
                resumed=sum(each.resumed > 0 for each in group),
                refused=sum(each.refused > 0 for each in group),
                repeated_steps=max(each.repeated_steps for each in group),
                lost_steps=max(each.lost_steps for each in group),
                wrong=sum(bool(each.problems) for each in group),
                seconds=round(sum(each.seconds for each in group), 1),
                seed=seed,
                machine=describe_machine("cpu"),
            )
        )
    return rows


def print_table(rows: Sequence[FaultRow], console: Console) -> None:
    """A line for each fault, and their sum."""
    table = Table(Column("fault", no_wrap=True))
    columns = ("rounds", "injected", "resumed", "refused with a message", "steps done again, at most")
    for column in (*columns, "saved steps lost, at most", "wrong"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.variant, *map(str, _numbers(row)))
    numbers = list(zip(*map(_numbers, rows), strict=True))
    table.add_section()
    together = [sum(n) if i not in (4, 5) else max(n) for i, n in enumerate(numbers)]
    table.add_row("all", *map(str, together))
    console.print(table)


def _numbers(row: FaultRow) -> tuple[int, ...]:
    return row.rounds, row.injected, row.resumed, row.refused, row.repeated_steps, row.lost_steps, row.wrong


def _outcomes(base: Path, drawn: Sequence[tuple[str, int]]) -> Iterator[Outcome]:
    data = base / "data"
    data.mkdir()
    (data / "text.txt").write_text(_made_up_text(), encoding="utf-8")
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
            yield Outcome(
                fault=name,
                seed=seed,
                what=stage.what,
                injected=stage.injected,
                resumed=stage.resumed,
                refused=stage.refused,
                repeated_steps=stage.repeated_steps,
                lost_steps=stage.lost_steps,
                problems=tuple(stage.problems),
                seconds=time.perf_counter() - start,
                folder=str(stage.folder) if stage.problems else None,
            )


def _truth(stage: Stage) -> Truth:
    stage.go_on()
    if stage.problems or not stage.saved:
        raise RuntimeError(f"the undisturbed run went wrong: {'; '.join(stage.problems) or 'no checkpoint was seen'}")
    return stage.truth()


def _made_up_text() -> str:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(60)]
    return "".join(" ".join(rng.choices(words, k=_KEPT)) + "\n" for _ in range(400))
