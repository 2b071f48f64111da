"""What two processes must agree on with one."""

import json
import os
import re
import subprocess

import pytest

from tests.patience import HANGS_S

SCORED = re.compile(r"^(\w+) +([\d.]+)$", re.MULTILINE)


def validate(shell, run, *words):
    command = [shell.python, "-m", "lightning_llm", "validate", "--ckpt_path", run, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **shell.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return {name: float(value) for name, value in SCORED.findall(done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1.0, 2, 0.3])
def test_validation_scores_the_same_windows_whatever_the_processes_and_batches(tiny, tmp_path, quick_processes, limit):
    cli = tiny("fit", **{"trainer.limit_val_batches": limit})
    run = cli.trainer.log_dir
    truth = json.loads((tmp_path / run / "summary.json").read_text())
    for size in (1, 7, 64):
        for words in ((), ("--trainer.devices=2", "--trainer.strategy=ddp")):
            found = validate(quick_processes, run, f"--data.eval_batch_size={size}", *words)
            assert found["val_loss"] == pytest.approx(truth["val_loss"], abs=1.5e-6)
            assert found["val_bits_per_byte"] == pytest.approx(truth["bits_per_byte"], abs=1.5e-6)
            for name in ("recall_loss", "other_loss", "recall_share"):
                assert found[f"val_{name}"] == pytest.approx(truth[name], abs=1.5e-6)
