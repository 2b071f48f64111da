"""Ours compared with transformers, each in a process of its own."""

import json

import pytest
import torch

from benchmarks import baselines
from benchmarks.__main__ import main
from benchmarks.baselines import WARM_UP, matmuls, ours, transformers
from lightning_llm.bench.harness import model_config, sizes_of
from lightning_llm.model import Transformer

TINY = "1x2x32x64x32x2x65"
SIZES = sizes_of(TINY, baselines.NAMES, TINY)


@pytest.mark.parametrize("side", [ours, transformers])
def test_each_side_times_as_many_steps_as_asked(side):
    seconds, peak = side(SIZES, "float32", "cpu", 3)
    assert peak is None  # the resident set tells, of the whole process
    assert len(seconds) == 3
    assert all(0 < second < 10 for second in seconds)


def test_matmuls_alone_are_those_with_weights(monkeypatch):
    made, multiply = [], torch.mm

    def counted(a, b):
        made.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", counted)
    seconds, _ = matmuls(SIZES, "float32", "cpu", 1)
    assert len(seconds) == 1
    model = Transformer(model_config(SIZES))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    assert sum(made) == (WARM_UP + 1) * 6 * 64 * sum(p.numel() for p in matrices)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--dtype", "float16"], "--dtype float16: baselines takes only float32, bfloat16"),
        (["--variants", "jax"], "variants 'jax': there are"),
        *(
            (["--shapes", text], f"shapes {text!r} must be layers x heads x hidden")
            for text in ("gpt5", "1x2", "0x2x32x64x32x2x65")
        ),
    ],
)
def test_bad_input(words, named, capsys):
    assert main(["baselines", *words]) == 2
    assert named in capsys.readouterr().err.strip().splitlines()[-1]


def test_an_asked_side_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert main(["baselines", "--shapes", TINY, "--variants", "ours", "litgpt"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "variants 'litgpt': litgpt is not installed; python -m pip install litgpt, or leave it out" in said


@pytest.mark.slow
def test_rows_of_processes_of_their_own(tmp_path):
    path = tmp_path / "rows.json"
    words = ["--shapes", TINY, "--variants", "transformers", "ours", "--rounds", "2", "--json", str(path)]
    assert main(["baselines", *words]) == 0
    theirs, mine = json.loads(path.read_text())["rows"]
    assert (theirs["variant"], mine["variant"], mine["ratio"]) == ("transformers", "ours", 1)
    assert theirs["total_p20_s"] / mine["total_p80_s"] <= theirs["ratio"] <= theirs["total_p80_s"] / mine["total_p20_s"]
    assert theirs["ratio_p20"] <= theirs["ratio"] <= theirs["ratio_p80"]
    for row in (theirs, mine):
        assert row["tokens_per_s"] == pytest.approx(64 / row["total_s"])
        assert row["peak_bytes"] > 0
    assert path.with_suffix(".png").is_file()
