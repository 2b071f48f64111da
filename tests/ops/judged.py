"""An operator is judged by the error of its plain form in the same dtype; the truth is in float64."""

import torch

DTYPES = [torch.float32, torch.bfloat16]


def relative_error(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


def with_gradients(function, inputs, dtype, autocast=None):
    """The result and the gradients of the inputs."""
    inputs = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    with torch.autocast(inputs[0].device.type, autocast, enabled=autocast is not None):
        out = function(*inputs)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, dtype=torch.float64).to(out))
    return [out.detach(), *(x.grad for x in inputs)]


def assert_as_good_as_plain(ours, plain, inputs, dtype, autocast=None):
    inputs = [x.detach().to(dtype).double() for x in inputs]  # the truth starts from the same rounded inputs
    truth = with_gradients(plain, inputs, torch.float64)
    our_results, plain_results = (with_gradients(function, inputs, dtype, autocast) for function in (ours, plain))
    for got, reference, true in zip(our_results, plain_results, truth, strict=True):
        assert got.dtype == (reference.dtype if autocast else dtype)
        assert (got.double() - true).norm() <= 2 * (reference.double() - true).norm()
