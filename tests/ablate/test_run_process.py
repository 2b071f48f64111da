"""Processes of an experiment: as ``python`` would run the code of a tree, as copies of one that has imported torch."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from lightning_llm.ablate import run_process
from lightning_llm.ablate.run_process import RunProcess, last_line, start_server, wait_for_one
from lightning_llm.io.processes import is_alive
from tests.patience import HANGS_S

FACTS = """
import atexit, json, os, sys

atexit.register(print, "the copy ends")
loaded = [name in sys.modules for name in ("colorsys", "lightning_llm")]
import lightning_llm

facts = {
    "words": sys.argv[1:],
    "word": os.environ.get("WORD"),
    "threads": os.environ["OMP_NUM_THREADS"],
    "slurm": [name for name in os.environ if name.startswith("SLURM_")],
    "folder": os.getcwd(),
    "has_session": os.getsid(0) == os.getpid(),
    "stdin": sys.stdin.read(),
    "name": __name__,
    "loaded": loaded,
    "package": lightning_llm.__file__,
    "cores": sorted(os.sched_getaffinity(0)),
}
print(json.dumps(facts), flush=True)
sys.exit(3)
"""
SLEEPS = "import signal, sys, time\n{}\nprint('ready', flush=True)\ntime.sleep(600)\n"
PARENT = """
import sys, time
from pathlib import Path
from lightning_llm.ablate import run_process

run_process.PRELOADED = []
process = run_process.RunProcess(Path(sys.argv[1]), [], log=Path(sys.argv[2]), threads=1)
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def _server():
    """One for all tests, which imports little: torch takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_process, "PRELOADED", ["colorsys"])
        patch.setattr(run_process, "_threads_of_server", None)
        yield
    forkserver._forkserver._stop()


@pytest.fixture
def start(tmp_path):
    """``start(code)``: a process of a tree with this code, once it has printed a line, and its log."""
    processes = []

    def begin(code, *words, **options):
        tree = tmp_path / "tree"
        (tree / "lightning_llm").mkdir(parents=True, exist_ok=True)
        (tree / "lightning_llm/__init__.py").write_text("")
        (tree / "fit.py").write_text(code)
        log = tmp_path / "logs" / f"{len(processes)}.txt"
        processes.append(RunProcess(tree / "fit.py", words, log=log, **{"threads": 1, **options}))
        await_output(log, processes[-1])
        return processes[-1], log

    yield begin
    for process in processes:
        process.ask_to_end()
        process.await_end(0.0)


def await_output(log, process=None):
    deadline = time.monotonic() + HANGS_S
    while not log.exists() or last_line(log) == "no output":
        assert time.monotonic() < deadline
        if process is not None and process.status() is not None:
            return
        time.sleep(0.02)


def test_it_runs_as_python_would_in_a_session_folder_and_environment_of_its_own(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    core = sorted(os.sched_getaffinity(0))[0]
    process, log = start(FACTS, "fit", "a b", environment={"WORD": "x"}, folder=tmp_path, cores=[core])
    assert process.wait() == 3
    lines = log.read_text().splitlines()
    assert lines[1:] == ["the copy ends"]
    assert json.loads(lines[0]) == {
        "words": ["fit", "a b"],
        "word": "x",
        "threads": "1",
        "slurm": [],
        "folder": str(tmp_path),
        "has_session": True,
        "stdin": "",
        "name": "__main__",
        "loaded": [True, False],  # the server has not imported this package: the tree's is the only one
        "package": str(tmp_path / "tree/lightning_llm/__init__.py"),
        "cores": [core],
    }
    assert os.environ["OMP_NUM_THREADS"] == "64"
    assert sys.modules["__main__"].__name__ == "__main__"


def test_it_is_asked_to_end_and_killed_if_it_does_not(start):
    process, _ = start(SLEEPS.format(""))
    assert process.status() is None
    process.ask_to_end()
    assert process.wait() == -signal.SIGTERM
    process, _ = start(SLEEPS.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    process.ask_to_end()
    assert process.status(0.3) is None
    process.await_end(0.1)
    assert process.status() == -signal.SIGKILL


def test_a_crash_is_that_of_one_copy(start):
    process, _ = start("import os\nprint(1, flush=True)\nos.abort()\n")
    assert process.wait() == -signal.SIGABRT
    process, _ = start("print(2)\n")
    assert process.wait() == 0


def test_the_first_that_ends_is_not_waited_for_longer(start):
    slow, _ = start(SLEEPS.format(""))
    fast, _ = start("print(1)\n")
    begun = time.monotonic()
    wait_for_one([slow, fast], HANGS_S)
    assert time.monotonic() - begun < HANGS_S / 2
    assert (slow.status(), fast.status()) == (None, 0)


def test_the_server_has_the_threads_of_its_runs(start):
    of_server = (
        "import os\nprint(os.getppid(), open(f'/proc/{os.getppid()}/environ').read().split('\\0'), flush=True)\n"
    )
    servers = []
    for threads in (2, 1):  # which libraries read when they are imported
        start_server(threads)
        process, log = start(of_server, threads=threads)
        assert process.wait() == 0
        servers.append(last_line(log).partition(" ")[0])
        assert f"'OMP_NUM_THREADS={threads}'" in last_line(log)
        assert "'OPENBLAS_NUM_THREADS=1'" in last_line(log)
    assert len(set(servers)) == 2


def test_a_file_of_the_current_folder_is_no_module_of_the_server(start, tmp_path, monkeypatch):
    for name in ("colorsys", "signal"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path(__file__ + '.ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    forkserver._forkserver._stop()
    process, _ = start("print(1)\n")
    assert process.wait() == 0
    assert not list(tmp_path.glob("*.ran"))
    assert Path.cwd() == tmp_path


def test_the_folder_of_temporary_files_may_have_a_long_path(start, tmp_path, monkeypatch):
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    forkserver._forkserver._stop()
    process, _ = start("print(1)\n")
    assert process.wait() == 0
    assert Path(config["tempdir"]).is_dir()


def test_a_run_survives_the_server_and_the_next_one_gets_another(start, tmp_path):
    ends = tmp_path / "ends"
    waiting = "import os, time\nprint(os.getppid(), flush=True)\n"
    waiting += f"while not os.path.exists({str(ends)!r}):\n    time.sleep(0.02)\n"
    process, log = start(waiting)
    os.kill(int(last_line(log)), signal.SIGKILL)
    assert process.status(0.3) is None
    begun = time.monotonic()
    wait_for_one([process], 0.2)
    assert time.monotonic() - begun >= 0.2  # what the server has left behind says nothing about the run
    other, _ = start("print(2)\n")
    assert other.wait() == 0
    ends.touch()
    assert process.wait() == -signal.SIGKILL  # nobody knows how it has ended
    assert not is_alive(process.pid)


def test_it_ends_with_the_process_that_started_it(start, tmp_path):
    saving = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))"
    process = start(SLEEPS.format(saving))[0]
    process.ask_to_end()
    process.await_end()  # and the tree is there
    main, log = tmp_path / "tree/fit.py", tmp_path / "logs/other.txt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(main), str(log)], stdout=subprocess.PIPE, text=True, env=environment
    )
    child = int(parent.stdout.readline())
    await_output(log)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + HANGS_S
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert log.read_text().split() == ["ready", "saved"]


def test_a_process_without_output_has_no_last_line(tmp_path):
    (tmp_path / "log.txt").touch()
    assert last_line(tmp_path / "log.txt") == "no output"
    Path(tmp_path / "log.txt").write_text("a\nlightning-llm: error: no\n\n")
    assert last_line(tmp_path / "log.txt") == "lightning-llm: error: no"
