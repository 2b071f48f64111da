"""Memory of a deep model from walks of a shallow one, so that a planner can ask for thousands of settings.

Layers of one level behave alike. At a given moment of the step, say when the MLP of the second layer of a run of equal
layers goes backward, what is alive is a constant for each layer of each run, plus the same temporaries. So the bytes at
that moment are affine in the lengths of the runs, and within a run affine in the layer: its ends and their neighbours
have the largest. Walks with three layers in each run, and with four in one of them, give every coefficient.

The result is that of ``step_memory`` to the byte, for any number of layers (``tests/accounting/test_layered.py``).
"""

import dataclasses
import re
from typing import Any

from lightning_llm.accounting.memory import StepMemory, step_memory
from lightning_llm.model.config import ModelConfig

LEVELS = (2, 1, 0)  # the order of the runs: what is kept by early layers is alive the longest, so they keep the least
LONG = 3  # layers that show all there is to a run: its first, its last, and one between
Counts = tuple[int, int, int]  # layers at levels 2, 1 and 0
Bytes = tuple[int, int]  # at most alive at a moment: with gradients, without


@dataclasses.dataclass(frozen=True)
class StepMoments:
    """A step, moment by moment, without the optimiser's state.

    Attributes:
        parameters: Bytes.
        gradients: Bytes of all of them.
        moments: The most bytes at each moment, with gradients and without; a layer's moments by its place in its run.
    """

    parameters: int
    gradients: int
    moments: dict[str, Bytes]

    @classmethod
    def of(cls, memory: StepMemory) -> "StepMoments":
        """Those of a step that was walked whole."""
        state = memory.optimizer_state
        moments = {place: (total - state, rest - state) for place, (total, rest) in memory.moments.items()}
        return cls(memory.parameters, memory.gradients, moments)

    @property
    def peak(self) -> int:
        """Bytes, parameters included."""
        return max(total for total, _ in self.moments.values())


class LayeredMemory:
    """``step_memory`` of one setting, for any number of layers at each level.

    Args:
        config: Its number of layers and their levels do not matter.
        settings: As ``step_memory`` takes them, without the optimiser's state.
    """

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        self.config, self.settings = config, settings
        self._walks: dict[Counts, StepMoments] = {}

    def at(self, counts: Counts) -> StepMoments:
        """The step with so many layers at level 2, then 1, then 0."""
        deep, shallow, rest = counts
        base_counts = min(deep, LONG), min(shallow, LONG), min(rest, LONG)
        base = self._walk(base_counts)
        longer = [
            (count - LONG, self._walk(_with(base_counts, run, LONG + 1)))
            for run, count in enumerate(counts)
            if count > LONG
        ]

        def extended(value: int, others: list[int]) -> int:
            return value + sum(more * (other - value) for (more, _), other in zip(longer, others, strict=True))

        moments = {
            key: (
                extended(total, [walk.moments[key][0] for _, walk in longer]),
                extended(rest, [walk.moments[key][1] for _, walk in longer]),
            )
            for key, (total, rest) in base.moments.items()
        }
        return StepMoments(
            extended(base.parameters, [walk.parameters for _, walk in longer]),
            extended(base.gradients, [walk.gradients for _, walk in longer]),
            moments,
        )

    def _walk(self, counts: Counts) -> StepMoments:
        if counts not in self._walks:
            levels = [level for level, count in zip(LEVELS, counts, strict=True) for _ in range(count)]
            config = dataclasses.replace(self.config, num_hidden_layers=len(levels), checkpoint_level=levels)
            memory = step_memory(config, state_per_parameter=0, **self.settings)
            self._walks[counts] = StepMoments(memory.parameters, memory.gradients, _by_place(memory.moments, counts))
        return self._walks[counts]


def _with(counts: Counts, run: int, count: int) -> Counts:
    deep, shallow, rest = (count if place == run else own for place, own in enumerate(counts))
    return deep, shallow, rest


def _by_place(moments: dict[str, Bytes], counts: Counts) -> dict[str, Bytes]:
    """The moments of a layer named by its run and its place there; one layer may have several places."""
    found: dict[str, Bytes] = {}
    for moment, size in moments.items():
        layer = re.search(r"layer (\d+)", moment)
        if layer is None:
            found[moment] = size
            continue
        for place in _places(int(layer[1]), counts):
            found[moment.replace(layer[0], place)] = size
    return found


def _places(layer: int, counts: Counts) -> list[str]:
    run = 0
    while layer >= counts[run]:
        layer, run = layer - counts[run], run + 1
    count = counts[run]
    if count < LONG:
        return [f"layer {layer} of those at level {LEVELS[run]}"]
    names = {0: "first", 1: "second"}, {count - 1: "last", count - 2: "last but one"}
    return [f"the {own[layer]} layer at level {LEVELS[run]}" for own in names if layer in own]
