"""Operators that the compiler does not trace into: as torch wants them to be, and made without waste."""

import pytest
import torch
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.ops import attention, losses, span_attention, swiglu
from lightning_llm.ops.autograd import custom_op
from lightning_llm.ops.swiglu_tiles import Options, Weights, swiglu_backward, swiglu_forward


def of_swiglu():
    torch.manual_seed(0)
    x, gate, up, down = (torch.randn(shape) for shape in ((2, 3, 16), (24, 16), (24, 16), (16, 24)))
    return x, gate, up, down, None


def calls():
    """Each operator with inputs, backward ones too."""
    x, *weights = of_swiglu()
    options = 1e-6, None, torch.float32
    _, g, u = swiglu._operator(x, *weights, True, *options)
    yield swiglu._operator, (x, *weights, True, *options)
    yield swiglu._operator, (x, *weights, False, *options)
    yield swiglu._operator_backward, (torch.ones_like(x), x, *weights, [g, u], [True] * 4 + [False], *options)
    heads = torch.randn(4, 5, 8)
    _, *probabilities = attention._operator(heads, heads, heads)
    yield attention._operator, (heads, heads + 1, heads + 2)
    yield attention._operator_backward, (heads, heads, heads + 1, heads + 2, probabilities)
    four, start = heads[None], torch.zeros(1, 5, dtype=torch.int64)
    yield span_attention._operator, (four, four + 1, four + 2, start)
    yield span_attention._operator_backward, (four, four, four + 1, four + 2, start)
    of_loss = -100, None, 0.0, "mean", torch.float32, None, 0.0
    yield losses._operator, (x, weights[0], None, torch.ones(2, 3).long(), None, [True, True, False], None, *of_loss)


@pytest.mark.parametrize("number", range(8))
def test_schema_and_shapes_are_those_of_the_results(number):
    """torch checks neither at a call: that no result is an input, or that the compiler gets the right shapes."""
    operator, inputs = list(calls())[number]
    library.opcheck(operator, inputs, test_utils=("test_schema", "test_faketensor"))


def test_an_operator_may_be_defined_again():
    """As by a notebook that reloads a file."""
    for factor in (2.0, 3.0):
        operator = custom_op("of_this_test", "Tensor x", lambda x, factor=factor: [x * factor], lambda x: [x.clone()])
        assert operator(torch.ones(1))[0] == factor


class Views(TorchDispatchMode):
    """Counts the operators that take a part of a tensor."""

    def __init__(self):
        super().__init__()
        self.taken = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.taken += function.overloadpacket in (torch.ops.aten.slice, torch.ops.aten.select)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("saves", [True, False])
def test_a_single_tile_takes_no_parts_of_tensors(saves):
    x, *weights = of_swiglu()
    options = Options(1e-6, 1, torch.float32)
    with Views() as views:
        y, *saved = swiglu_forward(x, Weights(*weights), options, saves=saves)
        swiglu_backward(torch.ones_like(y), x, Weights(*weights), saved, options, (True,) * 4 + (False,))
    assert views.taken == 0
