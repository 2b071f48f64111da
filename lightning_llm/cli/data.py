"""``lightning-llm prepare``, ``tokenizer`` and ``data``: make token stores and tokenizers from text; inspect a store.

``data inspect DIR`` shows a store, ``data verify DIR`` checks all of it.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.data.corpora import STDIN, open_corpus
from lightning_llm.data.find_store import default_store
from lightning_llm.data.prepare import DEFAULT_VOCAB_SIZE, bytes_and_tokens, prepare_store, train_tokenizer
from lightning_llm.data.splits import MOST_SHARDS, Shard, split_warnings
from lightning_llm.data.store_tokenizer import boundary_lines, end_of_documents, open_tokenizer
from lightning_llm.data.token_store import TOKEN_DTYPES, TokenStore, by_powers_of_two, document_lengths
from lightning_llm.data.token_store_writer import merge_shards
from lightning_llm.io.atomic import write_text
from lightning_llm.io.progress import progress_bar
from lightning_llm.io.shell import shell_option, shell_path

_BAR = 40  # characters of the longest bar


def _prepare_options(parser: OneLineParser) -> None:
    add = parser.add_argument
    inputs = "'stdlib' (source of Python's standard library), 'shakespeare' (downloaded once), 'recall' (synthetic), "
    inputs += (
        "a file of UTF-8 text, .jsonl or .parquet, also .gz or .zst, a folder, a quoted glob, or - for standard input"
    )
    add("inputs", nargs="*", metavar="INPUT", help=inputs)
    add("--tokenizer", default="bpe", metavar="char|byte|bpe|FILE", help="built-in, or a tokenizer.json (default: bpe)")
    add("--vocab-size", type=int, metavar="N", help="vocabulary size that bpe learns (default: 4096)")
    add("--text-key", metavar="NAME", help="key or column of the text in .jsonl and .parquet (default: text)")
    begin, end = "token before each document, or none", "token after each of several documents, or none"
    add("--begin-of-text", metavar="TOKEN", help=f"{begin} (default: as the tokenizer's file has it)")
    add("--end-of-text", metavar="TOKEN", help=f"{end} (default: the tokenizer's, if one is known)")
    add("--test-fraction", type=float, default=0.0, metavar="F", help="fraction of the text for testing (default: 0)")
    add("--out", metavar="DIR", help="folder of the store (default: in stores/, named after the input)")
    add("--shard", metavar="I/N", help="prepare part I of N, from 1; needs --out; combine the parts with --merge")
    add("--merge", metavar="DIR", help="combine the shards in DIR into a store; takes no other option")


@subcommand(_prepare_options, when_interrupted="; run the same command again to resume")
def run_prepare(options: argparse.Namespace) -> None:
    """Turn text into a token store for training."""
    if options.merge:
        if options != run_prepare.parser.parse_args([f"--merge={options.merge}"]):
            raise ValueError(f"--merge {options.merge} takes no input and no other option: the shards have theirs")
        store = merge_shards(Path(options.merge), progress=True)
    else:
        store = _prepare(options)
        if options.shard is not None:
            part, count = options.shard.split("/")
            print(f"{store.path}: shard {int(part)} of {int(count)}")
            print(f"when all {int(count)} are made: lightning-llm prepare --merge {shell_path(options.out)}")
            return
    for name, split in store.splits.items():
        print(f"{name:<6}{split.tokens:>16,} tokens{split.bytes:>16,} bytes{split.documents:>10,} documents")
    print(f"{store.path}: {store.vocab_size:,} ids, {store.dtype}")
    for line in boundary_lines(store):
        print(line)
    for line in split_warnings(store, options.test_fraction):
        print(line, file=sys.stderr)
    print(f"next: lightning-llm fit --data.store {shell_path(store.path)}")


def _prepare(options: argparse.Namespace) -> TokenStore:
    inputs = options.inputs
    tokenizer = options.tokenizer
    out = options.out
    shard: Shard | None = None
    vocab_size = DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size
    if not inputs:
        raise ValueError("no INPUT: give a file, a folder, a glob, - or a corpus; see lightning-llm prepare --help")
    if options.vocab_size is not None and tokenizer != "bpe":
        problem = f"{tokenizer!r} determines its own vocabulary"
        raise ValueError(f"--vocab-size {vocab_size} needs --tokenizer bpe: {problem}")
    if options.shard is not None:
        numbers = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", options.shard)
        if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]) <= MOST_SHARDS:
            raise ValueError(f"--shard {options.shard!r} is not I/N with 1 ≤ I ≤ N ≤ {MOST_SHARDS}, such as 1/16")
        if out is None:
            raise ValueError(f"--shard {options.shard} needs --out DIR, the same for all shards")
        shard = Shard(int(numbers[1]), int(numbers[2]))
    if "-" in inputs and out is None:
        raise ValueError("standard input has no name: name the store with --out DIR")
    out = out or default_store(inputs, tokenizer, vocab_size)
    names = ("tokenizer", "test_fraction", "text_key", "begin_of_text", "end_of_text")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    return prepare_store(inputs, out, vocab_size=vocab_size, progress=True, shard=shard, **settings)


def _tokenizer_options(parser: OneLineParser) -> None:
    add = parser.add_argument
    add("action", choices=("train",), help="train: write a tokenizer.json")
    add("inputs", nargs="+", metavar="INPUT", help="any input of `lightning-llm prepare`: files, folders, …")
    kinds = "bpe: byte pairs, learned from the text; char: its characters; byte: the 256 bytes (default: bpe)"
    add("--kind", choices=("bpe", "char", "byte"), default="bpe", help=kinds)
    add("--vocab-size", type=int, metavar="N", help="vocabulary size of a bpe tokenizer (default: 4096)")
    add(
        "--special-token", action="append", default=[], metavar="TEXT", help="text with one id, never split; repeatable"
    )
    add("--text-key", metavar="NAME", help="key of the text in .jsonl and .parquet (default: text)")
    add("--out", type=Path, default="tokenizer.json", metavar="FILE", help="file to write (default: tokenizer.json)")


@subcommand(_tokenizer_options, when_interrupted="; nothing was written")
def run_tokenizer(options: argparse.Namespace) -> None:
    """Train a tokenizer on text."""
    if options.kind != "bpe" and (options.vocab_size is not None or options.special_token):
        name = "--special-token" if options.vocab_size is None else "--vocab-size"
        raise ValueError(f"{name} needs --kind bpe: {options.kind!r} takes its vocabulary from the text")
    if os.path.lexists(options.out):
        raise ValueError(f"{options.out} exists: give another --out, or delete it")
    if not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    vocab_size = DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size
    corpus = open_corpus(options.inputs, text_key=options.text_key)
    with progress_bar(corpus.size, True) as phase:
        tokenizer = train_tokenizer(options.kind, vocab_size, corpus, phase, options.special_token)
        size, tokens = bytes_and_tokens(tokenizer, corpus, phase)
    write_text(options.out, tokenizer.to_str())
    print(f"{options.out}: {options.kind}, {tokenizer.vocab_size:,} ids")
    if options.kind == "bpe" and tokenizer.vocab_size < vocab_size:
        print(f"fewer than the requested {vocab_size:,}: the text has no pair left to merge")
    print(f"{size:,} bytes as {tokens:,} tokens: {size / max(tokens, 1):.3f} bytes per token")
    inputs = [name if name == STDIN else shell_path(name) for name in options.inputs]
    rest = "" if options.text_key is None else f" {shell_option('--text-key', options.text_key)}"
    rest += " --out DIR" if STDIN in inputs else ""  # standard input has no name that the store could get
    print(f"next: lightning-llm prepare {' '.join(inputs)} --tokenizer {shell_path(options.out)}{rest}")


def _data_options(parser: OneLineParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect|verify")
    inspect = actions.add_parser("inspect", help="print counts, vocabulary, a window of text, and document lengths")
    verify = actions.add_parser("verify", help="check sizes, checksums, and every id")
    for action in (inspect, verify):
        add = action.add_argument
        add("store", metavar="DIR", help="folder of a token store")
        add("--raw-dtype", choices=TOKEN_DTYPES, help="DIR has raw train.bin and val.bin of this type, as nanoGPT's")
        add("--vocab-size", type=int, metavar="N", help="vocabulary size of such files")
    add = inspect.add_argument
    add("--split", default="train", help="train, val, or test (default: train)")
    add("--start", type=int, default=0, metavar="N", help="first token to show (default: 0)")
    add("--tokens", type=int, default=64, metavar="N", help="tokens to show (default: 64)")


@subcommand(_data_options)
def run_data(options: argparse.Namespace) -> None:
    """Inspect or verify a token store."""
    if (options.raw_dtype is None) != (options.vocab_size is None):
        raise ValueError("--raw-dtype and --vocab-size go together: both for raw .bin files, none for a token store")
    if options.raw_dtype is None:
        store = TokenStore.open(options.store)
    else:
        store = TokenStore.open_raw(options.store, vocab_size=options.vocab_size, dtype=options.raw_dtype)
    if options.action == "inspect":
        _inspect(store, options.split, options.start, options.tokens)
        return
    store.verify()
    size = sum((store.path / f"{name}.bin").stat().st_size for name in store.splits)
    checked = "sizes, checksums and ids" if store.tokenizer_file else "sizes and ids, there are no checksums"
    print(f"{store.path}: {', '.join(store.splits)}, {size:,} bytes: good ({checked})")


def _inspect(store: TokenStore, split: str, start: int, count: int) -> None:
    tokens = store.tokens(split)
    if not 0 <= start < max(1, len(tokens)) or count < 1:
        window = f"--start {start} --tokens {count} is not a window of the {len(tokens)} tokens of {split}"
        raise ValueError(f"{window}: --start is from 0 to {len(tokens) - 1}, --tokens at least 1")
    print(f"{store.path}: {store.vocab_size:,} ids, {store.dtype}, fingerprint {store.fingerprint}")
    for field, value in store.source.items():
        print(f"  {field}: {', '.join(value) if isinstance(value, list) else value}")
    for name, counts in store.splits.items():
        ratio = store.bytes_per_token(name)
        text = "" if ratio is None else f"{counts.bytes:>16,} bytes{ratio:>8.3f} bytes/token"
        documents = f"{counts.documents:>10,} documents" if store.tokenizer_file else ""
        print(f"{name:<6}{counts.tokens:>16,} tokens{text}{documents}")
    ids = tokens[start : start + count].tolist()
    print(f"\n{split}, tokens {start} to {start + len(ids) - 1}:")
    tokenizer = open_tokenizer(store)
    print(" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids))
    lengths = document_lengths(store, split, end_of_documents(store, tokenizer))
    if lengths is None:
        print("\nlengths of documents: unknown, no end-of-text id separates them")
        return
    bins = list(by_powers_of_two(lengths))
    most = max((documents for _, _, documents in bins), default=1)
    print(f"\nlengths of documents of {split}, in tokens:")
    for first, last, count in bins:
        print(f"{first:>12,} to {last:>12,}{count:>12,} {'█' * -(-_BAR * count // most)}".rstrip())
