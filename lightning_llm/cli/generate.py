"""``lightning-llm generate CKPT --prompt TEXT``: continue a prompt, printed as it is generated."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.errors import OneLineParser, one_line, tool
from lightning_llm.cli.process import interrupts, print_data
from lightning_llm.cli.runs import add_model_options, open_model
from lightning_llm.io.untrusted import read_text

if TYPE_CHECKING:
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.model.transformer import Transformer

STDIN = "-"
LONGEST_PROMPT = 4 << 20  # ten times the longest contexts; the model could not read the rest
INPUTS = ("prompt", "prompt_file", "stdin", "interactive")


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm generate", "Continue a prompt with a trained model.")
    add_model_options(parser)
    add = parser.add_argument
    add("stdin", nargs="?", choices=[STDIN], help="read the prompt from the standard input")
    add("--prompt", help="the text to continue (default: a newline)")
    add("--prompt-file", metavar="FILE", help="a UTF-8 file with the text to continue")
    add("--interactive", action="store_true", help="continue each line that is typed, until Ctrl-D")
    add("--num-samples", type=int, default=1, metavar="N", help="how many texts (default: 1)")
    add("--max-new-tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    add("--temperature", type=float, default=0.8, help="divides the logits; 0: greedy decoding (default: 0.8)")
    add("--top-k", type=int, help="sample among this many most likely tokens (default: all)")
    add("--top-p", type=float, help="sample among the fewest tokens that reach this probability")
    add("--min-p", type=float, help="sample among tokens this many times as likely as the most likely one")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repetitions (default: 1, off)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; can be repeated")
    add("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    return parser


@tool(build_parser, RuntimeError)
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    if options.num_samples < 1:
        raise ValueError(f"--num-samples must be at least 1, got {options.num_samples}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {options.seed}")
    given = [name for name in INPUTS if getattr(options, name) not in (None, False)]
    if len(given) > 1:
        raise ValueError(f"one prompt at a time: {' and '.join(given)} were given")
    prompt = None if options.interactive else _prompt(options)
    # after the options are parsed: a typo is reported without waiting for torch
    from lightning_llm.generation.decoding import Sampling

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = Sampling(**{name: getattr(options, name) for name in names})
    model, tokenizer = open_model(options.checkpoint, options.device, trust_code=options.trust_code)
    print_data()
    if prompt is not None:
        _write(model, tokenizer, prompt, sampling, options)
        return
    while (line := _typed()) is not None:
        try:
            _write(model, tokenizer, line, sampling, options)
        except KeyboardInterrupt:  # ends this text; Ctrl-C or Ctrl-D at the next line ends the command
            interrupts.number = 0
            print()
        except ValueError as error:
            print(f"lightning-llm generate: {one_line(error)}", file=sys.stderr)


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt_file is not None:
        return read_text(options.prompt_file, LONGEST_PROMPT)
    if not options.stdin:
        return "\n" if options.prompt is None else str(options.prompt)
    try:
        text = sys.stdin.read(LONGEST_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt in the standard input is not UTF-8: {error}") from error
    if len(text) > LONGEST_PROMPT:
        raise ValueError(f"prompt in the standard input has more than {LONGEST_PROMPT} characters")
    return text


def _typed() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def _write(
    model: "Transformer", tokenizer: "Tokenizer", prompt: str, sampling: Any, options: argparse.Namespace
) -> None:
    """Print the first text as it is generated; the others, which are decoded with it, when all are complete."""
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
    print(f"--- 1 ---\n{prompt}" if len(texts) > 1 else prompt, end="", flush=True)
    for pieces in steps:
        print(pieces[0], end="", flush=bool(pieces[0]))
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    print()
    for number, text in enumerate(texts[1:], start=2):
        print(f"--- {number} ---\n{prompt}{text}")
