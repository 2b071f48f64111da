"""The packed step: its logits, and the models that it is not for."""

import copy

import pytest
import torch
from torch import nn

from lightning_llm.generation import decoding, generate
from lightning_llm.generation.packed_step import can_pack
from tests.generation.models import MODELS, built, prompts_of

LENGTHS = (3, 11, 1, 11)


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


def test_what_is_no_module_of_ours_is_not_packed(model):
    hooked = copy.deepcopy(model)
    hooked.layers[0].mlp.register_forward_hook(lambda module, args, out: out)
    own = copy.deepcopy(model)
    own.layers[1].self_attn.v_proj = nn.Sequential(own.layers[1].self_attn.v_proj)
    assert can_pack(model)
    assert not can_pack(hooked)
    assert not can_pack(own)
    assert not can_pack(model.bfloat16())


def test_packed_weights_give_the_same_text_beyond_the_context(model, monkeypatch):
    prompts = prompts_of(3, 9, 24)
    packed = generate(model, prompts, max_new_tokens=60, temperature=0)
    monkeypatch.setattr("lightning_llm.generation.decoding.can_pack", lambda model: False)
    assert generate(model, prompts, max_new_tokens=60, temperature=0) == packed
