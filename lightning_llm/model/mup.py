"""Maximal update parametrization: how initial values and learning rates scale with the width. No torch.

``mup`` multiplies the scales of ``weights.py`` and the learning rates by powers of m = ``hidden_size / base_width`` and
of q = ``sqrt(base_head_dim / head_dim)``, which are 1 at the base width (Yang et al. 2022, "Tensor Programs V",
arXiv:2203.03466, tables 3 and 8, for Adam):

===================================  =======================  ======================
parameter                            initial value times      learning rate times
===================================  =======================  ======================
q_proj.weight, without ``qk_norm``   q / sqrt(m)              q / m
q_proj.bias, without ``qk_norm``     q                        q
q_norm.weight, with ``qk_norm``      q                        q
lm_head.weight                       1 / m                    1 / m
other projections                    1 / sqrt(m)              1 / m
embeddings, norms, biases            1                        1
===================================  =======================  ======================

In table 8, attention is scaled by 1 / head_dim instead of 1 / sqrt(head_dim), and logits by 1 / m. Adam's steps do not
depend on the scale of a gradient. So a factor before a weight is the same as a factor of its initial value and learning
rate, as which the first is in the query here, and the second in the head. The model computes what it does without
``mup``, in training, generation and exports.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_llm.io.untrusted import shown
from lightning_llm.model.parts import BUILT_IN

MUP_OPTIONS = ("base_width", "base_head_dim")
MOST_BASE = 2**16


def width_factors(
    mup: Mapping[str, int] | None, hidden_size: int, head_dim: int, *, qk_norm: bool
) -> dict[str, tuple[float, float]]:
    """The table: factors of initial values and of learning rates, by pattern; the first applies."""
    if mup is None:
        return {}
    m = hidden_size / mup["base_width"]
    q = math.sqrt(mup["base_head_dim"] / head_dim)
    query = {"*.q_proj.weight": (q / math.sqrt(m), q / m), "*.q_proj.bias": (q, q)}
    if qk_norm:  # it makes the scale of the projection irrelevant
        query = {"*.q_norm.weight": (q, q)}
    return {**query, "lm_head.weight": (1 / m, 1 / m), "*_proj.weight": (1 / math.sqrt(m), 1 / m)}


def mup_problems(mup: dict[str, Any], names: Mapping[str, str], *, ties_embeddings: bool) -> Iterator[str]:
    """Problems with the options of ``mup``, or with a model that has them.

    Args:
        mup: The options.
        names: The parts of the model, by kind.
        ties_embeddings: Whether the head has the embedding's weight.
    """
    sizes = [value for value in mup.values() if type(value) is int and 1 <= value <= MOST_BASE]
    if set(mup) != set(MUP_OPTIONS) or len(sizes) != len(MUP_OPTIONS):
        yield f"mup must have {' and '.join(MUP_OPTIONS)}, whole numbers from 1 to {MOST_BASE}, got {shown(mup)}"
    if ties_embeddings:
        yield "mup needs tie_word_embeddings false: embedding and head get different learning rates"
    for kind, name in names.items():
        if name not in BUILT_IN[kind] or not BUILT_IN[kind][name].has_mup:
            yield f"mup does not know the scales of {kind} {name!r}: use another {kind}, or no mup"
