"""``lightning-llm data inspect DIR`` and ``data verify DIR``: look into a token store, or check all of it."""

import argparse

from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.data.token_store import DTYPES, TokenStore, by_powers_of_two, document_lengths
from lightning_llm.data.tokenizers import Tokenizer

_BAR = 40  # characters of the longest bar


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm data", "Look into a token store, or check it.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect|verify")
    inspect = actions.add_parser("inspect", help="counts, vocabulary, a window of text, lengths of documents")
    verify = actions.add_parser("verify", help="sizes, checksums and every id")
    for action in (inspect, verify):
        add = action.add_argument
        add("store", metavar="DIR", help="folder of a token store")
        add("--raw-dtype", choices=DTYPES, help="DIR holds raw train.bin and val.bin of this type, as nanoGPT writes")
        add("--vocab-size", type=int, metavar="N", help="vocabulary size of such files")
    add = inspect.add_argument
    add("--split", default="train", help="train, val or test (default: train)")
    add("--start", type=int, default=0, metavar="N", help="first token to show (default: 0)")
    add("--tokens", type=int, default=64, metavar="N", help="tokens to show (default: 64)")
    return parser


@tool(build_parser)
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    if (options.raw_dtype is None) != (options.vocab_size is None):
        raise ValueError("--raw-dtype and --vocab-size go together: both for raw .bin files, none for a token store")
    if options.raw_dtype is None:
        store = TokenStore.open(options.store)
    else:
        store = TokenStore.open_raw(options.store, vocab_size=options.vocab_size, dtype=options.raw_dtype)
    if options.action == "verify":
        store.verify()
        size = sum((store.path / f"{name}.bin").stat().st_size for name in store.splits)
        checked = "sizes, checksums and ids" if store.tokenizer_file else "sizes and ids, there are no checksums"
        print(f"{store.path}: {', '.join(store.splits)}, {size:,} bytes: good ({checked})")
    else:
        _inspect(store, options.split, options.start, options.tokens)


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
    ids = tokens[start : start + count].tolist()
    print(f"\n{split}, tokens {start} to {start + len(ids) - 1}:")
    print(Tokenizer.from_file(store.tokenizer_file).decode(ids) if store.tokenizer_file else " ".join(map(str, ids)))
    lengths = document_lengths(store, split)
    if lengths is None:
        print("\nlengths of documents: unknown, no end-of-text id separates them")
        return
    bins = list(by_powers_of_two(lengths))
    most = max((documents for _, _, documents in bins), default=1)
    print(f"\nlengths of documents of {split}, in tokens:")
    for first, last, count in bins:
        bar = "█" * -(-_BAR * count // most)
        print(f"{first:>12,} to {last:>12,}{count:>12,} {bar}".rstrip())
