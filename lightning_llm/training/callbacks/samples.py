"""What the model writes while it learns: a sample every N steps, printed and as text in TensorBoard."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from rich.markup import escape
from torch import nn

from lightning_llm.checkpoints.loop_state import step_is_complete
from lightning_llm.generation import generate
from lightning_llm.io.console import Console
from lightning_llm.training.tensorboard import SAMPLES, tensorboard_writers


class SampleText(Callback):
    """Continues a prompt every ``every_n_steps`` optimiser steps.

    Training is the same with and without, bit for bit.

    Args:
        every_n_steps: Optimiser steps between two samples.
        prompt: The text to continue.
        max_new_tokens: How many tokens to add.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Sample among so many likeliest tokens. Null: among all.
        seed: Same seed and weights, same sample.

    Raises:
        ValueError: An option out of range; at the start of the run also a prompt that the tokenizer cannot express,
            or data without a tokenizer.
    """

    def __init__(
        self,
        every_n_steps: int,
        prompt: str = "\n",
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
    ) -> None:
        faults = [
            f"SampleText.{name} must be at least {least}, got {value}"
            for name, value, least in (
                ("every_n_steps", every_n_steps, 1),
                ("max_new_tokens", max_new_tokens, 1),
                ("temperature", temperature, 0),
                ("top_k", top_k, 1),
            )
            if value is not None and not value >= least
        ]
        if not prompt:
            faults.append("SampleText.prompt is empty: give at least one character")
        if faults:
            raise ValueError("; ".join(faults))
        self.every_n_steps, self.prompt, self.max_new_tokens = every_n_steps, prompt, max_new_tokens
        self.temperature, self.top_k, self.seed = temperature, top_k, seed
        self._is_sharded = False
        self._tokenizer: Any = None
        self._prompt_ids: list[int] = []
        self._console = Console(markup=True, soft_wrap=True, highlight=False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Encode the prompt: what is wrong with it shows before the first step."""
        self._is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if self._is_sharded:  # a config with samples composes with one that shards
            if trainer.is_global_zero:
                self._console.print("SampleText prints no samples: no process holds a sharded model")
            return
        self._tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if self._tokenizer is None:
            raise ValueError("SampleText needs a tokenizer and the data hold none: leave it out, or prepare the text")
        try:
            self._prompt_ids = self._tokenizer.encode(self.prompt)
        except ValueError as error:
            raise ValueError(f"SampleText.prompt {self.prompt!r}: {error}") from error

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Generate, print and write, in the first process."""
        if self._is_sharded or not trainer.is_global_zero:
            return
        if not step_is_complete(trainer) or trainer.global_step % self.every_n_steps:
            return
        with _evaluating(pl_module), trainer.precision_plugin.forward_context():
            ids = generate(
                pl_module,
                torch.tensor([self._prompt_ids], device=pl_module.device),
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                eos_token_id=self._tokenizer.eos_token_id,
                # of its own: the global one belongs to the training
                generator=torch.Generator(pl_module.device).manual_seed(self.seed),
            )
        # a vocabulary may be rounded up: a model that has learnt little yet draws ids that stand for nothing
        text = self._tokenizer.decode([number for number in ids[0].tolist() if number < self._tokenizer.vocab_size])
        self._console.print(f"[bold]sample after step {trainer.global_step}[/]\n{escape(text)}\n")
        for writer in tensorboard_writers(trainer):
            writer.add_text(SAMPLES, as_code(text), trainer.global_step)


def as_code(text: str) -> str:
    """Text as a block of code in Markdown: line breaks, spaces and signs stay as they are."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every part has the mode it had, which need not be that of the whole."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
