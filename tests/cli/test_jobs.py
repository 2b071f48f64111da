"""Which job a process belongs to, and what is refused before waiting for others."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_llm.cli import train
from lightning_llm.cli.jobs import check_address, check_restarts, lost_contact, may_have_run_before, this_job

TORCHRUN = {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("environment", "job", "may"),
    [
        ({}, None, False),
        ({"SLURM_JOB_ID": "17"}, "slurm-17", False),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, "slurm-17", True),
        (TORCHRUN, "torchrun-abc", True),
        ({**TORCHRUN, "SLURM_JOB_ID": "17"}, "torchrun-abc", True),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, "torchrun-none", False),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun-none", True),
    ],
)
def test_the_job_and_its_attempts(monkeypatch, environment, job, may):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert this_job() == job
    assert may_have_run_before() is may


def test_a_torchrun_job_resumes_from_its_own_checkpoint_without_being_told(tiny, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        for name, value in TORCHRUN.items():
            patch.setenv(name, value)
        tiny("fit", **{"trainer.max_steps": 3})
        rest = tiny("fit")
    assert "Resumed from step 3" in capsys.readouterr().out
    assert rest.trainer.log_dir.endswith("version_0")
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "another")
        other = tiny("fit", **{"trainer.max_steps": 3})
    assert other.trainer.log_dir.endswith("version_1")


def test_restarts_that_could_not_work_are_refused(monkeypatch):
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    check_restarts()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(ValueError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restarts()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    check_restarts()


def test_an_address_that_nobody_knows_is_refused_at_once(flags, monkeypatch, tmp_path, error_line):
    from lightning_llm.cli.train import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert run(["fit", *flags()]) == 2
    assert "MASTER_ADDR 'no-such-host.invalid', where process 0 runs, is not known" in error_line()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    check_address()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is typically caused", "Read error"),
        ("buffer.cc:81] Timed out waiting 10000ms for recv operation to complete", "Timed out waiting 10000ms"),
    ],
)
def test_gloo_says_that_a_process_is_gone(monkeypatch, found, reason):
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    line = lost_contact(RuntimeError(f"[../third_party/gloo/gloo/transport/tcp/{found}"))
    assert line.startswith("process 1 on ")
    assert "could not reach the others at 10.0.0.1:" in line
    assert reason in line
    assert "gloo" not in line
    assert lost_contact(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_what_waits_beside_an_exchange_that_timed_out_has_lost_the_others_too(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    connect = partial(dist.ProcessGroupGloo, store, size=2, timeout=timedelta(minutes=1))
    with ThreadPoolExecutor(2) as pool:
        group, silent = pool.map(lambda rank: connect(rank=rank), range(2))

    def exchange_within(seconds):
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=seconds)
        return group.allreduce([torch.ones(1)], options)

    first, second = exchange_within(1), exchange_within(60)  # the first to give up closes what the second waits for
    for exchange, prefix in ((first, "["), (second, "Application timeout")):
        with pytest.raises(RuntimeError, match="^" + re.escape(prefix)) as failed:
            exchange.wait()
        assert "Timed out waiting" in lost_contact(failed.value)
    del silent  # alive until here


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are seen on Linux only")
@pytest.mark.parametrize(("status", "leaves"), [(None, True), (143, True), (1, False)])
def test_the_threads_of_groups_end_before_python_does(tmp_path, monkeypatch, status, leaves):
    def job(words):
        holder = SimpleNamespace(group=dist.new_group(backend="gloo"))
        holder.itself = holder  # as a Trainer and its callbacks hold each other
        dist.all_reduce(torch.ones(1), group=holder.group)
        assert threads() - before
        if status is not None:
            raise SystemExit(status)

    def threads():
        return {task.name for task in Path("/proc/self/task").iterdir()}

    monkeypatch.setattr(train, "cli_main", job)
    before = threads()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert train.run(["fit"]) == (status or 0)
        assert dist.is_initialized() is not leaves
        if leaves:
            assert threads() <= before
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
