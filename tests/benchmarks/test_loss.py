"""``bench loss`` on toy shapes: what the head and the loss hold."""

import json
import sys

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.loss import added_resident_bytes


@pytest.mark.slow
def test_loss_never_holds_all_logits(tmp_path):
    names = ("plain", "ours, 64 chunks")  # each takes a process
    path = tmp_path / "rows.json"
    words = ["--shapes", "1024x8x2000", "--variants", *names, "--rounds", "1", "--json", str(path)]
    assert main(["loss", *words]) == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    logits = 4 * 1024 * 2000
    assert rows["plain"]["peak_bytes"] >= 2 * logits
    assert rows["ours, 64 chunks"]["peak_bytes"] < logits / 8


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the peak of a process")
def test_resident_memory_is_that_of_a_process_of_its_own():
    held = torch.ones(2**26)  # this process was larger than the measured ones ever are
    sizes = {"tokens": 2048, "hidden": 8, "vocab": 8000}
    plain, ours = (added_resident_bytes(variant, sizes, torch.float32) for variant in ("plain", "ours"))
    assert held.sum() > 0
    assert plain > 2 * 4 * 2048 * 8000 > 1.5 * ours > 0
