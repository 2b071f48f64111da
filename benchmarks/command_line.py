"""The options of ``python -m benchmarks NAME``, and what it prints and writes: a table, JSON and a plot."""

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path

from lightning_llm.cli.subcommand import OneLineParser, Subcommand
from lightning_llm.io.shell import shell_command

PROGRAM, MODULE = "python -m benchmarks", "benchmarks"
BENCHES = {
    "swiglu": "memory and time of the MLP, in every implementation",
    "loss": "memory and time of head and cross-entropy",
    "generate": "tokens per second of decoding, compared with recomputing the prefix and with transformers",
    "runs": "the shipped configs, trained as their users train them (options of fit may follow behind --)",
    "baselines": "whole training steps, compared with transformers, litgpt and plain torch",
    "techniques": "the techniques of a fast training step, added one at a time",
    "overhead": "time of a training step outside forward, backward, clipping and optimizer",
    "cost": "how time and memory of a step grow with each size, and the time to the first step of fit",
    "memory-scaling": "peak memory of the MLP against the number of tokens",
    "process-scaling": "tokens per second on 1 to N processes, and a prediction for 8 and 64",
    "checkpoint": "how long saving holds up training: waiting for the disk, and in the background",
    "optimizer": "milliseconds per step of each optimizer, ours and torch's",
    "ablate": "whether verdicts, tuning and workers keep their promises (--shapes, --seed of the kills)",
    "race": "loops that keep changes, replayed on trained runs whose truth is known (--shapes)",
    "stream": "which ideas of a stream the rule adopts: useless ones, and true ones (--shapes)",
    "mup": "whether a learning rate fits wider models, with mup and without (--shapes, --text FILE)",
    "ladder": "whether --size carries learning rates from one size to another (--shapes transfer)",
    "initial-values": "how far the losses of two models differ by chance, with initial values by name and without",
    "data": "speed and memory of prepare, for each tokenizer",
    "faults": "random kills, full disks, damaged files and so on, and their cost (--rounds: total, --seed)",
}
DTYPES = ("float32", "bfloat16", "float16")


def add_options(parser: OneLineParser) -> None:
    """Add the options of a bench."""
    listed = "\n".join(f"  {name:<16} {text}" for name, text in BENCHES.items())
    parser.description = f"Run one benchmark on this machine and print a table. BENCH is one of:\n\n{listed}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("bench", choices=BENCHES, metavar="BENCH", help="a name from the list above")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where to measure (default: cpu)")
    add("--dtype", nargs="+", default=["float32"], choices=DTYPES, help="one or more (default: float32)")
    add("--shapes", nargs="+", metavar="SHAPE", help="sizes, such as 8x512x1024x4096x3 for swiglu")
    add("--variants", nargs="+", metavar="NAME", help="variants, such as standard 'ours 1' (default: all)")
    add("--rounds", type=int, default=7, metavar="N", help="timed rounds (default: 7); for faults: number of rounds")
    add("--seed", type=int, default=0, metavar="N", help="for faults: seed of the first round (default: 0)")
    add("--budget-s", type=float, metavar="S", help="stop timing after S seconds")
    add("--json", type=Path, metavar="FILE", help="write the rows to FILE and a plot next to it (.png)")
    add("--keep-freed-memory", action="store_true", help="glibc: keep freed memory in the process, as fit does")
    add("--text", type=Path, metavar="FILE", help="for mup: a text to train on (default: Python's source)")


def run_bench(argv: Sequence[str]) -> int:
    """Run a bench; returns the exit status.

    Args:
        argv: The words of the command line after ``python -m benchmarks``; behind ``--``, options of ``fit``.
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    act = partial(_measure, fit_options=words[end + 1 :], command=f"{PROGRAM} {shell_command(*words)}")
    return Subcommand(act, PROGRAM, add_options, RuntimeError)(words[:end])


def _measure(options: argparse.Namespace, fit_options: Sequence[str], command: str) -> None:
    # after the options are read: a typing mistake is answered without waiting for torch
    import torch

    from benchmarks.harness import Bench, Request
    from benchmarks.rows import write_rows
    from lightning_llm.io.console import Console
    from lightning_llm.training.environment import keep_freed_memory

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: there is no CUDA device; measure on cpu")
    if options.rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {options.rounds}")
    bench: Bench = import_module(f"{MODULE}.{options.bench.replace('-', '_')}").BENCH
    _check_choice(options.bench, "--device", [options.device], bench.devices)
    _check_choice(options.bench, "--dtype", options.dtype, bench.dtypes)
    keeps_freed_memory = options.keep_freed_memory and keep_freed_memory()
    allocator = bench.allocator or ("freed memory kept" if keeps_freed_memory else "default allocator")
    shapes = bench.read_shapes(options.shapes)
    options.fit_options = fit_options
    fields = {name: getattr(options, name) for name in ("bench", "device", "variants", "rounds", "budget_s")}
    fields |= {"options": options, "parts": len(shapes) * len(options.dtype)}
    rows = []
    with Console(stderr=True).status("measuring …") as status:
        for (shape, sizes), dtype in product(shapes.items(), options.dtype):
            for row in bench.run(Request(shape=shape, sizes=sizes, dtype=dtype, status=status, **fields)):
                rows.append(row)
                status.update(f"measuring … {len(rows)} rows, last {row.shape} {row.dtype} {row.variant}")
    console = Console()
    bench.print_table(rows, console)
    console.print(f"{rows[0].machine}, torch {rows[0].torch}, {allocator}")
    if options.json is not None:
        write_rows(rows, options.json, command, bench.files)
        plot = options.json.with_suffix(".png")
        bench.draw(rows, plot, f"{options.bench}: {rows[0].machine}, {allocator}")
        console.print(f"written: {options.json}, {plot}")
    bench.check(rows)


def _check_choice(bench: str, option: str, chosen: Sequence[str], choices: Sequence[str]) -> None:
    if wrong := [name for name in chosen if choices and name not in choices]:
        raise ValueError(f"{option} {' '.join(wrong)}: {bench} takes only {', '.join(choices)}")
