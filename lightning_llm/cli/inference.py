"""``lightning-llm generate``: print a continuation of a prompt as a trained model generates it."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.errors import one_line
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.standard_streams import print_data
from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.io.trust import add_trust_option
from lightning_llm.io.untrusted import prefixed, read_text
from lightning_llm.runs.find import RUNS, named_checkpoint, open_model

if TYPE_CHECKING:
    from lightning_llm.generation import Sampling
    from lightning_llm.model.transformer import Transformer

STDIN = "-"
LONGEST_PROMPT = 4 << 20  # ten times the longest contexts; the model could not read the rest
INPUTS = ("prompt", "prompt_file", "stdin", "interactive")
MODELS = "a checkpoint, a run directory (its best checkpoint, else its newest), or an exported folder"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# Imports inside the functions come after the options are parsed: a typo is reported without waiting for torch.


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`open_model`."""
    parser.add_argument("checkpoint", help=MODELS)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or mps (default: cpu)")
    add_trust_option(parser)


def _generate_options(parser: OneLineParser) -> None:
    add_model_options(parser)
    add = parser.add_argument
    add("stdin", nargs="?", choices=[STDIN], help="read the prompt from standard input")
    add("--prompt", help="the text to continue (default: a newline)")
    add("--prompt-file", metavar="FILE", help="a UTF-8 file with the text to continue")
    add("--interactive", action="store_true", help="continue each line that you type, until Ctrl-D")
    add("--num-samples", type=int, default=1, metavar="N", help="number of texts (default: 1)")
    add("--max-new-tokens", type=int, default=200, help="number of tokens to add (default: 200)")
    add("--temperature", type=float, default=0.8, help="divides the logits; 0: greedy decoding (default: 0.8)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (default: all)")
    add("--top-p", type=float, help="sample from the fewest tokens with this total probability")
    add("--min-p", type=float, help="drop tokens below this fraction of the highest probability")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repetitions (default: 1, off)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the text before TEXT; repeatable")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")


@subcommand(_generate_options, RuntimeError)
def run_generate(options: argparse.Namespace) -> None:
    """Continue a prompt with a trained model."""
    if options.num_samples < 1:
        raise ValueError(f"--num-samples must be at least 1, got {options.num_samples}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {options.seed}")
    inputs = [name for name in INPUTS if getattr(options, name) not in (None, False)]
    if len(inputs) > 1:
        raise ValueError(f"one prompt at a time: {' and '.join(inputs)} were given")
    prompt = None if options.interactive else _prompt(options)
    named_checkpoint(options.checkpoint, RUNS)
    from lightning_llm.generation import Sampling

    sampling = Sampling(**{name: getattr(options, name) for name in SAMPLING})
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
    with prefixed("prompt on standard input is not UTF-8", UnicodeDecodeError):
        text = sys.stdin.read(LONGEST_PROMPT + 1)
    if len(text) > LONGEST_PROMPT:
        raise ValueError(f"prompt on standard input has more than {LONGEST_PROMPT} characters")
    return text


def _typed() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def _write(
    model: "Transformer", tokenizer: Tokenizer, prompt: str, sampling: "Sampling", options: argparse.Namespace
) -> None:
    """Print the first text as it is generated; the others, which are decoded with it, when all are complete."""
    import torch

    from lightning_llm.generation import stream_text

    prompts = [prompt] * options.num_samples
    generator = torch.Generator().manual_seed(options.seed)
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "stop": options.stop, "generator": generator}
    steps = stream_text(model, tokenizer, prompts, sampling=sampling, **settings)
    texts = [""] * len(prompts)
    print(f"--- 1 ---\n{prompt}" if len(texts) > 1 else prompt, end="", flush=True)
    for pieces in steps:
        print(pieces[0], end="", flush=bool(pieces[0]))
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    print()
    for number, text in enumerate(texts[1:], start=2):
        print(f"--- {number} ---\n{prompt}{text}")
