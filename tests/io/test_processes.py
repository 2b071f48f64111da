"""Whether a process is alive, whoever owns it, and which is the first of those that train together."""

import os
import subprocess
import sys

import pytest

from lightning_llm.io.processes import await_ends, is_alive, is_first_process


def test_a_process_is_alive_until_it_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    process.communicate(b"\n")
    assert not is_alive(process.pid)


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_the_end_of_another_s_child_is_waited_for(monkeypatch, has_descriptors):
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        await_ends([child, 10**7], 0.01)  # the second one does not exist
        assert is_alive(child)
        os.kill(child, 9)
        await_ends([child], 60.0)
        assert not is_alive(child)
        parent.stdin.close()


def test_a_process_of_somebody_else_is_alive(monkeypatch):
    def refuse(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert is_alive(1)


def test_no_process_has_so_high_a_number():
    assert not is_alive(10**30)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_each_launcher_says_which_process_is_the_first(monkeypatch, name):
    for other in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(other, raising=False)
    assert is_first_process()
    monkeypatch.setenv(name, "0")
    assert is_first_process()
    monkeypatch.setenv(name, "1")
    assert not is_first_process()


def test_a_process_that_has_ended_unnoticed_is_not_alive():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its status is there, and stays
        assert not is_alive(process.pid)
