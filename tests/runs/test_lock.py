"""One process at a time writes to a run's folder, and a kill frees it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from lightning_llm.runs.directory import RunDirectory
from lightning_llm.runs.lock import LOCK, RunLock, is_locked

HOLDER = """
import os, sys, time
from pathlib import Path
from lightning_llm.runs.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
if os.fork() == 0:  # as workers that load data
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder and has forked a worker."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    yield process, worker
    os.kill(worker, signal.SIGKILL)
    process.kill()
    process.communicate()  # ends when neither has the pipe open any more


def test_the_process_that_trains_there_is_named_and_a_kill_frees_the_folder(tmp_path, holder, monkeypatch):
    process, worker = holder
    monkeypatch.setattr("lightning_llm.runs.lock.WAIT_S", 0.0)
    lock = RunLock(tmp_path)
    with pytest.raises(
        ValueError, match=rf"process {process.pid} on \S+ trains in {tmp_path}: wait until it has ended"
    ):
        lock.acquire()
    process.kill()
    process.wait()
    os.kill(worker, 0)  # it lives, and does not hold the lock
    lock.acquire()
    lock.release()


def test_a_process_that_is_ending_is_waited_for(tmp_path, holder, monkeypatch):
    process, _ = holder
    monkeypatch.setattr("lightning_llm.runs.lock.time.sleep", lambda seconds: (process.kill(), process.wait()))
    lock = RunLock(tmp_path)
    lock.acquire()
    assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()} ")
    lock.release()


def test_one_process_locks_a_folder_once_at_a_time(tmp_path):
    lock = RunLock(tmp_path)
    for _ in range(2):
        lock.acquire()
        with pytest.raises(ValueError, match=f"process {os.getpid()} on "):
            RunLock(tmp_path).acquire()
        lock.release()


@pytest.mark.parametrize("instead", ["a FIFO", "a link", "a folder"])
def test_a_lock_that_is_no_file_locks_nobody_in(tmp_path, capsys, instead):
    put = {"a FIFO": os.mkfifo, "a link": lambda path: path.symlink_to("other"), "a folder": os.mkdir}[instead]
    put(tmp_path / LOCK)
    for run in (RunLock(tmp_path), RunDirectory(tmp_path)):
        run.take(tmp_path) if isinstance(run, RunDirectory) else None
        with pytest.raises(ValueError, match=f"{LOCK} is {instead}, expected a file"):
            run.acquire() if isinstance(run, RunLock) else run.open()
    assert is_locked(tmp_path) is None
    assert names(tmp_path) == {LOCK}
    assert capsys.readouterr().err == ""  # no word about a file system without locks


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_once(tmp_path, monkeypatch, capsys, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    run = RunDirectory(tmp_path)
    run.open()
    run.open()
    run.close()
    said = capsys.readouterr().err
    assert said.count(f"{run.path} is on a file system without locks ({os.strerror(number)})") == 1


def test_a_lock_can_be_waited_for_without_end(tmp_path, holder, monkeypatch):
    process, _ = holder
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 100:  # twice as long as others wait
            process.kill()
            process.wait()

    monkeypatch.setattr("lightning_llm.runs.lock.time.sleep", sleep)
    monkeypatch.setattr("lightning_llm.runs.lock.WAIT_S", 0.0)
    RunLock(tmp_path, wait_s=float("inf")).acquire().release()
    assert len(waits) == 100
