"""The benches on toy shapes: what they write, and what their numbers must satisfy whatever the machine."""

import json
import sys

import pytest
import torch

from benchmarks.__main__ import BENCHES
from lightning_llm.__main__ import main
from lightning_llm.bench.loss import resident_bytes
from lightning_llm.cli.bench import MOVED


def rows_of(tmp_path, *words):
    path = tmp_path / "rows.json"
    assert main(["bench", *words, "--rounds", "1", "--json", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 5000
    return {row["variant"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch.compile of torch 2.13
def test_swiglu_saves_less_at_each_level(tmp_path, capsys):
    rows = rows_of(tmp_path, "swiglu", "--shapes", "2x64x32x128x2")
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    tokens, hidden, intermediate = 128, 32, 128
    # by hand: g, u, silu(g) and a for each layer, the input of the second, and the output
    assert saved["standard"] == 4 * (2 * 4 * tokens * intermediate + 2 * tokens * hidden)
    assert saved["ours 0"] == 4 * (2 * 2 * tokens * intermediate + 2 * tokens * hidden)
    assert saved["ours 1"] == saved["notebook 1"] == saved["checkpoint"] == 4 * 2 * tokens * hidden
    assert saved["ours 2"] < saved["norm + standard"]
    assert rows["compiled standard"]["peak_bytes"] is None  # what is compiled cannot be seen: not guessed
    for row in rows.values():
        assert row["bench"] == "swiglu"
        assert row["total_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(tokens / row["total_s"])
    assert "ours 1" in capsys.readouterr().out


def test_loss_never_holds_all_logits(tmp_path):
    names = ("plain", "ours, 64 chunks")  # each takes a process
    rows = rows_of(tmp_path, "loss", "--shapes", "1024x8x2000", "--variants", *names)
    logits = 4 * 1024 * 2000
    assert rows["plain"]["peak_bytes"] >= 2 * logits
    assert rows["ours, 64 chunks"]["peak_bytes"] < logits / 8


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the peak of a process")
def test_resident_memory_is_that_of_a_process_of_its_own():
    held = torch.ones(2**26)  # this process was larger than the measured ones ever are
    sizes = {"tokens": 2048, "hidden": 8, "vocab": 8000}
    plain, ours = (resident_bytes(variant, sizes, torch.float32) for variant in ("plain", "ours"))
    assert held.sum() > 0
    assert plain > 2 * 4 * 2048 * 8000 > 1.5 * ours > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["swiglu", "--shapes", "8x512"], "must be batch x seq x hidden x intermediate x layers, such as"),
        (["loss", "--shapes", "0x1x2"], "must be tokens x hidden x vocab, such as 4096x768x50257, or llama-3-8b"),
        (["swiglu", "--variants", "ours 9", "standard"], "variants 'ours 9': there are standard, notebook 0,"),
        (["swiglu", "--rounds", "0"], "rounds must be at least 1"),
    ],
)
def test_a_users_mistake_is_one_line(words, says, capsys):
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("old", "new"), sorted(MOVED.items()))
def test_a_moved_bench_says_what_to_type(old, new, capsys):
    assert new in BENCHES
    assert main(["bench", old, "--rounds", "1"]) == 2
    error = capsys.readouterr().err.strip()
    assert f"{old} has moved; from the root of a clone, type: python -m benchmarks {new} --rounds 1" in error
    assert len(error.splitlines()) == 1
