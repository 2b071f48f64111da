"""``lightning-llm bench NAME``: measure on this machine; a table here, JSON and a plot by option.

``python -m benchmarks`` of a clone is the same with other benches.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path

from lightning_llm.cli.errors import reports
from lightning_llm.cli.tool import OneLineParser, Tool
from lightning_llm.io.config_file import config_path

PROG, PACKAGE = "lightning-llm bench", "lightning_llm.bench"
BENCHES = {
    "swiglu": "memory and time of the MLP, in every implementation",
    "loss": "memory and time of head and cross-entropy",
    "memory": "memory of two configs, compared (--config A --config B [-- options of fit])",
    "generate": "tokens per second of decoding, compared with recomputing the prefix and with transformers",
    "overhead": "time of a training step outside forward, backward, clipping and optimizer",
    "techniques": "the techniques of a fast training step, added one at a time",
}
RENAMED = {"ladder": "techniques"}  # for one version
MOVED = {
    **{name: name for name in ("cost", "checkpoint", "optimizer", "data", "faults")},
    **{"peers": "baselines", "growth": "memory-scaling", "scaling": "process-scaling"},
}
DTYPES = ("float32", "bfloat16", "float16")


def add_options(parser: OneLineParser, benches: Mapping[str, str] = BENCHES) -> None:
    """The options.

    Args:
        parser: Gets them.
        benches: A line about each.
    """
    listed = "\n".join(f"  {name:<16} {text}" for name, text in benches.items())
    parser.description = f"Run one benchmark on this machine and print a table. BENCH is one of:\n\n{listed}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("bench", choices=benches, metavar="BENCH", help="a name from the list above")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where to measure (default: cpu)")
    add("--dtype", nargs="+", default=["float32"], choices=DTYPES, help="one or more (default: float32)")
    add("--shapes", nargs="+", metavar="SHAPE", help="sizes, such as 8x512x1024x4096x3 for swiglu")
    add("--variants", nargs="+", metavar="NAME", help="variants, such as standard 'ours 1' (default: all)")
    add("--rounds", type=int, default=7, metavar="N", help="timed rounds (default: 7); for faults: the total")
    add("--seed", type=int, default=0, metavar="N", help="for faults: draws the first round (default: 0)")
    add("--budget-s", type=float, metavar="S", help="stop timing after S seconds")
    add("--json", type=Path, metavar="FILE", help="write the rows to FILE and a plot next to it (.png)")
    add("--keep-freed-memory", action="store_true", help="glibc: keep freed memory in the process, as fit does")
    add("--text", type=Path, metavar="FILE", help="for mup: a text to train on (default: Python's source)")
    configs = "for memory: a config for fit, at least two; options of fit may follow after --"
    add("--config", action="append", default=[], metavar="FILE", help=configs)


def run_bench(
    argv: Sequence[str], prog: str = PROG, benches: Mapping[str, str] = BENCHES, package: str = PACKAGE
) -> int:
    """Run a bench; returns the exit status.

    Args:
        argv: The words of the command line behind ``prog``.
        prog: As it is typed.
        benches: A line about each.
        package: Of their modules.
    """
    words = list(argv)
    name = words[0] if words and benches is BENCHES else ""
    if name in RENAMED:
        words[0] = RENAMED[name]
        print(f"{prog} {name} is now {prog} {words[0]}; the old name will go soon", file=sys.stderr)
    if name in MOVED:
        command = shlex.join(["python", "-m", "benchmarks", MOVED[name], *words[1:]])
        line = f"{prog}: error: {name} has moved; from the root of a clone, type: {command}"
        return reports.mistake("bench", line)
    end = words.index("--") if "--" in words else len(words)
    act = partial(_measure, fit_options=words[end + 1 :], package=package, command=f"{prog} {shlex.join(words)}")
    return Tool(act, prog, partial(add_options, benches=benches), RuntimeError)(words[:end])


def _measure(options: argparse.Namespace, fit_options: Sequence[str], package: str, command: str) -> None:
    for config in options.config:
        config_path(config)
    # after the options are read: a typing mistake is answered without waiting for torch
    import torch

    from lightning_llm.bench import harness, plots
    from lightning_llm.io.console import Console
    from lightning_llm.training.environment import keep_freed_memory

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: there is no CUDA device; measure on cpu")
    if options.rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {options.rounds}")
    bench = import_module(f"{package}.{options.bench.replace('-', '_')}")
    for option, given, taken in (
        ("--device", [options.device], getattr(bench, "DEVICES", ("cpu", "cuda"))),
        ("--dtype", options.dtype, getattr(bench, "DTYPES", DTYPES)),
    ):
        if wrong := [name for name in given if name not in taken]:
            raise ValueError(f"{option} {' '.join(wrong)}: {options.bench} takes only {', '.join(taken)}")
    kept = options.keep_freed_memory and keep_freed_memory()
    example, known = bench.DEFAULT_SHAPES[0], getattr(bench, "SHAPES", {})
    read = partial(harness.sizes_of, names=getattr(bench, "NAMES", ()), example=example, known=known)
    named = options.shapes or bench.DEFAULT_SHAPES
    shapes = {shape: getattr(bench, "parse", read)(shape) for name in named for shape in known.get(name, [name])}
    options.fit_options = fit_options
    asked = {name: getattr(options, name) for name in ("bench", "device", "variants", "rounds", "budget_s")}
    asked |= {"options": options, "parts": len(shapes) * len(options.dtype)}
    rows = []
    with Console(stderr=True).status("measuring …") as status:
        for (shape, sizes), dtype in product(shapes.items(), options.dtype):
            for row in bench.run(harness.Request(shape=shape, sizes=sizes, dtype=dtype, status=status, **asked)):
                rows.append(row)
                status.update(f"measuring … {len(rows)} rows, last {row.shape} {row.dtype} {row.variant}")
    console = Console()
    table = partial(harness.print_table, shown=getattr(bench, "COLUMNS", harness.COLUMNS))
    getattr(bench, "print_table", table)(rows, console)
    for note in getattr(bench, "notes", lambda rows: ())(rows):
        console.print(note, highlight=False)
    allocator = getattr(bench, "ALLOCATOR", "freed memory kept" if kept else "default allocator")
    console.print(f"{rows[0].machine}, torch {rows[0].torch}, {allocator}")
    if options.json is not None:
        harness.write_rows(rows, options.json, command, getattr(bench, "FILES", ()))
        plot = options.json.with_suffix(".png")
        getattr(bench, "draw", plots.draw_points)(rows, plot, f"{options.bench}: {rows[0].machine}, {allocator}")
        console.print(f"written: {options.json}, {plot}")
    getattr(bench, "verdict", lambda rows: None)(rows)
