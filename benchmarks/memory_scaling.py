"""``lightning-llm bench growth``: how the MLP's peak memory grows with the number of tokens; one metered step each.

The tiled op's buffers have a fixed size, so its peak may grow only by what is kept: input, output and their gradients.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_llm.bench import swiglu
from lightning_llm.bench.harness import MIB, Request, Row, chosen, describe_machine, measure_memory

SHAPES = {"1k-64k": [f"{n}x1024x1024x4096x1" for n in (1, 2, 4, 8, 16, 32, 64)]}
DEFAULT_SHAPES = ["1k-64k"]
VARIANTS = ("standard", "checkpoint", "ours 0", "ours 1")


def run(asked: Request) -> Iterator[Row]:
    """A row for each shape, dtype and variant. Nothing is timed."""
    for text in asked.shapes:
        for dtype in asked.dtypes:
            cases = chosen(swiglu.cases(swiglu.parse_shape(text), dtype, asked.device), asked.variants or VARIANTS)
            for variant, case in cases.items():
                saved, peak = measure_memory(case, asked.device)
                case.clear()
                yield Row(
                    bench="growth",
                    variant=variant,
                    shape=text,
                    dtype=str(dtype).removeprefix("torch."),
                    device=asked.device,
                    machine=describe_machine(asked.device),
                    peak_bytes=peak,
                    saved_bytes=saved,
                )


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Peak memory against tokens, a line for each variant and a picture for each dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure, axes = pyplot.subplots(1, len(dtypes), figsize=(6.5 * len(dtypes), 5), squeeze=False, layout="constrained")
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for variant in dict.fromkeys(row.variant for row in rows):
            points = [
                (batch * seq, row.peak_bytes / MIB)
                for row in rows
                if (row.variant, row.dtype) == (variant, dtype) and row.peak_bytes is not None
                for batch, seq, *_ in [swiglu.parse_shape(row.shape)]
            ]
            style = "--" if variant == "checkpoint" else "-"  # it may lie on the standard one
            axis.plot(*zip(*sorted(points), strict=True), style, marker="o", label=variant)
        axis.set(xlabel="tokens", ylabel="peak memory, MiB", title=dtype)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
