"""``lightning-llm tokenizer train INPUT… --kind bpe --vocab-size N``: train a tokenizer on text."""

import argparse
from pathlib import Path

from lightning_llm.cli.errors import OneLineParser, tool


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm tokenizer", "Train a tokenizer on text.")
    add = parser.add_argument
    add("action", choices=("train",), help="train: write a tokenizer.json")
    add("inputs", nargs="+", metavar="INPUT", help="any input of `lightning-llm prepare`: files, folders, …")
    kinds = "bpe: byte pairs, learned from the text; char: its characters; byte: the 256 bytes (default: bpe)"
    add("--kind", choices=("bpe", "char", "byte"), default="bpe", help=kinds)
    add("--vocab-size", type=int, metavar="N", help="vocabulary size of a bpe tokenizer (default: 4096)")
    add("--special-token", action="append", default=[], metavar="TEXT", help="one id, never split; can be repeated")
    add("--text-key", metavar="NAME", help="key of the text in .jsonl and .parquet (default: text)")
    add("--out", type=Path, default="tokenizer.json", metavar="FILE", help="the file (default: tokenizer.json)")
    return parser


@tool(build_parser, when_interrupted="; nothing was written")
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_llm.data.corpora import open_corpus
    from lightning_llm.data.formats import progress_bar
    from lightning_llm.data.prepare import DEFAULT_VOCAB_SIZE, bytes_and_tokens, train_tokenizer

    if options.kind != "bpe" and (options.vocab_size is not None or options.special_token):
        name = "--special-token" if options.vocab_size is None else "--vocab-size"
        raise ValueError(f"{name} needs --kind bpe: {options.kind!r} takes its vocabulary from the text")
    if options.out.exists():
        raise ValueError(f"{options.out} exists: give another --out, or delete it")
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
        print(f"fewer than the requested {vocab_size:,}: the text has no pair left to merge")
    print(f"{size:,} bytes as {tokens:,} tokens: {size / max(tokens, 1):.3f} bytes per token")
    print(f"next: lightning-llm prepare {' '.join(options.inputs)} --tokenizer {options.out}")
