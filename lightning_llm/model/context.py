"""Values that the parts of one forward pass share, and the check of what a part returns."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.position import Position
from lightning_llm.ops.span_attention import AttentionSpans

Mask = Tensor | AttentionSpans


class CrossLayerState(dict[str, Any]):
    """Notes of the parts of one forward pass for one another, by name.

    FSDP2 casts and copies the tensors in the tuples and dicts that a block gets; this class of dicts it leaves alone.
    """


class Context(NamedTuple):
    """Made once per forward pass, for every block.

    Attributes:
        positions: (seq,) or (batch, seq), int64.
        position: The part ``position`` of the model.
        shared: For whatever parts leave for those of later layers, such as the first layer's values.
        state: What ``position`` prepared for these positions.
        cache: Keys and values of the positions before, to which attention adds the new ones.
        spans: The documents that tokens see, where attention stays inside documents.
        mask: What full attention takes: the spans, perhaps with their blocks; or (batch, 1, seq, seq), added to the
            scores in their dtype, or true where a position may look; with a cache (batch, 1, 1, its length + 1).
            ``None``: everything before.
    """

    positions: Tensor
    position: Position
    shared: CrossLayerState
    state: Any = None
    cache: KVCache | None = None
    spans: AttentionSpans | None = None
    mask: Mask | None = None

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (batch, heads, seq, head_dim) and keys (batch, kv_heads, seq, head_dim), as the positions ask."""
        turned = self.position.rotate(query, key, self.state)
        checked("position", self.position, turned[0], query)
        return turned[0], checked("position", self.position, turned[1], key)


def checked(kind: str, part: nn.Module, out: Any, x: Tensor) -> Tensor:
    """The output of a part, of the same shape as its input.

    Raises:
        ValueError: It has another shape.
    """
    if isinstance(out, Tensor) and out.shape == x.shape:
        return out
    got = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
    raise ValueError(f"{kind} {type(part).__qualname__} must return the shape {tuple(x.shape)} of its input, got {got}")
