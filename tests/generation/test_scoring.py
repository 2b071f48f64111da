"""The score of a text: every token but the first counts once, whatever is computed at once."""

import itertools
import math

import pytest
import torch

from lightning_llm import ModelConfig, Transformer
from lightning_llm.generation import Score, score, scoring
from lightning_llm.generation.scoring import windows


@pytest.mark.parametrize("stride", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 30])
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(length, stride):
    scored = []
    for window, new in windows(range(length), 8, stride):
        assert len(window) <= 8
        assert window == list(range(window[0], window[-1] + 1))
        scored += window[-new:]
        assert len(window) - new >= min(8 - stride, window[-new])
    assert scored == list(range(1, length))


def test_sums_add_up():
    both = Score(2.0, 4, 3, 0.5, 1) + Score(1.0, 2, 1, 0.25, 2)
    assert (both.loss, both.tokens, both.bytes) == (0.5, 6, 4)
    assert (both.recall_loss, both.other_loss) == (0.25, 0.75)
    assert (Score(1.0, 2).recall_loss, Score(1.0, 2).other_loss) == (None, 0.5)
    assert (Score(1.0, 2, 0, 1.0, 2).other_loss, Score().other_loss) == (None, None)
    assert both.bits_per_byte == 3 / math.log(2) / 4
    assert Score(1.0, 1).bits_per_byte is None
    assert math.isnan(Score().loss)
    assert Score(1000.0, 1).perplexity == math.inf


def test_a_model_is_scored_in_python_from_any_iterator():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=4))
    found = score(model.eval(), iter([1, 2, 3]), stride=2)
    logits = model.logits(model(torch.tensor([[1, 2]])))[0]
    assert found.nats == pytest.approx(torch.nn.functional.cross_entropy(logits, torch.tensor([2, 3])).item() * 2)


def test_windows_and_logits_may_be_taken_by_any_number_at_once(monkeypatch):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=4))
    model.double().eval()
    ids = torch.randint(9, (43,)).tolist()
    found = {}
    for at_once in ((1, 1), (9, 20), (12, 9 * 5), (4096, 2**23)):
        monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", {"cpu": at_once[0]})
        monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", at_once[1])
        found[at_once] = score(model, ids, stride=3)
    expected = found.pop((1, 1))
    assert expected.tokens == 42
    assert all(other.tokens == 42 for other in found.values())
    assert [other.nats for other in found.values()] == pytest.approx([expected.nats] * 3, rel=1e-12)
    assert {other.recall_tokens for other in found.values()} == {expected.recall_tokens}
    assert [other.recall_nats for other in found.values()] == pytest.approx([expected.recall_nats] * 3, rel=1e-12)


@pytest.mark.parametrize("stride", [1, 5, 15])
def test_a_bigram_is_repeated_if_the_window_that_scores_it_has_had_it(stride):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=4, hidden_size=8, num_attention_heads=2, max_position_embeddings=16))
    model.double().eval()
    ids = torch.randint(4, (90,)).tolist()
    nats, tokens = 0.0, 0
    for window, new in windows(ids, 16, stride):
        losses = -model.logits(model(torch.tensor([window]))).log_softmax(-1)[0]
        pairs = list(itertools.pairwise(window))
        for place in range(len(pairs) - new, len(pairs)):
            if pairs[place] in pairs[:place]:
                nats, tokens = nats + losses[place, window[place + 1]].item(), tokens + 1
    found = score(model, ids, stride=stride)
    assert 0 < tokens == found.recall_tokens < found.tokens
    assert found.recall_loss == pytest.approx(nats / tokens, rel=1e-12)
    rest = found.tokens - tokens
    assert nats + found.other_loss * rest == pytest.approx(found.nats, abs=1e-6)


def test_an_id_beyond_the_vocabulary_is_said_before_a_device_sees_it():
    model = Transformer(ModelConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=4))
    with pytest.raises(IndexError, match="a token id is beyond the vocabulary of 9"):
        score(model.eval(), [1, 2, 9], stride=2)
