"""Text that the model generates every N training steps, printed and as text in TensorBoard."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from rich.markup import escape
from torch import nn

from lightning_llm.checkpoints.loop_state import step_is_complete
from lightning_llm.data.datamodule import tokenizer_of
from lightning_llm.generation import generate
from lightning_llm.generation.decoding import NaNLogits
from lightning_llm.io.console import Console
from lightning_llm.io.options import raise_all
from lightning_llm.io.untrusted import prefixed
from lightning_llm.training.callbacks.dashboard import tensorboard_writers
from lightning_llm.training.callbacks.non_finite import NonFinite
from lightning_llm.training.metrics import SAMPLES
from lightning_llm.training.schedule_free import evaluated

MINIMA = {"every_n_steps": 1, "max_new_tokens": 1, "temperature": 0, "top_k": 1}


class SampleText(Callback):
    """Continues a prompt every ``every_n_steps`` optimizer steps.

    Training gives the same bits with and without it.

    Args:
        every_n_steps: Optimizer steps between two samples.
        prompt: The text to continue.
        max_new_tokens: Number of tokens to add.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among this many most likely tokens. Null: among all.
        seed: The same seed and weights give the same sample.

    Raises:
        ValueError: An option is out of range; at the start of the run also: the tokenizer cannot encode the prompt, or
            the data have no tokenizer.
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
        self.every_n_steps = every_n_steps
        self.prompt = prompt
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k
        problems = [
            f"SampleText.{name} must be at least {least}, got {value}"
            for name, least in MINIMA.items()
            if (value := getattr(self, name)) is not None and not value >= least
        ]
        raise_all(problems + ([] if prompt else ["SampleText.prompt is empty: give at least one character"]))
        self._is_sharded = False
        self._tokenizer: Any = None
        self._prompt_ids: list[int] = []
        self._console = Console(markup=True, soft_wrap=True, highlight=False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Encode the prompt, so that its problems show before the first step."""
        self._is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if self._is_sharded:  # a config with samples can be combined with one that shards
            if trainer.is_global_zero:
                self._console.print("SampleText prints no samples: no process holds a sharded model")
            return
        self._tokenizer = tokenizer_of(getattr(trainer, "datamodule", None))
        if self._tokenizer is None:
            raise ValueError("SampleText needs a tokenizer, and the data have none: leave it out, or prepare the text")
        with prefixed(f"SampleText.prompt {self.prompt!r}", ValueError):
            self._prompt_ids = self._tokenizer.encode_prompt(self.prompt)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        is_due = step_is_complete(trainer) and trainer.global_step % self.every_n_steps == 0
        if self._is_sharded or not trainer.is_global_zero or not is_due:
            return
        try:
            with evaluated(trainer, exactly=True), _evaluating(pl_module), trainer.precision_plugin.forward_context():
                ids = generate(
                    pl_module,
                    torch.tensor([self._prompt_ids], device=pl_module.device),
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    top_k=self.top_k,
                    eos_token_id=self._tokenizer.eos_token_id,
                    # not the global generator, which belongs to the training
                    generator=torch.Generator(pl_module.device).manual_seed(self.seed),
                )
        except NaNLogits as error:
            raise NonFinite(f"{error}, found by the sample after step {trainer.global_step}") from error
        # a vocabulary may be rounded up: an untrained model draws ids beyond the tokenizer's
        known = [number for number in ids[0].tolist() if number < self._tokenizer.vocab_size]
        text = self._tokenizer.decode(self._tokenizer.without_begin_of(known))
        self._console.print(f"[bold]sample after step {trainer.global_step}[/]\n{escape(text)}\n")
        for writer in tensorboard_writers(trainer):
            writer.add_text(SAMPLES, as_code(text), trainer.global_step)


def as_code(text: str) -> str:
    """Text as a code block in Markdown, which preserves line breaks, spaces and symbols."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every submodule has its previous mode, which need not be that of the whole."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
