"""Repeated bigrams, against a loop over the pairs of each row."""

import pytest
import torch

from lightning_llm.data.batches import IGNORED
from lightning_llm.data.bigrams import repeated_bigrams


def expected(input_ids, targets, documents):
    found = []
    for row, (ids, wanted) in enumerate(zip(input_ids.tolist(), targets.tolist(), strict=True)):
        following = [*ids[1:], wanted[-1]]
        seen, of_row = set(), []
        for place, pair in enumerate(zip(ids, following, strict=True)):
            pair = (int(documents[row, place]), *pair)
            of_row.append(pair in seen)
            seen.add(pair)
        found.append(of_row)
    return torch.tensor(found)


@pytest.mark.parametrize("vocab_size", [1, 3, 20, 500_000])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_bigram_is_repeated_if_its_row_has_had_it(vocab_size, masked, has_documents):
    generator = torch.Generator().manual_seed(vocab_size)
    ids = torch.randint(vocab_size, (5, 124), generator=generator)
    ids[:, 60:] = ids[:, : ids.shape[1] - 60].clone()  # of a large vocabulary too, some are repeated
    input_ids, targets = ids[:, :-1], ids[:, 1:].clone()
    counted = torch.ones_like(targets, dtype=torch.bool)
    if masked:
        counted = torch.rand(targets.shape, generator=generator) < 0.5
        targets[~counted] = IGNORED
    documents = (torch.rand(targets.shape, generator=generator) < 0.02).cumsum(1)
    found = repeated_bigrams(input_ids, targets, documents if has_documents else None)
    wanted = expected(input_ids, targets, documents if has_documents else torch.zeros_like(documents))
    assert found.shape == targets.shape
    assert torch.equal(found[counted], wanted[counted])
    assert 0 < int(found.sum()) < found.numel()


def test_a_bigram_in_the_text_before_masked_targets_counts():
    input_ids = torch.tensor([[7, 8, 9, 7, 8]])
    targets = torch.tensor([[IGNORED, IGNORED, IGNORED, 8, 5]])
    assert repeated_bigrams(input_ids, targets).tolist() == [[False, False, False, True, False]]
