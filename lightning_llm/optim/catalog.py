"""The optimizers that the accounting, ``size`` and checkpoints know, by import path. No torch.

``fit`` takes any other class, too. The accounting measures its state, ``size`` rejects it.
"""

from typing import NamedTuple


class KnownOptimizer(NamedTuple):
    """Known facts about an optimizer.

    Attributes:
        state_per_parameter: Tensors of its size that it keeps for a parameter; MuonAdamW has one for matrices.
        lr, weight_decay: Its defaults.
        width_exponent: ``size`` divides the learning rate by the relative width to this power; ``None``: it cannot.
        batch_exponent: It multiplies it by the relative batch to this power.
    """

    state_per_parameter: int
    lr: float
    weight_decay: float
    width_exponent: float | None = None
    batch_exponent: float = 0.5


STATE_BYTES = {None: None, "bfloat16": 2}  # of AdamW's state_dtype
OPTIMIZERS = {
    "lightning_llm.optim.AdamW": KnownOptimizer(2, 1e-3, 0.1, width_exponent=1.0),
    "torch.optim.AdamW": KnownOptimizer(2, 1e-3, 0.01, width_exponent=1.0),
    "torch.optim.Adam": KnownOptimizer(2, 1e-3, 0.0, width_exponent=1.0),
    "lightning_llm.optim.MuonAdamW": KnownOptimizer(2, 1e-3, 0.1, width_exponent=0.5, batch_exponent=0.0),
    "torch.optim.SGD": KnownOptimizer(0, 1e-3, 0.0),
    "torch.optim.RMSprop": KnownOptimizer(1, 1e-2, 0.0),
    "torch.optim.Adagrad": KnownOptimizer(1, 1e-2, 0.0),
}
