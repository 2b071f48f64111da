"""How Lightning reads and writes checkpoints here: what a module saves, and the files, written atomically.

No code of a checkpoint runs when it is read. On request, no step waits for the disk.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule

from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.background import Background, HostCopy
from lightning_llm.checkpoints.compatibility import check_loading
from lightning_llm.checkpoints.loop_state import rescale_batch_progress
from lightning_llm.checkpoints.reading import EXECUTION, only_checkpoints, read_checkpoint
from lightning_llm.checkpoints.recipes import optimizer_recipe, schedule_recipe
from lightning_llm.checkpoints.schema import FORMAT, FORMAT_VERSION, LIGHTNING
from lightning_llm.data.datamodule import tokenizer_of
from lightning_llm.io.atomic import remove_path
from lightning_llm.model.config import ModelConfig
from lightning_llm.optim.groups import GroupRule
from lightning_llm.training.environment import print_changes, record


class CheckpointedModule(LightningModule):
    """A language model whose checkpoints hold plain values, weights and the tokenizer.

    Attributes:
        groups: Rules for some of the parameters.
        has_loaded: Whether the weights come from a file, and not from random numbers.
    """

    architecture: ModelConfig
    loss_chunks: int | None
    groups: Sequence[GroupRule] = ()
    has_loaded = False
    _recipes: dict[str, Any] = {}  # noqa: RUF012  # of optimizer and schedule; replaced, never changed

    def save_plain_hyperparameters(self, **recipes: Any) -> None:
        """Note what a checkpoint says of the model: a dataclass in it could not be read without running code.

        Args:
            recipes: Of optimizer and schedule, once they are known.
        """
        self._recipes = recipes or self._recipes
        plain = {"architecture": self.architecture.to_dict(), "loss_chunks": self.loss_chunks, **self._recipes}
        if groups := [dataclasses.asdict(rule) for rule in self.groups]:
            plain["groups"] = groups
        self.save_hyperparameters(plain, logger=False)

    def save_recipes(self, optimizer: Any, schedule: Any) -> None:
        """Note in every checkpoint how optimizer and schedule were made."""
        self.save_plain_hyperparameters(optimizer=optimizer_recipe(optimizer), schedule=schedule_recipe(schedule))

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, trust_code: bool = False, **options: Any) -> Any:
        """The model of a checkpoint; no code of the file runs. Arguments are those of Lightning's, and of this class.

        Restored are the architecture, ``loss_chunks``, ``groups``, an optimizer of ``lightning_llm.optim`` or
        ``torch.optim`` and a schedule of the former with their settings, unless given. A warning
        names any other one: the model can be used, but not trained.

        Raises:
            ValueError: The file is damaged, is not a checkpoint, or names code that is not ours without ``trust_code``.
        """
        with only_checkpoints(checkpoint_path, trust_code=trust_code):
            return super().load_from_checkpoint(checkpoint_path, *args, **{**options, "weights_only": True})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the tokenizer: a checkpoint alone is enough to generate text."""
        tokenizer = tokenizer_of(getattr(self._trainer, "datamodule", None))
        content = None if tokenizer is None else tokenizer.to_str()
        checkpoint[FORMAT] = {"format_version": FORMAT_VERSION, "tokenizer": content, EXECUTION: record(self.trainer)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint fits this model, and put the run in its place.

        Lightning counts micro-batches; the checkpoint's counts become those of the present accumulation.
        """
        check_loading(checkpoint, self)
        self.has_loaded = True
        if self._trainer is not None and self.trainer.state.fn == "fit":
            rescale_batch_progress(checkpoint, self.trainer.accumulate_grad_batches)
            print_changes(checkpoint[FORMAT].get(EXECUTION, {}), self.trainer)


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
        if weights_only is False:
            raise ValueError("weights_only=False would run code from the checkpoint: leave the option out")
        return read_checkpoint(path, map_location, needs=LIGHTNING)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete ``path``, if it exists."""
        remove_path(Path(path))

    def teardown(self) -> None:
        """Finish the write in flight. A run that ended well has asked for errors before; a failed run has its own."""
        try:
            self.wait()
        except OSError as error:
            print(error, file=sys.stderr)
