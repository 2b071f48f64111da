"""Whether a process is alive, whoever owns it."""

import os
import subprocess
import sys

from lightning_llm.io.processes import is_alive


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
