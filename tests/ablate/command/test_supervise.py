"""One run of a program, whatever it does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from lightning_llm.ablate.command import process, supervise
from lightning_llm.ablate.command.log import CappedLog
from lightning_llm.ablate.command.process import SupervisedProcess
from lightning_llm.ablate.command.supervise import Job
from lightning_llm.ablate.command.workplace import Place
from lightning_llm.ablate.run_process import last_line
from lightning_llm.io.processes import is_alive
from lightning_llm.runs.status import read_summary, run_state

LOSS = "print('loss 2.5')"


@pytest.fixture
def job(tmp_path):
    """A job whose program is this code."""
    (tmp_path / "work").mkdir()
    (tmp_path / "out" / "logs").mkdir(parents=True)

    def make(code, is_first=False, **changes):
        return Job(
            run="a,seed=0",
            run_folder=str(tmp_path / "out" / "runs" / "a,seed=0"),
            files=str(tmp_path / "out" / "files" / "a-0"),
            log=str(tmp_path / "out" / "logs" / "a,seed=0.txt"),
            words=[sys.executable, "-c", code.replace("{", "{{").replace("}", "}}"), "{run}"],
            values={"run": str(tmp_path / "out" / "files" / "a-0"), "seed": "0"},
            metric="loss",
            **{"read": "loss {number}", **changes},
            place=Place(
                folder=str(tmp_path / "work"),
                out=str(tmp_path / "out"),
                run_folder=str(tmp_path / "out" / "runs" / "a,seed=0"),
                is_first=is_first,
            ),
            environment=dict(os.environ),
        )

    return make


def ended(job):
    """Its exit status, the state of the run in words, and the end of the log."""
    status = SupervisedProcess(job).wait()
    return status, run_state(Path(job.run_folder)).description, last_line(Path(job.log))


def summary_of(job):
    return read_summary(Path(job.run_folder), ())


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (LOSS, "finished"),
        ("print('loss 1'); print('loss nan')", "diverged (its loss is nan)"),
        ("raise SystemExit(3)", "failed (exit status 3, it printed nothing)"),
        (f"{LOSS}; print('no GPU here'); raise SystemExit(1)", "failed (exit status 1, no GPU here)"),
        ("print('hello')", "failed (it showed no 'loss {number}'; its last line: hello)"),
        (f"{LOSS}; import os; os.abort()", "failed (it was ended by signal 6)"),
        (f"{LOSS}; import sys; print('bye', file=sys.stderr)", "finished"),
        ("import sys; sys.stdout.write('loss 2.5')", "finished"),
        (f"{LOSS}; import os; os.write(1, b'\\xff\\x00\\n')", "finished"),
        ("assert input() == ''", "failed (exit status 1, EOFError: EOF when reading a line)"),
    ],
)
def test_the_end_of_a_program_is_an_outcome(job, code, state):
    assert ended(job(code))[:2] == (0, state)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print('hello')", "the program showed no 'loss {number}'; its last line: hello"),
        (
            "import nothing",
            "the program ended with exit status 1; its last line: ModuleNotFoundError: No module named",
        ),
    ],
)
def test_a_program_that_never_shows_its_metric_with_the_first_seed_is_a_mistake(job, code, line):
    status, state, last = ended(job(code, is_first=True))
    assert (status, state) == (1, "has not ended yet, or was killed")
    assert last.startswith(line)


def test_one_that_did_show_it_is_an_outcome_with_the_first_seed_too(job):
    assert ended(job(f"{LOSS}; raise SystemExit(1)", is_first=True))[:2] == (0, "failed (exit status 1, loss 2.5)")


def test_a_summary_has_the_numbers(job):
    code = "import time; x = bytearray(64 << 20); print('step 1 loss 3'); print('step 5 loss 2'); time.sleep(0.7)"
    run = job(f"print('parameters: 12'); print('batches: 1f'); {code}", read="step {step} loss {number}")
    assert ended(run)[:2] == (0, "finished")
    summary = summary_of(run)
    assert {"loss": 2.0, "steps": 5, "parameters": 12.0, "batches": "1f", "exit_status": 0}.items() <= summary.items()
    assert 0.06 < summary["peak_memory_gib"] < 1
    assert summary["seconds"] > 0.7
    curve = json.loads((Path(run.run_folder) / supervise.CURVE).read_text())
    assert curve == {"values": [[1, 3.0], [5, 2.0]]}


NVIDIA_SMI = """#!/bin/sh
test "$*" = "--id=3,4 --query-gpu=memory.used --format=csv,noheader,nounits" || exit 1
if mkdir FOLDER/asked 2>/dev/null; then printf "500\\n500\\n"; else touch FOLDER/again; printf "3000\\n1000\\n"; fi
"""


@pytest.mark.parametrize(("gpus", "used"), [("3,4", 3000 / 1024), ("9", None)])
def test_the_memory_of_a_run_with_gpus_is_what_their_driver_reports(job, tmp_path, monkeypatch, gpus, used):
    """With a stand-in for its program; of GPUs that it does not know, the memory is that on the host."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(NVIDIA_SMI.replace("FOLDER", str(tmp_path / "work")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    until_it_is_sampled = "import os\nwhile os.path.exists('asked') and not os.path.exists('again'): pass\n"
    run = job(f"{until_it_is_sampled}{LOSS}", gpus=gpus, time_limit_s=60.0)
    assert ended(run)[:2] == (0, "finished")
    summary = summary_of(run)
    assert (supervise.ON_GPUS in summary["notes"]) == (used is not None)
    if used is not None:
        assert summary["peak_memory_gib"] == used


def test_a_metric_that_should_be_high_is_read_with_its_sign_changed(job):
    run = msgspec.structs.replace(job("print('loss 0.9')"), metric="-loss")
    assert ended(run)[:2] == (0, "finished")
    assert summary_of(run)["-loss"] == -0.9


def test_the_metric_may_be_in_a_file(job):
    code = "import sys, json; open(sys.argv[1] + '/r.json', 'w').write(json.dumps({'a': {'loss': 2}}))"
    run = job(code, read="", file="r.json", key="a.loss")
    assert ended(run)[:2] == (0, "finished")
    assert summary_of(run)["loss"] == 2.0
    assert ended(job("pass", read="", file="s.json", key="loss"))[1].endswith(
        "its last line: it printed nothing; it wrote no s.json)"
    )


def test_a_program_that_hangs_and_will_not_end_is_ended_with_all_that_it_started(job, tmp_path):
    child = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid(); time.sleep(600)"
    code = f"""import os, signal, subprocess, sys, time
signal.signal(15, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', {child!r}])
open('pids', 'w').write(f'{{os.getpid()}} {{child.pid}}')
time.sleep(600)"""
    process = SupervisedProcess(job(code, time_limit_s=1.5, grace_s=1.0))
    assert process.wait() == 0
    pids = [*map(int, (tmp_path / "work" / "pids").read_text().split())]
    assert not any(map(is_alive, pids))
    run = Path(job(code).run_folder)
    assert run_state(run).description == "failed (it took longer than the time limit of 1.5 s)"


def test_what_forks_away_is_ended_when_the_program_has_ended(job, tmp_path):
    code = f"""import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        open('pid', 'w').write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists('pid') or not open('pid').read(): time.sleep(0.05)
{LOSS}"""
    assert ended(job(code))[:2] == (0, "finished")
    assert not is_alive(int((tmp_path / "work" / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_interrupted_has_no_result_and_leaves_nothing_running(job, tmp_path, number):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    supervised = SupervisedProcess(job(code))
    pid = tmp_path / "work" / "pid"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    os.kill(supervised.pid, number)
    assert supervised.wait() == (143 if number == signal.SIGTERM else -9)
    deadline = time.monotonic() + 60
    while is_alive(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert run_state(Path(job(code).run_folder)).description == "has not ended yet, or was killed"


def test_a_supervisor_starts_without_what_takes_long():
    """SciPy alone took 0.4 s, for each run."""
    code = f"import sys, {supervise.__name__}; print(*{{'torch', 'numpy', 'scipy', 'yaml'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def test_a_supervisor_that_is_killed_before_it_has_its_job_has_ended(job, monkeypatch):
    popen = subprocess.Popen

    def killed(words, **options):
        child = popen(words, **options)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        return child

    monkeypatch.setattr(process.subprocess, "Popen", killed)
    assert SupervisedProcess(job(LOSS)).wait() == -9


RESUMED = """
import os, sys, time
run, *words = sys.argv[1:]
state = os.path.join(run, "state")
print("words", words, os.path.exists(state))
if not words:
    open(state, "x").close()
    {after}
print("loss 2.5")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_is_resumed_if_the_command_can(job, number):
    wait = "time.sleep(0 if os.path.exists('quick') else 600)"
    run = job(RESUMED.format(after=wait), is_first=True)
    run = msgspec.structs.replace(run, words=[*run.words, "{resume}"], resume=["--init", "a b", "{run}/x"])
    supervised = SupervisedProcess(run)
    await_parts(run)
    time.sleep(2 * supervise.SAMPLE_S)  # that count in its seconds
    os.kill(supervised.pid, number)
    assert supervised.wait() != 0
    assert ended(run)[:2] == (0, "finished")
    assert f"words ['--init', 'a b', '{run.files}/x'] True" in Path(run.log).read_text()
    summary = summary_of(run)
    assert (summary["loss"], summary["output"]) == (2.5, None)
    assert summary["seconds"] > 0.5
    shutil.rmtree(run.run_folder)  # the user lets it train again: from the beginning
    Path(run.place.folder, "quick").touch()
    assert ended(run)[:2] == (0, "finished")
    assert summary_of(run)["output"] is not None
    assert any("was interrupted, and resumed" in note for note in summary["notes"])


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("fails", ["sys.exit(1)", "sys.exit(0)"])  # with a torn checkpoint, or with nothing left to do
def test_a_failure_after_an_interruption_does_not_count(job, fails, is_first):
    code = RESUMED.format(after="time.sleep(0 if os.path.exists('interrupted') else 600)")
    code = code.replace('print("words"', f'if words: {fails}\nprint("words"')
    run = job(code, is_first=is_first)
    run = msgspec.structs.replace(run, words=[*run.words, "{resume}"], resume=["--init"])
    supervised = SupervisedProcess(run)
    await_parts(run)
    Path(run.place.folder, "interrupted").touch()
    os.kill(supervised.pid, signal.SIGKILL)
    supervised.wait()
    assert ended(run)[:2] == (143, "has not ended yet, or was killed")
    assert ended(run)[:2] == (0, "finished")
    summary = summary_of(run)
    assert summary["loss"] == 2.5
    assert not any("resumed" in note for note in summary["notes"])


def await_parts(run):
    while not (Path(run.files) / "state").exists() or not Path(run.log).with_suffix(supervise.PARTS).exists():
        time.sleep(0.05)


def test_after_a_mistake_nothing_is_resumed(job):
    run = job(RESUMED.format(after="sys.exit()"), is_first=True)
    run = msgspec.structs.replace(run, words=[*run.words, "{resume}"], resume=["--init"])
    for _ in range(2):  # the second one would not make its state where that of the first is
        assert ended(run)[2].endswith("; its last line: words [] False")


def test_a_program_that_somebody_kills_starts_again_and_the_second_time_is_an_outcome(job):
    code = "import os; os.kill(os.getpid(), 9)"
    assert ended(job(code))[:2] == (143, "has not ended yet, or was killed")
    assert ended(job(code))[:2] == (0, "failed (it was ended by signal 9)")


def test_a_log_has_its_beginning_and_its_end(job, tmp_path):
    log = CappedLog(tmp_path / "log", half=100)
    for number in range(1000):
        log.write(b"%04d\n" % number)
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:20] == [f"{number:04}" for number in range(20)]
    assert lines[20:22] == ["", "[4,800 bytes are left out here]"]
    assert lines[22:] == [f"{number:04}" for number in range(980, 1000)]


@pytest.mark.slow
def test_a_gigabyte_of_output_is_read_and_not_kept(job):
    code = f"import sys\nfor n in range(1 << 10): sys.stdout.write('x' * ((1 << 20) - 1) + '\\n')\n{LOSS}"
    run = job(code)
    assert ended(run)[:2] == (0, "finished")
    assert Path(run.log).stat().st_size < 102 << 20


def test_what_a_run_changes_in_its_folder_is_named(job, tmp_path):
    (tmp_path / "work" / "data").write_text("1")
    code = f"open('ckpt.pt', 'w'); open('data', 'a').write('2'); import sys; open(sys.argv[1] + '/own', 'w'); {LOSS}"
    run = job(code, is_first=True)
    assert ended(run)[:2] == (0, "finished")
    (note,) = summary_of(run)["notes"]
    assert note.startswith("A run writes to its folder (ckpt.pt, data): ")


def test_a_program_that_is_not_there_is_one_line(job):
    run = msgspec.structs.replace(job(""), words=["/nowhere/python"])
    status, _, last = ended(run)
    assert status == 1
    assert last.startswith("'/nowhere/python' cannot be started in ")


def test_a_file_of_an_earlier_run_is_no_result(job, tmp_path):
    result = tmp_path / "work" / "r.json"
    result.write_text('{"loss": 1}')
    os.utime(result, (1, 1))
    run = job("pass", read="", file="r.json", key="loss")
    run = msgspec.structs.replace(run, words=run.words[:-1])  # without a folder of its own
    assert ended(run)[1].endswith("it printed nothing; it wrote no r.json)")


def test_an_error_of_the_hook_that_moves_seeds_is_named(job):
    finder = "import sys, importlib.machinery as m; sys.meta_path.insert(0, m.PathFinder)"  # comes before the hook
    run = job(f"{finder}; import random; {LOSS}")
    run = msgspec.structs.replace(run, place=msgspec.structs.replace(run.place, reseed=1))
    assert ended(run)[:2] == (0, "finished")
    assert any(note.startswith("The start-up hook failed: ") for note in summary_of(run)["notes"])
