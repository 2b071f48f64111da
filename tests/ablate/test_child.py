"""A process of the snapshot: in a session of its own, with a log, ended whether it wants or not."""

import os
import signal
import time

import pytest

from lightning_llm.ablate.child import Child, last_line
from lightning_llm.ablate.plan import CODE, MAIN

STUBBORN = "import signal, sys, time\n{}\nprint('ready', sys.argv[1:], flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def start(tmp_path):
    """``start(code)``: a process that runs this code in the place of the snapshot's, once it has printed a line."""
    children = []

    def begin(code, **options):
        main = tmp_path / CODE / MAIN
        main.parent.mkdir(exist_ok=True)
        main.write_text(code)
        log = tmp_path / "logs" / "log.txt"
        children.append(Child(tmp_path, ["ablate", "work"], log=log, **options))
        deadline = time.monotonic() + 60
        while last_line(log) == "no output" and children[-1].status() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return children[-1], log

    yield begin
    for child in children:
        child.end(0.0)


def test_it_has_a_session_and_a_log_of_its_own(start, tmp_path):
    child, log = start(STUBBORN.format(""), environment={**os.environ, "A": "1"}, folder=str(tmp_path))
    assert os.getsid(child.process.pid) == child.process.pid != os.getsid(0)
    assert last_line(log) == "ready ['ablate', 'work']"
    assert child.status() is None
    with child:
        pass
    assert child.status() == -signal.SIGTERM


def test_what_does_not_end_is_killed(start):
    child, _ = start(STUBBORN.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    child.ask_to_end()
    assert child.status(0.3) is None
    child.end(0.1)
    assert child.status() == -signal.SIGKILL


def test_signals_of_slurm_can_be_ignored(start):
    child, _ = start(STUBBORN.format(""), ignored=(signal.SIGUSR2,))
    child.process.send_signal(signal.SIGUSR2)
    assert child.status(0.3) is None


def test_the_status_is_that_of_the_code(start):
    child, log = start("import sys; print('lightning-llm: error: no', file=sys.stderr); sys.exit(2)")
    assert (child.status(60.0), last_line(log)) == (2, "lightning-llm: error: no")
