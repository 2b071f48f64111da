"""``lightning-llm prepare``: text in, a token store out."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.parser import OneLineParser, run_tool

if TYPE_CHECKING:
    from lightning_llm.data.token_store import TokenStore


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    again = "; the same command goes on from here"
    return run_tool(
        _parser(), argv, lambda given: _merge(given) if given.merge else _prepare(given), when_interrupted=again
    )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser("lightning-llm prepare", "Turns text into a token store that training reads.")
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="'stdlib' (source of Python's standard library), 'shakespeare' (downloaded once), a file of UTF-8 text, "
        ".jsonl or .parquet, also .gz or .zst, a folder, a quoted glob, or - for the standard input",
    )
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        metavar="char|byte|bpe|FILE",
        help="characters, bytes, byte pairs learnt from the text, or a tokenizer.json (default: bpe)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="how many ids bpe learns (default: 4096)")
    parser.add_argument(
        "--text-key", metavar="NAME", help="key or column of the text in .jsonl and .parquet (default: text)"
    )
    parser.add_argument(
        "--test-fraction", type=float, default=0.0, metavar="F", help="share of the text kept for test (default: 0)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the store (default: stores/, named after the input)")
    parser.add_argument(
        "--shard", metavar="I/N", help="do the I-th of N parts of the work, I from 1 on; needs --out, then --merge"
    )
    parser.add_argument("--merge", metavar="DIR", help="make the store DIR of its shards; nothing else goes with it")
    return parser


def _prepare(arguments: argparse.Namespace) -> None:
    from lightning_llm.data.find_store import default_store
    from lightning_llm.data.prepare import DEFAULT_VOCAB_SIZE, prepare_store
    from lightning_llm.data.segments import Share

    if not arguments.inputs:
        raise ValueError(
            "no INPUT: give a file, a folder, a glob, - or a corpus; lightning-llm prepare --help says more"
        )
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        raise ValueError(
            f"--vocab-size {arguments.vocab_size} goes with --tokenizer bpe only: the vocabulary of "
            f"{arguments.tokenizer!r} follows from it"
        )
    share = None if arguments.shard is None else Share(*_share(arguments.shard))
    if share is not None and arguments.out is None:
        raise ValueError(f"--shard {arguments.shard} needs --out DIR, the same for all shards")
    if "-" in arguments.inputs and arguments.out is None:
        raise ValueError("the standard input has no name: give the store one with --out DIR")
    vocab_size = DEFAULT_VOCAB_SIZE if arguments.vocab_size is None else arguments.vocab_size
    out = arguments.out or default_store(arguments.inputs, arguments.tokenizer, vocab_size)
    options: dict[str, Any] = {
        "tokenizer": arguments.tokenizer,
        "vocab_size": vocab_size,
        "test_fraction": arguments.test_fraction,
        "text_key": arguments.text_key,
        "progress": True,
    }
    if share is None:
        _show(prepare_store(arguments.inputs, out, **options))
        return
    shard = prepare_store(arguments.inputs, out, share=share, **options)
    print(f"{shard.path}: shard {share.index} of {share.count}")
    print(f"when all {share.count} are made: lightning-llm prepare --merge {out}")


def _merge(arguments: argparse.Namespace) -> None:
    from lightning_llm.data.token_store_writer import merge_shards

    defaults = vars(_parser().parse_args([]))
    if [name for name, value in vars(arguments).items() if name != "merge" and value != defaults[name]]:
        raise ValueError(f"--merge {arguments.merge} takes no input and no other option: the shards know theirs")
    _show(merge_shards(Path(arguments.merge), progress=True))


def _share(given: str) -> tuple[int, int]:
    from lightning_llm.data.segments import MOST_SHARES

    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MOST_SHARES:
        raise ValueError(f"--shard {given!r} is not I/N with I from 1 to N and N up to {MOST_SHARES}, such as 1/16")
    return int(found[1]), int(found[2])


def _show(store: "TokenStore") -> None:
    for name, split in store.splits.items():
        print(f"{name:<6}{split.tokens:>16,} tokens{split.bytes:>16,} bytes{split.documents:>10,} documents")
    print(f"{store.path}: {store.vocab_size:,} ids, {store.dtype}")
    print(f"next: lightning-llm fit --data.store {store.path}")
