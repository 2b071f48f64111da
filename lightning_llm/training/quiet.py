"""Lightning's notes that a run hides, on the command line and in Python: our own report prints what matters."""

import logging
import os
import warnings

IGNORED_WARNINGS = (
    ".*does not have many workers.*",
    ".*Experiment logs directory .* not empty",  # it has our config.yaml
    "Checkpoint directory .* exists and is not empty",  # it has our checkpoints
    ".*have no `val_dataloader`.*",  # our report prints that it was not validated
    ".*sync_dist=True.*",  # what is logged is the same in every process
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6 with torch 2.13
)
WITHOUT_SRUN = "The `srun` command is available.*"  # in a job a real mistake, on a login node none


def quieten() -> None:
    """Hide Lightning's notes on devices, seeds and its services."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # results of --trainer.profiler
    in_job = "SLURM_JOB_ID" in os.environ
    for message in IGNORED_WARNINGS if in_job else (*IGNORED_WARNINGS, WITHOUT_SRUN):
        warnings.filterwarnings("ignore", message=message)
