"""Signals at any moment of a command: one line, 128 plus the signal's number, no stack trace; readers that leave."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.checkpoints.reading import is_intact
from lightning_llm.cli import report
from lightning_llm.cli.process import Interrupts, lasting, send_nowhere
from lightning_llm.training.callbacks import RunCheckpoints, StopOnSignal
from lightning_llm.training.module import LanguageModel

ALL = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("default_signals")


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def sending(owner, name, monkeypatch, *numbers, when=lambda *args: True):
    """The method sends the signals to this process, once, before it does what it always does."""
    original, sent = getattr(owner, name), []

    def method(self, *args, **kwargs):
        if not sent and when(*args):
            sent.append(numbers)
            send(*numbers)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def ended(tiny, capsys, command="fit", **options):
    """Exit status and what was said of the interruption: one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        tiny(command, **options)
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert len(said) == 1, said
    assert said[0].startswith(f"lightning-llm {command}: interrupted")
    return leaving.value.code, said[0]


def at_step(number):
    return lambda trainer, *args: trainer.state.fn == "fit" and trainer.global_step == number


@pytest.mark.parametrize("first", ALL)
def test_ctrl_c_after_a_signal_does_not_wait(tiny, monkeypatch, capsys, first):
    sending(StopOnSignal, "on_train_batch_end", monkeypatch, first, signal.SIGINT, when=at_step(3))
    status, line = ended(tiny, capsys)
    assert (status, line) == (130, "lightning-llm fit: interrupted")


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize(
    ("owner", "name"), [(LanguageModel, "configure_model"), (StopOnSignal, "setup"), (report, "print_sample")]
)
def test_a_signal_before_and_after_training_is_one_line(tiny, monkeypatch, capsys, owner, name, number):
    sending(owner, name, monkeypatch, number)
    status, line = ended(tiny, capsys)
    assert status == 128 + number
    assert line == "lightning-llm fit: interrupted" + ("" if number == signal.SIGINT else f" by {number.name}")
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


@pytest.mark.parametrize("number", ALL)
def test_a_signal_while_a_checkpoint_is_validated_is_one_line(tiny, monkeypatch, capsys, number):
    tiny("fit")
    sending(StopOnSignal, "on_validation_batch_end", monkeypatch, number)
    assert ended(tiny, capsys, "validate", ckpt_path="last")[0] == 128 + number


@pytest.mark.parametrize("number", ALL)
def test_a_signal_while_the_last_step_is_saved_ends_the_run_once_it_is(tiny, monkeypatch, capsys, number):
    sending(RunCheckpoints, "on_train_end", monkeypatch, number)
    status, line = ended(tiny, capsys, **{"trainer.val_check_interval": 4})
    assert status == 128 + number
    assert "after step 6" in line
    run = Path("runs/run/version_0")
    assert is_intact(run / "checkpoints" / "step-00000006.ckpt")
    assert not (run / "summary.json").exists()


@pytest.mark.parametrize("number", ALL)
def test_what_the_parent_ignores_stays_ignored(tiny, monkeypatch, number):
    signal.signal(number, signal.SIG_IGN)
    sending(StopOnSignal, "on_train_batch_end", monkeypatch, number, number, when=at_step(3))
    sending(report, "print_sample", monkeypatch, number)
    cli = tiny("fit")
    assert cli.trainer.global_step == 6
    assert signal.getsignal(number) is signal.SIG_IGN


# ---- processes of the command's own


def test_a_command_inside_of_another_gives_the_name_back():
    """``ablate`` reads each side by ``check``."""
    found = Interrupts()
    with found.taken("ablate"):
        with found.taken("check"):
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
    "words", [["fit", "--config", "x.yaml"], ["generate", "y"], ["bench", "loss"], ["evaluate", "y", "--data", "y"]]
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


# ---- readers that leave

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


def test_in_a_notebook_the_process_stays_that_of_the_caller(capsys):
    before = signal.getsignal(signal.SIGINT)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
