"""Sampling: the filters, how often a token is drawn, and the random numbers of each row."""

import pytest
import torch

from lightning_llm.generation import Sampling
from lightning_llm.generation.sampling import Draws, filter_logits, pick


def test_filters_are_those_of_transformers():
    from transformers.generation import logits_process as theirs

    torch.manual_seed(0)
    logits, ids = torch.randn(7, 50) * 3, torch.randint(50, (7, 9))
    seen = torch.zeros(7, 50, dtype=torch.bool).scatter(1, ids, True)
    sampling = Sampling(temperature=0.7, top_k=12, top_p=0.97, min_p=0.2, repetition_penalty=1.7)
    expected = logits
    for process in (
        theirs.RepetitionPenaltyLogitsProcessor(1.7),
        theirs.TemperatureLogitsWarper(0.7),
        theirs.TopKLogitsWarper(12),
        theirs.TopPLogitsWarper(0.97),
        theirs.MinPLogitsWarper(0.2),
    ):
        before = expected
        expected = process(ids, expected)
        assert not torch.equal(expected, before)  # each of them does something here
    found = filter_logits(logits, sampling, seen)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected)
    penalised = filter_logits(logits, Sampling(repetition_penalty=1.7), seen)  # where nothing is hidden by the others
    assert torch.allclose(penalised, theirs.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    numbers = torch.rand(4000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def drawn(**options):
        return pick(filter_logits(logits, Sampling(**options)), numbers)

    assert set(drawn(top_k=2).tolist()) == {0, 1}
    assert set(drawn(top_p=0.6).tolist()) == {0, 1}
    assert set(drawn(top_p=0.5).tolist()) == {0}
    assert set(drawn(min_p=0.25).tolist()) == {0, 1, 2}
    counts = torch.bincount(drawn(), minlength=4) / 4000
    assert counts.tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    squared = drawn(temperature=0.5)  # 0.25 : 0.09 : …
    assert (squared == 0).float().mean().item() == pytest.approx(0.25 / 0.365, abs=0.03)
    edges = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    assert pick(torch.tensor([[-torch.inf, 0, 0, -torch.inf]]).expand(2, 4), edges).tolist() == [1, 2]


def test_numbers_of_a_row_are_its_own():
    prompts = [[1, 2], [3], [1, 2]]
    draws = Draws(prompts, torch.Generator().manual_seed(0), "cpu")
    steps = torch.cat([draws.next() for _ in range(150)], dim=1)
    alone = Draws([[3]], torch.Generator().manual_seed(0), "cpu")
    assert torch.equal(steps[1:2], torch.cat([alone.next() for _ in range(150)], dim=1))
    assert len(steps.flatten().unique()) == 3 * 150
    assert steps.mean().item() == pytest.approx(0.5, abs=0.05)
