"""Lightning's way to checkpoint files, made atomic and safe."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH

from lightning_llm.training.checkpointing import read_checkpoint, write_atomically


class AtomicCheckpointIO(CheckpointIO):
    """Files are written whole or not at all, and read without running code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``; what was there stays until the new file is complete."""
        write_atomically(checkpoint, path)

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read ``path``, tensors to ``map_location`` (default: main memory)."""
        if weights_only is False:
            raise ValueError("weights_only=False would run code from the checkpoint: leave the option out")
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete ``path``, if it is there."""
        Path(path).unlink(missing_ok=True)
