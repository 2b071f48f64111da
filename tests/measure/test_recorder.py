"""What a recorder sees of a step, and that it changes nothing."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_llm.measure.recorder import Recorder

SIZE = 6


class Layer(nn.Module):
    """A residual stream with one branch, which may run again in backward."""

    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.mlp = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        branch = checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x)
        return x + self.dropout(branch)


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(5, SIZE)
        self.layers = nn.ModuleList([Layer(recompute) for _ in range(2)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def made(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def recorded(model, pieces):
    with Recorder(model) as recorder:
        for ids in pieces:
            with recorder.forward():
                loss = model(ids)
            loss.backward()
        return recorder.step({name: parameter.grad for name, parameter in model.named_parameters()})


IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])
PARTS = ["embed", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp"]


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_and_parts_in_the_order_in_which_they_begin(recompute):
    step = recorded(made(recompute=recompute), [IDS])
    assert step.order == PARTS
    assert list(step.outputs) == ["embed", "layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1"]
    assert step.outputs["layers.1"].shape == (2, 3, SIZE)
    assert step.inputs.keys() == step.input_gradients.keys() == {*PARTS} - {"embed"}  # which gets ids


def test_the_gradient_of_an_input_is_what_the_module_contributes():
    step = recorded(made(), [IDS])
    beside = 2 * step.outputs["layers.1"]  # of the residual stream
    np.testing.assert_allclose(step.input_gradients["layers.1"], beside + step.input_gradients["layers.1.mlp"])
    assert abs(step.input_gradients["layers.1.mlp"]).max() > 0.01


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_are_put_together(recompute):
    whole, cut = recorded(made(), [IDS]), recorded(made(recompute=recompute), [IDS[:1], IDS[1:]])
    for kind in ("inputs", "outputs", "input_gradients", "gradients"):
        ours, theirs = getattr(whole, kind), getattr(cut, kind)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_allclose(value, theirs[name])


def test_it_changes_no_result_and_leaves_no_hook():
    watched, free = made(), made()
    recorded(watched, [IDS])
    free(IDS).backward()
    pairs = zip(watched.parameters(), free.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())


def test_a_module_that_is_called_twice_has_two_records():
    model = made()
    model.layers[1] = model.layers[0]
    step = recorded(model, [IDS, IDS])
    assert step.order == ["embed", "layers.0", "layers.0.mlp", "layers.0 (call 2)", "layers.0.mlp (call 2)"]
    assert step.outputs["layers.0 (call 2)"].shape == (4, 3, SIZE)


def test_labels_and_opaque_modules():
    model = made()
    with Recorder(model, lambda name: name.replace("embed", "table"), lambda module: module is model.layers[0]) as one:
        with one.forward():
            model(IDS)
        assert one.step({}).order == ["table", "layers.0", "layers.1", "layers.1.mlp"]
