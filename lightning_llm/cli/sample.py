"""The text that a run ends with: what its model writes. A run that cannot show one has succeeded all the same."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from rich.markup import escape

from lightning_llm.generation import generate
from lightning_llm.io.console import Console

SAMPLE_TOKENS = 200


def print_sample(console: Console, model: LightningModule, data: Any) -> None:
    """Print a sample, or a line that says why there is none: whatever goes wrong here, the model is trained and saved.

    Args:
        console: Where it is printed.
        model: With ``transformer`` or as ``generate`` takes it.
        data: The data module that the model was trained on.
    """
    try:
        if data.tokenizer is None:
            raise ValueError("the token files are raw, without a tokenizer to write text with")
        text = _sample(model, data)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        console.print(f"\n[bold]no sample[/]  {escape(reason)}")
        return
    console.print("\n[bold]a sample[/]")
    console.print(escape(text.strip("\n")))


def _sample(model: LightningModule, data: Any) -> str:
    tokenizer = data.tokenizer
    prompt = torch.tensor([_prompt(data)], device=model.device)
    generator = torch.Generator(model.device).manual_seed(0)
    was_training = model.training
    model.eval()
    try:
        ids = generate(model, prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0.8, top_k=50, generator=generator)
    finally:
        model.train(was_training)  # a notebook may train on: Lightning leaves the mode as it finds it
    # a vocabulary may be rounded up
    text: str = tokenizer.decode([number for number in ids[0].tolist() if number < tokenizer.vocab_size])
    return text


def _prompt(data: Any) -> list[int]:
    """A newline; where the tokenizer does not know one, the text's own first token."""
    try:
        ids: list[int] = data.tokenizer.encode("\n")
    except ValueError:
        ids = []
    return ids or [int(data.store.tokens("train")[0])]
