"""``lightning-llm prepare``: text in, a token store out."""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from lightning_llm.data.token_store import TokenStore

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not the whole usage."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; {self.prog} --help says more\n")


def main(argv: list[str]) -> int:
    """Runs the command.

    Args:
        argv: Arguments behind ``prepare``.

    Returns:
        Exit code: 0; 2 after a line about what is wrong; 130 when interrupted.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:  # --help, or a wrong option
        return int(end.code or 0)
    try:
        return _merge(arguments) if arguments.merge else _prepare(arguments)
    except ValueError as error:
        print(f"lightning-llm prepare: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("lightning-llm prepare: interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lightning-llm prepare", description="Turns text into a token store that training reads.")
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
        help="FILE is a tokenizer.json (default: bpe)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids of tokenizer bpe (default: 4096)")
    parser.add_argument(
        "--text-key", metavar="NAME", help="key or column of the text in .jsonl and .parquet (default: text)"
    )
    parser.add_argument(
        "--test-fraction", type=float, default=0.0, metavar="F", help="share of a test split (default: 0)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the store (default: stores/, named after the input)")
    parser.add_argument(
        "--shard", metavar="I/N", help="do the I-th of N parts of the work, I from 1 on; needs --out, then --merge"
    )
    parser.add_argument("--merge", metavar="DIR", help="make the store DIR of its shards; nothing else goes with it")
    return parser


def _prepare(arguments: argparse.Namespace) -> int:
    from lightning_llm.data.find_store import default_store
    from lightning_llm.data.prepare import DEFAULT_VOCAB_SIZE, prepare_shard, prepare_store
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
    if share is not None:
        folder = prepare_shard(
            arguments.inputs,
            out,
            share,
            tokenizer=arguments.tokenizer,
            vocab_size=vocab_size,
            test_fraction=arguments.test_fraction,
            text_key=arguments.text_key,
            progress=True,
        )
        print(f"{folder}: shard {share.index} of {share.count}")
        print(f"when all {share.count} are made: lightning-llm prepare --merge {out}")
        return 0
    _show(
        prepare_store(
            arguments.inputs,
            out,
            tokenizer=arguments.tokenizer,
            vocab_size=vocab_size,
            test_fraction=arguments.test_fraction,
            text_key=arguments.text_key,
            progress=True,
        )
    )
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from lightning_llm.data.shards import merge_shards

    defaults = vars(_parser().parse_args([]))
    if [name for name, value in vars(arguments).items() if name != "merge" and value != defaults[name]]:
        raise ValueError(f"--merge {arguments.merge} takes no input and no other option: the shards know theirs")
    _show(merge_shards(Path(arguments.merge), progress=True))
    return 0


def _share(given: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--shard {given!r} is not I/N with I from 1 to N, such as 1/16")
    return int(found[1]), int(found[2])


def _show(store: "TokenStore") -> None:
    for name, split in store.splits.items():
        print(f"{name:<6}{split.tokens:>16,} tokens{split.bytes:>16,} bytes{split.documents:>10,} documents")
    print(f"{store.path}: {store.vocab_size:,} ids, {store.dtype}")
    print(f"next: lightning-llm fit --data.store {store.path}")
