"""Jobs of several processes and hosts under torchrun: the same curve, and what is left when one of them is lost."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs.directory import step_files, step_of
from tests.patience import HANGS_S

TIMEOUT = 10  # seconds until a process gives the others up
STRATEGY = {
    "class_path": "lightning.pytorch.strategies.DDPStrategy",
    "init_args": {"process_group_backend": "gloo", "gradient_as_bucket_view": True, "timeout": f"0:00:{TIMEOUT}"},
}


ON_A_CPU = """
import sys
from pathlib import Path
from lightning_llm.__main__ import main
from lightning_llm.accounting import hardware
hardware.CPU_INFO = Path(sys.argv.pop(1))
sys.exit(main())
"""


def environment(**more):
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **more,
    }


def forked(shell):
    """Environment variables for a job that nobody disturbs: torchrun's processes are forked, and start at once."""
    return {**shell.environment, "PYTHON_EXEC": shell.python}


def torchrun(*words, **more):
    """A job of torchrun's, started; its output goes to a file."""
    command = [sys.executable, "-m", "torch.distributed.run", *words[0], "-m", "lightning_llm", "fit", *words[1]]
    prefix, log = more.pop("prefix", []), Path(more.pop("log", "job.log"))
    with log.open("a") as output:
        return subprocess.Popen([*prefix, *command], env=environment(**more), stdout=output, stderr=output)


def workers(job):
    """The processes that train, of a job: torchrun's children."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def newest_step(root):
    files = [file for folder in Path(root).glob("*/*/checkpoints") for file in step_files(folder)]
    return max((step_of(file) for file in files), default=0)


def last_weights(root, step):
    (file,) = Path(root).glob(f"*/*/checkpoints/step-{step:08d}.ckpt")
    return read_checkpoint(file)["state_dict"]


def wait_for(condition, seconds, job=None):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert job is None or job.poll() is None, Path("job.log").read_text()[-3000:]
        time.sleep(0.02)


@pytest.fixture
def job_words(flags, tmp_path, monkeypatch):
    """``job_words(root, steps, **changes)``: a run that saves every five steps."""
    monkeypatch.chdir(tmp_path)

    def words(root, steps, **changes):
        Path(f"{root}.yaml").write_text(
            "trainer:\n  callbacks:\n    - class_path: "
            "lightning_llm.training.callbacks.RunCheckpoints\n      init_args: {every_n_steps: 5}\n"
        )
        options = {"trainer.max_steps": steps, "trainer.val_check_interval": 100, "trainer.default_root_dir": root}
        options |= {"trainer.strategy": STRATEGY, "trainer.devices": 2, "trainer.enable_progress_bar": False}
        return ["--config", f"{root}.yaml", *flags(**{**options, **changes})]

    return words


@pytest.mark.slow
def test_a_process_killed_twice_loses_nothing(job_words, quick_processes):
    steps, kills = 100, 2
    start = ["--standalone", "--nproc-per-node=2", f"--max-restarts={kills}"]
    undisturbed = torchrun(start, job_words("whole", steps), **forked(quick_processes))
    assert undisturbed.wait(300) == 0, Path("job.log").read_text()[-3000:]

    rng = random.Random(0)
    job = torchrun(start, job_words("killed", steps))
    for target in sorted(rng.sample(range(5, steps - 20, 5), kills)):
        wait_for(lambda at=target: newest_step("killed") >= at and len(workers(job)) == 2, 300, job)
        time.sleep(rng.random() / 5)
        os.kill(rng.choice(workers(job)), signal.SIGKILL)
    assert job.wait(400) == 0, Path("job.log").read_text()[-3000:]

    whole, killed = last_weights("whole", steps), last_weights("killed", steps)
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert Path("job.log").read_text().count("Resumed from step") >= kills - 1  # two kills may hit one attempt


@pytest.fixture
def two_hosts():
    """The names of two network namespaces, joined by a cable, and a function that sets it ``"up"`` or ``"down"``."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("two hosts need root and iproute2")

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    hosts = [f"llm-{os.getpid()}-{letter}" for letter in "ab"]  # a run that was killed leaves its own behind
    first, second = hosts
    try:
        for host in hosts:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for number, host in enumerate(hosts, start=1):
            ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
        yield hosts, lambda state: ip("-n", first, "link", "set", "cable", state)
    finally:
        for host in hosts:
            left = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
            for pid in left.split():  # of a test that failed
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host])


def start_on_two_hosts(hosts, words):
    jobs = []
    for number, host in enumerate(hosts):
        # the other rendezvous, c10d, leaves the agent behind the cut waiting for the kernel's TCP, some 15 minutes
        start = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1", "--rdzv-id=two-hosts"]
        start += ["--master-addr=10.77.0.1", "--master-port=29400"]
        more = {"prefix": ["ip", "netns", "exec", host], "log": f"{'ab'[number]}.log"}
        jobs.append(torchrun(start, words, GLOO_SOCKET_IFNAME="cable", **more))
    return jobs


@pytest.mark.slow
def test_a_cut_cable_ends_the_job_and_it_goes_on_once_mended(job_words, two_hosts, quick_processes):
    hosts, cable = two_hosts
    steps = 300
    changes = {"trainer.devices": 1, "trainer.num_nodes": 2}
    one = torchrun(["--standalone", "--nproc-per-node=2"], job_words("whole", steps), **forked(quick_processes))
    assert one.wait(400) == 0, Path("job.log").read_text()[-3000:]

    jobs = start_on_two_hosts(hosts, job_words("hosts", steps, **changes))
    wait_for(lambda: newest_step("hosts") >= 100, 300, jobs[0])
    cable("down")
    cut = time.monotonic()
    assert all(job.wait(120) != 0 for job in jobs)
    assert time.monotonic() - cut < 4 * TIMEOUT  # gloo's wait, and then torchrun's for its process to end
    for number, host in enumerate("ab"):
        log = Path(f"{host}.log").read_text()
        said = re.findall(r"lightning-llm fit: (.*)", log)
        assert len(said) == 1, log[-3000:]
        assert said[0].startswith(f"process {number} on ")
        assert "has lost the others" in said[0]
        assert "Timed out waiting" in said[0]

    left = newest_step("hosts")
    assert 100 <= left < steps
    cable("up")
    jobs = start_on_two_hosts(hosts, job_words("hosts", steps, **changes))
    assert [job.wait(400) for job in jobs] == [0, 0], Path("a.log").read_text()[-3000:]
    assert f"Resumed from step {left}" in Path("a.log").read_text()
    whole, cut_off = last_weights("whole", steps), last_weights("hosts", steps)
    assert all(torch.equal(whole[name], cut_off[name]) for name in whole)


def losses(root):
    (file,) = Path(root).glob("**/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize(("mlp", "chunks"), [("swiglu", 0), ("memory_optimized_swiglu", 3)])
def test_two_processes_have_the_curve_of_one(job_words, quick_processes, mlp, chunks):
    changes = {"model.architecture.mlp": mlp, "model.loss_chunks": chunks, "data.micro_batch_size": 2}
    for devices in (1, 2):
        root = f"on{devices}"
        logger = {"class_path": "lightning_llm.training.json_logger.JSONLinesLogger", "init_args": {"save_dir": root}}
        more = {**changes, "trainer.devices": devices, "trainer.logger": logger}
        if devices == 1:
            more["trainer.strategy"] = "auto"
        words = job_words(root, 30, **more)
        job = torchrun(["--standalone", f"--nproc-per-node={devices}"], words, **forked(quick_processes))
        assert job.wait(300) == 0, Path("job.log").read_text()[-3000:]
    one, two = losses("on1"), losses("on2")
    assert [step for step, _ in one] == [step for step, _ in two] == list(range(1, 31))
    # float32 sums in another order: 2^-24 a step and a factor for what Adam's division makes of it
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=30 * 2**-24 * 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--data.seed=7", "option data.seed is 7 there and 1"),
        ("--data.path=other.txt", "data is "),
        ("", "option trainer.precision is 32-true there and bf16-mixed in process 0"),
    ],
)
def test_a_process_that_runs_something_else_is_named(job_words, quick_processes, text_file, change, named):
    Path("other.txt").write_text(text_file.read_text().upper())
    features = ("avx512_bf16", "avx512_bf16" if change else "avx2")
    for rank in range(2):
        Path(f"cpu-{rank}").write_text(f"flags: {features[rank]}\n")
    words = job_words("differs", 5)
    launched = []
    for rank in range(2):
        given = [*words, "--trainer.devices=1", "--trainer.num_nodes=2", *([change] if change and rank else [])]
        command = [quick_processes.python, "-c", ON_A_CPU, f"cpu-{rank}", "fit", *given]
        ranks = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "NODE_RANK": str(rank)}  # each a host
        more = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", **ranks, **quick_processes.environment)
        launched.append(subprocess.Popen(command, env=more, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=HANGS_S)[1] for process in launched]
    assert [process.returncode for process in launched] == [2, 2], errors
    assert "lightning-llm fit: error: the processes differ: process 1 on " in errors[0]
    assert named in errors[0]
    assert "Traceback" not in errors[0] + errors[1]


@pytest.mark.slow
def test_what_only_the_second_process_finds_is_printed_by_it(job_words, quick_processes, text_file):
    Path("other.txt").write_text(text_file.read_text().upper())
    launched = []
    for rank in range(2):
        given = job_words("own", 5, **({"data.path": "other.txt", "data.store": "nowhere"} if rank else {}))
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}  # one host
        more = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="29519", **ranks, **quick_processes.environment)
        command = [quick_processes.python, "-m", "lightning_llm", "fit", *given]
        launched.append(subprocess.Popen(command, env=more, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=HANGS_S)[1] for process in launched]
    assert all(process.returncode for process in launched), errors
    (line,) = (line for line in errors[1].splitlines() if "lightning-llm fit: " in line)
    assert line.startswith("process 1: lightning-llm fit: error: ")
    assert "nowhere" in line
    assert "Traceback" not in errors[0] + errors[1]


@pytest.mark.slow
def test_a_first_process_that_never_comes_is_waited_for_within_bounds(job_words, quick_processes):
    command = [quick_processes.python, "-m", "lightning_llm", "fit", *job_words("alone", 5)]
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    done = subprocess.run(
        command,
        env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="29518", **ranks, **quick_processes.environment),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 1, done.stderr
    assert "process 1 on " in done.stderr
    assert "could not reach the others at 127.0.0.1:29518" in done.stderr
    assert "Traceback" not in done.stderr
