"""How much of a pair's difference is due to which windows of text it was validated on: its standard error over windows.

A loss is a mean over the windows of the validation text. Another text of the same kind would give another difference of
two models. More seeds do not show this error, since the runs of all seeds share their windows; so it is reported apart
from that over seeds, and never pooled with it.

Windows that follow each other come from the same documents and are correlated. So the unit is a block of consecutive
windows, as in the clustered standard errors of Miller 2024 ("Adding Error Bars to Evals", arXiv 2411.00640, section
2.2), of the differences in pairs (section 4.2). A loss is a sum of nats over a sum of tokens, and the last windows may
have fewer tokens: the standard error is that of a ratio (Cochran 1977, "Sampling Techniques", section 6.4).

A run writes its record, ``windows.json``, at its end: ``step``, and for each block the number of ``windows``, their
``tokens`` and their sum of ``nats``. A block has ``WINDOWS`` windows, or a power of two times as many in a long text.
The last block, and the last one of each source of a mixture, may have fewer.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_llm.statistics.ratios import residuals, standard_error

WINDOWS, MOST_BLOCKS = 8, 4096
FEWEST_BLOCKS = 8  # fewer say too little about their own spread
Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class WindowError:
    """Standard errors over the validation windows, in nats per token.

    Attributes:
        pair: Of the difference of one pair, on average over the pairs.
        mean: Of the mean difference of all pairs. It does not go to zero with more pairs.
        blocks: Number of blocks that these come from.
    """

    pair: float
    mean: float
    blocks: int


def window_error(pairs: Sequence[tuple[Record, Record]]) -> WindowError | None:
    """The standard errors of the differences, variant minus baseline, over blocks of validation windows.

    Args:
        pairs: For each pair the record of the baseline's run, and of the variant's.

    Returns:
        ``None`` if there are no pairs, fewer than ``FEWEST_BLOCKS`` blocks, or if any two runs have other blocks: other
        tokens, as with another tokenizer, or another part of the text.
    """
    blocks = [(list(record["windows"]), list(record["tokens"])) for pair in pairs for record in pair]
    if not blocks or len(blocks[0][0]) < FEWEST_BLOCKS or any(of_run != blocks[0] for of_run in blocks):
        return None
    tokens = np.array(blocks[0][1], dtype=np.float64)  # (blocks,)
    differences = np.array([np.subtract(variant["nats"], base["nats"]) for base, variant in pairs])  # (pairs, blocks)
    errors = [standard_error(residuals(nats, tokens)) for nats in differences]
    mean_error = standard_error(residuals(differences.mean(axis=0), tokens))
    return WindowError(float(np.mean(errors)), mean_error, len(tokens))
