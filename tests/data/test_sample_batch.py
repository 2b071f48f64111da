import numpy as np
import pytest
import torch

from lightning_llm.data import sample_batch


@pytest.mark.parametrize("kind", ["int64", "uint16", "int32 tensor", "memmap"])
def test_targets_are_the_next_tokens(kind, tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    if kind == "memmap":
        tokens.tofile(tmp_path / "tokens.bin")
        tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    elif kind == "int32 tensor":
        tokens = torch.arange(100, dtype=torch.int32)
    else:
        tokens = tokens.astype(kind)
    inputs, targets = sample_batch(tokens, 32, 7, "cpu")
    assert inputs.shape == targets.shape == (32, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))


def test_every_start_is_equally_likely():
    generator = torch.Generator().manual_seed(0)
    counts, batches = torch.zeros(93), 300
    for _ in range(batches):
        inputs, _ = sample_batch(np.arange(100), 32, 7, "cpu", generator)
        counts += torch.bincount(inputs[:, 0], minlength=93)
    expected = batches * 32 / 93
    # Five standard deviations of a binomial count, for the largest of 93.
    assert (counts - expected).abs().max() < 5 * (expected * (1 - 1 / 93)) ** 0.5


def test_generator_decides():
    batches = [sample_batch(np.arange(1000), 4, 7, "cpu", torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_shortest_possible_text():
    inputs, targets = sample_batch(np.arange(8), 2, 7, "cpu")
    assert inputs.tolist() == [list(range(7))] * 2
    assert targets.tolist() == [list(range(1, 8))] * 2


@pytest.mark.parametrize(("tokens", "batch_size", "context_length"), [(7, 2, 7), (0, 1, 1), (9, 0, 7), (9, 1, 0)])
def test_text_too_short_and_sizes_below_one_are_refused(tokens, batch_size, context_length):
    message = f"cannot take {batch_size} windows of context_length {context_length} from {tokens} tokens"
    with pytest.raises(ValueError, match=message):
        sample_batch(np.arange(tokens), batch_size, context_length, "cpu")


def test_device_is_where_the_batch_goes():
    inputs, targets = sample_batch(np.arange(100), 2, 7, "meta")
    assert inputs.device.type == targets.device.type == "meta"
