"""``lightning-llm bench memory --config A --config B``: where the memory of two runs differs.

Each config trains the same few steps by ``lightning-llm fit`` in a process of its own, in a folder that is removed
afterwards; its last step is metered by ``MemoryProfiler``. What stands behind ``--`` goes to each ``fit``:

    lightning-llm bench memory --config a.yaml --config b.yaml --json out/memory.json -- --data.path my.txt

Two moments are compared: the peak of the step, which may lie in forward here and in backward there, and the beginning
of backward, when all that forward kept is alive.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Column, Table

from lightning_llm.bench.harness import Row, describe_machine
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.measure.timeline import CATEGORIES
from lightning_llm.training.callbacks.memory_report import NAMES, Report, draw, mib, save

STEPS = 3  # the optimiser's state is there from the second on
MOST_MODULES = 20
MOMENTS = {"peak": "At the peak", "kept": "When the last backward begins: what forward has kept"}


def compare(configs: Sequence[str], fit_options: Sequence[str], *, json_path: Path | None, console: Console) -> None:
    """Measure each config, print the differences, and write JSON and a picture if a path is given.

    Args:
        configs: Files for ``fit``; the first is what the others are compared with.
        fit_options: Further options of every ``fit``.
        json_path: Where rows go; the picture lies beside it.
        console: Where tables go.

    Raises:
        ValueError: Fewer than two configs, one twice, or one that is no file.
        RuntimeError: A run failed, with the last line that it wrote.
    """
    if len(configs) < 2 or len(set(configs)) < len(configs):
        raise ValueError("bench memory compares runs: give --config two different files or more")
    if missing := [name for name in configs if not Path(name).is_file()]:
        raise ValueError(f"--config {', '.join(missing)}: no such file")
    reports = {}
    for name in configs:
        with console.status(f"training {STEPS} steps of {escape(name)} …"):
            reports[name] = measure(name, fit_options)
    for moment in MOMENTS:
        console.print(difference(reports, moment))
    devices = {"cuda" if report["device"].startswith("cuda") else "cpu" for report in reports.values()}
    machine = describe_machine(devices.pop() if len(devices) == 1 else "cpu")
    console.print(f"{machine}, torch {torch.__version__}; counted operator by operator")
    if json_path is not None:
        rows = [
            {**dataclasses.asdict(_row(n, r, machine)), "peak": r["peak"], "kept": r["kept"]}
            for n, r in reports.items()
        ]
        write_json(json_path, rows, indent=1)
        picture = json_path.with_suffix(".png")
        save(draw(reports, f"bench memory: step {STEPS}, {machine}"), picture)
        console.print(f"written: {json_path}, {picture}")


def measure(config: str, fit_options: Sequence[str]) -> Report:
    """The report of one config's last step."""
    profiler = {
        "class_path": "lightning_llm.training.callbacks.MemoryProfiler",
        "init_args": {"every_n_steps": STEPS},
    }
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        words = [
            *("fit", "--config", config, *fit_options),
            f"--trainer.max_steps={STEPS}",
            f"--trainer.val_check_interval={STEPS}",
            "--trainer.limit_val_batches=1",
            f"--trainer.default_root_dir={folder}",
            f"--trainer.callbacks+={json.dumps(profiler, allow_nan=False)}",
        ]
        done = subprocess.run([sys.executable, "-m", "lightning_llm", *words], capture_output=True, text=True)
        found = sorted(Path(folder).rglob(f"memory/step-{STEPS}.json"))
        if done.returncode or not found:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise RuntimeError(f"fit --config {config} failed: {lines[-1]}")
        report: Report = json.loads(found[0].read_text(encoding="utf-8"))
    if report["compiled"]:
        raise ValueError(f"--config {config}: what torch.compile made cannot be metered; leave compiling out")
    return report


def difference(reports: Mapping[str, Report], moment: str) -> Table:
    """Kinds, then modules (those that differ, most first): MiB of each config, and the difference from the first."""
    names = list(reports)
    table = Table(Column("MiB", no_wrap=True), title=MOMENTS[moment])
    for name in names:
        table.add_column(Path(name).stem, justify="right")
    for name in names[1:]:
        table.add_column(f"{Path(name).stem} - {Path(names[0]).stem}", justify="right")
    moments = [reports[name][moment] for name in names]
    for kind in CATEGORIES:
        sizes = [m["by_kind"][kind] for m in moments]
        if any(sizes):
            table.add_row(NAMES.get(kind, kind), *_cells(sizes))
    table.add_section()
    modules = dict.fromkeys(name for m in moments for name in m["by_module"])
    sizes_of = {name: [m["by_module"].get(name, 0) for m in moments] for name in modules}
    ordered = sorted(sizes_of, key=lambda name: (-_spread(sizes_of[name]), name))
    shown = [name for name in ordered if _spread(sizes_of[name])][:MOST_MODULES]
    for name in shown:
        table.add_row(name, *_cells(sizes_of[name]))
    rest = [sum(sizes_of[name][place] for name in ordered[len(shown) :]) for place in range(len(names))]
    table.add_row("all others", *_cells(rest))
    table.add_section()
    table.add_row("all", *_cells([m["bytes"] for m in moments]))
    return table


def _cells(sizes: Sequence[int]) -> list[str]:
    changes = [size - sizes[0] for size in sizes[1:]]
    return [mib(size) or "0" for size in sizes] + [f"+{mib(n)}" if n > 0 else mib(n) or "=" for n in changes]


def _spread(sizes: Sequence[int]) -> int:
    return max(sizes) - min(sizes)


def _row(name: str, report: Report, machine: str) -> Row:
    return Row(
        bench="memory",
        variant=name,
        shape="",
        dtype="",
        device=report["device"],
        machine=machine,
        peak_bytes=report["peak"]["bytes"],
        saved_bytes=report["kept"]["by_kind"]["activations"],
    )
