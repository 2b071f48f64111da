"""``python -m benchmarks mup``: does a learning rate that fits a narrow model fit a wide one, with ``mup`` and without?

``coordinates=64-512`` is the coordinate check (Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, appendix D.1):
by how much the activations of each part have changed after a few steps, at each width, and the slope of a line through
the logarithms. With ``mup`` it is near 0: no part stands still or explodes as the model grows.

``transfer=64-256`` trains each width at each learning rate of a grid of half octaves. With ``mup`` the best rate stays
where it is; without, it falls as the width grows. The narrowest width is the base width, where both are one model.

Width doubles; heads stay, so that they become wider too. ``--text FILE`` is what to train on, character by character.
The command fails if a slope with ``mup`` is above 0.1 in absolute value, or if the best rate moves by more than one
point with ``mup``, or by less than two without.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.charts import LOWER
from benchmarks.cost import slope
from benchmarks.harness import Bench, Request
from benchmarks.parts import doubled
from benchmarks.rows import Row
from benchmarks.workloads import model_config
from lightning_llm.data.batches import sample_batch
from lightning_llm.data.corpora import open_corpus
from lightning_llm.io.charts import chart
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.schedules import WarmupLinear
from lightning_llm.training.module import LanguageModel

VARIANTS = ("standard", "mup")
HEADS, LAYERS, CONTEXT, BATCH = 4, 2, 64, 8
CHARACTERS = 1_000_000  # of the standard library's source, without --text
VALIDATION = 16  # batches
CHECK_STEPS, CHECK_LR, CHECK_SEEDS = 5, 2**-8, range(4)
STEPS, SEEDS = 100, range(2)
RATES = [2 ** (-half / 2) for half in range(22, 9, -1)]  # 0.0005 to 0.03
WATCHED = re.compile(r"embed_tokens|layers\.\d+(\.self_attn|\.mlp)?|norm|lm_head")
LOOKS = {  # of a plot: the field of x, and the labels
    "changes": ("widths", "width", "mean change of activations"),
    "losses": ("rates", "learning rate", f"validation loss, nats/character\n{LOWER.strip()}"),
}
MOST_SLOPE, MOST_MOVED, LEAST_MOVED = 0.1, 1, 2
Batch = dict[str, Tensor]


def parse(text: str) -> tuple[str, list[int]]:
    """``coordinates=64-512`` as its name and the widths, each twice the one before."""
    name, widths = doubled(text)
    if name not in ("coordinates", "transfer") or len(widths) < 2 or widths[0] % (2 * HEADS):
        wanted = f"coordinates or transfer with two widths, multiples of {2 * HEADS}, the second twice the first"
        raise ValueError(f"shapes {text!r} must be {wanted} or more, such as coordinates=64-512 or transfer=64-256")
    return name, widths


def run(request: Request) -> Iterator[Row]:
    """A row for each variant and part, or for each variant and width.

    ``widths``, ``changes`` and ``slope`` of a part; of a width ``rates``, ``losses`` in nats per token, the best of
    both, and ``moved``: by how many points of the grid its best rate is above that of the narrowest width.
    """
    experiment, widths = request.sizes
    measure = _coordinates if experiment == "coordinates" else _transfer
    yield from measure(request, widths, read_tokens(request.options.text))


def read_tokens(path: Path | None) -> Tensor:
    """The characters of a text as numbers from 0; ``None``: of the source of Python's standard library."""
    if path is None:
        texts = (document.first for document in open_corpus(["stdlib"]).documents())
        text = "".join(islice((character for each in texts for character in each), CHARACTERS))
    else:
        text = path.read_text(encoding="utf-8")
    number = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text])


def small_model(vocab: int, hidden: int, lr: float, seed: int, **fields: Any) -> LanguageModel:
    """A model with the initial values of a seed; ``fields`` are further options of ``ModelConfig``."""
    sizes = {"vocab": vocab, "hidden": hidden, "layers": LAYERS, "heads": HEADS, "context": CONTEXT}
    model = LanguageModel(model_config(sizes, **fields), partial(AdamW, lr=lr))
    model.seed = seed
    model.configure_model()
    return model


def _model(width: int, variant: str, vocab: int, base: int, lr: float, seed: int) -> LanguageModel:
    mup = {"base_width": base, "base_head_dim": base // HEADS} if variant == "mup" else None
    return small_model(vocab, width, lr, seed, intermediate_size=3 * width, mup=mup)


def draw_batches(tokens: Tensor, number: int, seed: int) -> Iterator[Batch]:
    """So many batches of a text, drawn with a seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        inputs, targets = sample_batch(tokens, BATCH, CONTEXT, "cpu", generator)
        yield {"input_ids": inputs, "targets": targets}


def train(model: LanguageModel, batches: Iterator[Batch], steps: int) -> None:
    """Train with warm-up over a tenth of the steps, then linear decay."""
    optimizer = model.optimizer_over(model.groups_of(model))
    usual = [group["lr"] for group in optimizer.param_groups]
    schedule = WarmupLinear(warmup_steps=steps // 10)
    for step, batch in enumerate(batches):
        for group, lr in zip(optimizer.param_groups, usual, strict=True):
            group["lr"] = lr * schedule.factor(step + 1, steps)
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(batch))
        optimizer.step()


def _coordinates(request: Request, widths: list[int], tokens: Tensor) -> Iterator[Row]:
    vocab = int(tokens.max()) + 1
    (shown,) = draw_batches(tokens, 1, seed=0)
    for variant in request.chosen(VARIANTS):
        changes: dict[str, list[float]] = {}
        for width in widths:
            mean_changes: dict[str, float] = defaultdict(float)  # over seeds
            for seed in CHECK_SEEDS:
                model = _model(width, variant, vocab, widths[0], CHECK_LR, seed)
                before = _activations(model, shown)
                train(model, draw_batches(tokens, CHECK_STEPS, seed + 1), CHECK_STEPS)
                for part, after in _activations(model, shown).items():
                    mean_changes[part] += float((after - before[part]).abs().mean()) / len(CHECK_SEEDS)
            for part, change in mean_changes.items():
                changes.setdefault(part, []).append(change)
        for part, own in changes.items():
            yield request.row(f"{variant}: {part}", widths=widths, changes=own, slope=slope(widths, own))


@torch.no_grad()
def _activations(model: LanguageModel, batch: Batch) -> dict[str, Tensor]:
    """What each part of the transformer returns, and the logits."""
    activations: dict[str, Tensor] = {}

    def note(part: nn.Module, args: Any, out: Tensor, name: str) -> None:
        activations[name] = out

    with ExitStack() as hooks:
        for name, part in model.transformer.named_modules():
            if WATCHED.fullmatch(name):
                hooks.enter_context(part.register_forward_hook(partial(note, name=name)))
        model(batch["input_ids"])
    return activations


def _transfer(request: Request, widths: list[int], tokens: Tensor) -> Iterator[Row]:
    vocab, cut = int(tokens.max()) + 1, int(0.9 * len(tokens))
    text, validation = tokens[:cut], list(draw_batches(tokens[cut:], VALIDATION, seed=0))
    curves: dict[tuple[str, int], list[float]] = {}
    for variant in request.chosen(VARIANTS):
        for width in widths:
            known = next((own for (_, other), own in curves.items() if other == width == widths[0]), None)
            curves[variant, width] = known or []  # at the base width both are one model
            for lr in RATES if known is None else ():
                models = {seed: _model(width, variant, vocab, widths[0], lr, seed) for seed in SEEDS}
                losses = [trained_loss(model, text, validation, STEPS, seed) for seed, model in models.items()]
                curves[variant, width].append(sum(losses) / len(losses))
            places = [int(np.argmin(curves[variant, each])) for each in (widths[0], width)]
            yield request.row(
                f"{variant}: {width}",
                width=width,
                rates=RATES,
                losses=curves[variant, width],
                best_lr=RATES[places[1]],
                val_loss=curves[variant, width][places[1]],
                moved=places[1] - places[0],
            )


def trained_loss(model: LanguageModel, text: Tensor, batches: Sequence[Batch], steps: int, seed: int) -> float:
    """The mean over batches after so many steps, in nats per token; that of guessing if the model has diverged."""
    train(model, draw_batches(text, steps, seed + 1), steps)
    with torch.inference_mode():
        loss = sum(float(model.loss(batch)) for batch in batches) / len(batches)
    return loss if math.isfinite(loss) else math.log(model.architecture.vocab_size or 1)


def check(rows: Sequence[Row]) -> None:
    """Fail if a learning rate does not carry over with ``mup``, or does without."""
    faults = [
        f"{row.variant}: slope {row.slope:+.3f}, expected at most {MOST_SLOPE} in absolute value"
        for row in rows
        if row.slope is not None and row.variant.startswith("mup") and abs(row.slope) > MOST_SLOPE
    ]
    for variant, least, most in (("mup", 0, MOST_MOVED), ("standard", LEAST_MOVED, len(RATES))):
        moved = [abs(row.moved) for row in rows if row.moved is not None and row.variant.startswith(variant)]
        if moved and not least <= max(moved) <= most:
            faults.append(f"{variant}: the best rate moves by {max(moved)} points, expected {least} to {most}")
    if faults:
        raise RuntimeError("; ".join(faults))


def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Without ``mup`` on the left, with it on the right: change against width, loss against learning rate."""
    kinds = {field: own for field in LOOKS if (own := [row for row in rows if getattr(row, field)])}
    with chart(path, title, height=3.4 * len(kinds), rows=len(kinds), columns=2, sharey="row", **options) as axes:
        for line, (field, own) in zip(axes, kinds.items(), strict=True):
            x, xlabel, ylabel = LOOKS[field]
            points = getattr(own[0], x)[:: 1 if field == "changes" else 4]
            for axis, variant in zip(line, VARIANTS, strict=True):
                for row in own:
                    name, _, part = row.variant.partition(": ")
                    if name == variant:
                        label = f"{part}: slope {row.slope:+.2f}" if field == "changes" else f"{part} wide"
                        axis.plot(getattr(row, x), getattr(row, field), marker="o", ms=3, label=label)
                axis.set(title=variant, xlabel=xlabel, xscale="log")
                axis.grid()
                axis.legend(fontsize=8.5)
                axis.set_xticks(points, [f"{point:.2g}" if point < 1 else f"{point}" for point in points])
                axis.minorticks_off()
            values = [value for row in own for value in getattr(row, field)]
            line[0].set(ylabel=ylabel, ylim=(0.97 * min(values), 1.4 * min(values)))
            if field == "changes":
                line[0].set(yscale="log", ylim=(None, 1e4 * max(values)))  # with room for the legend


BENCH = Bench(
    run=run,
    shapes=["coordinates=64-512"],
    parse=parse,
    devices=("cpu",),
    dtypes=("float32",),
    columns={
        "change, narrowest": (lambda row: row.changes and row.changes[0], 1, ".3g"),
        "change, widest": (lambda row: row.changes and row.changes[-1], 1, ".3g"),
        "slope": ("slope", 1, "+.3f"),
        "best rate": ("best_lr", 1, ".5f"),
        "loss there": ("val_loss", 1, ".4f"),
        "moved, points": ("moved", 1, "+d"),
    },
    draw=draw,
    files=("lightning_llm/model", "lightning_llm/ops", "lightning_llm/optim"),
    check=check,
)
