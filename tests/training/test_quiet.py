"""Lightning's notes are hidden in Python as on the command line."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from lightning.pytorch import LightningModule
from lightning_llm import Trainer

class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
    def training_step(self, batch, number):
        return self.linear(batch["input_ids"]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

options = {"accelerator": "cpu", "precision": "32-true", "log_every_n_steps": 1, "enable_progress_bar": False}
batches = torch.utils.data.DataLoader([{"input_ids": torch.ones(2)}] * 8, batch_size=2)
trainer = Trainer(max_steps=4, **options)
trainer.fit(Plain(), batches)
trainer.save_checkpoint("x.ckpt")
Trainer(max_steps=6, **options).fit(Plain(), batches, ckpt_path="x.ckpt")
"""


@pytest.mark.slow
def test_a_run_in_python_prints_no_notes_of_lightning_and_its_end_is_known(tmp_path):
    """A process of its own: pytest catches warnings, and other tests have set the loggers."""
    login = tmp_path / "bin"  # a machine from which one can submit to SLURM
    login.mkdir()
    (login / "srun").touch(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env["PATH"] = f"{login}{os.pathsep}{env['PATH']}"
    words = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True, env=env)
    assert run.stdout == ""
    assert run.stderr == ""
    words = [sys.executable, "-m", "lightning_llm", "runs"]
    listed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True).stdout
    assert listed.count("finished") == 2
    assert "killed" not in listed
