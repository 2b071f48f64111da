"""Canon layers against their formula in float64, and their convolution piece by piece."""

import pytest
import torch

from lightning_llm import Transformer
from tests.model.made import assert_decoding_is_the_full_pass, attention_run, config, with_arguments, written_out


def convolved(x, weight, documents=None):
    """``x`` and the sum over itself and the ``width - 1`` positions before it in its document."""
    out = x.clone()
    for row in range(len(x)):
        for place in range(x.shape[1]):
            for back in range(min(place + 1, weight.shape[-1])):
                if documents is None or documents[row, place] == documents[row, place - back]:
                    out[row, place] += weight[:, 0, -1 - back] * x[row, place - back]
    return out


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 2 + [1] * 8])], ids=["one", "documents"])
@pytest.mark.parametrize(("places", "width"), [("A", 4), ("B", 3), ("AB", 2)])
def test_it_is_its_formula(places, width, documents):
    options = {"attention": with_arguments("canon", places=places, width=width), "position": "none"}
    attention, x, got = attention_run(documents, seq=9, **options)
    if "A" in places:
        x = convolved(x, attention.canon["A"].weight, documents)
    every = torch.cat([proj(x) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=-1)
    if "B" in places:
        every = convolved(every, attention.canon["B"].weight, documents)
    heads = [part.unflatten(-1, (-1, 10)).transpose(1, 2) for part in every.split([40, 20, 20], dim=-1)]
    torch.testing.assert_close(got, written_out(attention, x, heads=heads, documents=documents))


def test_decoding_equals_the_full_forward_pass_in_pieces_and_for_rows_of_unequal_length():
    model = Transformer(config(attention=with_arguments("canon", width=4)), seed=0).double()
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.canon["A"].weight)
    assert_decoding_is_the_full_pass(model)
