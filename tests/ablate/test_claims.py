"""A run belongs to one worker at a time, whatever happens to workers and clocks."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from lightning_llm.ablate import claims
from lightning_llm.ablate.claims import STALE_S, claimed, take

RUN = "mlp=relu2,seed=3"


def test_of_many_that_ask_one_gets_it(tmp_path):
    found, barrier = [], threading.Barrier(8)

    def ask():
        barrier.wait()
        found.append(take(tmp_path, RUN))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([claim for claim in found if claim]) == 1
    assert claimed(tmp_path, [RUN])
    assert take(tmp_path, "mlp=relu2,seed=33") is not None  # another run


def test_many_can_read_the_clock_of_the_file_system_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        times = list(pool.map(claims._file_system_time, [tmp_path] * 400))
    assert max(times) - min(times) < STALE_S
    assert not os.listdir(tmp_path)


def test_what_was_given_up_can_be_taken_at_once(tmp_path):
    take(tmp_path, RUN).give_up()
    assert not claimed(tmp_path, [RUN])
    assert take(tmp_path, RUN) is not None


def elsewhere(claim):
    """As if a worker on another host had it."""
    claim.path.write_text("1 another-host pid:[1]\n")
    return claim


def test_a_claim_that_nobody_renews_becomes_stale_by_the_clock_of_the_file_system(tmp_path, monkeypatch):
    claim = elsewhere(take(tmp_path, RUN))
    monkeypatch.setattr(claims.time, "time", lambda: 4e9)  # the host's clock does not count
    assert take(tmp_path, RUN) is None
    now = claim.path.stat().st_mtime
    os.utime(claim.path, (now, now - STALE_S - 1))
    assert claim.renew()  # nobody has taken it yet
    assert take(tmp_path, RUN) is not None
    assert not claim.renew()  # its holder learns that it has lost the run
    assert take(tmp_path, RUN) is None


def test_a_renewed_claim_stays(tmp_path, monkeypatch):
    claim = elsewhere(take(tmp_path, RUN))
    os.utime(claim.path, (1.0, 1.0))
    claim._renewed -= claims.RENEW_S
    assert claim.renew()
    assert take(tmp_path, RUN) is None


def test_a_worker_that_was_slow_to_decide_takes_nothing_from_a_younger_claim(tmp_path, monkeypatch):
    os.utime(elsewhere(take(tmp_path, RUN)).path, (1.0, 1.0))
    slow, taken = claims._is_stale, []

    def decide(claim):  # while it decides, another worker takes the run
        found = slow(claim)
        monkeypatch.setattr(claims, "_is_stale", slow)
        taken.append(take(tmp_path, RUN))
        return found

    monkeypatch.setattr(claims, "_is_stale", decide)
    assert take(tmp_path, RUN) is None
    assert taken[0].renew()


def test_where_there_is_no_proc_the_claim_of_a_dead_process_is_stale_too(tmp_path, monkeypatch):
    def no_proc(path):
        raise FileNotFoundError(path)

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(claims.os, "readlink", no_proc)  # as on macOS
    with monkeypatch.context() as there:
        there.setattr(claims.os, "getpid", lambda: ended.pid)
        assert take(tmp_path, RUN) is not None
    assert take(tmp_path, RUN) is not None


def test_the_claim_of_a_killed_process_of_this_host_is_stale_at_once(tmp_path):
    code = "import sys; from pathlib import Path; from lightning_llm.ablate.claims import take;"
    code += "take(Path(sys.argv[1]), sys.argv[2]); print('taken', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "taken\n"
    assert take(tmp_path, RUN) is None
    other.kill()
    other.communicate()
    assert take(tmp_path, RUN) is not None
    assert socket.gethostname() in (tmp_path / "claims" / f"{RUN}.1").read_text()
