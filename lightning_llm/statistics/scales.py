"""Whether two models start at one scale: a difference in scale is a change of its own, besides the one that was meant.

A role of a matrix is the kind of its part, and whether its layer writes to the residual stream.
``model.initial_scales`` computes the scale of each role.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

MOST = 0.05  # by which scales may differ, besides the sampling error of a measured one


class Scale(NamedTuple):
    """The scale of a role.

    Attributes:
        rms: Root mean square of all elements.
        elements: How many there are.
    """

    rms: float
    elements: int

    def ratio(self, other: "Scale") -> float | None:
        """How many times the other scale it is; ``None``: they agree within 5% and the sampling error, 4/√(2n)."""
        if self.rms == other.rms or not self.elements or not other.elements:
            return None
        ratio = self.rms / other.rms if other.rms else math.inf
        bound = MOST + 4 / math.sqrt(2 * min(self.elements, other.elements))
        return ratio if abs(ratio - 1) > bound else None


def differing_scales(own: Mapping[str, Scale], base: Mapping[str, Scale], of_base: str = "the baseline's") -> list[str]:
    """A clause for each role of both whose scales differ.

    Args:
        own: By role.
        base: What they are compared with.
        of_base: Whose scale that is.
    """
    clauses = []
    for role in own.keys() & base.keys():
        if (ratio := own[role].ratio(base[role])) is None:
            continue
        values = f"root mean square {own[role].rms:.3g} versus {base[role].rms:.3g}"
        times = f"{ratio:.3g} times {of_base} scale" if base[role].rms else f"a scale above 0, unlike {of_base}"
        clauses.append(f"{role} weights start at {times} ({values})")
    return sorted(clauses)
