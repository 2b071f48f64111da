"""How Lightning reads and writes checkpoint files here: atomically, and without running code of the file.

On request, no step waits for the disk.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.background import Background, HostCopy
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.schema import LIGHTNING
from lightning_llm.io.atomic import remove_path

HANDED_BACK = ".temp.ckpt"  # Lightning's name for weights alone, from a forked or spawned process to its parent


class AtomicCheckpointIO(CheckpointIO):
    """Checkpoints are written completely or not at all, and read without running code.

    Args:
        asynchronous: Copy the tensors to host memory, and write them while training continues. Only one write is in
            flight: the next one waits until the previous one is on the disk.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._background = Background()
        self._copy = HostCopy()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``; an earlier file stays until the new one is complete.

        Raises:
            OSError: It could not be written; if asynchronous, the previous one could not.
        """
        self.write(lambda content: write_atomically(content, path), checkpoint)

    def write(self, write: Callable[[Any], None], content: Any) -> None:
        """Pass ``content`` to ``write``; if asynchronous, a copy of it in host memory, from another thread.

        Raises:
            OSError: As :meth:`save_checkpoint`.
        """
        self.wait()
        if self.asynchronous:
            copy = self._copy.of(content)
            self._background.add(lambda: write(copy))
        else:
            write(content)

    def then(self, action: Callable[[], object]) -> None:
        """Do ``action`` once everything saved so far is on the disk."""
        if self.asynchronous:
            self._background.add(action)
        else:
            action()

    def wait(self) -> None:
        """Wait until everything saved is on the disk.

        Raises:
            OSError: It could not be written.
        """
        self._background.wait()

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read ``path``, tensors to ``map_location`` (default: the CPU)."""
        refuse_code(weights_only)
        return read_checkpoint(path, map_location, needs=() if Path(path).name == HANDED_BACK else LIGHTNING)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete ``path``, if it exists."""
        remove_path(Path(path))

    def teardown(self) -> None:
        """Finish the write in flight. A run that ended well has asked for errors before; a failed run has its own."""
        try:
            self.wait()
        except OSError as error:
            print(error, file=sys.stderr)


def refuse_code(weights_only: bool | None) -> None:
    """Refuse an option of Lightning with which torch would run what a checkpoint names.

    Raises:
        ValueError: It is false.
    """
    if weights_only is False:
        raise ValueError("weights_only=False would run code from the checkpoint: leave the option out")
