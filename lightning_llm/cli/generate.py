"""``lightning-llm generate CKPT --prompt TEXT``: continue a prompt, printed token by token."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.cli.parser import OneLineParser, run_tool


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm generate", "Continue a prompt with a trained model.")
    parser.add_argument("checkpoint", help="a checkpoint, or a run directory (takes its best, else its newest)")
    parser.add_argument("--prompt", default="\n", help="the text to continue (default: a newline)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, help="sample among so many likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="sample among the fewest tokens that reach this probability")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default: cpu)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status, 130 when interrupted."""
    try:
        return run_tool(build_parser(), argv, _generate, RuntimeError)
    except KeyboardInterrupt:
        print()
        return 130


def _generate(options: argparse.Namespace) -> None:
    # after the options are read: a typing mistake is answered without waiting for torch
    import torch

    from lightning_llm.cli.runs import find_checkpoint
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.generation import stream
    from lightning_llm.training.checkpointing import load_transformer

    model, content = load_transformer(find_checkpoint(options.checkpoint, Path("runs")), options.device)
    if content is None:
        raise ValueError(f"checkpoint {options.checkpoint} holds no tokenizer: it was trained without a token store")
    tokenizer = Tokenizer.from_str(content)
    ids = tokenizer.encode(options.prompt)
    if not ids:
        raise ValueError("prompt is empty: give at least one character")
    tokens = stream(
        model,
        torch.tensor([ids], device=options.device),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        eos_token_id=tokenizer.eos_token_id,
        generator=torch.Generator(options.device).manual_seed(options.seed),
    )
    text = tokenizer.stream()
    print(options.prompt, end="", flush=True)
    for token in tokens:
        number = int(token)
        if number != tokenizer.eos_token_id:
            print(text.push(number), end="", flush=True)
    print(text.flush())
