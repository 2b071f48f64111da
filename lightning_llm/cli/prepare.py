"""``lightning-llm prepare``: text in, a token store out."""

import argparse
import sys
from typing import NoReturn

EXIT_USAGE = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not the whole usage."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; {self.prog} --help says more\n")


def main(argv: list[str]) -> int:
    """Runs the command.

    Args:
        argv: Arguments behind ``prepare``.

    Returns:
        Exit code: 0, or 2 after a line about what is wrong.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:  # --help, or a wrong option
        return int(end.code or 0)
    try:
        return _prepare(arguments)
    except ValueError as error:
        print(f"lightning-llm prepare: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lightning-llm prepare", description="Turns text into a token store that training reads.")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="'stdlib' (source of Python's standard library), 'shakespeare' (downloaded once), a UTF-8 text file, "
        "a folder, or a quoted glob",
    )
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        metavar="char|byte|bpe|FILE",
        help="FILE is a tokenizer.json (default: bpe)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids of tokenizer bpe (default: 4096)")
    parser.add_argument(
        "--test-fraction", type=float, default=0.0, metavar="F", help="share of a test split (default: 0)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the store (default: stores/, named after the input)")
    return parser


def _prepare(arguments: argparse.Namespace) -> int:
    from lightning_llm.data.find_store import default_store
    from lightning_llm.data.prepare import DEFAULT_VOCAB_SIZE, prepare_store

    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        raise ValueError(
            f"--vocab-size {arguments.vocab_size} goes with --tokenizer bpe only: the vocabulary of "
            f"{arguments.tokenizer!r} follows from it"
        )
    vocab_size = DEFAULT_VOCAB_SIZE if arguments.vocab_size is None else arguments.vocab_size
    store = prepare_store(
        arguments.inputs,
        arguments.out or default_store(arguments.inputs, arguments.tokenizer, vocab_size),
        tokenizer=arguments.tokenizer,
        vocab_size=vocab_size,
        test_fraction=arguments.test_fraction,
        progress=True,
    )
    for name, split in store.splits.items():
        print(f"{name:<6}{split.tokens:>16,} tokens{split.bytes:>16,} bytes{split.documents:>10,} documents")
    print(f"{store.path}: {store.vocab_size:,} ids, {store.dtype}")
    print(f"next: lightning-llm fit --data.store {store.path}")
    return 0
