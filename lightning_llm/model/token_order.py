"""Checks of custom parts: does an attention use the positions of its model, and does a part see later tokens?

Both are seen in what a copy with random weights computes, since neither shows in a loss: a model without positions
learns less than it could, and one that sees the next token more than it should.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_llm.accounting.parts import IN_LAYERS, layer_groups
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, CrossLayerState
from lightning_llm.model.initial_values import drawing
from lightning_llm.model.parts import BUILT_IN, name_of
from lightning_llm.model.position import Position

NEAR, FAR = (0, 1), (0, 7)  # positions of two tokens
TOKENS = 8  # the second half of which is changed
STD = 0.5  # of all parameters: what starts at zero, such as an output projection, would hide what they do
ROUNDING = 1e-3  # of the largest output


def token_order_lines(blocks: Iterable[tuple[str, Block, int]], config: ModelConfig) -> list[str]:
    """A line about each block with a custom part that ignores positions or sees later tokens.

    Only positions that act inside attention can be ignored: those that rotate queries and keys or add to the scores.

    Args:
        blocks: Those of ``initial_scales.one_of_each_kind``; they are not changed.
        config: Of the model.
    """
    groups = layer_groups(config)
    lines = list[str]()
    for (path, block, _), group in zip(blocks, groups, strict=True):
        custom = [kind for kind in IN_LAYERS if name_of(getattr(group.config, kind)) not in BUILT_IN[kind]]
        if custom:
            lines += [f"{path}{line}" for line in _lines(block, group.config, custom)]
    return lines


def _lines(block: Block, config: ModelConfig, custom: Sequence[str]) -> Iterator[str]:
    position: Position = build("position", config, seed=0, path="embed_positions")
    acts_inside = type(position).rotate is not Position.rotate or position.has_score_bias
    if "attention" in custom and acts_inside:
        near, far = (_output(block.self_attn, config, position, places) for places in (NEAR, FAR))
        if near is not None and far is not None and torch.equal(near, far):
            called = f"attention {name_of(config.attention)} does not use position {name_of(config.position)}"
            advice = "if it has positions of its own, set position: none; otherwise it cannot tell the order of tokens"
            yield f".self_attn: {called} (two tokens give the same output at any distance): {advice}"
    first, other = (_output(block, config, position, range(TOKENS), changed) for changed in (False, True))
    if first is not None and other is not None:
        apart = (first - other)[:, : TOKENS // 2].abs().max()
        if apart > ROUNDING * first.abs().max():
            names = ", ".join(f"{kind} {name_of(getattr(config, kind))}" for kind in custom)
            yield f": with {names}, outputs change with later tokens: the model would see what it is to predict"


def _output(
    part: nn.Module, config: ModelConfig, position: Position, places: Sequence[int], is_changed: bool = False
) -> Tensor | None:
    """Run a copy of a part, with random weights, on random tokens; ``None``: it fails, or its output is not finite."""
    positions = torch.tensor(places)
    part = copy.deepcopy(part).eval()
    with drawing(0, "token order"), torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(std=STD)
        x = torch.randn(1, len(places), config.hidden_size)
        if is_changed:
            x[:, len(places) // 2 :] = torch.randn(1, len(places) - len(places) // 2, config.hidden_size)
        try:
            context = Context(positions, position, CrossLayerState(), position.prepare(positions, x.dtype))
            if (prepare := getattr(part, "prepare", None)) is not None:
                prepare(x, context)
            out: Tensor = part(x, context)
        except Exception:  # so few tokens are not enough for it, or it is wrong, which training says in its own line
            return None
    return out if out.isfinite().all() else None
