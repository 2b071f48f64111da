"""``lightning-llm bench NAME``: measure on this machine; a table here, JSON and a picture by option."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lightning_llm.cli.errors import OneLineParser, run_tool

BENCHES = {
    "swiglu": "memory and time of the MLP, every way of writing it",
    "loss": "memory and time of head and cross-entropy",
    "growth": "peak memory of the MLP against the number of tokens",
    "overhead": "what a training step costs beside its products",
    "memory": "where the memory of two configs differs (--config A --config B [-- options of fit])",
    "optimizer": "milliseconds of a step of each optimiser, ours and torch's",
    "checkpoint": "how long saving holds training up, waited for and in the background",
    "peers": "whole training steps beside transformers and litgpt",
    "cost": "how time and memory of a step grow with each size, and the time to the first step of fit",
    "ladder": "the techniques of a training step, one rung at a time",
    "scaling": "tokens per second on 1 to N processes, and what 8 and 64 should reach",
    "generate": "tokens per second of decoding, beside recomputing the prefix and transformers",
    "data": "speed and memory of prepare, for each tokenizer",
    "faults": "random kills, full disks, damaged files and so on, and what they cost (--rounds N in all, --seed)",
}
DTYPES = ("float32", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    listed = "\n".join(f"  {name:<11}{text}" for name, text in BENCHES.items())
    parser = OneLineParser(
        "lightning-llm bench",
        f"Measure one thing on this machine, and print a table. BENCH is one of:\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bench", choices=BENCHES, metavar="BENCH", help="one of those above")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to measure (default: cpu)")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], choices=DTYPES, help="one or more (default: float32)"
    )
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="sizes, such as 8x512x1024x4096x3 for swiglu")
    parser.add_argument(
        "--variants", nargs="+", metavar="NAME", help="only these, such as standard 'ours 1' (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="timed rounds (default: 7); for faults: all of them"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="for faults: draws the first round (default: 0)"
    )
    parser.add_argument(
        "--budget-s", type=float, metavar="S", help="stop timing after so many seconds, however many rounds are done"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows here, and a picture beside them (.png)"
    )
    parser.add_argument(
        "--keep-freed-memory", action="store_true", help="glibc: measure with freed memory kept, as `fit` runs"
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="for memory: a config for fit, given twice or more; options of fit may follow behind --",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)

    def bench(options: argparse.Namespace) -> None:
        if options.bench == "memory":
            _compare(options, words[end + 1 :])
        elif options.bench == "faults":
            _inject(options)
        else:
            _measure(options)

    return run_tool(build_parser(), words[:end], bench, RuntimeError)


def _compare(options: argparse.Namespace, fit_options: Sequence[str]) -> None:
    from lightning_llm.bench import memory
    from lightning_llm.io.console import Console

    memory.compare(options.config, fit_options, json_path=options.json, console=Console())


def _inject(options: argparse.Namespace) -> None:
    from lightning_llm.bench import faults
    from lightning_llm.io.console import Console

    if options.device != "cpu" or options.shapes or options.dtype != ["float32"]:
        raise ValueError("bench faults trains a tiny model on the CPU: it takes no --device, --dtype or --shapes")
    faults.measure(
        options.rounds, options.variants, seed=options.seed, json_path=options.json, console=Console(soft_wrap=True)
    )


def _measure(options: argparse.Namespace) -> None:
    # after the options are read: a typing mistake is answered without waiting for torch
    import torch

    from lightning_llm.bench import harness
    from lightning_llm.io.console import Console
    from lightning_llm.training.allocator import keep_freed_memory

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: there is no CUDA device; measure on cpu")
    if options.rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {options.rounds}")
    kept = options.keep_freed_memory and keep_freed_memory()
    bench = import_module(f"lightning_llm.bench.{options.bench}")
    given = options.shapes or bench.DEFAULT_SHAPES
    rows = []
    with Console(stderr=True).status("measuring …") as status:
        asked = harness.Request(
            device=options.device,
            dtypes=[getattr(torch, name) for name in options.dtype],
            shapes=[shape for name in given for shape in bench.SHAPES.get(name, [name])],
            variants=options.variants,
            rounds=options.rounds,
            budget_s=options.budget_s,
        )
        for row in bench.run(asked):
            rows.append(row)
            status.update(f"measuring … {len(rows)} rows, last {row.shape} {row.dtype} {row.variant}")
    console = Console()
    getattr(bench, "print_table", harness.print_table)(rows, console)
    allocator = "freed memory kept" if kept else "default allocator"
    console.print(f"{rows[0].machine}, torch {rows[0].torch}, {allocator}")
    if options.json is not None:
        harness.write_rows(rows, options.json)
        draw = getattr(bench, "draw", harness.draw)
        draw(rows, options.json.with_suffix(".png"), f"bench {options.bench}: {rows[0].machine}, {allocator}")
        console.print(f"written: {options.json}, {options.json.with_suffix('.png')}")
