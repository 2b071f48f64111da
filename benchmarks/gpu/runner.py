"""Runs the measurements of a part one after another, each for a limited time, and writes the rows after each.

A part is a module with a ``PART``. Its measurements run in one process, because loading everything takes longer than
most of them. If that process dies or hangs, a new one takes the next measurement. A measurement that is in the file
already is not repeated, except one that failed, which comes after all others.
"""

import contextlib
import ctypes
import dataclasses
import fnmatch
import gc
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

from benchmarks.steps import state_of_gpu
from lightning_llm.bench.harness import Bench, Request
from lightning_llm.bench.rows import Columns, Row, print_table, read_rows, write_rows
from lightning_llm.cli.errors import one_line
from lightning_llm.io.console import Console

TABLE_WIDTH = 160
PATIENCE = 4  # times what a measurement should take at most
FOLDERS = "bench-gpu-process-"  # of temporary files, with the number of the command's process
DIES_WITH_PARENT = 1  # prctl(2): PR_SET_PDEATHSIG


class Task(NamedTuple):
    """One measurement: its name, about how many seconds it takes, what yields its rows, and whether it comes first."""

    name: str
    seconds: float
    run: Callable[[], Iterable[Row]]
    must: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where figures are taken, and the folder of wheels and text; a dry run is on the CPU, at toy sizes."""

    inputs: Path
    dry_run: bool = False

    @property
    def device(self) -> str:
        """As harness and benches call it."""
        return "cpu" if self.dry_run else "cuda"

    def request(self, bench: Bench, shape: str, dtype: str, **options: Any) -> Request:
        """A request to a bench, as its command makes it; few rounds in a dry run."""
        options |= {"rounds": 1} if self.dry_run else {}
        sizes = bench.read_shapes([shape])[shape]
        return Request(bench=bench.name, shape=shape, sizes=sizes, dtype=dtype, device=self.device, **options)

    def row(self, variant: str, samples: Sequence[float] = (), **fields: Any) -> Row:
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
    left.sort(key=lambda task: (task.name in record.rows, not task.must))
    print(f"{len(tasks) - len(left)} of {len(tasks)} measurements are in {record.path}", flush=True)
    with contextlib.closing(Worker(part.tasks.__module__, machine, end)) as worker:
        while task := next((task for task in left if task.seconds <= end - time.monotonic()), None):
            left.remove(task)
            print(f"{task.name} … ", end="", flush=True)
            begun = time.monotonic()
            try:
                rows = worker.rows_of(task)
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
    found = [row for task in tasks for row in record.rows.get(task.name, [])]
    return int(bool(left) or any(row.error and not row.is_missing for row in found))


class Record:
    """The rows of a part by measurement, written whole after each and read at the start, perhaps from the inputs."""

    def __init__(self, part: Part, machine: Machine, out: Path, command: str) -> None:
        name = f"{part.name}-{'dry-run' if machine.dry_run else 'cuda'}.json"
        self.part, self.path, self.command = part, out / name, command
        commit = machine.inputs / "commit.txt"
        self.commit = commit.read_text(encoding="utf-8").strip() if commit.is_file() else None
        self.rows: dict[str, list[Row]] = {}
        earlier = next((path for path in (self.path, machine.inputs / name) if path.is_file()), None)
        for row in read_rows(earlier) if earlier else []:
            self.rows.setdefault(row.task, []).append(row)

    def has(self, task: str) -> bool:
        """Whether it is measured, if only in part, as where a package is missing."""
        return any(row.error is None for row in self.rows.get(task, []))

    def add(self, task: str, rows: Iterable[dict[str, Any]]) -> None:
        """Take the rows of a measurement, and write all."""
        self.rows[task] = [Row(**{**row, "task": task}) for row in rows]
        write_rows(self.all(), self.path, self.command, self.part.files, self.commit)

    def all(self) -> list[Row]:
        """All rows, with what compares them."""
        rows = [row for of_task in self.rows.values() for row in of_task]
        self.part.complete(rows)
        return rows

    def show(self, order: Sequence[str]) -> None:
        """Print the table, and draw the plot beside the file."""
        self.rows = {name: self.rows[name] for name in order if name in self.rows}
        rows, console = self.all(), Console(width=TABLE_WIDTH)
        for row in rows:
            row._group = f"{row.shape} {row.dtype}"
        print_table(rows, console, {**self.part.columns, "note": ("error", 1, "")})
        plot = self.path.with_suffix(".png")
        if measured := [row for row in rows if row.error is None and row.total_s]:
            self.part.draw(measured, plot, f"{self.part.name}: {measured[0].machine}, torch {measured[0].torch}")
        console.print(f"written: {self.path}{f', {plot}' if plot.exists() else ''}")


class Worker:
    """A process that measures one thing after another, and can be killed with all that it has started.

    All must have ended at ``end`` on the monotonic clock; ``part`` is the name of a module.
    """

    def __init__(self, part: str, machine: Machine, end: float) -> None:
        self._given, self._end = (part, machine), end
        self._process: Any = None

    def rows_of(self, task: Task) -> list[dict[str, Any]]:
        """The fields of a measurement's rows; it starts a process if there is none.

        Raises:
            ChildProcessError: The process died, or did not answer within the time; it is gone then.
        """
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._folder = tempfile.TemporaryDirectory(prefix=f"{FOLDERS}{os.getpid()}-", ignore_cleanup_errors=True)
            self._process = context.Process(target=_work, args=(theirs, *self._given, self._folder.name))
            self._process.start()
            theirs.close()
            self._answer(self._end - time.monotonic())  # it has loaded everything
        with contextlib.suppress(OSError):  # then there is no answer
            self._pipe.send(task.name)
        answer: list[dict[str, Any]] = self._answer(min(PATIENCE * task.seconds, self._end - time.monotonic()))
        return answer

    def _answer(self, seconds: float) -> Any:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            reason = f"stopped after {seconds:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            reason = f"its process ended with status {self._process.exitcode}"
        self.close()
        raise ChildProcessError(reason)

    def close(self) -> None:
        """Kill the process, with its children, and remove its files."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None
            self._folder.cleanup()


def _remove_left_folders() -> None:
    """Those of commands that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        if not Path("/proc", folder.name.removeprefix(FOLDERS).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _work(pipe: Any, part: str, machine: Machine, folder: str) -> None:
    os.setpgid(0, 0)
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # here and in all that it starts
    with contextlib.suppress(AttributeError, OSError):  # Linux: nothing measures on after the command was killed
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # what it says of devices and its tips
    tasks = {task.name: task for task in import_module(part).PART.tasks(machine)}
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_measured(tasks[pipe.recv()], machine))
            gc.collect()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()


def _measured(task: Task, machine: Machine) -> list[dict[str, Any]]:
    try:
        rows = list(task.run())
    except Exception as error:
        rows = [machine.row(task.name, error=f"{type(error).__name__}: {one_line(error)}")]
    gpu = {"gpu": state_of_gpu()} if machine.device == "cuda" else {}
    return [{**gpu, **{name: value for name, value in vars(row).items() if name[0] != "_"}} for row in rows]
