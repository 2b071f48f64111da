"""``vocab_multiple_of``: rows of embedding and head that are no tokens change nothing but the shapes."""

import pytest
import torch

from lightning_llm import LanguageModel, ModelConfig
from lightning_llm.accounting import parameters_by_part
from lightning_llm.generation import generate
from lightning_llm.optim import AdamW, param_groups

VOCAB, MULTIPLE = 101, 64


def build(multiple, **options):
    config = ModelConfig(
        vocab_size=VOCAB,
        vocab_multiple_of=multiple,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        **options,
    )
    model = LanguageModel(config)
    model.seed = 5
    model.configure_model()
    return model


def tables(model):
    names = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")
    return {name: value for name, value in model.transformer.state_dict().items() if name in names}


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"lm_head_bias": True}], ids=str)
@pytest.mark.parametrize("loss_chunks", [None, 0, 3])
def test_training_is_that_without_them(options, loss_chunks):
    """Initial values bit for bit; losses and weights up to the rounding of wider matmuls, in float64."""
    plain, padded = models = [build(multiple, **options).double() for multiple in (1, MULTIPLE)]
    assert sum(p.numel() for p in padded.parameters()) == sum(parameters_by_part(padded.architecture).values())
    for name, value in tables(padded).items():
        assert len(value) == 2 * MULTIPLE
        assert torch.equal(value[:VOCAB], tables(plain)[name])
    optimizers = [AdamW(param_groups(model), lr=1e-2, weight_decay=0.1) for model in models]
    for _ in range(3):
        ids = torch.randint(0, VOCAB, (2, 9))
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model.loss_chunks = loss_chunks
            optimizer.zero_grad()
            loss = model.loss({"input_ids": ids[:, :-1], "targets": ids[:, 1:]})
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
    for name, value in tables(padded).items():
        torch.testing.assert_close(value[:VOCAB], tables(plain)[name])
        assert not value[VOCAB:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # a packed step, and the modules
def test_no_text_has_an_id_that_is_no_token(dtype):
    texts = []
    for multiple in (1, MULTIPLE):
        model = build(multiple).transformer.eval().to(dtype)
        with torch.no_grad():
            model.norm.weight.zero_()  # all logits are 0: each id is as likely
        texts.append(
            generate(model, torch.tensor([[1, 2]]), max_new_tokens=40, generator=torch.Generator().manual_seed(1))
        )
        assert model.logits(torch.zeros(3, 32, dtype=dtype)).shape == (3, VOCAB)
    assert torch.equal(*texts)
