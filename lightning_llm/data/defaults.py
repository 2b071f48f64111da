"""Defaults of ``TokenDataModule`` that ``estimate`` and ``plan`` need without torch."""

CONTEXT_LENGTH = 256  # tokens per row
GLOBAL_BATCH_SIZE = 32  # rows per optimizer step
