"""The state of an optimizer that the accounting does not list is what its steps keep."""

import pytest
import torch
from pytorch_optimizer import SOAP

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.groups import param_groups
from lightning_llm.training.measured_optimizer import state_bytes, state_per_parameter

CONFIG = ModelConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)


class FromSecondStep(torch.optim.Optimizer):
    """Keeps a list of two halves of each parameter, from its second step on; it needs the closure and its mode."""

    def __init__(self, params):
        super().__init__(params, {})
        self.steps = None

    def train(self):
        self.steps = 0

    def step(self, closure):
        assert closure() == 0.0
        for group in self.param_groups:
            for param in group["params"] if self.steps else ():
                self.state[param]["halves"] = [param.bfloat16(), {"other": param.bfloat16()}]
        self.steps += 1


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("torch.optim.Adamax", {}),
        ("torch.optim.SGD", {}),
        ("torch.optim.SGD", {"momentum": 0.9}),
        ("pytorch_optimizer.SOAP", {"lr": 0.01}),
        ("pytorch_optimizer.ScheduleFreeAdamW", {}),
    ],
)
def test_the_state_without_storage_is_that_of_real_steps(path, arguments):
    model = Transformer(CONFIG)
    module, _, name = path.rpartition(".")
    optimizer = getattr(torch.optim if module == "torch.optim" else __import__(module), name)(
        param_groups(model), **arguments
    )
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    tensors = [leaf for state in optimizer.state.values() for value in state.values() for leaf in flat(value)]
    real = sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor) and tensor.ndim)
    parameters = sum(param.nbytes for param in model.parameters())
    found = state_per_parameter(path, arguments, CONFIG, "32-true")
    assert found * parameters == pytest.approx(real, abs=8 * len(list(model.parameters())))  # its counts of steps
    assert found > 4 if optimizer.__class__ is SOAP else found < 2.01


def flat(value):
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list | tuple) else [value]


def test_state_that_the_second_step_makes_counts_wherever_it_is():
    parameters = [torch.nn.Parameter(torch.empty(3, 4, device="meta"))]
    assert state_bytes(FromSecondStep(parameters), parameters) == 2 * 12 * 2


@pytest.mark.parametrize(
    ("path", "arguments", "problem"),
    [
        ("torch.optim.Absent", {}, "model.optimizer 'torch.optim.Absent' cannot be imported"),
        ("torch.optim.lr_scheduler.partial", {}, "must be a subclass of torch.optim.Optimizer"),
        ("torch.optim.Adamax", {"speed": 1}, "model.optimizer torch.optim.Adamax cannot be measured: .*speed"),
        ("torch.optim.Muon", {}, "cannot be measured: Muon only supports 2D parameters"),
    ],
)
def test_what_cannot_be_measured(path, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        state_per_parameter(path, arguments, CONFIG, "32-true")
