"""Lightning's way to checkpoints, made atomic and safe; by option without the step waiting for the disk."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH

from lightning_llm.checkpoints import sharded as sharded_files
from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.background import Background, HostCopy
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.schema import LIGHTNING
from lightning_llm.io.atomic import remove_path


class AtomicCheckpointIO(CheckpointIO):
    """Checkpoints are written whole or not at all, and read without running code.

    Args:
        asynchronous: Copy the tensors to main memory, and write them while training goes on. One checkpoint at a time:
            the next one waits until the one before is on the disk.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._background = Background()
        self._copy = HostCopy()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``; what was there stays until the new file is complete.

        Raises:
            OSError: It could not be written; where asynchronous, the one before it.
        """
        self._write(lambda content: write_atomically(content, path), checkpoint)

    def save_shards(
        self, checkpoint: dict[str, Any], path: Path, *, process: int, processes: int, agree: sharded_files.Agree
    ) -> None:
        """Write a checkpoint with sharded tensors as a folder. Every process must call it.

        Args:
            checkpoint: The content; its shards (``DTensor``) are written by each process, the rest by the first.
            path: The folder.
            process: Number of this process.
            processes: How many there are.
            agree: See :func:`sharded_files.write_folder`; where asynchronous, it is called from another thread.

        Raises:
            OSError: As :meth:`save_checkpoint`, in every process.
        """
        shards: dict[str, dict[str, Any]] = {}
        main = sharded_files.split(checkpoint, shards)

        def write(content: Any) -> None:
            rest, own = content
            sharded_files.write_folder(rest, own, path, process=process, processes=processes, agree=agree)

        self._write(write, (main if process == 0 else {}, shards))

    def then(self, action: Callable[[], object]) -> None:
        """Do ``action`` once all that was saved so far is on the disk."""
        if self.asynchronous:
            self._background.add(action)
        else:
            action()

    def wait(self) -> None:
        """Until all that was saved is on the disk.

        Raises:
            OSError: It could not be written.
        """
        self._background.wait()

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read ``path``, tensors to ``map_location`` (default: main memory)."""
        if weights_only is False:
            raise ValueError("weights_only=False would run code from the checkpoint: leave the option out")
        return read_checkpoint(path, map_location, needs=LIGHTNING)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete ``path``, if it is there."""
        remove_path(Path(path))

    def teardown(self) -> None:
        """Let what is being written end. A run that ends well has asked for errors before; another has its own."""
        try:
            self.wait()
        except OSError as error:
            print(error, file=sys.stderr)

    def _write(self, write: Callable[[Any], None], content: Any) -> None:
        self.wait()
        if self.asynchronous:
            copy = self._copy.of(content)
            self._background.add(lambda: write(copy))
        else:
            write(content)
