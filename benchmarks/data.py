"""``python -m benchmarks data``: speed and memory of ``prepare``.

The text, Python's standard library repeated, is made here. Each measurement is a process of its own, whose resident
high-water is reported; its time is that of the whole of ``prepare_store``, surveys and checks included, but not of the
imports. ``bpe`` has a tokenizer of 4,096 ids that was trained before, and an eighth of the text; it is compared with
the time of the library ``tokenizers`` to encode the same text, held in memory and already cut, on the same cores.
``batches`` is the other end: training batches, in their order, from a store of bytes that the system has cached.
"""

import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.charts import HIGHER, Measure, bar_plot
from benchmarks.data_process import measured
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row, columns
from lightning_llm.data.corpora import open_corpus
from lightning_llm.data.cuts import cut_at_newlines
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.io.units import byte_size
from lightning_llm.same.processes import in_fresh_processes

VARIANTS = ("byte", "char", "bpe", "tokenizers", "batches")
_ON_A_PART, _BPE_PART = ("bpe", "tokenizers"), 8
_MOST_ROUNDS = 3  # a round takes seconds to minutes


def run(request: Request) -> Iterator[Row]:
    """A row for each variant; at most three rounds, interleaved, medians."""
    variants, size = request.chosen(VARIANTS), request.sizes
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        folder = Path(name)
        unit = "".join(file.text() for file in open_corpus(["stdlib"]).files).encode()
        bpe = Tokenizer.train_bpe(cut_at_newlines([unit.decode()], 1 << 15), 4096)
        (folder / "tokenizer.json").write_text(bpe.to_str(), encoding="utf-8")
        sizes = {variant: max(1, size // _BPE_PART) if variant in _ON_A_PART else size for variant in variants}
        for length in set(sizes.values()):
            whole_units, rest = divmod(length, len(unit))
            with (folder / f"{length}.txt").open("wb") as out:
                for _ in range(whole_units):
                    out.write(unit)
                out.write(unit[:rest].decode("utf-8", errors="ignore").encode().ljust(rest))
        jobs = {variant: [(variant, folder, sizes[variant])] for variant in variants}
        runs = {variant: partial(in_fresh_processes, measured, job, name=variant) for variant, job in jobs.items()}
        taken = request.interleaved(runs, min(request.rounds, _MOST_ROUNDS))
    seconds = {variant: statistics.median(each.seconds for (each,) in runs) for variant, runs in taken.items()}
    for variant, results in taken.items():
        yield request.row(
            variant,
            shape=request.shape if sizes[variant] == size else f"{request.shape}/{_BPE_PART}",
            dtype="uint16",
            total_s=seconds[variant],
            ratio=seconds["tokenizers"] / seconds["bpe"] if variant == "bpe" and "tokenizers" in seconds else None,
            resident_bytes=max(each.resident_bytes for (each,) in results),
            tokens_per_s=results[0][0].tokens / seconds[variant],
            bytes_per_s=None if variant == "batches" else sizes[variant] / seconds[variant],
        )


BENCH = Bench(
    run=run,
    shapes=["256MiB"],
    parse=byte_size,
    devices=("cpu",),
    dtypes=("float32",),  # it prepares text
    columns={
        **columns("s", "resident MiB"),
        "MB/s of text": ("bytes_per_s", 1e-6, ".1f"),
        "Mtokens/s": ("tokens_per_s", 1e-6, ".2f"),
        "speed over the library's": ("ratio", 1, ".2f"),
    },
    draw=bar_plot(Measure("bytes_per_s", 1e-6, f"MB/s of text{HIGHER}"), log=True),
    files=("lightning_llm/data",),
)
