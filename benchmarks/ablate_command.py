"""Verdicts on commands: the parts ``aa``, ``planted`` and ``pairing`` of ``python -m benchmarks ablate``.

``aa`` and ``planted`` run whole experiments on a small program whose losses are normal: seeds add the same to both runs
of a pair, and each run something of its own, so that two options differ by nothing, or by a known amount. The share of
verdicts is compared with the error rate, and with what ``ablate power`` says. ``pairing`` trains
``examples/any_program/train.py``: what a seed shares where a variant draws as many random numbers as the baseline, and
where it draws more, so that its batches are others too. ``fit`` trains a model of about this size, with another
learning rate and with wider MLPs.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ablate_experiments import workplace
from benchmarks.harness import Request
from benchmarks.rows import Row
from lightning_llm.ablate.report.record import Row as ReportRow
from lightning_llm.ablate.report.report import Report
from lightning_llm.cli.ablate import run_ablate
from lightning_llm.io.atomic import write_text
from lightning_llm.statistics.design import BETTER, UNDECIDED, WORSE, Design
from lightning_llm.statistics.power import power_analysis

PROGRAM = """
import argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--effect", type=float, default=0.0)
parser.add_argument("--variant", default="baseline")
args = parser.parse_args()
shared, own = random.Random(args.seed).gauss(0, 0.02), random.Random(f"{args.seed} {args.variant}").gauss(0, 0.01)
print(f"val loss {3 + shared + own - args.effect}")
"""
EXPERIMENTS, PAIRS = 60, 8
SD = 0.01 * 2**0.5  # of a pair's difference
EFFECT = 1.0  # in standard deviations
MOST_FALSE, POWER_TOLERANCE = 6, 0.10
EXAMPLE = Path(__file__).parents[1] / "examples" / "any_program"
ITERATIONS = 200
ALIKE, OTHERWISE = "learning_rate=0.0012", "n_embd=68"  # the second draws more initial values before its batches
# The same, as far as fit compares it: a pair shares parameters, so the width that changes is that of the MLPs
OF_FIT = ("model.optimizer.init_args.lr=0.0012", "model.architecture.intermediate_size=272")
FIT = {
    "model": {
        "architecture": {
            "hidden_size": 64,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "max_position_embeddings": 64,
            "mlp": "gelu",
        },
        "optimizer": {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.001}},
    },
    "data": {
        "path": str(EXAMPLE / "input.txt"),
        "tokenizer": "char",
        "context_length": 64,
        "global_batch_size": 16,
    },
    "trainer": {"max_steps": ITERATIONS, "val_check_interval": ITERATIONS},
}


def _of_command(command: str) -> list[str]:
    return ["--command", command, "--read", "val loss {number}"]


def _experiment(folder: Path, program: list[str], variant: dict[str, str], first_seed: int, pairs: int) -> ReportRow:
    """What an experiment found of its variant."""
    words = ["run", *program, "--pairs", str(pairs), "--out", str(folder)]
    words += [word for name, value in variant.items() for word in ("--with", f"{name}={value}")]
    words[words.index("--with")] = "--vary"
    words += ["--first-seed", str(first_seed)]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        if status := run_ablate(words):
            raise RuntimeError(f"status {status}: {said.getvalue()}")
    (found,) = Report.read(folder).of_kind("result")
    return found


def _verdicts(effect: float) -> Iterator[str]:
    """The verdicts of all experiments with an effect."""
    with workplace() as folder:
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        # with a folder of its own, several run at a time
        command = f"sh -c '{sys.executable} {folder}/program.py --seed={{seed}} {{options}} # {{run}}'"
        for number in range(EXPERIMENTS):
            variant = {"variant": str(number), "effect": str(effect * SD)}
            row = _experiment(folder / f"{effect}-{number}", _of_command(command), variant, 1000 * number, PAIRS)
            yield row.verdict


def false_directions(request: Request) -> Iterator[Row]:
    """How often a difference is found between two options that differ by nothing."""
    found = [verdict for verdict in _verdicts(0.0) if verdict in (BETTER, WORSE)]
    problems = [f"{len(found)} of {EXPERIMENTS} false directions"] if len(found) > MOST_FALSE else []
    share = len(found) / EXPERIMENTS
    yield request.row("a command, no effect", found=share, predicted=0.05, comparisons=EXPERIMENTS, problems=problems)


def planted(request: Request) -> Iterator[Row]:
    """How often a planted effect is found, and what ``ablate power`` predicts."""
    found = [verdict for verdict in _verdicts(EFFECT) if verdict != UNDECIDED]
    share, wrong = found.count(BETTER) / EXPERIMENTS, found.count(WORSE)
    predicted = power_analysis(Design(0.05, (PAIRS,)), EFFECT * SD, SD).direction
    is_off = abs(share - predicted) > POWER_TOLERANCE or wrong
    problems = [f"{share:.0%} found and {wrong} the wrong way, {predicted:.0%} predicted"] if is_off else []
    facts: dict[str, Any] = {"found": share, "predicted": predicted, "pairs": PAIRS, "effect": EFFECT}
    yield request.row("a command, 1 sd", **facts, comparisons=EXPERIMENTS, problems=problems)


def pairing(request: Request) -> Iterator[Row]:
    """What a seed shares, in a training script of a user's."""
    script = f"{sys.executable} {EXAMPLE / 'train.py'} --max_iters={ITERATIONS}"
    command = f"{script} --seed={{seed}} --out_dir={{run}} {{options}}"
    for label, option in {"the same batches": ALIKE, "other batches": OTHERWISE}.items():
        with workplace() as folder:
            yield _paired(request, folder, f"{option}: {label}", _of_command(command), option)
    for option in OF_FIT:
        with workplace() as folder:
            write_text(folder / "fit.yaml", yaml.safe_dump(FIT))
            program = ["--baseline", str(folder / "fit.yaml"), "--match", "tokens"]
            name, _, value = option.partition("=")
            label = f"fit, {name.rpartition('.')[2]}={value}: the same batches"
            yield _paired(request, folder, label, program, option)


def _paired(request: Request, folder: Path, label: str, program: list[str], option: str) -> Row:
    name, _, value = option.partition("=")
    row = _experiment(folder / "pairing", program, {name: value}, 0, PAIRS)
    saved = None if row.noise is None else row.noise.seeds_saved
    facts: dict[str, Any] = {"sd": row.sd, "correlation": row.correlation, "difference": row.difference, "saved": saved}
    return request.row(label, **facts, pairs=row.pairs, cores=len(os.sched_getaffinity(0)))
