"""Ctrl-C at any moment of a command in a process of its own: one line, 130, no stack trace."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli.interrupts import Interrupts

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("default_signals")


def test_a_command_inside_of_another_gives_the_name_back():
    """``ablate`` reads each side by ``check``."""
    found = Interrupts()
    with found.handling("ablate"):
        with found.handling("check"):
            assert found.command == "check"
        assert found.command == "ablate"


def process(act, words=("fit",), **options):
    """``lightning-llm`` in a process, where ``act``, a line of Python, is what the command does."""
    code = "import os, signal, sys, types\nsend = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
    code += f"def run(words):\n {act}\n"
    code += "module = types.ModuleType('lightning_llm.cli.train')\nmodule.run = run\n"
    code += "sys.modules[module.__name__] = module\nfrom lightning_llm.__main__ import main\nsys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, **{"capture_output": True, "text": True, **options})


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config", "x.yaml"],
        ["generate", "y"],
        ["same", "-c", "x.yaml", "--vary", "decoding"],
        ["evaluate", "y", "--data", "y"],
    ],
)
def test_ctrl_c_while_torch_is_imported_is_one_line(words, tmp_path):
    """Where the import continues, the line is still the only one: the libraries' handling of errors plays no part."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException:\n    raise ImportError('swallowed')\n"
    )
    (tmp_path / "y").write_text("text")
    (tmp_path / "x.yaml").write_text("trainer: {max_steps: 1}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "lightning_llm", *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"lightning-llm {words[0]}: interrupted\n")


CLEARING = "\n try: send()\n except KeyboardInterrupt:\n  {}"
DYING = "class A: __del__ = lambda self: send()\n a = A(); del a\n print('went on')"


@pytest.mark.parametrize(
    "act",
    ["send()", CLEARING.format("send()"), CLEARING.format("raise"), DYING, "pass\n try: send()\n finally: send()"],
)
def test_ctrl_c_is_one_line_wherever_it_hits_and_however_often(act):
    done = process(act)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lightning-llm fit: interrupted\n")


def test_ctrl_c_after_the_last_line_changes_nothing():
    late = "import atexit, threading\n atexit.register(send)\n threading._register_atexit(send)\n return 3"
    done = process(late)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_background_job_of_a_script_does_not_take_ctrl_c_over():
    done = process("send(); return 4", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stderr) == (4, "")


def test_a_second_process_says_nothing():
    done = process("os.environ['LOCAL_RANK'] = '1'; send()")
    assert (done.returncode, done.stderr) == (130, "")


def test_in_a_notebook_the_process_stays_that_of_the_caller(capsys):
    before = signal.getsignal(signal.SIGINT)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
