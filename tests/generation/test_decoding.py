"""Decoding: equal to recomputing the whole prefix, alone and in a batch, and within the options given."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.generation import Sampling, decoding, generate, stream
from lightning_llm.generation.decoding import Decoder
from tests.generation.models import MODELS, built, prompts_of

LENGTHS = (3, 11, 1, 11)


def test_greedy_equals_recomputing_the_prefix(model):
    prompt = torch.randint(0, 31, (3, 5))
    expected = prompt
    for _ in range(19):  # up to the context limit
        expected = torch.cat([expected, model.logits(model(expected)[:, -1]).argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, prompt, max_new_tokens=19, temperature=0), expected)


def test_beyond_the_context_the_newest_half_is_read_again(model):
    out = generate(model, torch.randint(0, 31, (1, 5)), max_new_tokens=40, temperature=0)
    assert out.shape == (1, 45)
    # 24 positions are full once tokens 0 to 23 are read; token 24 followed from them. Then 12 tokens are read again.
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


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(name):
    """Beyond the context too, which each row fills at a time of its own; sampled, and greedily."""
    model = built(name).double()
    prompts = prompts_of(*LENGTHS, 24)
    for options in ({"temperature": 0}, {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.3}):
        generator = torch.Generator()
        together = generate(model, prompts, max_new_tokens=30, generator=generator.manual_seed(7), **options)
        for prompt, row in zip(prompts, together, strict=True):
            alone = generate(model, [prompt], max_new_tokens=30, generator=generator.manual_seed(7), **options)[0]
            assert row[: len(prompt)] == prompt
            assert len(row) == len(prompt) + 30
            assert row == alone


def test_copies_of_a_prompt_give_different_texts_and_the_first_what_it_gives_alone(model):
    (prompt,) = prompts_of(4)
    copies = generate(model, [prompt] * 3, max_new_tokens=12, generator=torch.Generator().manual_seed(1))
    assert len({tuple(row) for row in copies}) == 3
    assert copies[0] == generate(model, [prompt], max_new_tokens=12, generator=torch.Generator().manual_seed(1))[0]


def test_a_row_that_ended_does_not_hold_up_or_disturb_the_others(model):
    prompts = prompts_of(5, 9)
    free = generate(model, prompts, max_new_tokens=40, temperature=0)
    token = next(
        token for token in free[0][5:12] if token not in free[1][9:30]
    )  # the second continues beyond its context
    ended = generate(model, prompts, max_new_tokens=40, temperature=0, eos_token_id=[token])
    for row, whole, prompt in zip(ended, free, prompts, strict=True):
        rest = whole[len(prompt) :]
        assert row == prompt + (rest[: rest.index(token) + 1] if token in rest else rest)
    assert len(ended[0]) < 5 + 8 < 30 <= len(ended[1])


def test_the_penalty_is_on_the_prompt_as_well_and_on_no_other_row(model):
    (prompt,) = prompts_of(6)
    most_likely = generate(model, [prompt], max_new_tokens=1, temperature=0)[0][-1]
    for _ in range(31):  # until the model would repeat what is in the prompt
        if most_likely in prompt:
            break
        prompt = [*prompt, most_likely]
        most_likely = generate(model, [prompt], max_new_tokens=1, temperature=0)[0][-1]
    assert most_likely in prompt
    other = [token for token in range(31) if token not in prompt][:3]
    options = {"max_new_tokens": 1, "temperature": 0}
    plain = generate(model, [prompt, other], **options)
    penalised = generate(model, [prompt, other], repetition_penalty=1e6, **options)
    assert plain[0][-1] == most_likely != penalised[0][-1]
    assert penalised[0][-1] not in prompt
    assert penalised[1] == generate(model, [other], repetition_penalty=1e6, **options)[0]


EVERY_OPTION = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, EVERY_OPTION])
def test_tokens_read_one_step_late_are_the_same(model, monkeypatch, sampling):
    def run(**options):
        prompts = [[1, 2, 3], [4], [1, 2, 3]]  # 45 tokens are beyond the context, which is read again
        seed = torch.Generator().manual_seed(0)
        return generate(model, prompts, max_new_tokens=45, generator=seed, **sampling, **options)

    free = run()
    ended = run(eos_token_id=free[1][12])
    assert min(map(len, ended)) < 46 <= min(map(len, free))
    monkeypatch.setattr(decoding, "_AHEAD", {"cpu": 1})  # as on CUDA
    assert run() == free
    assert run(eos_token_id=free[1][12]) == ended


class Reads(TorchDispatchMode):
    """The operators for which the host would wait for a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.WAITING:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, EVERY_OPTION])
def test_between_two_tokens_the_host_reads_nothing_else(model, monkeypatch, sampling):
    monkeypatch.setattr(decoding, "_AHEAD", {"cpu": 1})
    monkeypatch.setattr(decoding, "can_pack", lambda model: False)  # that path is for CPUs
    steps = iter(Decoder(model, [[1, 2, 3], [4]], 12, Sampling(**sampling)))
    next(steps)
    with Reads() as reads:
        for _ in range(9):
            next(steps)
    assert reads.found == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("sampling", [{"temperature": 0}, EVERY_OPTION])
def test_decoding_on_cuda_does_not_wait(model, sampling):
    options = {**sampling, "max_new_tokens": 20}
    expected = generate(model, [[1, 2, 3], [4]], generator=torch.Generator().manual_seed(0), **options)
    steps = Decoder(model.cuda(), [[1, 2, 3], [4]], 20, Sampling(**sampling), torch.Generator().manual_seed(0))
    found = iter(steps)
    rows = {0: [1, 2, 3], 1: [4]}
    try:
        for number, tokens in enumerate(found):
            torch.cuda.set_sync_debug_mode("error" if 2 <= number < 18 else "default")
            for row, token in tokens.items():
                rows[row].append(token)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert list(rows.values()) == expected


@pytest.mark.parametrize("device", ["mps", "cuda"])
def test_probabilities_are_summed_on_the_host_where_a_device_cannot(model, monkeypatch, device):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: device == "cuda")
    weight = SimpleNamespace(device=torch.device(device))
    held = SimpleNamespace(config=model.config, embed_tokens=SimpleNamespace(weight=weight))
    assert Decoder(held, [[1]], 3, Sampling())._choosing.type == "cpu"
    assert Decoder(held, [[1]], 3, Sampling(temperature=0))._choosing.type == device


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_are_rejected(model, temperature):
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(model, [[1, 2]], max_new_tokens=3, temperature=temperature)


def test_what_is_generated_can_be_trained_on(model):
    ids = generate(model, torch.tensor([[1, 2]]), max_new_tokens=9)
    model.logits(model(ids)).sum().backward()
    assert model.embed_tokens.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature must be 0 \\(greedy decoding\\), or at least 1e-06"),
        ({"temperature": 1e-40}, "temperature must be 0 \\(greedy decoding\\), or at least 1e-06"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": float("nan")}, "top_p must be above 0 and at most 1, got nan"),
        ({"min_p": float("nan")}, "min_p must be at least 0 and at most 1, got nan"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be from 1e-06 to 1000000.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p must be at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 1e-06"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be from 1e-06"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
    ],
)
def test_an_option_out_of_range_is_named(model, options, says):
    with pytest.raises(ValueError, match=says):
        stream(model, torch.zeros(1, 2, dtype=torch.long), **{"max_new_tokens": 3, **options})


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"at least one token each, got lengths \[1, 0\]"):
        generate(model, [[1], []], max_new_tokens=3)
