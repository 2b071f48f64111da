"""``lightning-llm bench memory --config A --config B``: where the memory of two runs differs.

Each config trains the same few steps by ``lightning-llm fit`` in a process of its own, in a folder that is removed
afterwards; its last step is metered by ``MemoryProfiler``. Words after ``--`` are passed to each ``fit``:

    lightning-llm bench memory --config a.yaml --config b.yaml --json out/memory.json -- --data.path my.txt

Two points in the step are compared: its peak, which may be in forward for one and in backward for the other, and the
beginning of backward, when everything saved by forward is alive.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Column, Table

from lightning_llm.bench.harness import Bench, Request, describe_machine
from lightning_llm.bench.rows import Row
from lightning_llm.io import charts
from lightning_llm.io.console import Console
from lightning_llm.io.units import short_mib
from lightning_llm.io.untrusted import read_json
from lightning_llm.measure.timeline import CATEGORIES
from lightning_llm.training.callbacks import memory_report
from lightning_llm.training.callbacks.memory_report import NAMES as KIND_NAMES
from lightning_llm.training.callbacks.memory_report import Report

STEPS = 3  # the optimizer's state is there from the second on
MOST_MODULES = 20
POINTS = {"peak": "At the peak", "saved": "When the last backward begins: saved by forward"}


def run(request: Request) -> Iterator[Row]:
    """A row for each config; the first is what the others are compared with.

    Raises:
        ValueError: Fewer than two configs, or one twice.
        RuntimeError: A run failed, with the last line that it wrote.
    """
    configs = request.options.config
    if len(configs) < 2 or len(set(configs)) < len(configs):
        raise ValueError("bench memory compares runs: give --config at least two different files")
    for name in configs:
        request.status.update(f"training {STEPS} steps of {name} …")
        report = measure(name, request.options.fit_options)
        points = {point: report[point] for point in POINTS}
        peak, saved = report["peak"]["bytes"], report["saved"]["by_kind"]["activations"]
        fields = {"device": report["device"], "machine": describe_machine(report["device"].partition(":")[0])}
        yield request.row(name, **fields, dtype="", peak_bytes=peak, saved_bytes=saved, **points, _report=report)


def measure(config: str, fit_options: Sequence[str]) -> Report:
    """The report of one config's last step."""
    name = "lightning_llm.training.callbacks.MemoryProfiler"
    profiler = json.dumps({"class_path": name, "init_args": {"every_n_steps": STEPS}}, allow_nan=False)
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        options = [
            *("fit", "--config", config, *fit_options),
            f"--trainer.max_steps={STEPS}",
            f"--trainer.val_check_interval={STEPS}",
            "--trainer.limit_val_batches=1",
            f"--trainer.default_root_dir={folder}",
            f"--trainer.callbacks+={profiler}",
        ]
        # as the script that pip installs: python -m would look for every module in the current folder first
        safe = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "lightning_llm", *options]
        done = subprocess.run(command, env={**os.environ, **safe}, capture_output=True, text=True)
        reports = sorted(Path(folder).rglob(f"memory/step-{STEPS}.json"))
        if done.returncode or not reports:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise RuntimeError(f"fit --config {config} failed: {lines[-1]}")
        report: Report = read_json(reports[0], 1 << 30)
    if report["compiled"]:
        raise ValueError(f"--config {config}: the meter does not see compiled code; leave compiling out")
    return report


def show(rows: Sequence[Row], console: Console) -> None:
    """The differences at each point in the step."""
    for point in POINTS:
        console.print(difference({row.variant: row._report for row in rows}, point))


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """The timelines of all configs."""
    charts.save(memory_report.draw({row.variant: row._report for row in rows}, f"{title}, step {STEPS}"), path)


def difference(reports: Mapping[str, Report], point: str) -> Table:
    """Kinds, then modules (those that differ, most first): MiB of each config, and the difference from the first."""
    names = [Path(name).stem for name in reports]
    table = Table(Column("MiB", no_wrap=True), title=POINTS[point])
    for name in (*names, *(f"{name} - {names[0]}" for name in names[1:])):
        table.add_column(name, justify="right")
    points = [report[point] for report in reports.values()]
    for category in CATEGORIES:
        sizes = [m["by_kind"][category] for m in points]
        if any(sizes):
            table.add_row(KIND_NAMES.get(category, category), *_cells(sizes))
    table.add_section()
    modules = dict.fromkeys(name for m in points for name in m["by_module"])
    sizes_of = {name: [m["by_module"].get(name, 0) for m in points] for name in modules}
    ordered = sorted(sizes_of, key=lambda name: (-_spread(sizes_of[name]), name))
    shown = [name for name in ordered if _spread(sizes_of[name])][:MOST_MODULES]
    for name in shown:
        table.add_row(name, *_cells(sizes_of[name]))
    rest = [sum(sizes_of[name][place] for name in ordered[len(shown) :]) for place in range(len(names))]
    table.add_row("all others", *_cells(rest))
    table.add_section()
    table.add_row("all", *_cells([m["bytes"] for m in points]))
    return table


def _cells(sizes: Sequence[int]) -> list[str]:
    changes = [size - sizes[0] for size in sizes[1:]]
    return [short_mib(size) or "0" for size in sizes] + [
        f"+{short_mib(n)}" if n > 0 else short_mib(n) or "=" for n in changes
    ]


def _spread(sizes: Sequence[int]) -> int:
    return max(sizes) - min(sizes)


BENCH = Bench(
    run=run,
    shapes=[""],
    dtypes=("float32",),  # each config has its own
    show=show,
    notes=lambda rows: ["counted operator by operator"],
    draw=draw,
    allocator="allocator as fit sets it",
)
