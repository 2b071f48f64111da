"""Whole experiments of ``lightning-llm ablate`` for ``python -m benchmarks ablate``: started, killed, compared."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks import commands
from benchmarks.faults import made_up_text
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.plan import LOGS, RUNS
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.run_process import last_line
from lightning_llm.ablate.runner import RUNNER

TEXT = "text.txt"
BASELINE = {
    "model": {
        "architecture": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "optimizer": {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.01}},
    },
    "data": {"path": TEXT, "tokenizer": "char", "context_length": 32, "global_batch_size": 8},
    "trainer": {"accelerator": "cpu", "max_steps": 60, "val_check_interval": 60, "enable_progress_bar": False},
    "keep_freed_memory": False,
}
COMMAND, RUN, SERVER = "the command", "a run", "the server"  # kinds of processes: runs are copies of the server
KINDS = ("all", COMMAND, RUN, SERVER)
MOST_WAIT_S = 8.0  # from a process of the drawn kind to its kill
# numbers of a report, and its folder
MEASURED = re.compile(
    r"folder|spent\.(date|rounds|other_cores|run_seconds)|tuning\.run_seconds"
    r"|variants\..*\.(step\..*|training_s|run_seconds|run_memory_gib)|curves\..*\.at_equal_time"
)
Process = subprocess.Popen[bytes]


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder with a text and a baseline, and no process when it is left. After an error it stays."""
    folder = Path(tempfile.mkdtemp(prefix="bench-ablate-")).resolve()
    (folder / TEXT).write_text(made_up_text(), encoding="utf-8")
    (folder / "base.yaml").write_text(yaml.safe_dump(BASELINE), encoding="utf-8")
    try:
        yield folder
    finally:
        kill_all(folder)
    shutil.rmtree(folder)


class Experiment:
    """An experiment of a workplace, whose folder has by default the name of its file.

    The content of the file is given without name and baseline; ``None``: the file is there.
    """

    def __init__(self, folder: Path, name: str, content: Mapping[str, Any] | None = None, out: str = "") -> None:
        self.folder, self._file, self.out = folder, folder / f"{name}.yaml", folder / "runs" / (out or name)
        if content is not None:
            whole = {"name": name, "baseline": str(folder / "base.yaml"), **content}
            self._file.write_text(yaml.safe_dump(whole), encoding="utf-8")

    def start(self, *options: str) -> Process:
        """``ablate run`` of it with these options; it trains all of its runs."""
        return self._start("run", "run", str(self._file), "--out", str(self.out), "--reuse", "none", *options)

    def work(self, number: int) -> Process:
        """``ablate work``: a further worker, with a number for its log."""
        return self._start(f"worker-{number}", "work", str(self.out))

    def _start(self, log: str, *words: str) -> Process:
        log_file = self.folder / f"{self.out.name}-{log}.txt"
        return commands.start("lightning_llm", "ablate", *words, folder=self.folder, log=log_file)

    def report(self, process: Process) -> Report:
        """The report, at the end of a process.

        Raises:
            RuntimeError: It failed, with the last line that it wrote.
        """
        if process.wait():
            raise RuntimeError(f"{self.last_line()}; see {self.folder}")
        return Report.read(self.out)

    def last_line(self) -> str:
        """The last one of its command."""
        return last_line(self.folder / f"{self.out.name}-run.txt")

    def check(self, report: Report, truth: Report) -> int:
        """Compare reports of one plan; returns how many values are equal.

        Raises:
            RuntimeError: A number differs that was not measured.
        """
        if names := differing(report, truth):
            raise RuntimeError(f"{self.out.name}: {', '.join(names)} differ; see {self.folder}")
        return sum(value != "measured" for _, value in _flat(truth.to_dict()))

    def seconds(self, *options: str) -> dict[str, float]:
        """Run it: seconds of the whole command, and from the frozen plan to the end of its last run."""
        begun = time.perf_counter()
        self.report(self.start(*options))
        whole, start = time.perf_counter() - begun, (self.out / PLAN).stat().st_mtime
        ends = [path.stat().st_mtime for path in (self.out / RUNS).glob("*/summary.json")]
        return {"command_s": whole, "runs_s": max(ends) - start}

    def count(self, word: str) -> Counter[str]:
        """How often each run was ``starting`` or ``resuming``."""
        lines = "".join(self._logs()).splitlines()
        return Counter(line.partition(": ")[0] for line in lines if line.endswith(f": {word}"))

    def taken(self) -> list[bool]:
        """Whether each worker took a run."""
        return [": starting" in log for log in self._logs()]

    def _logs(self) -> list[str]:
        paths = [self.out / LOGS / RUNNER, *self.folder.glob(f"{self.out.name}-worker-*.txt")]
        return [path.read_text(encoding="utf-8") for path in paths]


def differing(report: Report, truth: Report) -> list[str]:
    """The names of what differs between two reports, such as ``rows.0.difference``, but not what is measured.

    Measured are seconds, memory, other programs' share of the cores, and the date: these must only be there in both.
    What a plan says of earlier experiments is left out, and with it the hash of the plan.
    """
    ours, theirs = (
        {name: value for name, value in _flat(each.to_dict()) if not name.startswith(("design.plan", "design.seen"))}
        for each in (report, truth)
    )
    return [name for name in {**theirs, **ours} if ours.get(name, "absent") != theirs.get(name, "absent")]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if not inner:
        yield name, "measured" if MEASURED.fullmatch(name) else value
    for key, each in inner or ():
        yield from _flat(each, f"{name}.{key}" if name else str(key))


def processes(folder: Path, kind: str = "all") -> list[int]:
    """Processes of the experiments in a folder: a command names the folder, and a run writes to a log in it."""
    by_kind: dict[str, list[int]] = {COMMAND: [], RUN: [], SERVER: []}
    for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):  # it ends now
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if words[0] == os.fsencode(sys.executable) and any(os.fsencode(folder) in word for word in words):
                by_kind[COMMAND].append(process)
            log = Path(os.readlink(f"/proc/{process}/fd/1"))
            if log.parent.name == LOGS and log.is_relative_to(folder):
                by_kind[RUN].append(process)
                by_kind[SERVER].append(int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1]))
    by_kind[SERVER] = [process for process in {*by_kind[SERVER]} if process > 1]  # of a run without one: init
    return by_kind.get(kind) or [each for found in by_kind.values() for each in found if kind == "all"]


def killed(one: Experiment, most: int, rng: random.Random) -> tuple[Process, int]:
    """Start an experiment, kill its processes at random moments, and start it again where nobody else does.

    Gives its last command, and how often something was killed: ``most`` times, or until it ended.
    """
    process, kills = one.start(), 0
    while kills < most and process.poll() is None:
        kind, later = rng.choice(KINDS), rng.uniform(0, MOST_WAIT_S)
        while process.poll() is None and not processes(one.out, kind):
            time.sleep(0.05)
        time.sleep(later)
        if process.poll() is not None or not (running := processes(one.out, kind)):
            continue
        kills += 1
        if kind == "all":
            kill_all(one.out)
        else:
            _kill(rng.choice(running))
        if kind in ("all", COMMAND):
            process.wait()
            process = one.start()
    return process, kills


def kill_all(folder: Path) -> None:
    """Kill all processes of the experiments in a folder."""
    while running := processes(folder):
        for process in running:
            _kill(process)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
