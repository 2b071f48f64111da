"""Text from a model, and how likely a model finds a text. Names are loaded when first used (PEP 562)."""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.generation.decoding import generate as generate
    from lightning_llm.generation.decoding import stream as stream
    from lightning_llm.generation.sampling import Sampling as Sampling
    from lightning_llm.generation.sampling import filter_logits as filter_logits
    from lightning_llm.generation.scoring import Score as Score
    from lightning_llm.generation.scoring import score as score
    from lightning_llm.generation.text import generate_text as generate_text
    from lightning_llm.generation.text import stream_text as stream_text
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
