"""The best loss of a resumed run starts again on other validation windows, and only then."""

import json
from pathlib import Path

import pytest
import torch

FIRST = {"trainer.max_steps": 2, "trainer.val_check_interval": 2, "trainer.limit_val_batches": 1}
RESUMED = {**FIRST, "trainer.max_steps": 3, "trainer.val_check_interval": 3}
LINE = "The checkpoint validated other windows of text than this run: its best loss"


def state_of(checkpoint):
    return next(state for key, state in checkpoint["callbacks"].items() if key.startswith("RunCheckpoints"))


def resumed(tiny, capsys, change, **options):
    """Resume a run whose checkpoint claims a best loss of 0; returns the best loss after it, and what was printed."""
    tiny("fit", **FIRST)
    (path,) = Path("runs").rglob("step-00000002.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    change(state_of(checkpoint))
    torch.save(checkpoint, path)
    capsys.readouterr()
    tiny("fit", "--ckpt_path", str(path), **{**RESUMED, **options})
    summaries = sorted(Path("runs").rglob("summary.json"), key=lambda file: file.stat().st_mtime)
    return json.loads(summaries[-1].read_text())["best_val_loss"], capsys.readouterr().out


def perfect(state):
    state["best_loss"] = 0.0


def of_an_earlier_version(state):
    perfect(state)
    del state["validation_batches"]


@pytest.mark.parametrize(
    ("change", "options", "starts_again"),
    [
        (perfect, {}, False),
        (perfect, {"data.micro_batch_size": 1, "data.eval_batch_size": 3}, False),
        (perfect, {"trainer.limit_val_batches": 2}, True),
        (of_an_earlier_version, {}, True),
    ],
)
def test_the_best_loss_starts_again_on_other_windows(tiny, capsys, change, options, starts_again):
    best, said = resumed(tiny, capsys, change, **options)
    assert (best > 0) == starts_again
    assert said.count(LINE) == starts_again
