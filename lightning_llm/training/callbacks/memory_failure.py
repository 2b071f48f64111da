"""The report when memory has run out: what was live, and which settings would lower the peak, by the accounting.

The accounting does not know a user's own MLP class. One layer of it is measured on a CPU, at two tiny numbers of
tokens, and extended as a line in them; the report says so.
"""

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.accounting.counts import MeasuredMLP, Sizes, hidden_matrix_parameters, step_flops
from lightning_llm.accounting.memory import StepMemory, step_memory
from lightning_llm.io.console import Console
from lightning_llm.measure.attribution import AttributedMeter
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.measure.timeline import StepPoint
from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig
from lightning_llm.model.mlp import build_mlp
from lightning_llm.training.callbacks.memory_report import Report, mib, point_report, step_report, table_of

WIDTH = 110
HALVING_COSTS = 0.02  # assumed: the same arithmetic in smaller pieces, and gradients added up
NOT_WORTH_NAMING = 0.005  # of the peak
TINY = 32  # tokens that an MLP is measured at, and twice as many
CATEGORIES = {"saved": "activations", "optimizer state": "optimizer_state"}  # the report's names for the accounting's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a step's memory depends on: the model, the micro-batch (rows, context_length), how it is computed."""

    architecture: ModelConfig
    rows: int
    context_length: int
    loss_chunks: int | None
    precision: str
    device: str
    optimizer: str
    mlp: MeasuredMLP | None = None

    def memory(self) -> StepMemory:
        """Of a step, without optimizer state."""
        return step_memory(
            self.architecture,
            rows=self.rows,
            context_length=self.context_length,
            precision=self.precision,
            device=self.device,
            loss_chunks=self.loss_chunks,
            state_per_parameter=0,
            mlp=self.mlp,
        )

    def work(self) -> int:
        """FLOPs of a step, recomputation included, per row."""
        length = self.context_length
        return step_flops(self.architecture, tokens=length, context_length=length, mlp=self.mlp).hardware


@dataclasses.dataclass(frozen=True)
class Saving:
    """A setting, the bytes by which it lowers the peak, its extra arithmetic as a fraction of the step's, a remark."""

    setting: str
    bytes: int
    extra_work: float
    note: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the word ``estimated`` goes with the number."""
        return {
            "setting": self.setting,
            "estimated_bytes_saved": self.bytes,
            "estimated_extra_work": self.extra_work,
            "note": self.note,
        }


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The peak of the step as it is (a report), what each setting would save, and what the estimate leaves out."""

    current: Report
    savings: list[Saving]
    remarks: list[str]


def describe_failure(
    trainer: Trainer,
    pl_module: LightningModule,
    batch: Any,
    *,
    metered: AttributedMeter | None,
    counters: dict[str, int],
    step: int,
    top: int,
) -> tuple[str, Report]:
    """The report as text and as plain values.

    Args:
        trainer: Lightning's.
        pl_module: The model; settings are judged only for a ``LanguageModel``.
        batch: The current micro-batch, if any.
        metered: The meter of the step, if the step was sampled.
        counters: Bytes by phase, from the gauge.
        step: Which one failed.
        top: Modules to list.
    """
    report: Report = {"step": step, "rank": trainer.global_rank, "counters": counters}
    where, meter, source = "", metered, "measured"
    title = "Live at the peak of the step, measured"
    if meter is None:
        meter = AttributedMeter(pl_module, trainer.optimizers, batch)
        meter.close()
        source = "held: counted; activations and temporary: not metered in this step"
        title = "Live for certain: what is held between steps (this step was not sampled)"
    elif meter.failed_in is not None:
        where = f", in {meter.failed_in[0]} ({meter.failed_in[1]})"
        report["failed_in"] = list(meter.failed_in)
    report |= {"source": source, **step_report(meter.timeline(), top)}
    blocks: list[Any] = [f"Out of memory in step {step} of rank {trainer.global_rank}{where}."]
    if highest := max(counters.values(), default=0):
        counter = "allocator" if trainer.strategy.root_device.type == "cuda" else "system"
        blocks.append(f"Peak in use, by the {counter}: {mib(highest)} MiB.")
    blocks.append(table_of(report["peak"], title, top))
    run = _run_of(trainer, pl_module, batch)
    found = None if run is None else estimate(run)
    if found is not None:
        if metered is None:
            title = "At the peak of a whole step, estimated, without optimizer state"
            blocks.append(table_of(found.current["peak"], title, top))
            report["estimated"] = found.current
        savings = cheapest(found.savings)
        report["settings"] = [saving.as_dict() for saving in savings]
        blocks += [*found.remarks, *_advice(savings)]
    return _rendered(blocks), report


def estimate(run: Run) -> Estimate | None:
    """The step's peak by the accounting, and what settings would save; ``None`` for what it does not cover."""
    remarks, config = [], run.architecture
    try:
        if config.dropout and run.device == "cpu":
            run = dataclasses.replace(run, architecture=dataclasses.replace(config, dropout=0.0))
            remarks.append("The estimate leaves dropout out.")
        if config.mlp not in BUILT_IN_MLPS:
            run = dataclasses.replace(run, mlp=measure_mlp(config, run.precision))
            remarks.append(f"The estimate extends {config.mlp} from a measurement at {TINY} and {2 * TINY} tokens.")
        memory, work = run.memory(), run.work()
    except (ValueError, RuntimeError):
        return None
    savings = []
    for setting, changed, note in candidates(run):
        with contextlib.suppress(ValueError):  # a combination that the model refuses
            saved = memory.peak - changed.memory().peak
            extra = HALVING_COSTS if changed.rows != run.rows else changed.work() / work - 1
            if saved > NOT_WORTH_NAMING * memory.peak:
                savings.append(Saving(setting, saved, extra, note))
    if run.optimizer == "AdamW" and run.mlp is None:
        savings.append(_muon(run, run.rows * work))
    table = {(CATEGORIES.get(name, name), part or "model"): size for (name, part), size in memory.at_peak.items()}
    saved_table = {("activations", part): size for part, size in memory.saved.items()}
    points = {"peak": StepPoint(0, memory.peak_point, table), "kept": StepPoint(0, "backward", saved_table)}
    return Estimate({name: point_report(point) for name, point in points.items()}, savings, remarks)


def cheapest(savings: Sequence[Saving], most: int = 3) -> list[Saving]:
    """Least arithmetic per byte first, among those that cost none the largest; of each option the cheapest value."""
    ordered = sorted(savings, key=lambda saving: (max(0.0, saving.extra_work) / saving.bytes, -saving.bytes))
    options: dict[str, Saving] = {}
    for saving in ordered:
        options.setdefault(saving.setting.rpartition(" ")[0], saving)
    return list(options.values())[:most]


def candidates(run: Run) -> Iterator[tuple[str, Run, str]]:
    """Settings to try, each with the run that it makes and a remark."""
    exact, tokens = "same results to rounding", run.rows * run.context_length
    if run.rows > 1:
        half = run.rows // 2
        yield f"data.micro_batch_size {half}", dataclasses.replace(run, rows=half), "same global batch, accumulated"
    if run.loss_chunks == 0:
        yield "model.loss_chunks null", dataclasses.replace(run, loss_chunks=None), exact
    elif run.loss_chunks is not None or tokens > 512:
        chunks = max(2 * (run.loss_chunks or 1), tokens // 256)
        yield f"model.loss_chunks {chunks}", dataclasses.replace(run, loss_chunks=chunks), exact
    for name, change in _changes(run.architecture):
        with contextlib.suppress(ValueError):
            changed = dataclasses.replace(run.architecture, **change)
            yield f"model.architecture.{name}", dataclasses.replace(run, architecture=changed), exact
    if run.precision == "32-true":
        yield "trainer.precision bf16-mixed", dataclasses.replace(run, precision="bf16-mixed"), "changes the numerics"


def _changes(config: ModelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    if config.is_gated:
        is_optimized = config.mlp == "memory_optimized_swiglu"
        lowest = min(config.checkpoint_levels) if is_optimized else -1
        word = "checkpoint_level" if is_optimized else "mlp memory_optimized_swiglu with checkpoint_level"
        for level in range(lowest + 1, 3):
            yield f"{word} {level}", {"mlp": "memory_optimized_swiglu", "checkpoint_level": level}
    if config.recompute == "none":
        for part in ("attention", "block"):
            yield f"recompute {part}", {"recompute": part}


def measure_mlp(config: ModelConfig, precision: str) -> MeasuredMLP:
    """What one layer of the config's MLP takes, by the meter at ``TINY`` and twice as many tokens."""
    mlp = build_mlp(config)
    if precision == "bf16-true":
        mlp.to(torch.bfloat16)
    once, twice = (_measured_bytes(mlp, config.hidden_size, tokens, precision) for tokens in (TINY, 2 * TINY))
    saved, forward, backward, flops = ((2.0 * a - b, (b - a) / TINY) for a, b in zip(once, twice, strict=True))
    elements = sum(parameter.numel() for parameter in mlp.parameters())
    return MeasuredMLP(parameters=elements, flops=round(flops[1]), saved=saved, forward=forward, backward=backward)


def _measured_bytes(mlp: torch.nn.Module, hidden: int, tokens: int, precision: str) -> tuple[int, int, int, int]:
    """Bytes saved for backward, temporaries of forward and of backward, and FLOPs of forward."""
    parameters = list(mlp.parameters())
    x = torch.zeros(1, tokens, hidden, dtype=next((p.dtype for p in parameters), None), requires_grad=True)
    counter, autocast = FlopCounterMode(display=False), torch.autocast("cpu", enabled=precision == "bf16-mixed")
    with MemoryMeter(exclude=[mlp, x]) as meter:
        with meter.phase("forward") as forward, counter, autocast:
            y = mlp(x)
        saved = meter.live_bytes - y.nbytes
        dy = torch.ones_like(y)
        with meter.phase("backward") as backward:
            gradients = torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)
    needed = saved + y.nbytes + dy.nbytes + sum(g.nbytes for g in gradients if g is not None)
    return saved, forward.peak_bytes - saved - y.nbytes, backward.peak_bytes - needed, counter.get_total_flops()


def _muon(run: Run, work: int) -> Saving:
    """One moment instead of two for the matrices inside the layers, for the arithmetic of the orthogonalization."""
    config = run.architecture
    shapes = [(min(shape), max(shape)) for shape in Sizes.of(config).matrices().values()]
    extra = sum(5 * (4 * low**2 * high + 2 * low**3) for low, high in shapes)  # five Newton-Schulz steps
    note = "changes the training, tune the learning rate"
    numbers, extra = hidden_matrix_parameters(config), config.num_hidden_layers * extra
    return Saving("model.optimizer lightning_llm.optim.MuonAdamW", 4 * numbers, extra / work, note)


def _advice(savings: list[Saving]) -> list[str]:
    if not savings:
        return ["No setting of the model or the batch would save memory."]
    lines = ["The cheapest settings to change, by estimate (least arithmetic per byte first):"]
    for place, saving in enumerate(savings, 1):
        price = f"{saving.extra_work:+.1%} arithmetic" if saving.extra_work else "no more arithmetic"
        lines.append(f"  {place}. {saving.setting}: saves {mib(saving.bytes)} MiB, {price}; {saving.note}")
    return lines


def _run_of(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Run | None:
    architecture = getattr(pl_module, "architecture", None)
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(architecture, ModelConfig) or ids is None or ids.dim() != 2:
        return None
    precision = str(trainer.precision)
    return Run(
        architecture=architecture,
        rows=ids.shape[0],
        context_length=ids.shape[1],
        loss_chunks=getattr(pl_module, "loss_chunks", None),
        precision=f"bf{precision}" if precision.startswith("16") else precision,
        device="cuda" if trainer.strategy.root_device.type == "cuda" else "cpu",
        optimizer=type(trainer.optimizers[0]).__name__ if trainer.optimizers else "",
    )


def _rendered(blocks: list[Any]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False)
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, str))
    return out.getvalue().rstrip()
