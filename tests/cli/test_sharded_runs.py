"""Runs whose parameters are spread over two processes, by the command line: the curve of one process."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.checkpoints.reading import read_checkpoint
from tests.docs.shell import Shell
from tests.patience import HANGS_S
from tests.tiny_run import curves

CONFIG = """
model:
  architecture: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 16}
  schedule: {class_path: lightning_llm.optim.Constant}
data: {path: text.txt, tokenizer: char, context_length: 16, global_batch_size: 8}
trainer:
  accelerator: cpu
  precision: 32-true
  max_steps: 6
  val_check_interval: 3
  log_every_n_steps: 1
  gradient_clip_val: 1.0  # below the first norms
  enable_progress_bar: false
"""
DDP = ("--trainer.devices=2", "--trainer.strategy=ddp")
SHARDED = ("--trainer.devices=2", "--trainer.strategy=fsdp2")
MUON = ("--model.optimizer=lightning_llm.optim.MuonAdamW", "--model.optimizer.newton_schulz_dtype=float32")
MODELS = {
    "memory-optimized": ("--model.architecture.checkpoint_level=2", "--data.micro_batch_size=2"),
    "standard, tied, all logits": (
        "--model.architecture.mlp=swiglu",
        "--model.architecture.tie_word_embeddings=true",
        "--model.loss_chunks=0",
    ),
    "muon": MUON,
}


class Folder(NamedTuple):
    """Where the runs of a test are, and what starts them."""

    path: Path
    shell: Shell

    def __truediv__(self, name):
        return self.path / name


@pytest.fixture
def folder(tmp_path, text_file, quick_processes):
    shutil.copy(text_file, tmp_path / "text.txt")
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return Folder(tmp_path, quick_processes)


def command(folder, word, *words, status=0):
    """What it printed, both streams."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **folder.shell.environment}
    done = subprocess.run(
        [folder.shell.python, "-m", "lightning_llm", word, *words],
        cwd=folder.path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == status, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout + done.stderr


def fit(folder, name, *words):
    command(folder, "fit", "--config", "tiny.yaml", f"--trainer.default_root_dir={name}", *words)
    return folder / name / "tiny" / "version_0"


def assert_same_curves(first, second):
    """Up to rounding: sums over two processes are taken in another order, each of relative error 6e-8."""
    ours, theirs = curves(first), curves(second)
    for name in ("train_loss", "val_loss", "grad_norm"):
        points = ours[name]
        assert [step for step, _ in points] == [step for step, _ in theirs[name]]
        values, expected = ([value for _, value in each] for each in (points, theirs[name]))
        assert values == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_curve_is_that_of_one_process_and_of_copies(folder, model):
    words = MODELS[model]
    one, copies, sharded = (fit(folder, name, *words, *how) for name, how in (("1", ()), ("2", DDP), ("s", SHARDED)))
    assert curves(one)["grad_norm"][0][1] > 1  # clipped
    assert_same_curves(copies, one)
    assert_same_curves(sharded, one)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, copies, sharded)]
    assert summaries[0].keys() == summaries[1].keys() == summaries[2].keys()
    for name in ("initial_values", "batches", "validation_batches", "batches_at"):
        assert summaries[0][name] == summaries[1][name] == summaries[2][name]
        assert summaries[0][name]
    first, *others = (json.loads((run / "windows.json").read_text()) for run in (one, copies, sharded))
    for windows in others:
        assert windows["nats"] == pytest.approx(first["nats"], rel=1e-5)
        assert {**windows, "nats": []} == {**first, "nats": []}
    assert (sharded / "checkpoints" / "best.ckpt" / "shard-00001.pt").is_file()


@pytest.mark.slow
def test_two_one_and_two_processes_go_on_from_each_other(folder, monkeypatch, capsys):
    whole = fit(folder, "whole", "--trainer.max_steps=9")
    asynchronous = folder / "asynchronous.yaml"
    asynchronous.write_text(
        "trainer: {callbacks: [{class_path: lightning_llm.training.callbacks.RunCheckpoints, "
        "init_args: {asynchronous: true, every_n_steps: 1, keep_last: 9}}]}"
    )
    words = ("--config", asynchronous.name)
    fit(folder, "run", "--trainer.max_steps=3", *SHARDED, *words)
    fit(folder, "run", "--trainer.max_steps=6", "--ckpt_path=last")
    run = fit(folder, "run", "--trainer.max_steps=9", "--ckpt_path=last", *SHARDED, *words)
    assert_same_curves(run, whole)
    checkpoints = run / "checkpoints"
    kinds = {path.name: path.is_dir() for path in checkpoints.iterdir()}
    assert kinds["step-00000006.ckpt"] is False
    assert kinds["step-00000009.ckpt"] is True
    assert kinds["best.ckpt"] is True
    assert not any(name.endswith(".tmp") for name in kinds)

    # read by one process, by two, as copies, and as one file
    found = [
        command(folder, "validate", "--ckpt_path", str(checkpoints / "step-00000009.ckpt"), *how)
        for how in ((), DDP, SHARDED)
    ]
    losses = [float(text.split("val_loss")[1].split()[0]) for text in found]
    assert losses == pytest.approx([curves(run)["val_loss"][-1][1]] * 3, abs=2e-6)
    monkeypatch.chdir(folder.path)
    assert main(["consolidate", str(run), "--out", "one.ckpt"]) == 0
    ours, theirs = read_checkpoint("one.ckpt"), read_checkpoint(checkpoints / "best.ckpt")
    assert all(torch.equal(ours["state_dict"][name], value) for name, value in theirs["state_dict"].items())
    assert main(["consolidate", str(run), "--out", "one.ckpt"]) == 2
    assert "one.ckpt exists" in capsys.readouterr().err
    texts = []
    for source in ("one.ckpt", str(run)):
        assert main(["generate", source, "--prompt", "A", "--max-new-tokens", "20"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    command(folder, "validate", "--config", "tiny.yaml", "--ckpt_path", "one.ckpt", *SHARDED)

    # the newest is damaged: the one before it
    shard = checkpoints / "step-00000009.ckpt" / "shard-00001.pt"
    shard.write_bytes(shard.read_bytes()[:-40])
    words = ("--config", "tiny.yaml", "--trainer.default_root_dir=run", "--trainer.max_steps=9")
    said = command(folder, "fit", *words, "--ckpt_path=last")
    assert "step-00000009.ckpt is truncated or damaged: using" in said
    assert "Resumed from step 8" in said
    assert Path(checkpoints / "step-00000009.aside").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_learns_the_same_up_to_its_digits(folder, precision):
    """Each activation is rounded to 8 bits, a relative error of 2^-9; the loss is a mean over 128 tokens of those."""
    how = f"--trainer.precision={precision}"
    one, sharded = fit(folder, "1", how), fit(folder, "s", how, *SHARDED)
    ours, theirs = curves(sharded)["train_loss"], curves(one)["train_loss"]
    assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=2**-9)


@pytest.mark.slow
def test_callbacks_work_on_shards(folder):
    """Histograms, a sampled step of the memory profiler; a text needs a model in one piece, which is said."""
    extra = folder / "callbacks.yaml"
    prefix = "lightning_llm.training.callbacks."
    extra.write_text(
        f"trainer: {{callbacks: [{{class_path: {prefix}Dashboard, init_args: {{histograms_every_n_steps: 2}}}}, "
        f"{{class_path: {prefix}MemoryProfiler, init_args: {{every_n_steps: 2}}}}]}}"
    )
    run = fit(folder, "run", "--config", extra.name, *SHARDED)
    assert (run / "memory" / "step-2.json").is_file()
    assert (run / "memory" / "rank-1" / "step-2.json").is_file()
    extra.write_text(f"trainer: {{callbacks: [{{class_path: {prefix}SampleText, init_args: {{every_n_steps: 2}}}}]}}")
    said = command(folder, "fit", "--config", "tiny.yaml", "--config", extra.name, *SHARDED)
    assert "SampleText prints no samples: no process holds a sharded model" in said


@pytest.mark.slow
def test_one_device_is_enough(folder):
    one, sharded = fit(folder, "1"), fit(folder, "s", "--trainer.strategy=fsdp2", "--trainer.devices=1")
    assert_same_curves(sharded, one)
