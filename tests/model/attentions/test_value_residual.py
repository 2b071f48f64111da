"""Attention with the first layer's values against its formula in float64."""

import torch

from lightning_llm import Transformer
from tests.model.made import config, with_arguments, written_out


def test_the_last_layer_mixes_the_first_values_with_its_own():
    options = {"attention": with_arguments("value_residual", share=0.3), "position": "none", "num_hidden_layers": 3}
    model = Transformer(config(**options), seed=0).double()
    assert [layer.self_attn.shares.tolist() for layer in model.layers[1:]] == 2 * [torch.tensor([0.7, 0.3]).tolist()]
    attentions, seen = [layer.self_attn for layer in model.layers], []
    for attention in attentions:
        attention.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    model(torch.randint(61, (2, 13)))
    inputs, outputs = zip(*seen, strict=True)
    own, first = (
        (x @ attention.v_proj.weight.T).unflatten(-1, (-1, 10)).transpose(1, 2)
        for x, attention in ((inputs[2], attentions[2]), (inputs[0], attentions[0]))
    )
    value = own * attentions[2].shares[0] + first * attentions[2].shares[1]
    torch.testing.assert_close(outputs[2], written_out(attentions[2], inputs[2], value=value))
    torch.testing.assert_close(outputs[0], written_out(attentions[0], inputs[0]))
