"""Lightning callbacks: checkpoints, resume, signals, the training log, progress. Names are loaded when first used."""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.training.callbacks.dashboard import Dashboard as Dashboard
    from lightning_llm.training.callbacks.inputs import InputHashes as InputHashes
    from lightning_llm.training.callbacks.memory_profiler import MemoryProfiler as MemoryProfiler
    from lightning_llm.training.callbacks.non_finite import NonFinite as NonFinite
    from lightning_llm.training.callbacks.non_finite import StopOnNonFinite as StopOnNonFinite
    from lightning_llm.training.callbacks.progress import StatusFile as StatusFile
    from lightning_llm.training.callbacks.progress import StepProgressBar as StepProgressBar
    from lightning_llm.training.callbacks.rank_consistency import RankConsistencyCheck as RankConsistencyCheck
    from lightning_llm.training.callbacks.resume_diff import ResumeDiff as ResumeDiff
    from lightning_llm.training.callbacks.run_checkpoints import RunCheckpoints as RunCheckpoints
    from lightning_llm.training.callbacks.samples import SampleText as SampleText
    from lightning_llm.training.callbacks.signals import Interrupted as Interrupted
    from lightning_llm.training.callbacks.signals import StopOnSignal as StopOnSignal
    from lightning_llm.training.callbacks.throughput import TrainingLog as TrainingLog
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
