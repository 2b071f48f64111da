"""Runs as copies of a worker: as ``python`` would run them, and nothing of them reaches the worker."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.ablate import fork
from lightning_llm.ablate.plan import CODE
from tests.patience import HANGS_S

# A worker: forks the main file with these words, and prints how each copy ended
WORKER = """
import atexit, json, os, signal, sys
from pathlib import Path
from lightning_llm.ablate.fork import Fork

atexit.register(print, "the worker ends")
signal.signal(signal.SIGTERM, lambda number, frame: print("the worker is asked to end"))
main, log, folder = map(Path, sys.argv[1:4])
statuses = []
for word in sys.argv[4:]:
    with open(log, "a") as output:
        child = Fork(main, [word], output.fileno(), {"WORD": word}, str(folder))
    if word == "sleep":
        while "asleep" not in log.read_text():
            pass
        child.send_signal(signal.SIGTERM)
    statuses.append(child.wait())
    assert child.poll() == statuses[-1]
print(json.dumps([os.getpid(), statuses]))
"""
MAIN = """
import atexit, os, sys, time

atexit.register(print, "the copy ends")
facts = [sys.argv[1], os.environ, os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read(), __name__]
print(*map(str, facts), flush=True)
if sys.argv[1] == "crash":
    os.abort()
if sys.argv[1] == "sleep":
    print("asleep", flush=True)
    time.sleep(600)
sys.exit(3 if sys.argv[1] == "fail" else 0)
"""


@pytest.fixture
def run(tmp_path):
    """``run(words)``: the worker's output, the statuses of the copies, and their log."""

    def begin(*words):
        (tmp_path / "main.py").write_text(MAIN)
        places = [str(tmp_path / name) for name in ("main.py", "log.txt", "there")]
        (tmp_path / "there").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", WORKER, *places, *words], capture_output=True, text=True, timeout=HANGS_S, check=True
        )
        answer, rest = done.stdout.split("\n", 1)
        _, statuses = json.loads(answer)
        return rest, statuses, (tmp_path / "log.txt").read_text()

    return begin


def test_a_copy_runs_in_a_session_folder_and_environment_of_its_own(run, tmp_path):
    rest, statuses, log = run("well", "fail")
    assert statuses == [0, 3]
    facts = log.splitlines()[0]
    assert facts.startswith("well environ({'WORD': 'well'")
    assert facts.endswith(f"{tmp_path / 'there'} True  __main__")
    assert log.count("the copy ends") == 2
    assert "the worker ends" not in log  # the worker's own handlers are not the copy's
    assert rest == "the worker ends\n"


def test_a_crash_or_a_signal_ends_the_copy_alone(run):
    rest, statuses, log = run("crash", "sleep", "well")
    assert statuses == [-signal.SIGABRT, -signal.SIGTERM, 0]
    assert "asked to end" not in rest + log


def test_only_one_thread_on_a_cpu_in_the_snapshot_is_copied(experiment, monkeypatch, tmp_path):
    plan = experiment({"a": {"effect": 0.0}})
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, threads in ((one, 1), (two, 2)):
        for number in range(threads):
            (folder / str(number)).mkdir(parents=True)
    monkeypatch.setattr(fork, "TASKS", one)
    assert not fork.can_fork(plan)  # this process does not execute the snapshot
    monkeypatch.setattr(fork, "PACKAGE", plan.out / CODE / "lightning_llm")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not fork.can_fork(plan)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert fork.can_fork(plan)
    monkeypatch.setattr(fork, "TASKS", two)
    assert not fork.can_fork(plan)  # another thread may hold a lock
    monkeypatch.setattr(fork, "TASKS", Path(os.devnull))  # not Linux
    assert not fork.can_fork(plan)


@pytest.mark.parametrize("changed", [{"threads": 2}, {"accelerator": "cuda"}])
def test_plans_of_more_threads_or_for_gpus_are_not_copied(experiment, changed):
    assert not fork.forks_runs(experiment({"a": {"effect": 0.0}}, **changed))
    assert fork.forks_runs(experiment({"a": {"effect": 0.0}}, out="one"))
