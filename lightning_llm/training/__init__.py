"""Training: the LightningModule, its metrics, checkpoints and callbacks. Names are loaded when first used."""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.checkpoints.plain_loop import load_checkpoint as load_checkpoint
    from lightning_llm.checkpoints.plain_loop import save_checkpoint as save_checkpoint
    from lightning_llm.training.evaluation import LanguageModelMetrics as LanguageModelMetrics
    from lightning_llm.training.module import LanguageModel as LanguageModel
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
