"""Processes that Lightning forks or spawns, as in notebooks: what they have trained comes back to their parent."""

import json
import os
import subprocess

import pytest

from lightning_llm.__main__ import main
from tests.patience import HANGS_S

SCRIPT = """
import json, sys
import torch
from lightning_llm import LanguageModel, ModelConfig, TokenDataModule, Trainer
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO

if __name__ == "__main__":
    data = TokenDataModule(path=sys.argv[1], tokenizer="char", context_length=16, global_batch_size=8)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    model = LanguageModel(ModelConfig(**sizes))
    options = {"accelerator": "cpu", "devices": 2, "strategy": sys.argv[2], "enable_progress_bar": False}
    plugins = AtomicCheckpointIO(asynchronous=True)
    trainer = Trainer(max_steps=3, limit_val_batches=2, precision="32-true", plugins=plugins, **options)
    trainer.fit(model, data)
    file = trainer.run_dir / "checkpoints" / "step-00000003.ckpt"
    saved = torch.load(file, weights_only=True)["state_dict"]
    found = model.state_dict()
    is_same = saved.keys() == found.keys() and all(torch.equal(saved[name], found[name]) for name in saved)
    result = {"step": trainer.global_step, "same": is_same, "loss": trainer.callback_metrics["val_loss"].item()}
    print(json.dumps({**result, "rows": model.hparams.architecture["vocab_size"], "vocabulary": data.vocab_size}))
"""


@pytest.mark.parametrize("strategy", ["ddp_notebook", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_fit_returns_what_the_processes_have_trained(strategy, text_file, tmp_path, quick_processes):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [quick_processes.python, str(tmp_path / "script.py"), str(text_file), strategy]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **quick_processes.environment}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": HANGS_S}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    summary = json.loads((tmp_path / "runs/run/version_0/summary.json").read_text())
    assert (result["step"], result["same"]) == (3, True)
    assert result["loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert result["rows"] == result["vocabulary"]


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook_find_unused_parameters_true"])
def test_a_command_names_another_strategy(strategy, flags, tmp_path, monkeypatch, error_line):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *flags(**{"trainer.devices": 2, "trainer.strategy": strategy})]) == 2
    assert f"trainer.strategy {strategy} forks or spawns processes, which no command does: use ddp" in error_line()
    assert not (tmp_path / "runs").exists()
