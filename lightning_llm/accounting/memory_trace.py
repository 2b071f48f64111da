"""Trace of a step: its points, and what is live at each. No torch."""

import dataclasses
from typing import Literal, NamedTuple

PHASES = {"forward": "", "recomputing": "backward, recomputing ", "backward": "backward, "}  # in words

StepPhase = Literal["forward", "recomputing", "backward"]
Stage = Literal["embeddings", "attention", "mlp", "final norm", "loss"]
Table = dict[tuple[str, str], int]  # bytes by category, as in ``measure.timeline``, and by part of the model


class TracePoint(NamedTuple):
    """A point in the step: what runs, and in which phase.

    Attributes:
        phase: Recomputing is a part of backward.
        stage: What runs: a part of a layer, or what is before or after the layers.
        layer: Its number; from the end, if it is negative.
    """

    phase: StepPhase
    stage: Stage
    layer: int | None = None

    def in_words(self) -> str:
        """For reports, such as ``backward, recomputing layer 3, mlp``."""
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"{PHASES[self.phase]}{layer}{self.stage}"


class LiveBytes(NamedTuple):
    """The most live bytes at a point in the step, the most of them without gradients, and what is live at the most."""

    total: int
    without_gradients: int
    table: Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """A step, point by point, without the optimizer's state and the batch.

    Attributes:
        parameters: Bytes of the model's parameters.
        gradients: Bytes of the gradients of all trained parameters.
        saved: Bytes that forward saves for backward, by part of the model.
        points: What is live at each point in the step.
        is_extrapolated: It could not be traced: it was run on small batches.
    """

    parameters: int
    gradients: int
    saved: dict[str, int]
    points: dict[TracePoint, LiveBytes]
    is_extrapolated: bool = False


class NeedsValues(Exception):
    """The step cannot be traced: what it does depends on the values of tensors."""
