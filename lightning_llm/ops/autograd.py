"""The place of operators in autograd, in torch.compile and under the transforms of torch.func."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, library

_LIBRARIES: dict[str, library.Library] = {}  # by operator: it is removed with its library, as when a file is reloaded

Backward = Callable[..., tuple[Tensor | None, ...]]


def reject_transforms(name: str, instead: str) -> None:
    """Reports that an operator with a backward of its own does not work under ``torch.func``.

    Raises:
        NotImplementedError: One of its transforms is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{name} does not work under the transforms of torch.func: use {instead} there")


def differentiable_once(backward: Backward) -> Backward:
    """Decorates the backward of a Function that autograd cannot differentiate again.

    torch's own ``once_differentiable`` looks at the incoming gradient only: where that is constant, gradients come out
    as if they were constants too, and a penalty on them is silently lost.

    Raises:
        RuntimeError: Under ``create_graph=True``.
    """

    @wraps(backward)
    def only_once(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this operator of lightning_llm cannot be differentiated twice (create_graph=True): "
                "use the plain form, swiglu_reference or that of torch.nn.functional"
            )
        return backward(ctx, *grads)

    return only_once


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Saves all inputs for backward, and all results but the first."""
    ctx.save_for_backward(*inputs, *output[1:])


def autograd_function(
    name: str,
    run: Callable[..., list[Tensor]],
    gradients: Callable[..., tuple[Any, ...]],
    run_backward: Callable[..., list[Tensor]],
    *,
    save: Callable[..., None] = save_inputs,
) -> Callable[..., Tensor]:
    """An operator outside of ``torch.compile``: an autograd Function that returns the first of the results.

    Args:
        name: Of its class.
        run: As of :func:`custom_op`.
        gradients: As of :func:`custom_op`; called with ``run_backward`` too.
        run_backward: Computes the gradients.
        save: As of :func:`custom_op`.
    """

    def forward(ctx: Any, *inputs: Any) -> Tensor:
        results = run(*inputs)
        save(ctx, inputs, results)
        return results[0]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gradients(ctx, [grad], run_backward)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiable_once(backward))}
    apply: Callable[..., Tensor] = type(name, (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]
    return apply


def custom_op(
    name: str,
    arguments: str,
    run: Callable[..., list[Tensor]],
    shapes: Callable[..., list[Tensor]],
    *,
    save: Callable[..., None] = save_inputs,
    gradients: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[..., list[Tensor]]:
    """An operator that ``torch.compile`` does not trace into, so that it saves for backward what it says.

    If the compiler traced into it, it would merge recomputation in backward with the forward pass (it removes common
    subexpressions), and the memory would be back. The kernels inside are the same as in eager mode.

    Args:
        name: In this package's namespace of torch's library.
        arguments: Its schema's arguments; it returns a list of tensors.
        run: Its implementation.
        shapes: Returns empty tensors of the results' shapes and dtypes.
        save: Saves inputs and results for backward: called with a context, the inputs and the results.
        gradients: Its backward, called with that context and the gradients of the results.
    """
    # torch's decorator custom_op does the same, and checks at each call whether results are inputs, which takes longer
    own = _LIBRARIES[name] = library.Library("lightning_llm", "FRAGMENT")  # type: ignore[no-untyped-call]
    qualified = f"lightning_llm::{name}"
    schema = f"{name}({arguments}) -> Tensor[]"
    tags = (torch.Tag.pt2_compliant_tag,)
    own.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    own.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    library.register_fake(qualified, shapes, lib=own)
    if gradients is not None:
        library.register_autograd(qualified, gradients, setup_context=save, lib=own)
    operator: Callable[..., list[Tensor]] = getattr(torch.ops.lightning_llm, name).default
    return operator
