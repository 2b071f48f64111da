"""``lightning-llm prepare``: text in, a token store out."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.errors import OneLineParser, tool

if TYPE_CHECKING:
    from lightning_llm.data.token_store import TokenStore


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm prepare", "Turn text into a token store for training.")
    add = parser.add_argument
    add(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="'stdlib' (source of Python's standard library), 'shakespeare' (downloaded once), a file of UTF-8 text, "
        ".jsonl or .parquet, also .gz or .zst, a folder, a quoted glob, or - for the standard input",
    )
    add("--tokenizer", default="bpe", metavar="char|byte|bpe|FILE", help="a kind, or a tokenizer.json (default: bpe)")
    add("--vocab-size", type=int, metavar="N", help="vocabulary size that bpe learns (default: 4096)")
    add("--text-key", metavar="NAME", help="key or column of the text in .jsonl and .parquet (default: text)")
    add("--test-fraction", type=float, default=0.0, metavar="F", help="fraction of the text for test (default: 0)")
    add("--out", metavar="DIR", help="folder of the store (default: in stores/, named after the input)")
    add("--shard", metavar="I/N", help="do part I of N, counted from 1; needs --out; combine the parts with --merge")
    add("--merge", metavar="DIR", help="combine the shards in DIR into a store; takes no other option")
    return parser


@tool(build_parser, when_interrupted="; run the same command again to resume")
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    if options.merge:
        _merge(options)
    else:
        _prepare(options)


def _prepare(options: argparse.Namespace) -> None:
    from lightning_llm.data.corpora import MOST_SHARES, Share
    from lightning_llm.data.prepare import DEFAULT_VOCAB_SIZE, default_store, prepare_store

    inputs, tokenizer, out = options.inputs, options.tokenizer, options.out
    vocab_size = DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size
    if not inputs:
        raise ValueError("no INPUT: give a file, a folder, a glob, - or a corpus; see lightning-llm prepare --help")
    if options.vocab_size is not None and tokenizer != "bpe":
        raise ValueError(
            f"--vocab-size {vocab_size} needs --tokenizer bpe: {tokenizer!r} determines its own vocabulary"
        )
    if options.shard is not None:
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", options.shard)
        if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MOST_SHARES:
            raise ValueError(f"--shard {options.shard!r} is not I/N with 1 ≤ I ≤ N ≤ {MOST_SHARES}, such as 1/16")
        if out is None:
            raise ValueError(f"--shard {options.shard} needs --out DIR, the same for all shards")
    if "-" in inputs and out is None:
        raise ValueError("the standard input has no name: give the store one with --out DIR")
    out = out or default_store(inputs, tokenizer, vocab_size)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": vocab_size, "progress": True}
    settings |= {"test_fraction": options.test_fraction, "text_key": options.text_key}
    if options.shard is None:
        _show(prepare_store(inputs, out, **settings))
        return
    share = Share(*map(int, options.shard.split("/")))
    shard = prepare_store(inputs, out, share=share, **settings)
    print(f"{shard.path}: shard {share.index} of {share.count}")
    print(f"when all {share.count} are made: lightning-llm prepare --merge {out}")


def _merge(options: argparse.Namespace) -> None:
    from lightning_llm.data.token_store_writer import merge_shards

    alone = build_parser().parse_args([f"--merge={options.merge}"])
    if options != alone:
        raise ValueError(f"--merge {options.merge} takes no input and no other option: the shards have theirs")
    _show(merge_shards(Path(options.merge), progress=True))


def _show(store: "TokenStore") -> None:
    for name, split in store.splits.items():
        print(f"{name:<6}{split.tokens:>16,} tokens{split.bytes:>16,} bytes{split.documents:>10,} documents")
    print(f"{store.path}: {store.vocab_size:,} ids, {store.dtype}")
    print(f"next: lightning-llm fit --data.store {store.path}")
