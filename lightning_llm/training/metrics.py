"""The names of the metrics of a run: in TensorBoard, in logs, and in ``trainer.callback_metrics``.

They are here for everything that writes, draws or compares them, without torch. TensorBoard groups them by the part
before the slash.
"""

from typing import NamedTuple

TRAIN_LOSS = "train_loss"  # mean over the targets since the last entry, nats per token
VAL_LOSS = "val_loss"
TRAIN_LOSS_EVAL = "train_loss_eval"  # the training text, read like the validation text
VAL_PERPLEXITY = "val_perplexity"
VAL_BITS_PER_BYTE = "val_bits_per_byte"
VAL_RECALL_LOSS = "val_recall_loss"  # of tokens whose bigram occurred before in the window
VAL_OTHER_LOSS, VAL_RECALL_SHARE = "val_other_loss", "val_recall_share"  # of the others; share of the former
LEARNING_RATE = "learning_rate"  # learning_rate/ and the name of a group, if model.groups or mup divide them
GRAD_NORM = "grad_norm"
AUXILIARY_LOSS = "auxiliary_loss"


class Metric(NamedTuple):
    """A number in ``summary.json`` that ``compare`` and ``ablate`` compare.

    Attributes:
        title: In tables.
        unit: Of its values.
        digits: Decimal places of its values and differences.
        is_cost: Whether it is a cost, whose difference has a percentage, and which no seed is meant to change.
        higher_is_better: Whether a positive difference is an improvement.
    """

    title: str
    unit: str
    digits: int = 4
    is_cost: bool = False
    higher_is_better: bool = False


BITS = "bits_per_byte"
RECALL = ("recall_loss", "other_loss")  # parts of the loss; runs of earlier versions have none
SECONDS, PEAK_MEMORY = "seconds", "peak_memory_gib"
METRICS = {
    VAL_LOSS: Metric("validation loss", "nats/token"),
    BITS: Metric("validation loss", "bits/byte"),
    **{name: Metric(name.replace("_", " "), "nats/token") for name in RECALL},
    SECONDS: Metric("time", "s", digits=1, is_cost=True),
    PEAK_MEMORY: Metric("peak memory", "GiB", digits=3, is_cost=True),
}
LOSSES = tuple(name for name, metric in METRICS.items() if not (metric.is_cost or metric.higher_is_better))


def unit_of_metric(name: str) -> str:
    """The unit of a metric; of one of another program, its name."""
    return METRICS[name].unit if name in METRICS else name


TOKENS_PER_SECOND = "throughput/tokens_per_second"
STEP_SECONDS = "throughput/step_s"
DATA_STALL = "throughput/data_stall_percent"
MFU, HFU = "throughput/mfu_percent", "throughput/hfu_percent"
TIME_OF_PHASE = "time/"  # time/forward_s and so on

MEMORY, PEAK = "memory/", "_peak_gib"  # such as memory/forward_peak_gib
MEMORY_AT_PEAK = "memory/at_peak/"  # and the category: parameters_gib and so on

SAMPLES = "samples"  # text
WEIGHTS, GRADIENTS = "weights/", "gradients/"  # histograms, and the name of the parameter
