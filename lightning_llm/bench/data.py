"""``lightning-llm bench data``: how fast ``prepare`` is and how much memory it takes.

The text, Python's standard library again and again, is made here. Each measurement is a process of its own, whose
resident high-water is reported; its time is that of the whole of ``prepare_store``, surveys and checks included, but
not of the imports. ``bpe`` has a tokenizer of 4,096 ids that was trained before, and an eighth of the text; beside it
stands what the library ``tokenizers`` takes to encode the same text, held in memory and already cut, on the same cores.
``batches`` is the other end: training batches, in their order, from a store of bytes that the system has cached.
"""

import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.table import Column, Table

from lightning_llm.bench.data_process import Measured, measured
from lightning_llm.bench.harness import MIB, Request, Row, chosen_names, describe_machine, draw_bars
from lightning_llm.data.corpora import open_corpus
from lightning_llm.data.tokenizers import Tokenizer, cut_at_newlines
from lightning_llm.io.console import Console

SHAPES: dict[str, list[str]] = {}
DEFAULT_SHAPES = ["256MiB"]
VARIANTS = ("byte", "char", "bpe", "tokenizers", "batches")

_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
_BPE_PART = 8
_MOST_ROUNDS = 3  # a round takes seconds to minutes


def run(asked: Request) -> Iterator[Row]:
    """A row for each size and variant; at most three rounds, by turns, medians."""
    if asked.device != "cpu" or asked.dtypes != [torch.float32]:
        raise ValueError("bench data prepares text on the CPU: it takes no --device and no --dtype")
    variants = chosen_names(VARIANTS, asked.variants)
    for text in asked.shapes:
        yield from _rows(text, parse_size(text), variants, min(asked.rounds, _MOST_ROUNDS), asked.budget_s)


def parse_size(text: str) -> int:
    """``256MiB`` or ``4GiB``: bytes of text."""
    found = re.fullmatch(r"([1-9][0-9]*)(MiB|GiB)", text)
    if found is None:
        raise ValueError(f"shapes {text!r} is no size of text, such as 256MiB or 4GiB")
    return int(found[1]) * _UNITS[found[2]]


def _rows(text: str, size: int, variants: Sequence[str], rounds: int, budget_s: float | None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        folder = Path(name)
        unit = "".join(file.text() for file in open_corpus(["stdlib"]).files).encode()
        (folder / "tokenizer.json").write_text(
            Tokenizer.train_bpe(cut_at_newlines([unit.decode()], 1 << 15), 4096).to_str(), encoding="utf-8"
        )
        whole = ("byte", "char", "batches")
        sizes = {variant: size if variant in whole else max(1, size // _BPE_PART) for variant in variants}
        for length in set(sizes.values()):
            _make_text(folder / f"{length}.txt", unit, length)
        taken: dict[str, list[Measured]] = {variant: [] for variant in variants}
        start = time.perf_counter()
        for _ in range(max(1, rounds)):
            for variant, runs in taken.items():
                runs.append(_in_process(variant, folder, sizes[variant]))
            if budget_s is not None and time.perf_counter() - start > budget_s:
                break
    seconds = {variant: statistics.median(each.seconds for each in runs) for variant, runs in taken.items()}
    for variant, runs in taken.items():
        yield Row(
            bench="data",
            variant=variant,
            shape=text if sizes[variant] == size else f"{text}/{_BPE_PART}",
            dtype="uint16",
            device="cpu",
            machine=describe_machine("cpu"),
            total_s=seconds[variant],
            ratio=seconds["tokenizers"] / seconds["bpe"] if variant == "bpe" and "tokenizers" in seconds else None,
            resident_bytes=max(each.resident_bytes for each in runs),
            tokens_per_s=runs[0].tokens / seconds[variant],
            bytes_per_s=None if variant == "batches" else sizes[variant] / seconds[variant],
        )


def _make_text(file: Path, unit: bytes, size: int) -> None:
    with file.open("wb") as out:
        whole, rest = divmod(size, len(unit))
        for _ in range(whole):
            out.write(unit)
        out.write(unit[:rest].decode("utf-8", errors="ignore").encode().ljust(rest))


def _in_process(variant: str, folder: Path, size: int) -> Measured:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(measured, variant, folder, size).result()


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Speed and memory; ``ratio`` is our speed over the library's."""
    table = Table(Column("variant", no_wrap=True))
    for column in ("text", "s", "MB/s of text", "Mtokens/s", "resident MiB", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        assert row.total_s is not None
        assert row.tokens_per_s is not None
        assert row.resident_bytes is not None
        table.add_row(
            row.variant,
            row.shape,
            f"{row.total_s:.2f}",
            "–" if row.bytes_per_s is None else f"{row.bytes_per_s / 1e6:.1f}",
            f"{row.tokens_per_s / 1e6:.2f}",
            f"{row.resident_bytes / MIB:.0f}",
            "–" if row.ratio is None else f"{row.ratio:.2f}",
        )
    console.print(table)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A bar of MB/s for each row."""
    values = {f"{row.variant}, {row.shape}": row.bytes_per_s / 1e6 for row in rows if row.bytes_per_s is not None}
    draw_bars(values, path, title, unit="MB/s of text", log=True)
