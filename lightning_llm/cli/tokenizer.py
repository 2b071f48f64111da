"""``lightning-llm tokenizer train INPUT… --kind bpe --vocab-size N``: learn a tokenizer from text."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.cli.parser import OneLineParser, run_tool


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm tokenizer", "Learn a tokenizer from text.")
    parser.add_argument("action", choices=("train",), help="train: make a tokenizer.json")
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="what `lightning-llm prepare` takes: files, folders, …"
    )
    parser.add_argument(
        "--kind",
        choices=("bpe", "char", "byte"),
        default="bpe",
        help="bpe: byte pairs, learnt from the text; char: its characters; byte: the 256 bytes (default: bpe)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids in all, of kind bpe (default: 4096)")
    parser.add_argument(
        "--special-token", action="append", default=[], metavar="TEXT", help="one id, never split; can be repeated"
    )
    parser.add_argument("--text-key", metavar="NAME", help="key of the text in .jsonl and .parquet (default: text)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("tokenizer.json"),
        metavar="FILE",
        help="where it goes (default: tokenizer.json)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _train, when_interrupted="; nothing was written")


def _train(options: argparse.Namespace) -> None:
    from lightning_llm.data.corpora import open_corpus
    from lightning_llm.data.formats import progress_bar
    from lightning_llm.data.prepare import DEFAULT_VOCAB_SIZE, bytes_and_tokens, train_tokenizer

    if options.kind != "bpe" and (options.vocab_size is not None or options.special_token):
        name = "--special-token" if options.vocab_size is None else "--vocab-size"
        raise ValueError(f"{name} goes with --kind bpe only: the ids of {options.kind!r} follow from the text")
    if options.out.exists():
        raise ValueError(f"{options.out} exists: give another --out, or remove it")
    if not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    vocab_size = DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size
    corpus = open_corpus(options.inputs, text_key=options.text_key)
    with progress_bar(corpus.size, True) as phase:
        tokenizer = train_tokenizer(options.kind, vocab_size, corpus, phase, options.special_token)
        size, tokens = bytes_and_tokens(tokenizer, corpus, phase)
    options.out.write_text(tokenizer.to_str(), encoding="utf-8")
    print(f"{options.out}: {options.kind}, {tokenizer.vocab_size:,} ids")
    if options.kind == "bpe" and tokenizer.vocab_size < vocab_size:
        print(f"fewer than {vocab_size:,} were asked for: the text has nothing left to merge")
    print(f"{size:,} bytes as {tokens:,} tokens: {size / max(tokens, 1):.3f} bytes per token")
    print(f"next: lightning-llm prepare {' '.join(options.inputs)} --tokenizer {options.out}")
