"""Sums, not means of means."""

import math
from types import SimpleNamespace

import pytest
import torch

from lightning_llm.training import LanguageModelMetrics
from lightning_llm.training.evaluation import Evaluation


def test_batches_of_unequal_size_count_by_their_tokens():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1.0), 30, 2.0)
    metrics.update(torch.tensor(4.0), 10, 2.0)
    result = metrics.compute()
    assert result["loss"] == 1.75
    assert result["perplexity"] == pytest.approx(math.exp(1.75))
    assert result["bits_per_byte"] == pytest.approx(1.75 / math.log(2) / 2)


def test_without_the_text_there_are_no_bits_per_byte():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1.0), torch.tensor(3))
    assert "bits_per_byte" not in metrics.compute()


def test_a_loss_beyond_the_range_of_exp_is_an_infinite_perplexity():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1000.0), 1)
    assert metrics.compute()["perplexity"] == math.inf


def test_sums_on_mps_are_on_the_host(monkeypatch):
    moved = []
    monkeypatch.setattr(LanguageModelMetrics, "to", lambda self, device: moved.append(device) or self)
    for device in ("mps", "cuda"):
        Evaluation(SimpleNamespace(device=torch.device(device), trainer=SimpleNamespace(testing=False)))
    assert [torch.device(device).type for device in moved] == ["cpu", "cpu", "cuda", "cuda"]


def test_the_mean_of_no_tokens_changes_nothing():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1.0), 2)
    metrics.update(torch.tensor(math.nan), 0)
    assert metrics.compute()["loss"] == 1
    metrics.update(torch.tensor(math.nan), 1)
    assert math.isnan(metrics.compute()["loss"])
