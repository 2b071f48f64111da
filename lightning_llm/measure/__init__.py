"""Live tensor bytes and times, measured. ``accounting`` predicts the same from a config.

The public names are loaded when first used (PEP 562).
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.measure.meter import MemoryMeter as MemoryMeter
    from lightning_llm.measure.meter import Phase as Phase
    from lightning_llm.measure.timer import Timing as Timing
    from lightning_llm.measure.timer import interleave as interleave
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
