"""``lightning-llm data inspect DIR`` and ``data verify DIR``: look into a token store, or check all of it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.cli.parser import OneLineParser, run_tool
from lightning_llm.data.token_store import DTYPES, TokenStore, by_powers_of_two, document_lengths
from lightning_llm.data.tokenizers import Tokenizer

_BAR = 40  # characters of the longest bar


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    return run_tool(_parser(), argv, _look)


def _look(arguments: argparse.Namespace) -> None:
    store = _open(arguments)
    if arguments.action == "verify":
        _verify(store)
    else:
        _inspect(store, arguments.split, arguments.start, arguments.tokens)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser("lightning-llm data", "Looks into a token store, or checks it.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect|verify")
    inspect = actions.add_parser("inspect", help="counts, vocabulary, a window of text, lengths of documents")
    verify = actions.add_parser("verify", help="sizes, checksums and every id")
    for action in (inspect, verify):
        action.add_argument("store", metavar="DIR", help="folder of a token store")
        action.add_argument(
            "--raw-dtype", choices=DTYPES, help="DIR holds bare train.bin and val.bin of this type, as of nanoGPT"
        )
        action.add_argument("--vocab-size", type=int, metavar="N", help="number of ids of such files")
    inspect.add_argument("--split", default="train", help="train, val or test (default: train)")
    inspect.add_argument("--start", type=int, default=0, metavar="N", help="first token that is shown (default: 0)")
    inspect.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens that are shown (default: 64)")
    return parser


def _open(arguments: argparse.Namespace) -> TokenStore:
    if (arguments.raw_dtype is None) != (arguments.vocab_size is None):
        raise ValueError("--raw-dtype and --vocab-size go together: both for bare .bin files, none for a token store")
    if arguments.raw_dtype is None:
        return TokenStore.open(arguments.store)
    return TokenStore.open_raw(arguments.store, vocab_size=arguments.vocab_size, dtype=arguments.raw_dtype)


def _verify(store: TokenStore) -> None:
    store.verify()
    size = sum((store.path / f"{name}.bin").stat().st_size for name in store.splits)
    checked = "sizes, checksums and ids" if store.tokenizer_file else "sizes and ids, there are no checksums"
    print(f"{store.path}: {', '.join(store.splits)}, {size:,} bytes: good ({checked})")


def _inspect(store: TokenStore, split: str, start: int, count: int) -> None:
    tokens = store.tokens(split)
    if not 0 <= start < max(1, len(tokens)) or count < 1:
        raise ValueError(
            f"--start {start} --tokens {count} is no window of the {len(tokens)} tokens of {split}: "
            f"--start is from 0 to {len(tokens) - 1}, --tokens at least 1"
        )
    print(f"{store.path}: {store.vocab_size:,} ids, {store.dtype}, fingerprint {store.fingerprint}")
    for field, value in store.source.items():
        print(f"  {field}: {', '.join(value) if isinstance(value, list) else value}")
    for name, counts in store.splits.items():
        ratio = store.bytes_per_token(name)
        text = "" if ratio is None else f"{counts.bytes:>16,} bytes{ratio:>8.3f} bytes/token"
        documents = f"{counts.documents:>10,} documents" if store.tokenizer_file else ""
        print(f"{name:<6}{counts.tokens:>16,} tokens{text}{documents}")
    window = tokens[start : start + count]
    print(f"\n{split}, tokens {start} to {start + len(window) - 1}:")
    print(_decoded(store.tokenizer_file, window.tolist()))
    _print_lengths(store, split)


def _decoded(tokenizer_file: Path | None, ids: list[int]) -> str:
    if tokenizer_file is None:
        return " ".join(map(str, ids))
    return Tokenizer.from_file(tokenizer_file).decode(ids)


def _print_lengths(store: TokenStore, split: str) -> None:
    lengths = document_lengths(store, split)
    if lengths is None:
        print("\nlengths of documents: not known, no end-of-text id is between them")
        return
    bins = list(by_powers_of_two(lengths))
    most = max((documents for _, _, documents in bins), default=1)
    print(f"\nlengths of documents of {split}, in tokens:")
    for first, last, documents in bins:
        bar = "█" * -(-_BAR * documents // most)
        print(f"{first:>12,} to {last:>12,}{documents:>12,} {bar}".rstrip())
