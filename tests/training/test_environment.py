"""What decides a run's bits besides its options is resolved once, recorded, and compared when the run is resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from benchmarks.digest import digest
from lightning_llm.__main__ import main
from lightning_llm.accounting import hardware
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.model.config import ModelConfig
from lightning_llm.runs.code import package_digest
from lightning_llm.runs.directory import step_files
from lightning_llm.training import environment, preflight

NEEDS = "trainer.tf32 true needs an NVIDIA GPU of compute capability 8.0 or later"
RUN = Path("runs/run/version_0")
MODEL = {"model.schedule.class_path": "lightning_llm.optim.Constant"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """``machine("avx512_bf16")``: the CPU has these features from now on."""
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")

    def has(features):
        hardware.CPU_INFO.write_text(f"model name\t: CPU with {features}\nflags\t\t: {features}\n", encoding="utf-8")

    return has


@pytest.mark.parametrize(("features", "expected"), [("avx512_bf16", "bf16-mixed"), ("avx2", "32-true")])
def test_what_auto_means_is_in_every_record(tiny, machine, features, expected):
    machine(features)
    cli = tiny("fit")
    assert cli.trainer.precision == expected
    written = yaml.safe_load((RUN / "config.yaml").read_text())
    summary = json.loads((RUN / "summary.json").read_text())
    checkpoint = read_checkpoint(step_files(RUN / "checkpoints")[-1])
    execution = {"precision": expected, "threads": torch.get_num_threads(), "device": f"CPU with {features}"}
    execution |= {"torch": torch.__version__, "numpy": np.__version__, "package": package_digest()}
    assert written["trainer"]["precision"] == expected
    assert checkpoint["lightning_llm"]["execution"] == execution
    assert {name: summary[name] for name in execution} == execution


@pytest.mark.parametrize("features", ["amx_bf16", "avx2"])
def test_estimate_and_fit_agree(tiny, machine, tmp_path, features):
    machine(features)
    trained = tiny("fit", **{"trainer.max_steps": 1}).trainer.precision
    Path("auto.yaml").write_text(yaml.safe_dump({"model": {"architecture": {"vocab_size": 16, "hidden_size": 32}}}))
    assert main(["estimate", "--config", "auto.yaml", "--json", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text())["settings"]["precision"] == trained


def test_a_resumed_run_keeps_the_precision_on_another_machine(tiny, machine, capsys):
    machine("avx512_bf16")
    tiny("fit", **MODEL, **{"trainer.max_steps": 3})
    machine("avx2")
    capsys.readouterr()
    cli = tiny("fit", "--ckpt_path=last", **MODEL, **{"trainer.precision": "auto"})
    assert cli.trainer.precision == "bf16-mixed"
    said = " ".join(capsys.readouterr().out.split())  # a terminal wraps
    assert "precision bf16-mixed (as in the checkpoint)" in said
    assert "device: CPU with avx512_bf16 -> CPU with avx2" in said
    assert "precision: " not in said
    assert yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["precision"] == "bf16-mixed"


def test_a_resumed_run_says_what_was_changed(tiny, machine, monkeypatch, capsys):
    machine("avx512_bf16")
    tiny("fit", **MODEL, **{"trainer.max_steps": 3})
    capsys.readouterr()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    tiny("fit", "--ckpt_path=last", **MODEL, **{"trainer.precision": "32-true"})
    said = capsys.readouterr().out
    assert said.count("precision: bf16-mixed -> 32-true") == 1
    assert f"threads: {threads} -> {threads + 1}" in said


@pytest.fixture
def _float32_matmuls():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_float32_matmuls")
def test_tf32_is_switched_in_each_process_and_recorded(monkeypatch):
    def trainer(tf32):
        strategy = SimpleNamespace(root_device=torch.device("cuda"))
        return SimpleNamespace(tf32=tf32, strategy=strategy, precision="32-true")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    for asked, expected in ((True, "high"), (None, "high"), (False, "highest"), (None, "highest")):
        environment.switch_tf32(trainer(asked))
        assert torch.get_float32_matmul_precision() == expected
        assert environment.environment_of(trainer(asked))["tf32"] is (expected == "high")
        errors = list(preflight._tf32_problems(trainer(asked)))
        assert errors == ([f"{NEEDS}, got Tesla V100-SXM2-32GB: leave it out"] if asked else [])
    environment.switch_tf32(None)  # validate() without a trainer of ours


def test_capture_and_chunks_of_the_loss_are_recorded_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    for kind, recorded in (("cuda", True), ("cpu", None)):
        strategy = SimpleNamespace(root_device=torch.device(kind))
        trainer = SimpleNamespace(tf32=None, capture=True, strategy=strategy, precision="32-true")
        assert environment.environment_of(trainer).get("capture") is recorded
    trainer.strategy, trainer.capture = SimpleNamespace(root_device=torch.device("cuda")), False
    assert environment.changes_since({"capture": True}, trainer) == ["capture: True -> False"]
    assert environment.changes_since({"loss_chunk_mib": 7}, trainer) == ["loss_chunk_mib: 7 -> 512"]


def test_deterministic_true_trains_validates_and_samples(tiny, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # which Lightning sets
    samples = [{"class_path": "lightning_llm.training.callbacks.SampleText", "init_args": {"every_n_steps": 3}}]
    try:
        tiny("fit", **{"trainer.deterministic": True, "trainer.callbacks": samples})
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (RUN / "summary.json").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.usefixtures("_float32_matmuls")
def test_tf32_on_a_gpu_rounds_the_factors():
    a, b = (torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    errors = {}
    for asked in (False, True):
        environment.switch_tf32(SimpleNamespace(tf32=asked))
        errors[asked] = float(((a.cuda() @ b.cuda()).cpu().double() - a.double() @ b.double()).norm())
    assert errors[True] > 10 * errors[False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_deterministic_runs_on_a_gpu_have_the_same_bits(flags, tmp_path, monkeypatch, precision):
    """In processes of their own: the switch, and CUBLAS_WORKSPACE_CONFIG, hold as long as the process."""
    monkeypatch.chdir(tmp_path)
    gpu = {"trainer.accelerator": "gpu", "trainer.devices": 1, "trainer.precision": precision}
    long = {"model.architecture.max_position_embeddings": 1024, "data.context_length": 1024}  # flash attention's
    options = {**gpu, **long, "trainer.deterministic": True, "model.architecture.num_attention_heads": 1}
    digests = {fit_in_a_process(lambda **more: flags(**options, **more), root) for root in ("one", "two")}
    assert len(digests) == 1


def fit_in_a_process(flags, root, **environment):
    """The digest of a run with default threads and precision."""
    words = flags(**{"trainer.default_root_dir": root, "keep_freed_memory": True})
    names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    more = {**clean, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_llm", "fit", *words], env=more, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return digest(step_files(Path(root, "run/version_0/checkpoints"))[-1])


@pytest.mark.slow
def test_the_bits_do_not_depend_on_how_idle_threads_wait(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bits = fit_in_a_process(flags, "default")
    # and the option of the seed says more than the environment
    assert fit_in_a_process(flags, "spinning", OMP_WAIT_POLICY="ACTIVE", PL_GLOBAL_SEED="1") == bits


ALLOCATOR = """
import os, pathlib, sys
from lightning_llm import __main__
__main__.NVIDIA_DRIVER = pathlib.Path(sys.argv[1])
names = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
__main__.help_text = lambda: f"{[os.environ.get(name) for name in names]} {'torch' in sys.modules}"
sys.argv = ["lightning-llm", "--help"]
__main__.main()
"""


@pytest.mark.parametrize(
    ("driver", "given", "expected"),
    [
        ("/dev/null", {}, "['expandable_segments:True', None]"),
        ("/dev/null", {"PYTORCH_ALLOC_CONF": "backend:native"}, "[None, 'backend:native']"),
        ("/dev/null", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "['backend:native', None]"),
        ("/dev/nowhere", {}, "[None, None]"),
    ],
)
def test_the_allocator_of_a_gpu_grows_in_place_unless_the_user_has_set_it(driver, given, expected):
    clean = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment = clean | {"PYTHONPATH": os.pathsep.join(sys.path), **given}
    command = [sys.executable, "-c", ALLOCATOR, driver]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{expected} False"  # before torch, which reads it once


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16), ("16-mixed", torch.float16), ("32-true", None)],
)
def test_the_kernel_of_attention_is_told_of_a_gpu(precision, dtype, monkeypatch):
    device, config = torch.device("cuda"), ModelConfig(vocab_size=65)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=device), precision=precision)
    monkeypatch.setattr(environment, "attention_kernel", lambda *asked: asked)
    assert environment.attention_of(trainer, config, 256) == (config, 256, dtype or torch.float32, device)
    assert environment.attention_of(trainer, None, 256) is None
    assert environment.attention_of(trainer, config, None) is None
    trainer.strategy.root_device = torch.device("cpu")
    assert environment.attention_of(trainer, config, 256) is None


SPIN = """
import os, sys
from lightning_llm import __main__
__main__.help_text = lambda: f"{os.environ.get('GOMP_SPINCOUNT')} {'torch' in sys.modules}"
sys.argv = ["lightning-llm", "--help"]
__main__.main()
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_idle_threads_stop_spinning_unless_the_user_has_said_how_they_wait(given, expected):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **given}
    done = subprocess.run([sys.executable, "-c", SPIN], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected, "False"]  # before torch loads its runtime, which reads it once


def test_the_masks_of_dropout_depend_on_the_seed_of_the_model_else_of_lightning_else_of_the_data(monkeypatch):
    def seed_of(model, of_lightning, of_data):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        if of_lightning is not None:
            monkeypatch.setenv("PL_GLOBAL_SEED", str(of_lightning))
        progress = SimpleNamespace(total=SimpleNamespace(ready=3))
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
        data = SimpleNamespace(seed=of_data)
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        trainer = SimpleNamespace(fit_loop=loop, datamodule=data, global_rank=0, strategy=strategy)
        environment.seed_dropout(trainer, model)
        return torch.initial_seed()

    assert seed_of(1, 2, 3) == seed_of(1, 5, 5) == seed_of(None, 1, 5) == seed_of(None, None, 1)
    assert len({seed_of(*seeds) for seeds in ((1, 2, 3), (None, 2, 3), (None, None, 3), (None, None, None))}) == 4
    assert seed_of(None, None, None) == seed_of(0, 1, 1)
