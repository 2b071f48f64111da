"""Runs the measurements of a part one after another, each for a limited time, and writes the rows after each.

A part is a module with a ``PART``. Each measurement has a process of its own, forked from one that has loaded the
libraries. It writes its rows to a file and ends at once. A measurement that is in the file already is not repeated if
it was made on the same GPU with the same torch and the same code. One that failed comes after all others.
"""

import contextlib
import ctypes
import dataclasses
import fnmatch
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.sampler import Sampler
from benchmarks.harness import Bench, Request
from benchmarks.rows import Columns, Row, print_table, read_rows, write_rows
from lightning_llm.cli.errors import one_line
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.measure.timer import Timing
from lightning_llm.runs.code import commit_of_package, package_digest

TABLE_WIDTH = 160
PATIENCE = 4  # times what a measurement should take at most
FOLDERS = "bench-gpu-process-"  # of temporary files, with the number of the command's process
DIES_WITH_PARENT = 1  # prctl(2): PR_SET_PDEATHSIG
PRELOADED = ["benchmarks.gpu.next_list", "benchmarks.gpu.second_list"]  # loads all that a measurement may need
ROWS = "rows.json"
ORIGIN = ("machine", "torch", "commit", "code")  # rows with another one are never compared
FORKED = multiprocessing.get_context("forkserver")


class Task(NamedTuple):
    """One measurement: its name, about how many seconds it takes, what yields its rows, and whether it comes first."""

    name: str
    seconds: float
    run: Callable[[], Iterable[Row]]
    must: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where figures are taken; a dry run is on the CPU, at toy sizes.

    Attributes:
        inputs: The folder of wheels and text.
        dry_run: Whether it is the CPU.
        out: The folder of results, where compiled code is saved too. ``None``: no code is saved.
        tests: Which tests marked ``gpu`` run, as pytest's ``-k`` takes it. ``None``: those that a list asks for.
    """

    inputs: Path
    dry_run: bool = False
    out: Path | None = None
    tests: str | None = None

    @property
    def device(self) -> str:
        """As harness and benches call it."""
        return "cpu" if self.dry_run else "cuda"

    def request(self, bench: Bench, shape: str, dtype: str, **options: Any) -> Request:
        """A request to a bench, as its command makes it; few rounds in a dry run."""
        options |= {"rounds": 1} if self.dry_run else {}
        sizes = bench.read_shapes([shape])[shape]
        return Request(bench=bench.name, shape=shape, sizes=sizes, dtype=dtype, device=self.device, **options)

    def row(self, variant: str, samples: Timing | Sequence[float] = (), **fields: Any) -> Row:
        """A row that no bench makes."""
        return Request(bench="gpu", shape="", sizes={}, dtype="", device=self.device).row(variant, samples, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the measurements on a GPU.

    Attributes:
        name: Of its file.
        tasks: Its measurements, by priority.
        columns: Of its table.
        draw: Draws its plot: of these rows, to this file, with this title.
        files: The code that it measures, from the root of a clone.
        complete: Adds to all rows what compares them.
    """

    name: str
    tasks: Callable[[Machine], list[Task]]
    columns: Columns
    draw: Callable[[Sequence[Row], Path, str], None]
    files: Sequence[str]
    complete: Callable[[Sequence[Row]], None] = lambda rows: None


def with_target(heading: str, field: str, factor: float, spec: str, sign: str = "≤") -> Columns:
    """A column, and beside it the target of that field, if the row has one."""
    target = f"{sign} {heading}"
    return {heading: (field, factor, spec), target: (lambda row: (row.targets or {}).get(field), factor, spec)}


def run_part(part: Part, machine: Machine, out: Path, *, command: str, limit_s: float, only: Sequence[str]) -> int:
    """Measure what is not measured yet, in the time there is, must-haves first; returns the exit status.

    That is 0 if every row is there, apart from those for which an optional package is missing. The folder ``out`` gets
    ``NAME-cuda.json``, with the command, and ``.png``; ``only`` are patterns of names, as of files.

    Raises:
        ValueError: No measurement has a name like that.
    """
    end = time.monotonic() + limit_s
    names = [task.name for task in part.tasks(machine)]
    if unknown := [pattern for pattern in only if not fnmatch.filter(names, pattern)]:
        raise ValueError(f"--only {unknown[0]!r}: this part has {', '.join(map(repr, names))}")
    record = Record(part, machine, out, command)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # end, but close the worker first
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    _remove_left_folders()
    tasks = [task for task in part.tasks(machine) if any(fnmatch.fnmatch(task.name, pattern) for pattern in only)]
    left = [task for task in tasks if not record.has(task.name)]
    left.sort(key=lambda task: (bool(record.of(task.name)), not task.must))
    print(f"{len(tasks) - len(left)} of {len(tasks)} measurements are in {record.path}", flush=True)
    FORKED.set_forkserver_preload(PRELOADED)
    while task := next((task for task in left if task.seconds <= end - time.monotonic()), None):
        left.remove(task)
        print(f"{task.name} … ", end="", flush=True)
        begun = time.monotonic()
        try:
            rows = rows_of(part.tasks.__module__, machine, task, min(PATIENCE * task.seconds, end - begun))
        except ChildProcessError as lost:
            if time.monotonic() >= end:
                left.append(task)
                print("no time left", flush=True)
                break
            rows = [vars(machine.row(task.name, error=str(lost)))]
        record.add(task.name, rows)
        errors = "; ".join(row["error"] for row in rows if row.get("error"))
        print(f"{time.monotonic() - begun:.1f} s{f': {errors}' if errors else ''}", flush=True)
    record.show(names)
    if left:
        print(f"not measured, there was no time left: {', '.join(task.name for task in left)}; run the command again")
    found = [row for task in tasks for row in record.of(task.name)]
    return int(bool(left) or any(row.error and not row.is_missing for row in found))


class Record:
    """The rows of a part, written whole after each measurement and read at the start, perhaps from the inputs.

    Rows of another GPU, another torch, or other code are kept, but do not count as measured.
    """

    def __init__(self, part: Part, machine: Machine, out: Path, command: str) -> None:
        name = f"{part.name}-{'dry-run' if machine.dry_run else 'cuda'}.json"
        self.part, self.path, self.command = part, out / name, command
        told = machine.inputs / "commit.txt"
        self.commit = told.read_text(encoding="utf-8").strip() if told.is_file() else None
        here = machine.row("", commit=commit_of_package() or self.commit, code=package_digest())
        self._origin = dict(zip(ORIGIN, origin_of(here), strict=True))
        earlier = next((path for path in (self.path, machine.inputs / name) if path.is_file()), None)
        self.rows = read_rows(earlier) if earlier else []

    def of(self, task: str) -> list[Row]:
        """The rows of a measurement that were made here, with this code."""
        return [row for row in self.rows if row.task == task and origin_of(row) == tuple(self._origin.values())]

    def has(self, task: str) -> bool:
        """Whether it is measured, if only in part, as where a package is missing."""
        return any(row.error is None for row in self.of(task))

    def add(self, task: str, rows: Iterable[dict[str, Any]]) -> None:
        """Take the rows of a measurement, and write all."""
        earlier = self.of(task)
        self.rows = [row for row in self.rows if not any(row is one for one in earlier)]
        self.rows += [Row(**{**row, **self._origin, "task": task}) for row in rows]
        self._write()

    def _write(self) -> None:
        self.part.complete(self.rows)
        write_rows(self.rows, self.path, self.command, self.part.files, self.commit)

    def show(self, order: Sequence[str]) -> None:
        """Print the table of what was measured here, and draw the plot next to the file."""
        self.part.complete(self.rows)
        rows, console = [row for name in order for row in self.of(name)], Console(width=TABLE_WIDTH)
        for row in rows:
            row._group = f"{row.shape} {row.dtype}"
        print_table(rows, console, {**self.part.columns, "note": ("error", 1, "")})
        plot = self.path.with_suffix(".png")
        if measured := [row for row in rows if row.error is None and row.total_s]:
            self.part.draw(measured, plot, f"{self.part.name}: {measured[0].machine}, torch {measured[0].torch}")
        console.print(f"written: {self.path}{f', {plot}' if plot.exists() else ''}")


def origin_of(row: Row) -> tuple[Any, ...]:
    """The GPU, the torch, and the code of a row: only rows with the same ones are compared."""
    return tuple(getattr(row, name) for name in ORIGIN)


def rows_of(part: str, machine: Machine, task: Task, seconds: float) -> list[dict[str, Any]]:
    """The fields of a measurement's rows, from a process that is killed with all that it has started.

    Args:
        part: The name of its module.
        machine: Where it is measured.
        task: The measurement.
        seconds: How long it may take.

    Raises:
        ChildProcessError: The process died, or has not ended within the time.
    """
    prefix = f"{FOLDERS}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        process = FORKED.Process(target=_measure, args=(part, machine, task.name, folder))
        process.start()
        try:
            process.join(max(0.0, seconds))
            has_ended = process.exitcode is not None
        finally:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        if not has_ended:
            raise ChildProcessError(f"stopped after {seconds:.0f} s")
        path = Path(folder, ROWS)
        if not path.is_file():
            raise ChildProcessError(f"its process ended with status {process.exitcode}")
        return [vars(row) for row in read_rows(path)]


def _remove_left_folders() -> None:
    """Those of commands that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        if not Path("/proc", folder.name.removeprefix(FOLDERS).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _measure(part: str, machine: Machine, name: str, folder: str) -> None:
    """Measure in this process and write the rows; it ends at once, since freeing memory in order takes seconds."""
    os.setpgid(0, 0)
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # here and in all that it starts
    with contextlib.suppress(AttributeError, OSError):  # Linux: nothing measures on after the command was killed
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # what it says of devices and its tips
    begun = time.time()
    with Sampler(Path(folder), _gpu()) if machine.device == "cuda" else contextlib.nullcontext() as sampler:
        try:
            (task,) = (task for task in import_module(part).PART.tasks(machine) if task.name == name)
            rows = list(task.run())
        except Exception as error:
            rows = [machine.row(name, error=f"{type(error).__name__}: {one_line(error)}")]
    for row in rows:
        row.gpu = sampler.summary(*(row._window or (begun, time.time()))) if sampler else None
    fields = [{name: value for name, value in vars(row).items() if name[0] != "_"} for row in rows]
    write_json(Path(folder, ROWS), {"rows": fields})
    os._exit(0)


def _gpu() -> str:
    """The GPU of this process, as ``nvidia-smi`` names it."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
