"""``python -m benchmarks initial-values``: what equal initial values are worth to a comparison of two models.

Each seed trains a baseline and two variants on the same batches: a *close* one, whose SwiGLU is an eighth wider, and a
*far* one, whose MLP is a GELU four times as wide as the model. Initial values come from the seed and the
parameter's name, as in every run, or, for comparison, from one generator that all parameters draw from in turn. The
smaller the standard deviation of the paired difference, the fewer seeds a comparison needs.

``--text FILE`` is what to train on, character by character. The command fails if a tensor that baseline and variant
both have starts from other values.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import mup
from benchmarks.charts import LOWER
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row
from lightning_llm.io.charts import chart
from lightning_llm.model.weights import assigned_stds
from lightning_llm.statistics.estimates import correlation, paired, seeds_saved
from lightning_llm.training.module import LanguageModel

HIDDEN, WIDE, LR = 64, 192, 4e-3
SIDES: dict[str, dict[str, Any]] = {
    "baseline": {"mlp": "swiglu", "intermediate_size": WIDE},
    "close": {"mlp": "swiglu", "intermediate_size": WIDE * 9 // 8},
    "far": {"mlp": "gelu", "intermediate_size": 4 * HIDDEN},
}
DRAWS = ("by name", "one generator")


def run(request: Request) -> Iterator[Row]:
    """A row for each way to draw and each variant, with the validation losses of all seeds in nats per token.

    ``sd`` is the standard deviation of the paired difference, ``seeds_saved`` the number of seeds that an unpaired
    comparison would need in addition for the same standard error.
    """
    tokens = mup.read_tokens(request.options.text)
    cut, vocab = int(0.9 * len(tokens)), int(tokens.max()) + 1
    train, validation = tokens[:cut], list(mup.draw_batches(tokens[cut:], mup.VALIDATION, seed=0))
    for draw in request.chosen(DRAWS):
        losses: dict[str, list[float]] = {side: [] for side in SIDES}
        for seed in range(request.sizes["seeds"]):
            for side, own in losses.items():
                model = build(side, draw, vocab, seed)
                own.append(mup.trained_loss(model, train, validation, request.sizes["steps"], seed))
                if request.status:
                    request.status.update(f"{draw}, seed {seed}, {side}: {own[-1]:.4f}")
        baseline = losses.pop("baseline")
        for side, own in losses.items():
            first, other = (build(name, draw, vocab, 0).transformer.state_dict() for name in ("baseline", side))
            shared = [name for name in first.keys() & other.keys() if first[name].shape == other[name].shape]
            estimate, saved = paired(baseline, own), seeds_saved(baseline, own)
            yield request.row(
                f"{side}, {draw}",
                shared=len(shared),
                equal=sum(torch.equal(first[name], other[name]) for name in shared),
                difference=estimate.difference,
                sd=estimate.sd,
                correlation=correlation(baseline, own),
                seeds_saved=None if saved is None else saved[0],
                baseline_losses=baseline,
                losses=own,
            )


def build(side: str, draw: str, vocab: int, seed: int) -> LanguageModel:
    """A model of one of ``SIDES``, whose initial values come from the seed in one of the ways ``DRAWS``."""
    model = mup.small_model(vocab, HIDDEN, LR, seed, **SIDES[side])
    if draw == "one generator":
        generator = torch.Generator().manual_seed(seed)
        stds = assigned_stds(model.transformer, model.architecture)
        for name, parameter in model.transformer.named_parameters():
            if name in stds:  # the others are ones
                torch.nn.init.normal_(parameter, 0, stds[name], generator=generator)
    return model


def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """A variant's loss against the baseline's: a point for each seed."""
    with chart(path, title, height=3.6, columns=2, sharex=True, sharey=True, **options) as axes:
        for axis, way in zip(axes[0], DRAWS, strict=True):
            for (side, way_of_row), row in ((row.variant.split(", "), row) for row in rows):
                if way_of_row == way:
                    label = f"{side}: correlation {row.correlation or 0:+.2f}"
                    axis.scatter(row.baseline_losses, row.losses, s=14, label=label)
            axis.set(title=f"initial values: {way}", xlabel=f"loss of the baseline, nats/token{LOWER}")
            axis.grid()
            axis.legend(fontsize=8)
        axes[0][0].set_ylabel(f"loss of the variant, nats/token{LOWER}")


def check(rows: Sequence[Row]) -> None:
    """Fail if initial values by name differ between two models."""
    if faults := [row.variant for row in rows if row.variant.endswith("by name") and row.equal < row.shared]:
        raise RuntimeError(f"{', '.join(faults)}: tensors that both models have start from other values")


BENCH = Bench(
    run=run,
    shapes=["20x200"],
    sizes=("seeds", "steps"),
    devices=("cpu",),
    dtypes=("float32",),
    columns={
        "shared tensors": ("shared", 1, "d"),
        "equal at the start": ("equal", 1, "d"),
        "difference": ("difference", 1, "+.4f"),
        "standard deviation": ("sd", 1, ".4f"),
        "correlation": ("correlation", 1, "+.2f"),
        "seeds saved": ("seeds_saved", 1, "d"),
    },
    draw=draw,
    files=("lightning_llm/model", "lightning_llm/optim"),
    check=check,
)
