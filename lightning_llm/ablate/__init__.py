"""Controlled comparisons: paired runs of a baseline and its variants, and what their differences say.

Public names are loaded when first used (PEP 562).
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.ablate.numbers import Verdicts as Verdicts
    from lightning_llm.ablate.numbers import verdict as verdict
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
