"""What is logged under which name: one place for those who write, draw, compare or test it.

A name up to its slash is the group that TensorBoard shows it in.
"""

TRAIN_LOSS = "train_loss"  # mean over the steps since the last entry, nats per token
VAL_LOSS = "val_loss"
TRAIN_LOSS_EVAL = "train_loss_eval"  # the training text, read like the validation text
VAL_PERPLEXITY = "val_perplexity"
VAL_BITS_PER_BYTE = "val_bits_per_byte"
VAL_LOSS_OF_SOURCE = "val_loss/"  # and the name of the source
LEARNING_RATE = "learning_rate"
GRAD_NORM = "grad_norm"

THROUGHPUT = "throughput/"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
STEP_SECONDS = "throughput/step_s"
DATA_STALL = "throughput/data_stall_percent"
MFU, HFU = "throughput/mfu_percent", "throughput/hfu_percent"
TIME_OF_PHASE = "time/"  # time/forward_s and the like

MEMORY = "memory/"  # memory/forward_peak_gib and the like
PEAK, LIVE = "_peak_gib", "_live_gib"
MEMORY_AT_PEAK = "memory/at_peak/"  # and the kind: parameters_gib and the like

SAMPLES = "samples"  # text
WEIGHTS, GRADIENTS = "weights/", "gradients/"  # histograms, and the name of the parameter
