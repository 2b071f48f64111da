"""The global batch of an optimizer step: its default size, and how devices and micro-batches share it."""

# Defaults of ``TokenDataModule``, which ``estimate`` and ``plan`` need without torch
CONTEXT_LENGTH = 256  # tokens per row
GLOBAL_BATCH_SIZE = 32  # rows per optimizer step


def divisor(micro_batch_size: int | None, devices: int) -> str:
    """What the global batch is divided by, in words."""
    words = f"{devices} device{'s' if devices > 1 else ''}"
    return words if micro_batch_size is None else f"{words} times data.micro_batch_size {micro_batch_size}"


def rows_per_micro_batch(global_batch_size: int, micro_batch_size: int | None, devices: int) -> int:
    """Rows of one micro-batch of one device, so that whole micro-batches make up the global batch.

    Args:
        global_batch_size: Rows of an optimizer step, over all devices.
        micro_batch_size: As asked for; ``None``: all of a device's share.
        devices: How many share a step.

    Raises:
        ValueError: They do not.
    """
    rows = global_batch_size // devices if micro_batch_size is None else micro_batch_size
    if rows < 1 or global_batch_size % (rows * devices):
        factors = divisor(micro_batch_size, devices)
        raise ValueError(f"data.global_batch_size {global_batch_size} cannot be divided by {factors}: change one")
    return rows
