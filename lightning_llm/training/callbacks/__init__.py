"""Lightning callbacks: checkpoints, signals, the training log, the progress bar. Names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.training.callbacks.checkpoints import RunCheckpoints
    from lightning_llm.training.callbacks.progress import StepProgressBar
    from lightning_llm.training.callbacks.signals import Interrupted, StopOnSignal
    from lightning_llm.training.callbacks.throughput import TrainingLog

_PUBLIC = {
    "Interrupted": "signals",
    "RunCheckpoints": "checkpoints",
    "StepProgressBar": "progress",
    "StopOnSignal": "signals",
    "TrainingLog": "throughput",
}

__all__ = ["Interrupted", "RunCheckpoints", "StepProgressBar", "StopOnSignal", "TrainingLog"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"lightning_llm.training.callbacks.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'lightning_llm.training.callbacks' has no attribute {name!r}")
