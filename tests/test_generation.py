"""Sampling: equal to recomputing the whole prefix, and within the options given."""

import pytest
import torch

from lightning_llm import ModelConfig, Transformer
from lightning_llm.generation import generate, sample, stream


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=31,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            max_position_embeddings=24,
            initializer_range=0.3,
        )
    )
    return model.double().eval()


def test_greedy_equals_recomputing_the_prefix(model):
    prompt = torch.randint(0, 31, (3, 5))
    expected = prompt
    for _ in range(19):  # up to the context limit
        expected = torch.cat([expected, model.logits(model(expected)[:, -1]).argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, prompt, max_new_tokens=19, temperature=0), expected)


def test_beyond_the_context_the_newest_half_is_read_again(model):
    out = generate(model, torch.randint(0, 31, (1, 5)), max_new_tokens=40, temperature=0)
    assert out.shape == (1, 45)
    # 24 positions are full once tokens 0 to 23 are read; token 24 followed from them. Then 12 tokens are read anew.
    assert out[0, 24] == model.logits(model(out[:, :24])[:, -1]).argmax(-1)
    for end in (25, 30, 36):
        assert out[0, end] == model.logits(model(out[:, 13:end])[:, -1]).argmax(-1)


def test_same_seed_same_tokens(model):
    prompt = torch.randint(0, 31, (2, 4))

    def run(seed):
        return generate(model, prompt, max_new_tokens=10, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_a_prompt_longer_than_the_context_keeps_its_end(model):
    prompt = torch.randint(0, 31, (1, 60))
    out = generate(model, prompt, max_new_tokens=1, temperature=0)
    assert out[0, -1] == model.logits(model(prompt[:, -24:])[:, -1]).argmax(-1)


def test_end_of_text_ends_a_sequence_and_then_the_whole(model):
    prompt = torch.randint(0, 31, (2, 4))
    free = generate(model, prompt, max_new_tokens=15, temperature=0)
    eos = int(free[0, 6])  # what the first sequence says as its third token
    out = generate(model, prompt, max_new_tokens=15, temperature=0, eos_token_id=eos)
    end = (out[0, 4:] == eos).nonzero()[0, 0] + 4
    assert (out[0, end:] == eos).all()
    assert torch.equal(out[0, : end + 1], free[0, : end + 1])


def test_top_k_and_top_p_keep_the_likeliest_only():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(2000, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(sample(logits, 1.0, 2, None, generator).tolist()) == {0, 1}
    assert set(sample(logits, 1.0, None, 0.6, generator).tolist()) == {0, 1}
    assert set(sample(logits, 1.0, None, 0.5, generator).tolist()) == {0}
    assert set(sample(logits, 1.0, None, 1.0, generator).tolist()) == {0, 1, 2, 3}
    drawn = sample(logits, 0.5, None, None, generator)  # probabilities squared: 0.25 : 0.09 : …
    assert (drawn == 0).float().mean().item() == pytest.approx(0.25 / 0.365, abs=0.04)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
    ],
)
def test_an_option_out_of_range_is_named(model, options, says):
    with pytest.raises(ValueError, match=says):
        stream(model, torch.zeros(1, 2, dtype=torch.long), **{"max_new_tokens": 3, **options})


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3)
