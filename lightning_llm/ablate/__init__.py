"""Controlled comparisons: paired runs of a baseline and its variants, and what their differences say.

Public names are loaded when first used (PEP 562).
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.ablate.log_audit import audit as audit
    from lightning_llm.ablate.report.from_table import verdict as verdict
    from lightning_llm.ablate.report.report import Report as Report
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
