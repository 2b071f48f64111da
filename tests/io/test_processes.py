"""Whether a process is alive, whoever owns it, and which is the first of those that train together."""

import os
import subprocess
import sys

import pytest

from lightning_llm.io.processes import is_alive, is_first_process


def test_a_process_is_alive_until_it_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    process.communicate(b"\n")
    assert not is_alive(process.pid)


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
