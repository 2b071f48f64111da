"""Decoding: equal to recomputing the whole prefix, alone and in a batch, and within the options given."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm import ModelConfig, Transformer
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation import Sampling, decoding, generate, generate_text, stream, stream_text
from lightning_llm.generation.decoding import Decoder
from lightning_llm.generation.packed_step import can_pack
from lightning_llm.generation.sampling import Draws, filter_logits, pick
from lightning_llm.generation.text import StopStrings


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


SIZES = {
    "vocab_size": 31, "hidden_size": 48, "intermediate_size": 77, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "initializer_range": 0.3,
}  # fmt: skip
GPT = {"norm": "layernorm", "position": "learned", "num_key_value_heads": 6}
MODELS = {
    "llama": {},
    "llama, biases, stretched": {
        "attention_bias": True, "mlp": "swiglu", "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "qk-norm": {"qk_norm": True, "head_dim": 10, "tie_word_embeddings": True},
    "gpt": {**GPT, "mlp": "gelu_tanh", "mlp_bias": True, "attention_bias": True, "lm_head_bias": True},
    "no positions": {"position": "none", "mlp": "relu"},
    "own mlp": {"mlp": f"{__name__}.OwnMLP"},
}  # fmt: skip
LENGTHS = (3, 11, 1, 11)


class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        assert x.dim() == 3
        return torch.tanh(self.mix(x))


def built(name, **options):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SIZES, **MODELS[name], **options})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(31, (length,), generator=generator).tolist() for length in lengths]


def stepwise_logits(model, prompts, text, monkeypatch, *, packs):
    """Logits of every step of a decoder that is made to choose the tokens of ``text``: for each row (new, vocab)."""
    seen = []

    def choose(logits, numbers):
        seen.append(logits)
        return torch.tensor([row[len(prompt) + len(seen) - 1] for row, prompt in zip(text, prompts, strict=True)])

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "pick", choose)
        if not packs:
            patch.setattr(decoding, "can_pack", lambda model: False)
        new = len(text[0]) - len(prompts[0])
        generate(model, prompts, max_new_tokens=new, temperature=0)
    assert len(seen) == new
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_token_by_token_are_those_of_the_full_pass(name, packs, monkeypatch):
    """Alone and beside rows of other lengths; the error against float64 is at most twice that of the full pass."""
    model = built(name)
    assert can_pack(model)
    truth_model = copy.deepcopy(model).double()
    prompts = prompts_of(*LENGTHS)
    text = [prompt + prompts_of(12)[0] for prompt in prompts]
    batched = stepwise_logits(model, prompts, text, monkeypatch, packs=packs)
    for row, (prompt, whole) in enumerate(zip(prompts, text, strict=True)):
        ids = torch.tensor([whole[:-1]])
        span = slice(len(prompt) - 1, None)
        with torch.no_grad():
            truth = truth_model.logits(truth_model(ids))[0, span]
            full = model.logits(model(ids))[0, span]
        alone = stepwise_logits(model, [prompt], [whole], monkeypatch, packs=packs)[0]
        allowed = 2 * (full - truth).norm()
        assert (batched[row] - truth).norm() <= allowed
        assert (alone - truth).norm() <= allowed


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


def test_what_is_no_module_of_ours_is_not_packed(model):
    hooked = copy.deepcopy(model)
    hooked.layers[0].mlp.register_forward_hook(lambda module, args, out: out)
    own = copy.deepcopy(model)
    own.layers[1].self_attn.v_proj = nn.Sequential(own.layers[1].self_attn.v_proj)
    assert can_pack(model)
    assert not can_pack(hooked)
    assert not can_pack(own)
    assert not can_pack(model.bfloat16())


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


def test_a_stop_string_is_found_across_pieces_and_nothing_of_it_is_passed_on():
    stops = StopStrings(["END", "aab"])
    assert [stops.push(piece) for piece in ("xE", "NO", " a", "a", "a", "c")] == ["x", "ENO", " ", "", "a", "aac"]
    assert [stops.push(piece) for piece in ("..E", "N", "D and", "more")] == ["..", "", "", ""]
    assert stops.is_found
    assert stops.flush() == ""
    first = StopStrings(["long stop", "g s"])
    assert first.push("a long stop") == "a lon"
    pieces = StopStrings(["long stop", "g s"])
    assert "".join(map(pieces.push, "a long stop")) == "a lon"  # whatever pieces it comes in
    held = StopStrings(["END"])
    assert held.push("the EN") + held.flush() == "the EN"


class Script(nn.Module):
    """Says the bytes of a text, whatever it is asked."""

    def __init__(self, text):
        super().__init__()
        self.config = ModelConfig(vocab_size=300, hidden_size=8, num_attention_heads=2, max_position_embeddings=64)
        self.embed_tokens = nn.Embedding(300, 8)
        self.said = list(text)

    def forward(self, ids, cache):
        cache.advance(ids.shape[1])
        return torch.zeros(*ids.shape, 8)

    def logits(self, hidden):
        return torch.nn.functional.one_hot(torch.tensor([self.said.pop(0)] * len(hidden)), 300) * 100.0


def said(text, **options):
    with mock.patch("lightning_llm.generation.decoding.can_pack", return_value=False):
        steps = stream_text(
            Script(text),
            Tokenizer.train_byte(),
            ["x"],
            max_new_tokens=len(text),
            sampling=Sampling(temperature=0),
            **options,
        )
        return [piece for (piece,) in steps]


def test_text_comes_as_it_is_whole_and_ends_before_a_stop_string_of_several_bytes():
    assert said("aé€.".encode()) == ["a", "", "é", "", "", "€", ".", ""]
    assert said("aé€é€!b".encode(), stop=["€!"]) == ["a", "", "é", "", "", "", "", "€é", "", "", "", "", ""]
    assert "".join(said("ab€".encode()[:-1])) == "ab\ufffd"  # the end came within a character
    assert said(b"abc", stop_token_ids=[ord("b")]) == ["a", "", ""]
    assert said([ord("a"), 299, ord("b")]) == ["a", "", "b", ""]  # 299 stands for nothing


def test_texts_of_a_batch_are_those_of_each_alone(model):
    tokenizer = Tokenizer.train_char(["abcdefghijklmnopqrstuvwxyz .,!?"])
    prompts = ["hello", "a longer one", "?"]
    options = {"max_new_tokens": 30, "sampling": Sampling(temperature=1.5), "stop": ["e", "xy"]}

    def texts(prompts):
        return generate_text(model, tokenizer, prompts, generator=torch.Generator().manual_seed(3), **options)

    together = texts(prompts)
    assert together == [texts([prompt])[0] for prompt in prompts]
    assert not any("e" in text for text in together)
    assert len(set(map(len, together))) > 1


def test_a_prompt_that_is_a_str_is_one_text(model):
    tokenizer = Tokenizer.train_char(["abcdefghijklmnopqrstuvwxyz .,!?"])

    def text(prompts, stop):
        generator = torch.Generator().manual_seed(3)
        return generate_text(model, tokenizer, prompts, max_new_tokens=30, stop=stop, generator=generator)

    found = text("hello", "xy")
    assert isinstance(found, str)
    assert [found] == text(["hello"], ["xy"])


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("a" * 25, {}, r"prompt has 25 tokens, more than the model's context \(max_position_embeddings\) of 24"),
        ("", {}, "prompt is empty"),
        ("a", {"stop": [""]}, "stop: a stop string must have at least one character"),
        ("a", {"stop_token_ids": [99]}, "stop token 99 is not in the tokenizer's vocabulary of 3"),
    ],
)
def test_what_cannot_be_continued_is_refused(model, prompt, options, says):
    with pytest.raises(ValueError, match=says):
        generate_text(model, Tokenizer.train_char(["abc"]), [prompt], max_new_tokens=3, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": float("nan")}, "top_p must be above 0 and at most 1, got nan"),
        ({"min_p": float("nan")}, "min_p must be at least 0 and at most 1, got nan"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be above 0 and finite"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p must be at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
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


def test_packed_weights_give_the_same_text_beyond_the_context(model, monkeypatch):
    prompts = prompts_of(3, 9, 24)
    packed = generate(model, prompts, max_new_tokens=60, temperature=0)
    monkeypatch.setattr("lightning_llm.generation.decoding.can_pack", lambda model: False)
    assert generate(model, prompts, max_new_tokens=60, temperature=0) == packed
