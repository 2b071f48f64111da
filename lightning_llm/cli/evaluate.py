"""``lightning-llm evaluate CKPT --data FILE…``: how likely a model finds texts, with a strided window."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.model_argument import KINDS, add_trust, open_model
from lightning_llm.cli.parser import OneLineParser, run_tool
from lightning_llm.io.atomic import write_json

if TYPE_CHECKING:
    from lightning_llm.data.formats import Document
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.generation.scoring import Score
    from lightning_llm.model.transformer import Transformer


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm evaluate", "Loss, perplexity and bits per byte of a model on texts.")
    parser.add_argument("checkpoint", help=KINDS)
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="FILE", help="what `prepare` takes: files, folders, …"
    )
    parser.add_argument("--text-key", metavar="NAME", help="key of the text in .jsonl and .parquet (default: text)")
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens by which the window moves on (default: half the context)"
    )
    parser.add_argument("--per-document", action="store_true", help="a line for each document too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default: cpu)")
    add_trust(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _evaluate, RuntimeError)


def _evaluate(options: argparse.Namespace) -> None:
    # after the options are read: a typing mistake is answered without waiting for torch
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
        content: dict[str, Any] = {"context": context, "stride": stride, **_numbers(total)}
        if options.per_document:
            content["documents"] = rows
        write_json(options.json, content)


def _score(model: "Transformer", tokenizer: "Tokenizer", document: "Document", stride: int | None) -> "Score":
    """Each document begins anew. Its first token is not predicted, so its bytes do not count either."""
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
        raise ValueError(
            f"the tokenizer's ids go beyond the model's vocabulary of {model.config.vocab_size}"
        ) from error
    return dataclasses.replace(found, bytes=size)


def _numbers(found: "Score") -> dict[str, Any]:
    """What JSON has no word for (not a number, infinity) is null."""
    loss = found.loss if found.tokens else None
    perplexity = found.perplexity if loss is not None and found.perplexity < float("inf") else None
    per_byte = found.bits_per_byte if loss is not None else None
    return {
        "loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": per_byte,
        "tokens": found.tokens,
        "bytes": found.bytes,
    }


def _line(numbers: dict[str, Any]) -> str:
    shown = [
        f"{name.replace('_', ' ')} {value:,.4f}"
        for name in ("loss", "perplexity", "bits_per_byte")
        if (value := numbers[name]) is not None
    ]
    return ", ".join([*shown, f"{numbers['tokens']:,} tokens, {numbers['bytes']:,} bytes"])
