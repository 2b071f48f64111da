"""lightning-llm: train decoder-only language models with PyTorch Lightning.

The public names are loaded when first used (PEP 562): importing the package costs no torch.
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_llm.data.datamodule import TokenDataModule as TokenDataModule
    from lightning_llm.experiment import Experiment as Experiment
    from lightning_llm.model.config import ModelConfig as ModelConfig
    from lightning_llm.model.mlp import MemoryOptimizedSwiGLU as MemoryOptimizedSwiGLU
    from lightning_llm.model.mlp import SwiGLU as SwiGLU
    from lightning_llm.model.transformer import Transformer as Transformer
    from lightning_llm.training.module import LanguageModel as LanguageModel
    from lightning_llm.training.trainer import Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
