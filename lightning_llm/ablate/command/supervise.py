"""Supervises one run of a command, in a process of its own: starts it, reads its output, measures it, and ends it.

``python -m lightning_llm.ablate.command.supervise`` reads a :class:`Job` from its input. If the program has ended, the
run's folder gets ``summary.json``, and ``curve.json`` if there are several numbers. If this process is asked to end,
or whoever started it has ended, the program is ended too, and the run has no result: it starts again.

A program that fails is an outcome, which the verdict counts. But one that never shows its metric with the first seed
is a mistake in the command: then there is no result, and the last line of the log says what is wrong.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from lightning_llm.ablate.command import descendants, template
from lightning_llm.ablate.command.gpu_memory import used_bytes
from lightning_llm.ablate.command.log import CappedLog
from lightning_llm.ablate.command.reading import (
    FACTS,
    TOLD,
    TOLD_IN_FILE,
    Match,
    Output,
    Pattern,
    is_finite,
    number_in,
    told_in,
)
from lightning_llm.ablate.command.workplace import Place, TreeWorkplace, Workplace, workplace_for
from lightning_llm.io.atomic import open_to_append, remove_path, write_json
from lightning_llm.io.units import GIB, shown_duration
from lightning_llm.io.untrusted import printable, read_json, shown
from lightning_llm.runs.directory import SUMMARY
from lightning_llm.runs.lock import RunLock
from lightning_llm.runs.status import DIVERGED, FAILED, FINISHED, write_status

CURVE = "curve.json"
SAMPLE_S = 0.5
SAMPLE_GPUS_S = 2.0  # asking the driver takes longer
ON_GPUS = "peak_memory_gib is memory on the GPUs of a run, as their driver reports it every 2 seconds."
CHUNK = 1 << 20
LONGEST_LINE = 1 << 16
LONGEST_SHOWN = 300
TICK_S = 0.02  # how far the clock of files may be behind
DRAIN_S = 1.0  # what somebody else who has the output still prints
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by somebody, not by the program
RESUMED = "A run was interrupted, and resumed by --resume: its seconds are those of all its parts."
PARTS = ".parts.json"  # of a run that may be resumed, beside its log: what its parts took
INTERRUPTED = 143  # exit status: the run has no result, and may start again


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its supervisor gets it.

    Attributes:
        run: Its name.
        run_folder: Its run directory.
        files: The program's own folder, ``{run}``.
        log: Of the program.
        words: The command with placeholders.
        values: Of the placeholders that are known before it starts.
        resume: The words of ``{resume}`` if the run was interrupted, with placeholders; empty: such a run starts again
            with empty ``files``.
        metric: Its name; with a minus before it, higher is better.
        read: The pattern of the metric; empty: it is in a file.
        file: Relative to the folder of ``values``, or to where the program starts.
        key: In the file.
        place: Where it starts.
        environment: All that it finds, besides what its place adds.
        gpus: As ``CUDA_VISIBLE_DEVICES`` names them; empty: none.
        cores: Those that it may use; empty: all.
        threads: Of its libraries.
        time_limit_s: ``None``: none.
        grace_s: Between SIGTERM and SIGKILL.
        parent: The process that started the supervisor, which may end before the supervisor can ask; 0: not known.
    """

    run: str
    run_folder: str
    files: str
    log: str
    words: list[str]
    values: dict[str, str | list[str]]
    resume: list[str] = []
    metric: str
    read: str = ""
    file: str = ""
    key: str = ""
    place: Place
    environment: dict[str, str]
    gpus: str = ""
    cores: list[int] = []
    threads: int = 1
    time_limit_s: float | None = None
    grace_s: float = descendants.GRACE_S
    parent: int = 0


class Refused(Exception):
    """The experiment cannot continue, and why."""


class Interrupted(Exception):
    """The run is to end without a result."""


class Outcome(msgspec.Struct, kw_only=True):
    """The end of a program.

    Attributes:
        status: Of its exit, or minus a signal.
        seconds: That it took, with earlier parts of its run.
        peak_bytes: Of all its processes together: on its GPUs, if their driver tells, else on the host.
        timed_out: Whether the time limit ended it.
    """

    status: int
    seconds: float
    peak_bytes: int
    timed_out: bool


class Supervisor:
    """Runs one job.

    Args:
        job: What is run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run_folder, self._files, self._log = map(Path, (job.run_folder, job.files, job.log))
        self._parent = job.parent or os.getppid()
        self._is_asked_to_end = False
        self._problem = ""  # of the file with the metric
        self._is_resumed = False
        self._used_before: int | None = None  # on its GPUs, by others
        self._parts = self._log.with_suffix(PARTS)
        self._earlier = {"seconds": 0.0, "peak_bytes": 0}  # parts of this run

    def run(self) -> int:
        """Run it; the exit status of this process: 0 if there is a result."""
        job = self._job
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_to_end)
        descendants.adopt_orphans()
        self._run_folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self._run_folder, wait_s=60.0).acquire()
        try:
            with workplace_for(job.place, job.environment, self._execute_setup) as workplace:
                return self._run_in(workplace)
        except Interrupted:
            return INTERRUPTED
        except (Refused, ValueError, OSError) as error:
            self._append_to_log(str(error))
            self._forget()
            return 1
        finally:
            descendants.end_all(os.getpid())
            lock.release()

    def _run_in(self, workplace: Workplace) -> int:
        job = self._job
        self._is_resumed = bool(job.resume) and self._files.is_dir() and self._parts.is_file()
        if self._is_resumed:
            self._earlier = read_json(self._parts)
        else:
            remove_path(self._files)
            self._files.mkdir(parents=True)
        port = str(_free_port())
        own = {template.PORT: port, template.TREE: str(workplace.top)}
        values = {**job.values, **own}
        resume = template.expanded(job.resume, values) if self._is_resumed else []
        words = template.expanded(job.words, {**values, template.RESUME: resume})
        if os.sep in words[0] and (missed := workplace.missed_in(words[0])):
            raise Refused(_advice_for(missed))
        output = Output(Pattern(job.read) if job.read else None)
        started = time.time()
        environment = {**workplace.environment, "MASTER_PORT": port}
        ended = self._execute(words, workplace.folder, environment, output)
        if ended.status < 0 and -ended.status in KILLS and not ended.timed_out and self._was_first_kill():
            self._append_to_log(f"the program was ended by signal {-ended.status}, by somebody else: it starts again")
            return INTERRUPTED
        found = self._found(output, workplace, started)
        if missed := workplace.missed_in(output.last):
            self._problem = _advice_for(missed)
        try:
            failure = self._failure(ended, found, output)
        except Refused:
            failure = "failed"
            if not self._is_resumed:
                raise
        if failure and self._is_resumed:  # perhaps it was killed while it saved, or after its last step
            self._append_to_log("resumed, it failed, which does not count: it starts again from the beginning")
            self._forget()
            return INTERRUPTED
        about = [RESUMED] * self._is_resumed + [ON_GPUS] * (self._used_before is not None)
        facts = {"started": started, "load": os.getloadavg()[0], "notes": [*workplace.leave(), *about]}
        if isinstance(workplace, TreeWorkplace):
            facts["imports_tree"] = workplace.has_imported
        self._write(ended, found, output, failure, facts)
        return 0

    # ---- what is executed

    def _execute(self, words: list[str], folder: Path, environment: Mapping[str, str], output: Output) -> Outcome:
        """Run the program to its end, or to the time limit.

        Raises:
            Refused: It cannot be started.
            Interrupted: This process is to end.
        """
        log = CappedLog(self._log)
        self._used_before = used_bytes(self._job.gpus)
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._prepare,
            )
        except OSError as error:
            log.close()
            raise Refused(f"{shown(words[0])} cannot be started in {folder}: {error.strerror}") from None
        try:
            peak, timed_out = self._watch(process, output, log, started)
        finally:
            log.close()
        seconds = self._earlier["seconds"] + time.monotonic() - started
        return Outcome(status=process.returncode, seconds=seconds, peak_bytes=peak, timed_out=timed_out)

    def _prepare(self) -> None:
        descendants.end_with_parent()
        if self._job.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._job.cores)

    def _watch(
        self, process: "subprocess.Popen[bytes]", output: Output, log: CappedLog, started: float
    ) -> tuple[int, bool]:
        """Read the output until the program has ended; the peak of its memory, and whether the time limit ended it."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        os.set_blocking(descriptor, False)
        lines = _Lines(output.take)
        peak = int(self._earlier["peak_bytes"])
        next_sample = started
        timed_out = False
        limit = self._job.time_limit_s
        started -= self._earlier["seconds"]
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            is_open = True
            while process.poll() is None:
                if self._is_to_end():
                    self._end(process)
                    raise Interrupted
                if is_open and selector.select(SAMPLE_S):
                    is_open = _read(descriptor, log, lines)
                    if not is_open:
                        selector.unregister(descriptor)
                elif not is_open:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(SAMPLE_S)
                now = time.monotonic()
                if now >= next_sample:
                    peak = max(peak, self._memory())
                    if self._job.resume:
                        write_json(self._parts, {"seconds": now - started, "peak_bytes": peak}, indent=None)
                    next_sample = now + (SAMPLE_S if self._used_before is None else SAMPLE_GPUS_S)
                if limit is not None and now - started > limit:
                    timed_out = True
                    self._end(process)
            descendants.end_all(os.getpid(), self._job.grace_s)  # what it has left behind
            deadline = time.monotonic() + DRAIN_S
            while is_open and time.monotonic() < deadline and selector.select(0.0):
                is_open = _read(descriptor, log, lines)
        lines.end()
        process.stdout.close()
        return peak, timed_out

    def _memory(self) -> int:
        """Bytes that the program has now."""
        if self._used_before is None:
            return descendants.memory_of(descendants.descendants(os.getpid()))
        return (used_bytes(self._job.gpus) or 0) - self._used_before

    def _execute_setup(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> None:
        """Run the set-up of a tree.

        Raises:
            Refused: It failed.
        """
        with open_to_append(log) as file:
            status = subprocess.run(
                words,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                check=False,
            ).returncode
        if status:
            raise Refused(f"--setup failed with exit status {status} in {folder}; see {log}")

    # ---- what came out

    def _found(self, output: Output, workplace: Workplace, started: float) -> list[Match]:
        """All values of the metric."""
        job = self._job
        if job.read:
            return output.found
        folder = self._files if template.has(job.words, template.RUN) else workplace.folder
        try:
            if (folder / job.file).stat().st_mtime < started - TICK_S:  # of an earlier run
                raise FileNotFoundError
            output.told |= told_in(folder / job.file)
            return number_in(folder / job.file, job.key)
        except FileNotFoundError:
            self._problem = f"it wrote no {job.file}"
        except (ValueError, OSError) as error:
            self._problem = str(error)
        return []

    def _failure(self, ended: Outcome, found: list[Match], output: Output) -> str:
        """How the program failed to train; empty if it did not.

        Raises:
            Refused: It never showed its metric, with the first seed.
        """
        job = self._job
        last = printable(output.last)[:LONGEST_SHOWN] or "it printed nothing"
        last += f"; {self._problem}" if self._problem else ""
        if ended.timed_out:
            limit = shown_duration(job.time_limit_s or 0.0)
            return f"failed: it took longer than the time limit of {limit}"
        what = f"no {shown(job.read)}" if job.read else f"no {job.key} in {job.file}"
        if not found and job.place.is_first:
            how = f"ended with exit status {ended.status}" if ended.status else f"showed {what}"
            raise Refused(f"the program {how}; its last line: {last}")
        if ended.status < 0:
            return f"failed: it was ended by signal {-ended.status}"
        if ended.status:
            return f"failed: exit status {ended.status}, {last}"
        if not found:
            return f"failed: it showed {what}; its last line: {last}"
        if not is_finite(found[-1].value):
            return f"{DIVERGED}: its {job.metric.removeprefix('-')} is {found[-1].value}"
        return ""

    def _write(
        self, ended: Outcome, found: list[Match], output: Output, failure: str, facts: Mapping[str, Any]
    ) -> None:
        """Write the result: the status comes last, since a run with one has ended."""
        job = self._job
        sign = -1.0 if job.metric.startswith("-") else 1.0
        last = found[-1] if found else None
        steps = None if last is None else last.step
        told: dict[str, Any] = {name: output.told[name] for name in (*TOLD, *TOLD_IN_FILE) if name in output.told}
        if "initial_values" in told:
            told["initial_values"] = {"all": told["initial_values"]}
        counts = {name: float(output.told[name]) for name in FACTS if _is_number(output.told.get(name))}
        values = [[match.step, sign * match.value] for match in found]
        if len(values) > 1:
            write_json(self._run_folder / CURVE, {"values": values}, indent=None)
        summary = {
            job.metric: sign * last.value if last is not None and not failure else None,
            "seconds": ended.seconds,
            "peak_memory_gib": ended.peak_bytes / GIB if ended.peak_bytes else None,
            "steps": steps,
            "threads": job.threads,
            "exit_status": ended.status,
            "output": None if self._is_resumed else output.digest,
            **told,
            **counts,
            **facts,
        }
        write_json(self._run_folder / SUMMARY, summary)
        status = FINISHED if not failure else DIVERGED if failure.startswith(DIVERGED) else FAILED
        reason = failure.partition(": ")[2]
        write_status(self._run_folder, status, step=steps or 0, reason=reason)
        remove_path(self._parts)  # if its folder is removed to train it again, there is nothing to resume

    def _forget(self) -> None:
        """Let the next try of this run start from the beginning, if it could resume."""
        if self._job.resume:
            remove_path(self._files)
            remove_path(self._parts)

    def _was_first_kill(self) -> bool:
        """Whether nobody has killed the program of this run before: twice in a row is an outcome."""
        marker = self._log.with_suffix(".killed")
        if marker.exists():
            return False
        marker.touch()
        return True

    # ---- the end

    def _ask_to_end(self, number: int, frame: FrameType | None) -> None:
        self._is_asked_to_end = True

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        descendants.end_all(os.getpid(), self._job.grace_s)
        process.wait()

    def _is_to_end(self) -> bool:
        return self._is_asked_to_end or os.getppid() != self._parent

    def _append_to_log(self, line: str) -> None:
        with open_to_append(self._log) as log:
            log.write(f"\n{line}\n".encode())


class _Lines:
    """Cuts bytes into lines; one that is too long is cut too."""

    def __init__(self, take: Callable[[str], object]) -> None:
        self._take = take
        self._rest = b""

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode("utf-8", errors="replace"))
        if len(self._rest) > LONGEST_LINE:
            self.end()

    def end(self) -> None:
        self._take(self._rest.decode("utf-8", errors="replace"))
        self._rest = b""


def _read(descriptor: int, log: CappedLog, lines: _Lines) -> bool:
    """Read what is there; whether there may be more."""
    try:
        data = os.read(descriptor, CHUNK)
    except BlockingIOError:
        return True
    log.write(data)
    lines.add(data)
    return bool(data)


def _advice_for(missed: str) -> str:
    return f"{missed} is in your folder, and not in its revision: if git ignores it, add --link {missed}"


def _is_number(text: str | None) -> bool:
    try:
        return is_finite(float(text or "nan"))
    except ValueError:
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(Supervisor(msgspec.json.decode(sys.stdin.buffer.read(), type=Job)).run())
