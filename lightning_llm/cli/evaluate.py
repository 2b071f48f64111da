"""``lightning-llm evaluate CKPT --data FILE…``: how likely a model finds texts, with a strided window."""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.cli.runs import add_model_options, open_model
from lightning_llm.io.atomic import write_json

if TYPE_CHECKING:
    from lightning_llm.data.formats import Document
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.generation.scoring import Score
    from lightning_llm.model.transformer import Transformer


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm evaluate", "Loss, perplexity and bits per byte of a model on texts.")
    add_model_options(parser)
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="FILE", help="any input of `prepare`: files, folders, …")
    add("--text-key", metavar="NAME", help="key of the text in .jsonl and .parquet (default: text)")
    add("--stride", type=int, metavar="N", help="tokens by which the window moves (default: half the context)")
    add("--per-document", action="store_true", help="print one line per document too")
    add("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return parser


@tool(build_parser, RuntimeError)
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    # after the options are parsed: a typo is reported without waiting for torch
    from lightning_llm.data.corpora import open_corpus
    from lightning_llm.data.formats import progress_bar
    from lightning_llm.generation.scoring import Score

    corpus = open_corpus(options.data, text_key=options.text_key)
    model, tokenizer = open_model(options.checkpoint, options.device, trust_code=options.trust_code)
    total, rows = Score(), []
    with progress_bar(corpus.size, True) as phase:
        advance = phase("evaluating")
        for document in (document for file in corpus.files for document in file.documents(advance)):
            found = _score(model, tokenizer, document, options.stride)
            total += found
            if options.per_document:
                rows.append({"document": document.name, **_numbers(found)})
    if not total.tokens:
        raise ValueError(f"{', '.join(options.data)}: no token has another before it to be predicted from")
    for row in rows:
        print(f"{row['document']}: {_line(row)}")
    print(_line(_numbers(total)))
    if options.json is not None:
        context = model.config.max_position_embeddings
        stride = max(1, context // 2) if options.stride is None else options.stride
        documents = {"documents": rows} if options.per_document else {}
        write_json(options.json, {"context": context, "stride": stride, **_numbers(total), **documents})


def _score(model: "Transformer", tokenizer: "Tokenizer", document: "Document", stride: int | None) -> "Score":
    """Each document is scored by itself. Its first token is not predicted, so its bytes do not count either."""
    from lightning_llm.data.prepare import encode_document
    from lightning_llm.generation.scoring import score

    size = 0

    def ids() -> Iterator[int]:
        nonlocal size
        for place, (numbers, text_bytes) in enumerate(encode_document(tokenizer, document)):
            size += text_bytes
            if place == 0 and numbers:
                size -= tokenizer.byte_count(numbers[0])
            yield from numbers

    try:
        found = score(model, ids(), stride=stride)
    except IndexError as error:
        vocabulary = f"the model's vocabulary of {model.config.vocab_size}"
        raise ValueError(f"the tokenizer has ids beyond {vocabulary}") from error
    return dataclasses.replace(found, bytes=size)


def _numbers(found: "Score") -> dict[str, Any]:
    """The results; null where they are not known, NaN or infinite, which JSON cannot express."""
    named = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in named.items()}
    return {**finite, "tokens": found.tokens, "bytes": found.bytes}


def _line(numbers: dict[str, Any]) -> str:
    names = [name for name in ("loss", "perplexity", "bits_per_byte") if numbers[name] is not None]
    results = [f"{name.replace('_', ' ')} {numbers[name]:,.4f}" for name in names]
    return ", ".join([*results, f"{numbers['tokens']:,} tokens, {numbers['bytes']:,} bytes"])
