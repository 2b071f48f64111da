"""``python -m benchmarks runs``: the shipped configs, trained as their users train them, each in a process of its own.

``--shapes shakespeare`` needs a text: ``… --shapes shakespeare -- --data.path FILE``.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.charts import LOWER, Measure, bar_plot
from benchmarks.commands import ROOT, finish
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row, columns

_CHAR = "shakespeare-char.yaml"
# A run: its config, its seed (None: the config's own), and further options.
RUNS: dict[str, list[tuple[str, int | None, list[str]]]] = {
    "quickstart": [("quickstart.yaml", None, [])],
    "shakespeare": [
        *((_CHAR, seed, []) for seed in (1, 2, 3)),
        (_CHAR, None, ["--trainer.max_steps=1300", "--trainer.val_check_interval=650"]),
    ],
}


def run(request: Request) -> Iterator[Row]:
    """A row for each run."""
    for config, seed, words in request.sizes:
        seeds = [] if seed is None else [f"--seed_everything={seed}", f"--data.seed={seed}"]
        options = [f"--config={ROOT / 'configs' / config}", *words, *seeds, *request.options.fit_options]
        with tempfile.TemporaryDirectory(prefix="bench-runs-") as folder:
            summary, seconds = fit(options, folder)
        yield request.row(
            config,
            [seconds],
            seed=seed,
            steps=summary["steps"],
            val_loss=summary["val_loss"],
            training_s=summary["seconds"],
            tokens_per_s=summary["tokens"] / summary["seconds"],
            dtype=summary["precision"],
        )


def fit(words: Sequence[str], folder: str, **environment: str) -> tuple[dict[str, Any], float]:
    """Train in a process of its own: the content of ``summary.json``, and the seconds of the whole command.

    Its run directory is the only one in ``folder``.
    """
    _, seconds = finish("lightning_llm", "fit", *words, folder=folder, **environment)
    (summary,) = Path(folder).glob("runs/*/*/summary.json")
    return json.loads(summary.read_text(encoding="utf-8")), seconds


BENCH = Bench(
    run=run,
    shapes=["quickstart"],
    parse=partial(parts.named, RUNS),
    dtypes=("float32",),  # each config has its own
    columns={**columns("s", "tokens/s"), "val_loss": ("val_loss", 1, ".4f"), "training s": ("training_s", 1, ".0f")},
    draw=bar_plot(Measure("val_loss", 1, f"validation loss, nats/token{LOWER}")),
    allocator="allocator as fit sets it",
    files=("lightning_llm/model", "lightning_llm/ops", "lightning_llm/optim", "lightning_llm/data", "configs"),
)
