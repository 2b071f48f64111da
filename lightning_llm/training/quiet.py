"""Lightning's notes that a run hides, on the command line and in Python: our own report prints what matters."""

import logging
import warnings

IGNORED_WARNINGS = (
    ".*does not have many workers.*",
    ".*Experiment logs directory .* not empty",  # it has our config.yaml
    "Checkpoint directory .* exists and is not empty",  # it has our checkpoints
    ".*have no `val_dataloader`.*",  # our report prints that it was not validated
    ".*sync_dist=True.*",  # what is logged is the same in every process
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6 with torch 2.13
)


def quieten() -> None:
    """Hide Lightning's notes on devices, seeds and its services."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # results of --trainer.profiler
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
