"""The difference of two ratios of sums, such as the loss per token of two models, with documents as the units.

A loss per token is a sum of nats over a sum of tokens, not a mean of documents: a long document counts for more. Over
the ``n`` documents that were sampled, with ``y`` the nats (or bits) and ``x`` the tokens (or bytes) of each,

    ``R_A = Σ y_A / Σ x_A``,    ``R_B = Σ y_B / Σ x_B``,    ``D = R_B - R_A``,

and a first-order expansion of ``D`` in the sums (linearization) is a mean of values ``e``, one per document:

    ``e = (y_B - R_B x_B) / mean(x_B) - (y_A - R_A x_A) / mean(x_A)``,    ``se(D)² = Σ e² / (n (n - 1))``.

Where both sides have the same ``x``, as two models of one tokenizer do, ``D = Σ (y_B - y_A) / Σ x``, and ``e`` is the
residual of the ratio estimator of the differences (Cochran 1977, "Sampling Techniques", third edition, chapter 6: the
variance from a sample is in section 6.4, two ratios are compared in section 6.18; there is no correction for a finite
population). With documents of the same length, all of this is the paired t test.

Its error is too small if a few documents hold most of the text, because the ratio follows them. Student's t therefore
has ``(Σ x)² / Σ x² - 1`` degrees of freedom: the effective number of documents (Kish 1965, "Survey Sampling") less one,
which is ``n - 1`` for documents of the same length. Simulated: lengths lognormal with σ = 1, a difference per byte that
does not depend on the length. With 4, 10, 30 and 100 documents, intervals of 95% cover 97, 94, 93 and 94% (with
``n - 1``: 87, 88, 92 and 94%). Where long documents differ otherwise than short ones, they cover 92, 86, 87 and 89%
(82, 81, 85 and 89%), so :attr:`Ratios.is_doubtful` says when the lengths are too unequal for their number.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_llm.statistics.estimates import Array, Estimate
from lightning_llm.statistics.no_spread import ROUNDING

# The working rule of Cochran 1977, section 6.3: the mean length has a coefficient of variation of at most 10%
LARGEST_VARIATION = 0.1


@dataclasses.dataclass(frozen=True)
class Ratios:
    """Two ratios over the same units.

    Attributes:
        difference: Ratio of the variant minus ratio of the baseline.
        units: Number of units.
        effective_units: How many units of the same size would say as much.
        estimate: The difference with its error; ``None`` for one unit, and if nothing varies.
    """

    difference: float
    units: int
    effective_units: float
    estimate: Estimate | None

    @property
    def is_doubtful(self) -> bool:
        """Whether the sizes of the units vary too much for their number, so that the interval may be too narrow."""
        if self.units < 2:
            return False
        squared_variation = (self.units / self.effective_units - 1) / (self.units - 1)
        return squared_variation > LARGEST_VARIATION**2


def residuals(values: ArrayLike, sizes: ArrayLike) -> Array:
    """Values ``e`` of one ratio ``Σ values / Σ sizes``, one per unit, whose mean is its first-order expansion.

    Args:
        values: A finite value per unit.
        sizes: The size of each unit, 0 or above; not all are 0.
    """
    y = np.asarray(values, dtype=np.float64)
    x = np.asarray(sizes, dtype=np.float64)
    found: Array = (y - y.sum() / x.sum() * x) / x.mean()
    return found


def standard_error(of_units: Array) -> float:
    """Standard error of a ratio, or of a difference of ratios, by its :func:`residuals`: two or more."""
    units = len(of_units)
    return math.sqrt(float(of_units @ of_units) / (units * (units - 1)))


def compare_ratios(
    baseline: Sequence[float], base_sizes: Sequence[float], variant: Sequence[float], sizes: Sequence[float]
) -> Ratios:
    """Compare ``Σ variant / Σ sizes`` with ``Σ baseline / Σ base_sizes``; formulas above.

    Args:
        baseline: A finite value per unit.
        base_sizes: The size of each unit, 0 or above; not all are 0.
        variant: As ``baseline``, in the same order.
        sizes: As ``base_sizes``, for ``variant``.
    """
    units = len(baseline)
    of_units = np.zeros(units)
    ratios: list[float] = []
    largest = 0.0  # of all terms: what rounding is relative to
    effective_units = math.inf
    for sign, values, weights in ((-1, baseline, base_sizes), (1, variant, sizes)):
        y = np.asarray(values, dtype=np.float64)
        x = np.asarray(weights, dtype=np.float64)
        ratios.append(float(y.sum() / x.sum()))
        of_units += sign * residuals(y, x)
        largest = max(largest, float(np.abs(y).max() / x.mean()))
        effective = round(float(x.sum() ** 2 / (x @ x)), 9)  # 4 units of one size are 4, and not 3.9999999999999996
        effective_units = min(effective_units, effective)
    difference = ratios[1] - ratios[0]
    if units < 2 or float(np.abs(of_units).max()) <= ROUNDING * largest:
        return Ratios(difference, units, effective_units, None)
    error = standard_error(of_units)
    freedom = effective_units - 1
    return Ratios(difference, units, effective_units, Estimate(difference, error, freedom, error * math.sqrt(units)))
