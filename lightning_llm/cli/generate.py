"""``lightning-llm generate CKPT --prompt TEXT``: continue a prompt, written as it comes."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.model_argument import KINDS, add_trust, open_model
from lightning_llm.cli.parser import OneLineParser, run_tool
from lightning_llm.cli.streams import print_data
from lightning_llm.io.untrusted import read_text

if TYPE_CHECKING:
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.model.transformer import Transformer

STDIN = "-"
LONGEST_PROMPT = 4 << 20  # ten times the longest contexts; the rest could not be read
INPUTS = ("prompt", "prompt_file", "stdin", "interactive")


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm generate", "Continue a prompt with a trained model.")
    parser.add_argument("checkpoint", help=KINDS)
    parser.add_argument("stdin", nargs="?", choices=[STDIN], help="take the prompt from the standard input")
    parser.add_argument("--prompt", help="the text to continue (default: a newline)")
    parser.add_argument("--prompt-file", metavar="FILE", help="a file of UTF-8 with the text to continue")
    parser.add_argument("--interactive", action="store_true", help="continue each line that is typed, until Ctrl-D")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="how many texts (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, help="sample among so many likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="sample among the fewest tokens that reach this probability")
    parser.add_argument("--min-p", type=float, help="sample among tokens this many times as likely as the likeliest")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: less of what was there (default: 1, off)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; can be repeated")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default: cpu)")
    add_trust(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _generate, RuntimeError)


def _generate(options: argparse.Namespace) -> None:
    if options.num_samples < 1:
        raise ValueError(f"--num-samples must be at least 1, got {options.num_samples}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {options.seed}")
    given = [name for name in INPUTS if getattr(options, name) not in (None, False)]
    if len(given) > 1:
        raise ValueError(f"one prompt at a time: {' and '.join(given)} were given")
    prompt = None if options.interactive else _prompt(options)
    # after the options are read: a typing mistake is answered without waiting for torch
    from lightning_llm.generation.sampling import Sampling

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    model, tokenizer = open_model(options.checkpoint, options.device, trust_code=options.trust_code)
    print_data()
    if prompt is not None:
        _write(model, tokenizer, prompt, sampling, options)
        return
    while (line := _typed()) is not None:
        try:
            _write(model, tokenizer, line, sampling, options)
        except KeyboardInterrupt:  # of this text; Ctrl-C or Ctrl-D at the next line leaves
            interrupts.number = 0
            print()
        except ValueError as error:
            print(f"lightning-llm generate: {' '.join(str(error).split())}", file=sys.stderr)


def _prompt(options: argparse.Namespace) -> str:
    if options.stdin:
        try:
            text = sys.stdin.read(LONGEST_PROMPT + 1)
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt in the standard input is not UTF-8: {error}") from error
        if len(text) > LONGEST_PROMPT:
            raise ValueError(f"prompt in the standard input has more than {LONGEST_PROMPT} characters")
        return text
    if options.prompt_file is not None:
        return read_text(options.prompt_file, LONGEST_PROMPT)
    return "\n" if options.prompt is None else str(options.prompt)


def _typed() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def _write(
    model: "Transformer", tokenizer: "Tokenizer", prompt: str, sampling: Any, options: argparse.Namespace
) -> None:
    """The first text as it comes, the others, which are decoded with it, when all are complete."""
    import torch

    from lightning_llm.generation.text import stream_text

    steps = stream_text(
        model,
        tokenizer,
        [prompt] * options.num_samples,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop=options.stop,
        generator=torch.Generator().manual_seed(options.seed),
    )
    texts = [""] * options.num_samples
    heads = options.num_samples > 1
    print(f"--- 1 ---\n{prompt}" if heads else prompt, end="", flush=True)
    for pieces in steps:
        if pieces[0]:
            print(pieces[0], end="", flush=True)
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    print()
    for number, text in enumerate(texts[1:], start=2):
        print(f"--- {number} ---\n{prompt}{text}")
