"""The job script for SLURM, run with a stand-in for `srun`."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "configs" / "slurm.sh"


def test_the_words_reach_fit_with_the_hosts_and_tasks_of_the_job(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    job = {"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "8", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["--config", "a b.yaml", "--data.seed=3"]
    done = subprocess.run(["bash", SCRIPT, *words], env={**os.environ, **job}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "--kill-on-bad-exit=1",
        *("lightning-llm", "fit", *words),
        *("--trainer.num_nodes", "4", "--trainer.devices", "8", "--trainer.enable_progress_bar", "false"),
    ]


def test_slurm_is_asked_to_signal_before_the_end_and_to_queue_again():
    directives = [line.split(maxsplit=1)[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--open-mode=append", "--signal=USR1@120"} <= set(directives)
