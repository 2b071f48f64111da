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
EXACT, OPTIMIZED = "same results to rounding", "memory_optimized_swiglu"
CATEGORIES = {"saved": "activations", "optimizer state": "optimizer_state"}  # the report's names for the accounting's


@dataclasses.dataclass(frozen=True)
class Run:
    """What a step's memory depends on: the model, and ``settings`` as ``step_memory`` takes them."""

    config: ModelConfig
    optimizer: str
    settings: dict[str, Any]

    def change(self, architecture: dict[str, Any] | None = None, **settings: Any) -> "Run":
        """The run with other options; a ValueError for a combination that the model refuses."""
        config = dataclasses.replace(self.config, **architecture or {})
        return Run(config, self.optimizer, {**self.settings, **settings})

    def memory(self) -> StepMemory:
        """Of a step, without optimizer state."""
        return step_memory(self.config, state_per_parameter=0, **self.settings)

    def work(self) -> int:
        """FLOPs of a step, recomputation included, per row."""
        length = self.settings["context_length"]
        return step_flops(self.config, tokens=length, context_length=length, mlp=self.settings["mlp"]).hardware


@dataclasses.dataclass(frozen=True)
class Saving:
    """A setting, the bytes by which it lowers the peak, its extra arithmetic as a fraction of the step's, a remark."""

    setting: str
    estimated_bytes_saved: int
    estimated_extra_work: float
    note: str


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
    where, meter, source, title = "", metered, "measured", "Live at the peak of the step, measured"
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
        report["settings"] = [dataclasses.asdict(saving) for saving in savings]
        blocks += [*found.remarks, *_advice(savings)]
    return _rendered(blocks), report


def estimate(run: Run) -> Estimate | None:
    """The step's peak by the accounting, and what settings would save; ``None`` for what it does not cover."""
    remarks, mlp = [], run.config.mlp
    try:
        if run.config.dropout and run.settings["device"] == "cpu":
            run = run.change({"dropout": 0.0})
            remarks.append("The estimate leaves dropout out.")
        if mlp not in BUILT_IN_MLPS:
            run = run.change(mlp=measure_mlp(run.config, run.settings["precision"]))
            remarks.append(f"The estimate extends {mlp} from a measurement at {TINY} and {2 * TINY} tokens.")
        memory, work = run.memory(), run.work()
    except (ValueError, RuntimeError):
        return None
    savings = []
    for setting, architecture, changes, note in candidates(run):
        with contextlib.suppress(ValueError):  # a combination that the model refuses
            changed = run.change(architecture, **changes)
            saved = memory.peak - changed.memory().peak
            if saved > NOT_WORTH_NAMING * memory.peak:
                extra = HALVING_COSTS if "rows" in changes else changed.work() / work - 1
                savings.append(Saving(setting, saved, extra, note))
    if run.optimizer == "AdamW" and mlp in BUILT_IN_MLPS:
        savings.append(_muon(run.config, run.settings["rows"] * work))
    table = {(CATEGORIES.get(name, name), part or "model"): size for (name, part), size in memory.at_peak.items()}
    saved_table = {("activations", part): size for part, size in memory.saved.items()}
    points = {"peak": StepPoint(0, memory.peak_point, table), "kept": StepPoint(0, "backward", saved_table)}
    return Estimate({name: point_report(point) for name, point in points.items()}, savings, remarks)


def cheapest(savings: Sequence[Saving], most: int = 3) -> list[Saving]:
    """Least arithmetic per byte first, among those that cost none the largest; of each option the cheapest value."""
    ordered = sorted(
        savings, key=lambda s: (max(0.0, s.estimated_extra_work) / s.estimated_bytes_saved, -s.estimated_bytes_saved)
    )
    options: dict[str, Saving] = {}
    for saving in ordered:
        options.setdefault(saving.setting.rpartition(" ")[0], saving)
    return list(options.values())[:most]


def candidates(run: Run) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """Settings to try, each with its changes to the architecture and to the settings of the step, and a remark."""
    config, rows, chunks, exact = run.config, run.settings["rows"], run.settings["loss_chunks"], EXACT
    tokens = rows * run.settings["context_length"]
    if rows > 1:
        yield f"data.micro_batch_size {rows // 2}", {}, {"rows": rows // 2}, "same global batch, accumulated"
    if chunks == 0:
        yield "model.loss_chunks null", {}, {"loss_chunks": None}, exact
    elif chunks is not None or tokens > 512:
        more = max(2 * (chunks or 1), tokens // 256)
        yield f"model.loss_chunks {more}", {}, {"loss_chunks": more}, exact
    if config.is_gated:
        is_optimized = config.mlp == OPTIMIZED
        option = "checkpoint_level" if is_optimized else f"mlp {OPTIMIZED} with checkpoint_level"
        for level in range(min(config.checkpoint_levels) + 1 if is_optimized else 0, 3):
            yield f"model.architecture.{option} {level}", {"mlp": OPTIMIZED, "checkpoint_level": level}, {}, exact
    if config.recompute == "none":
        for part in ("attention", "block"):
            yield f"model.architecture.recompute {part}", {"recompute": part}, {}, exact
    if run.settings["precision"] == "32-true":
        yield "trainer.precision bf16-mixed", {}, {"precision": "bf16-mixed"}, "changes the numerics"


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


def _muon(config: ModelConfig, work: int) -> Saving:
    """One moment instead of two for the matrices inside the layers, for the arithmetic of the orthogonalization."""
    shapes = [(min(shape), max(shape)) for shape in Sizes.of(config).matrices().values()]
    extra = sum(5 * (4 * low**2 * high + 2 * low**3) for low, high in shapes)  # five Newton-Schulz steps
    note, setting = "changes the training, tune the learning rate", "model.optimizer lightning_llm.optim.MuonAdamW"
    return Saving(setting, 4 * hidden_matrix_parameters(config), config.num_hidden_layers * extra / work, note)


def _advice(savings: list[Saving]) -> list[str]:
    if not savings:
        return ["No setting of the model or the batch would save memory."]
    lines = ["The cheapest settings to change, by estimate (least arithmetic per byte first):"]
    for place, saving in enumerate(savings, 1):
        extra, size = saving.estimated_extra_work, mib(saving.estimated_bytes_saved)
        price = f"{extra:+.1%} arithmetic" if extra else "no more arithmetic"
        lines.append(f"  {place}. {saving.setting}: saves {size} MiB, {price}; {saving.note}")
    return lines


def _run_of(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Run | None:
    config = getattr(pl_module, "architecture", None)
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(config, ModelConfig) or ids is None or ids.dim() != 2:
        return None
    precision = str(trainer.precision)
    settings = {
        "rows": ids.shape[0],
        "context_length": ids.shape[1],
        "loss_chunks": getattr(pl_module, "loss_chunks", None),
        "precision": f"bf{precision}" if precision.startswith("16") else precision,
        "device": "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu",
        "mlp": None,
    }
    return Run(config, type(trainer.optimizers[0]).__name__ if trainer.optimizers else "", settings)


def _rendered(blocks: list[Any]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False)
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, str))
    return out.getvalue().rstrip()
