"""Stochastic rounding of float32 to bfloat16, with noise that is a pure function of step and index.

bfloat16 is the upper half of float32's bits. Rounded to the nearest, an average that moves by less than half of a last
digit (2⁻⁸ of its size at most) does not move at all: with β₂ = 0.999 Adam's second average, which shrinks by 1/1000 a
step at most, never does. Rounded stochastically it is right in the mean (Zamirai et al. 2020, "Revisiting BFloat16
Training", arXiv:2010.06192):

    x between the neighbors a and b = a + u    becomes b with probability (x - a) / u, else a

To do so, add 16 random bits to the bits of the float32 and drop the lower 16: the carry is the draw. It leads away from
zero for either sign, as the sign is a bit of its own. A value that bfloat16 can represent does not change (±0 and ±∞
too), and NaN stays NaN. Above the largest finite bfloat16 the upper neighbor is ∞, in the place of 2¹²⁸; rounding to
the nearest becomes ∞ from halfway on.

The noise is a hash of a counter (the principle of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
no generator is read or advanced, all processes and resumed runs make the same bits, and tensors may be cut anywhere.
Its rounds multiply and xor-shift as MurmurHash3's finalizer does, with the step as key. A 32-bit word serves both
averages, one by each half: 1.1 ns a word on two cores, for 2^18 of them; a ``torch.Generator``, which fills on one
core, takes 0.84 ns for each half.

Parameters in bfloat16 are served likewise: with the usual rates most of their updates are below half of a last digit.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# odd, below 2^31
_FIRST = 0x2C1B3C6D
_SECOND = 0x297A2D39
_THIRD = 0x7FEB352D
_UPPER = -(2**16)  # 0xFFFF0000 as int32


def round_stochastically_(values: Tensor, noise: Tensor) -> None:
    """Round float32 in place to one of the two bfloat16 neighbors, in the mean over the noise to ``values``.

    ``values`` keep their dtype. ``noise`` has the same shape: int32, uniform on 0 to 65535; it is not changed.
    """
    # -inf, and NaN where NaN is: the carry may have turned such bits into a number. where() takes three times as long.
    bad = values.clamp(max=-torch.inf)
    values.view(torch.int32).add_(noise).bitwise_and_(_UPPER)
    torch.maximum(values, bad, out=values)


def rounding_noise(
    ranges: Iterable[tuple[int, int]], *, step: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Two streams of 16 random bits for each index: int32 tensors of the lengths' sum, each value from 0 to 65535.

    Args:
        ranges: (start, length) of the numbers' indices among all parameters. Indices that differ by a multiple of 2³²
            get the same bits.
        step: Number of the step.
        device: Where to compute it; the bits do not depend on it.
    """
    key = _mixed(step)
    offset = key & 0xFFFFFFFF
    whitener = torch.tensor(_signed(key >> 32), dtype=torch.int32)
    words = []
    for start, length in ranges:
        word = torch.arange(length, dtype=torch.int32, device=device)
        words.append(word.mul_(_FIRST).add_(_signed(start * _FIRST + offset)))
    word = words[0] if len(words) == 1 else torch.cat(words)
    # The shifts keep the sign, which makes two words in 2^32 collide, as a random function would; it spares a mask.
    word.bitwise_xor_(word >> 15)
    torch.add(whitener, word, alpha=_SECOND, out=word)  # key + word * _SECOND in one pass
    word.bitwise_xor_(word >> 15).mul_(_THIRD)
    upper = word >> 16
    return word.bitwise_xor_(upper).bitwise_and_(0xFFFF), upper.bitwise_and_(0xFFFF)


def rounding_update_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    offsets: list[int],
    update_: Callable[..., None],
    step: int,
    round_params: bool = False,
) -> None:
    """One step on float32 copies of what is narrower; both averages are rounded back stochastically.

    Args:
        params: Tensors of one device and dtype.
        grads: Their gradients; not changed.
        exp_avgs: First averages, bfloat16.
        exp_avg_sqs: Second averages, likewise.
        offsets: Index of the first number of each, among all parameters.
        update_: Updates parameters and averages of one dtype in place; called with the first four.
        step: Number of this step.
        round_params: Whether parameters, which are bfloat16, are rounded stochastically too; else to the nearest.
    """
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    lengths = [param.numel() for param in params]
    wide_params, wide_grads = ([tensor.to(dtype) for tensor in tensors] for tensors in (params, grads))
    averages = [torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype) for tensors in (exp_avgs, exp_avg_sqs)]
    views = [
        [flat.view(param.shape) for flat, param in zip(torch.split(average, lengths), params, strict=True)]
        for average in averages
    ]
    update_(wide_params, wide_grads, *views)
    if round_params:
        round_params_(params, wide_params, offsets=offsets, step=step)
    elif dtype != params[0].dtype:
        torch._foreach_copy_(params, wide_params)
    noises = rounding_noise(zip(offsets, lengths, strict=True), step=step, device=params[0].device)
    for tensors, average, shaped, noise in zip((exp_avgs, exp_avg_sqs), averages, views, noises, strict=True):
        values = average.float()
        round_stochastically_(values, noise)
        if values is not average:  # of float64 parameters
            average.copy_(values)
        torch._foreach_copy_(tensors, shaped)


def round_params_(params: list[Tensor], values: list[Tensor], *, offsets: list[int], step: int) -> None:
    """Copies float32 values to bfloat16 parameters, rounded stochastically, with other noise than the averages'.

    ``offsets`` and ``step`` are those of :func:`rounding_update_`.
    """
    lengths = [param.numel() for param in params]
    flat = torch.cat([value.reshape(-1) for value in values])
    # steps count from 1: below 0 are other words
    round_stochastically_(flat, rounding_noise(zip(offsets, lengths, strict=True), step=-step, device=flat.device)[0])
    rounded = torch.split(flat, lengths)
    torch._foreach_copy_(params, [each.view(param.shape) for each, param in zip(rounded, params, strict=True)])


def _mixed(number: int) -> int:
    """64 bits from a counter: SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    mask = 2**64 - 1
    z = (number * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    """The int32 with the lower 32 bits of a number."""
    return (number + 2**31) % 2**32 - 2**31
