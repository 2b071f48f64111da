"""An array of workers on a real SLURM on this machine: Debian's slurm-wlm and munge, one node."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lightning_llm.ablate.plan import Replay
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.slurm import submit
from tests.patience import HANGS_S

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobRequeue=1
KillWait=30
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=3 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
EXPERIMENT = {
    "baseline": "base.yaml",
    "variants": {"relu": {"model.architecture.mlp": "relu"}},
    "looks": [2],
    "out": "out",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, what):
    deadline = time.monotonic() + HANGS_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
    return found


def test_the_name_of_a_job_is_one_line(monkeypatch, tmp_path):
    """It becomes a comment of the shell script that sbatch runs."""
    given = {}

    class Executor:
        def __init__(self, **options):
            self.batch, self.submit = nullcontext, lambda job: SimpleNamespace(job_id="1")

        def update_parameters(self, **parameters):
            given.update(parameters)

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(SlurmExecutor=Executor))
    record = SimpleNamespace(threads=1)
    plan = SimpleNamespace(out=tmp_path, record=record, experiment=SimpleNamespace(name="a\ntouch ran\n"))
    assert submit(plan, 1, []) == ["1"]
    assert given["job_name"] == r"a\ntouch ran\n"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A SLURM of one node with three CPUs, for this test; ``slurm("scontrol", …)`` runs one of its commands."""
    pytest.importorskip("submitit", reason="needs the extra slurm: submitit")
    if missing := [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        pytest.skip(f"needs Debian's slurm-wlm and munge on this machine: no {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("needs root: SLURM's daemons run as root")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = {"host": socket.gethostname().partition(".")[0], "folder": folder}
    conf = folder / "slurm.conf"
    conf.write_text(CONFIG.format(**names, controller_port=free_port(), node_port=free_port()))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, filter(None, sys.path))))
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    daemons = [subprocess.Popen(munge)]
    until((folder / "munge.socket").exists, lambda: (folder / "munged.log").read_text())
    daemons += [subprocess.Popen(["slurmctld", "-D"]), subprocess.Popen(["slurmd", "-D"])]

    def run(*words):
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def logs():
        return "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))

    try:
        until(lambda: "idle" in run("sinfo", "--noheader", "--format=%T"), logs)
        yield run
    finally:
        run("scancel", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()


def test_what_is_missing_is_one_line(experiment, monkeypatch):
    plan = experiment({"a": {"effect": 0.0}})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"--slurm needs submitit: python -m pip install"):
        submit(plan, 1, [])


@pytest.mark.slow
def test_an_array_ends_with_the_same_results_after_a_requeue_and_a_kill(slurm, tmp_path, monkeypatch, text_file):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(text_file.read_text())
    model = {"architecture": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}}
    data = {"path": "text.txt", "tokenizer": "char", "context_length": 16, "global_batch_size": 8}
    trainer = {"accelerator": "cpu", "max_steps": 200, "val_check_interval": 20, "limit_val_batches": 2}
    Path("base.yaml").write_text(yaml.safe_dump({"model": model, "data": data, "trainer": trainer}))
    Path("exp.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    command = [
        sys.executable,
        "-m",
        "lightning_llm",
        "ablate",
        "run",
        "exp.yaml",
        "--workers",
        "3",
        "--slurm",
        "mem=100",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    array = re.search(r"submitted (\d+)_0, \d+_1, \d+_2", done.stderr)[1]
    out = Path("out").resolve()

    def saved():
        return [path.parents[1] for path in out.glob("runs/*/checkpoints/step-*.ckpt")]

    def logs():
        return "\n".join(path.read_text()[-2000:] for path in [*out.glob("slurm/*.err"), *out.glob("logs/*.txt")])

    until(saved, logs)
    slurm("scancel", "--signal=USR2", f"{array}_0")
    until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", f"{array}_0"), logs)

    def worker_of(task):
        job = re.search(r"JobId=(\d+)", slurm("scontrol", "show", "job", f"{array}_{task}"))
        listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(maxsplit=1) for line in listed.splitlines() if "ablate work" in line]
        return [int(pid) for pid, _ in rows if job and f"SLURM_JOB_ID={job[1]}".encode() in environ(pid)]

    os.kill(until(lambda: worker_of(1), logs)[0], signal.SIGKILL)
    until(lambda: not load_experiment(out).state.needed, logs)
    loaded = load_experiment(out)
    assert loaded.replay == Replay(0.0)
    assert {run.name for run in loaded.results} == {"baseline", "baseline-again", "null", "relu"}
    local = [*command[: command.index("--workers")], "--out", "local", "--reuse", "none"]
    done = subprocess.run(local, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone = load_experiment("local")
    assert {run: each.loss for run, each in alone.results.items()} == {
        run: each.loss for run, each in loaded.results.items()
    }
    assert alone.state.verdicts == loaded.state.verdicts
    assert any("resum" in path.read_text().lower() for path in out.glob("logs/*.txt"))
    assert json.loads((out / "plan.json").read_text())["threads"] == loaded.plan.record.threads


def environ(pid):
    try:
        return Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return b""
