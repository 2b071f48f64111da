"""The built-in loss with its options, in chunks and all at once, against the plain formula."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_llm import LanguageModel
from lightning_llm.model import ModelConfig
from lightning_llm.model.loss import CrossEntropy

CONFIG = ModelConfig(vocab_size=61, vocab_multiple_of=64, hidden_size=8)
OPTIONS = {"z_loss": 0.1, "label_smoothing": 0.2}


def inputs():
    """Hidden states, a head with rows that are no tokens, targets of which some do not count, weights."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(8, 64, dtype=torch.float64)
    targets = torch.randint(61, (2, 5))
    targets[0, 1:3] = -100
    return hidden, head, targets, torch.rand(2, 5, dtype=torch.float64)


@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, OPTIONS])
@pytest.mark.parametrize("weighted", [False, True])
def test_sum_and_count_are_those_of_the_formula(num_chunks, options, weighted):
    hidden, head, targets, weights = inputs()
    logits = head(hidden)[..., :61]
    log_p, counted = logits.log_softmax(-1), (targets != -100) * (weights if weighted else 1.0)
    smoothing, z_loss = (options.get(name, 0) for name in ("label_smoothing", "z_loss"))
    kinds = F.one_hot(targets.clamp(min=0), 61).double() * (1 - smoothing) + smoothing / 61
    expected = ((-(kinds * log_p).sum(-1) + z_loss * logits.logsumexp(-1) ** 2) * counted).sum()
    loss = CrossEntropy(CONFIG, **options)
    total, count = loss(hidden, head, targets, weights if weighted else None, num_chunks=num_chunks)
    torch.testing.assert_close(count, counted.sum().double(), rtol=1e-15, atol=0)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    wanted = (hidden, head.weight, head.bias)
    torch.testing.assert_close(torch.autograd.grad(total, wanted), torch.autograd.grad(expected, wanted))


@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (torch.ones(2, 1), r"weights of a batch must be real numbers of shape \(2, 5\), got torch.float32 \(2, 1\)"),
        (-torch.ones(2, 5), "weights of a batch must be at least 0, got -1"),
    ],
)
def test_weights_that_do_not_fit_are_rejected(num_chunks, weights, says):
    hidden, head, targets, _ = inputs()
    with pytest.raises(ValueError, match=says):
        CrossEntropy(CONFIG)(hidden, head, targets, weights, num_chunks=num_chunks)


def test_the_loss_of_validation_has_neither_options_nor_weights():
    ids = torch.randint(61, (2, 5))
    batch = {"input_ids": ids, "targets": ids, "weights": torch.rand(2, 5)}
    sizes = {"vocab_size": 61, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LanguageModel(ModelConfig(loss={"class_path": "cross_entropy", "init_args": OPTIONS}, **sizes))
    model.configure_model()
    plain = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    torch.testing.assert_close(model.cross_entropy(batch), plain)
    assert model.loss(batch) > plain + 0.5  # 0.1 · log² 61
