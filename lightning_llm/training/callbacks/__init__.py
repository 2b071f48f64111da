"""Lightning callbacks: checkpoints, resume, signals, the training log, progress. Names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.training.callbacks.agreement import SameEverywhere
    from lightning_llm.training.callbacks.checkpoints import RunCheckpoints
    from lightning_llm.training.callbacks.dashboard import Dashboard
    from lightning_llm.training.callbacks.finite import NonFinite, StopOnNonFinite
    from lightning_llm.training.callbacks.memory import MemoryProfiler
    from lightning_llm.training.callbacks.progress import StepProgressBar
    from lightning_llm.training.callbacks.resume import HonestResume
    from lightning_llm.training.callbacks.samples import SampleText
    from lightning_llm.training.callbacks.signals import Interrupted, StopOnSignal
    from lightning_llm.training.callbacks.status import StatusFile
    from lightning_llm.training.callbacks.throughput import TrainingLog

_PUBLIC = {
    "Dashboard": "dashboard",
    "HonestResume": "resume",
    "Interrupted": "signals",
    "MemoryProfiler": "memory",
    "NonFinite": "finite",
    "RunCheckpoints": "checkpoints",
    "SameEverywhere": "agreement",
    "SampleText": "samples",
    "StatusFile": "status",
    "StepProgressBar": "progress",
    "StopOnNonFinite": "finite",
    "StopOnSignal": "signals",
    "TrainingLog": "throughput",
}

__all__ = [
    "Dashboard",
    "HonestResume",
    "Interrupted",
    "MemoryProfiler",
    "NonFinite",
    "RunCheckpoints",
    "SameEverywhere",
    "SampleText",
    "StatusFile",
    "StepProgressBar",
    "StopOnNonFinite",
    "StopOnSignal",
    "TrainingLog",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"lightning_llm.training.callbacks.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'lightning_llm.training.callbacks' has no attribute {name!r}")
