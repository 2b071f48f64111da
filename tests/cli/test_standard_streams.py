"""Readers that leave, streams that are closed, and a terminal that waits for an import.

What reaches a stream whole or escaped is in ``test_control_characters.py``.
"""

import io
import os
import pty
import subprocess
import sys

import pytest

from lightning_llm.cli.standard_streams import lasting, send_nowhere
from tests.cli.test_interrupts import ROOT, process

pytestmark = pytest.mark.usefixtures("default_signals")

SAYING = "[print('x' * 9999, file=f) for f in (sys.stdout, sys.stderr) for _ in range(9)]; return 0"


@pytest.fixture
def nobody():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def test_training_continues_where_its_reader_leaves(nobody):
    assert process(SAYING, capture_output=False, stdout=nobody, stderr=nobody).returncode == 0
    done = process(SAYING, capture_output=False, stdout=nobody, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, ("x" * 9999 + "\n") * 9)


def test_training_continues_where_its_streams_are_closed_from_the_start(tmp_path):
    kept = "file = open('kept', 'w')\n os.write(1, b'lost'); os.write(2, b'lost')\n"
    kept += " print('lost')\n return file.close() or 0"
    done = process(kept, capture_output=False, cwd=tmp_path, preexec_fn=lambda: os.closerange(0, 3))
    assert done.returncode == 0
    assert (tmp_path / "kept").read_bytes() == b""


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_what_only_prints_ends_without_a_word(words, nobody):
    done = process("pass", words, capture_output=False, stdout=nobody, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_reader_of_a_table_leaves(tmp_path, nobody):
    for number in range(2):
        run = tmp_path / f"version_{number}"
        run.mkdir()
        (run / "config.yaml").write_text(f"seed_everything: {number}\n")
        (run / "summary.json").write_text("{}")
    done = process("pass", ["compare", str(tmp_path)], capture_output=False, stdout=nobody, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_run_reports_to_nobody(tiny, nobody, monkeypatch):
    stream = io.TextIOWrapper(io.FileIO(os.dup(nobody), "wb"), line_buffering=True)
    with stream, lasting(stream) as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        assert tiny("fit").trainer.global_step == 6
        monkeypatch.undo()


def test_other_errors_of_a_stream_are_errors():
    with open("/dev/full", "w") as full:
        out = lasting(full)
        out.write("x")
        with pytest.raises(OSError, match="No space left"):
            out.flush()
        send_nowhere(full.fileno())  # what it still holds
        out.flush()


@pytest.mark.slow
def test_a_whole_run_is_piped_into_a_reader_that_leaves(flags, tmp_path):
    command = [sys.executable, "-m", "lightning_llm", "fit", *flags()]
    line = f"{subprocess.list2cmdline(command)} | head -1; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert "Error" not in done.stderr
    assert (tmp_path / "runs/run/version_0/summary.json").exists()


WAITING = """
import sys
from lightning_llm.cli import standard_streams
standard_streams.PATIENCE = float(sys.argv[1])
standard_streams.note_imports("lightning-llm fit")
import torch
print("done", file=sys.stderr)
"""


@pytest.mark.parametrize(("patience", "is_shown"), [("0.05", True), ("60", False)])
def test_a_terminal_is_told_of_a_slow_import_and_a_pipe_is_not(patience, is_shown, tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(0.6)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", WAITING, patience]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "done\n")
    leader, terminal = pty.openpty()
    subprocess.run(command, env=environment, stderr=terminal, check=True)
    os.close(terminal)
    line = "lightning-llm fit: importing PyTorch …"
    shown = f"{line}\r{' ' * len(line)}\r" if is_shown else ""
    assert os.read(leader, 1000).decode() == f"{shown}done\r\n"
    os.close(leader)
