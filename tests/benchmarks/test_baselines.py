"""Ours compared with transformers, each in a process of its own."""

import pytest
import torch

from benchmarks import baselines
from benchmarks.__main__ import main
from benchmarks.matmuls import matmuls_alone, matmuls_of
from benchmarks.workloads import model_config, sizes_of
from lightning_llm.accounting.counts import step_flops
from lightning_llm.model import Transformer

TINY = "1x2x32x64x32x2x65"
SIZES = sizes_of(TINY, baselines.BENCH.sizes, TINY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmuls_alone_are_those_of_a_step(dtype, monkeypatch):
    made = []

    def counted(multiply):
        def call(a, b, out):
            made.append((2 * a.numel() * b.shape[-1], a.dtype))
            return multiply(a, b, out=out)

        return call

    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name)))
    config = model_config(SIZES)
    matmuls_alone(Transformer(config), SIZES, dtype, cuts_head=True)()
    flops = step_flops(config, tokens=64, context_length=32)
    assert {kind for _, kind in made} == {dtype}
    masked = 3 * flops.by_part["attention_scores"] // 2  # half of the pairs, forward and twice backward
    assert sum(each for each, _ in made) == flops.model - masked


def test_the_head_is_cut_as_the_loss_cuts_it():
    sizes = sizes_of("1x2x32x64x256x2x5000", baselines.BENCH.sizes, TINY)
    head = torch.nn.Linear(32, 5000, bias=False)
    cut = matmuls_of(head, {**sizes, "layers": 0}, torch.float32, cuts_head=True)
    assert [each.columns for each in cut[::3]] == [2048, 2048, 904]


def test_an_asked_side_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert main(["baselines", "--shapes", TINY, "--variants", "ours", "litgpt"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "variants 'litgpt': litgpt is not installed; python -m pip install litgpt, or leave it out" in said
