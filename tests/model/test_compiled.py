"""The whole model and its loss in one compiled graph, as a user would compile them."""

import pytest
import torch

from lightning_llm import LanguageModel, ModelConfig

SIZES = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}


def step(model, loss_of, batch):
    model.zero_grad()
    loss = loss_of(batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch.compile of torch 2.13
@pytest.mark.filterwarnings("ignore:.*Function.. should not be instantiated")  # by the same
@pytest.mark.parametrize("autocast", [False, True])
def test_one_compiled_graph_gives_the_same_loss_and_gradients(autocast):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**SIZES, checkpoint_level=[0, 1, 2]))
    model.configure_model()
    ids = torch.randint(0, 101, (4, 33))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    compiled = torch.compile(model.loss, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = [step(model, loss_of, batch) for loss_of in (model.loss, compiled)]
    tolerance = {"rtol": 0.05, "atol": 0.002} if autocast else {}  # bf16 sums in another order
    torch.testing.assert_close(*results, **tolerance)
