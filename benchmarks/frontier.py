"""The plot of docs/memory-optimized.md: peak memory against time of the MLPs, from written rows of ``bench swiglu``."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_llm.bench.harness import read_rows
from lightning_llm.bench.plots import chart, color


def draw_frontier(files: Mapping[str, Sequence[Path]], path: Path, title: str) -> None:
    """Draw written rows as one plot: peak memory against time, both over those of the standard MLP, by dtype.

    The plot's description is the :func:`fingerprint` of the files, which tells whether it still shows them.

    Args:
        files: What ``--json`` wrote, under the name of the set-up (at most two), drawn filled and hollow.
        path: Where the plot is written.
        title: Above it.
    """
    rows = [(set_up, row) for set_up, names in files.items() for name in names for row in read_rows(name)]
    dtypes = list(dict.fromkeys(row.dtype for _, row in rows))
    metadata = {"Description": fingerprint([name for group in files.values() for name in group])}
    with chart(path, title, columns=len(dtypes), sharex=True, sharey=True, metadata=metadata) as [axes]:
        for axis, dtype in zip(axes, dtypes, strict=True):
            for set_up, is_filled in zip(files, (True, False), strict=False):
                group = {row.variant: row for its, row in rows if (its, row.dtype) == (set_up, dtype)}
                for name, row in group.items():
                    point = [
                        getattr(row, field) / getattr(group["standard"], field) for field in ("total_s", "peak_bytes")
                    ]
                    face = color(name) if is_filled else "none"
                    axis.scatter(*point, s=70, edgecolors=color(name), facecolors=face, zorder=3)
                    label = name.replace("ours", "ours, level") if is_filled else ""
                    offset = (0, 9) if name == "standard" else (0, -18)
                    axis.annotate(label, point, offset, textcoords="offset points", ha="center")
            axis.axhline(1, color="lightgray", zorder=1)
            axis.axvline(1, color="lightgray", zorder=1)
            axis.set(title=dtype, xlabel="time of forward and backward, standard = 1", xlim=(0.6, 1.4), ylim=(0, 1.15))
        axes[0].set_ylabel("peak memory, standard = 1")
        for set_up, face in zip(files, ("black", "none"), strict=False):
            axes[-1].scatter([], [], s=70, edgecolors="black", facecolors=face, label=set_up)
        axes[-1].legend(loc="lower left")


def fingerprint(files: Sequence[Path]) -> str:
    """Of the content of files in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
