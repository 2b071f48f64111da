"""The default `fit` beside other work: does it take the same bits, and how long do two runs at once take?

    python -m benchmarks.beside_load bits --runs 30 --kills 40 --load 4 --json docs/benchmarks/same-bits-cpu.json
    python -m benchmarks.beside_load two --rounds 2 --json docs/benchmarks/two-at-once-cpu.json

`bits` starts identical commands, two at a time beside busy processes, without a precision or a number of threads. Then
it kills runs with SIGKILL at random moments and resumes each with `--ckpt_path last`. It compares the sha256 of weights
and optimizer state (`benchmarks.digest`). `two` times one run alone, and two at once: with
the bounded waiting of idle OpenMP threads that the command sets, and with libgomp's own. Take its figures on an idle
machine.
"""

import argparse
import contextlib
import itertools
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import commands
from benchmarks.digest import digest
from benchmarks.harness import Request
from benchmarks.rows import Row, ratios, write_rows
from benchmarks.start_up import CONFIG
from lightning_llm.io.console import Console
from lightning_llm.runs.directory import step_files

NOT_DEFAULT = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
STEPS, KILLED_STEPS = 20, 40
WAYS: dict[str, dict[str, str]] = {"bounded waiting (default)": {}, "libgomp's own": {"GOMP_SPINCOUNT": "300000"}}
CALLBACK = "--trainer.callbacks"
EVERY_STEP = (f"{CALLBACK}+=lightning_llm.training.callbacks.RunCheckpoints", f"{CALLBACK}.every_n_steps=1")


def start(folder: Path, name: str, *options: str, **environment: str) -> "subprocess.Popen[bytes]":
    """A run in ``folder/name``, as a user starts it."""
    words = ["lightning_llm", "fit", "--config", str(CONFIG), "--data.path", "text.txt", "--data.store", "store"]
    words += ["--trainer.default_root_dir", name, "--trainer.enable_progress_bar", "false", *options]
    return commands.start(*words, folder=folder, log=folder / f"{name}.txt", without=NOT_DEFAULT, **environment)


def fit(folder: Path, name: str, *options: str, **environment: str) -> float:
    """Seconds of a whole run."""
    begun = time.perf_counter()
    check(start(folder, name, *options, **environment).wait(), folder, name)
    return time.perf_counter() - begun


def check(status: int, folder: Path, name: str, allowed: int = 0) -> None:
    """Fail with the end of a run's output if it did not end as it should."""
    if status not in (0, allowed):
        raise RuntimeError(f"{name} ended with {status}: {(folder / f'{name}.txt').read_text()[-2000:]}")


def steps(number: int) -> list[str]:
    """The options of a run of so many steps without validation in between."""
    return [f"--trainer.max_steps={number}", f"--trainer.val_check_interval={number}", "--trainer.limit_val_batches=4"]


def checkpoints(folder: Path, name: str) -> list[Path]:
    """The checkpoints of the one run below ``folder/name``, oldest first."""
    return step_files(folder / name / CONFIG.stem / "version_0" / "checkpoints")


def killed(folder: Path, name: str, kills: int, seed: int) -> int:
    """Kill a run at random moments and resume it until it ends; returns how often it was killed."""
    rng, done, options = random.Random(seed), 0, tuple[str, ...]()
    while done < kills:
        before = checkpoints(folder, name)[-1:]
        process = start(folder, name, *steps(KILLED_STEPS), *EVERY_STEP, *options)
        at_start = rng.choice((True, False, False, False))
        until = time.monotonic() + rng.uniform(0, 12)
        while process.poll() is None:
            if time.monotonic() > until if at_start else checkpoints(folder, name)[-1:] != before:
                time.sleep(rng.uniform(0, 0.2))
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        if (status := process.wait()) == 0:
            break  # it reached its end
        check(status, folder, name, allowed=-signal.SIGKILL)
        done += 1
        options = ("--ckpt_path", "last") if checkpoints(folder, name) else ()
        if not options:
            shutil.rmtree(folder / name, ignore_errors=True)
    fit(folder, name, *steps(KILLED_STEPS), *EVERY_STEP, *options)
    return done


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that take whatever the cores give."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def bits(folder: Path, options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """The digests of identical runs, and of killed and resumed ones."""
    fit(folder, "first", *steps(STEPS))  # alone; it also prepares the store
    fit(folder, "whole", *steps(KILLED_STEPS), *EVERY_STEP)
    truth = {name: digest(checkpoints(folder, name)[-1]) for name in ("first", "whole")}
    with busy(options.load), ThreadPoolExecutor(2) as pool:
        names = [f"run-{number}" for number in range(options.runs)]
        jobs = pool.map(lambda name: fit(folder, name, *steps(STEPS)), names)
        list(track(jobs, "identical commands", total=len(names), console=Console(stderr=True)))
        each = 10  # kills of one run
        runs = [(f"killed-{number}", min(each, options.kills - number)) for number in range(0, options.kills, each)]
        jobs = pool.map(lambda run: killed(folder, run[0], run[1], hash(run[1]) + len(run[0])), runs)
        kills = sum(track(jobs, "killed and resumed runs", total=len(runs), console=Console(stderr=True)))
    same = Counter(digest(checkpoints(folder, name)[-1]) == truth["first"] for name in names)
    resumed = Counter(digest(checkpoints(folder, name)[-1]) == truth["whole"] for name, _ in runs)
    console.print(f"{same[True]} of {len(names)} identical commands have the bits of one alone")
    console.print(f"{resumed[True]} of {len(runs)} runs have the bits of an undisturbed one, after {kills} kills")
    if same[False] or resumed[False]:
        raise RuntimeError(f"other bits; everything is in {folder}")
    row = partial(Request(bench="bits", shape="", sizes=None).row, dtype="", busy_processes=options.load)
    yield row("identical commands", runs=len(names), same_bits=same[True])
    yield row("killed and resumed", runs=len(runs), same_bits=resumed[True], kills=kills)


def two(folder: Path, options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Seconds of one run alone and of two at once, interleaved."""
    fit_options = (*steps(options.steps), "--trainer.precision", options.precision)
    fit(folder, "prepares", *steps(1))
    numbers = itertools.count()

    def seconds(environment: dict[str, str]) -> tuple[float, float]:
        name = f"{next(numbers)}"
        alone = fit(folder, f"alone-{name}", *fit_options, **environment)
        with ThreadPoolExecutor(2) as pool:
            both = pool.map(lambda side: fit(folder, f"both-{name}-{side}", *fit_options, **environment), "ab")
            return alone, max(both)

    request = Request(bench="two", shape="", sizes=None, rounds=options.rounds)
    for way, pairs in request.interleaved({way: partial(seconds, own) for way, own in WAYS.items()}).items():
        alone, at_once = (list(times) for times in zip(*pairs, strict=True))
        times: dict[str, Any] = ratios(at_once, alone)
        medians = f"one alone {statistics.median(alone):.1f} s, two at once {statistics.median(at_once):.1f} s"
        console.print(f"{way}: {medians}, {times['ratio']:.2f} times as long")
        times |= {"alone_s": alone, "at_once_s": at_once, "steps": options.steps, "precision": options.precision}
        yield request.row(way, dtype="", **times)


def main() -> None:
    """Parse the command line, run in a temporary folder, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bits", "two"))
    for name, default in {"runs": 30, "kills": 40, "load": 4, "rounds": 2, "steps": 125}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="busy processes" if name == "load" else None)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--json", type=Path)
    options, console = parser.parse_args(), Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="beside-load-"))
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(200)]
    lines = [" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(20000)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = list((bits if options.what == "bits" else two)(folder, options, console))
    if options.json is not None:
        write_rows(rows, options.json, shlex.join(["python", "-m", "benchmarks.beside_load", *sys.argv[1:]]))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
