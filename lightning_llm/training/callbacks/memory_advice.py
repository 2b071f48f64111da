"""The report of a step that ran out of memory: what was live, and by the accounting which settings would save most."""

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from lightning_llm.accounting.counts import Dimensions, hidden_matrix_parameters, step_flops
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.accounting.memory import StepMemory, step_memory
from lightning_llm.accounting.parts import parts_to_measure
from lightning_llm.accounting.step_settings import StepSettings, item_sizes
from lightning_llm.io.console import Console
from lightning_llm.io.units import short_mib
from lightning_llm.measure.attribution import AttributedMeter
from lightning_llm.measure.timeline import MemorySample
from lightning_llm.model.config import SWIGLUS, ModelConfig
from lightning_llm.optim.catalog import STATE_BYTES
from lightning_llm.training.callbacks.memory_breakdown import Breakdown, point_breakdown, step_breakdown, table_of
from lightning_llm.training.environment import settings_of

HALVING_COSTS = 0.02  # assumed: the same arithmetic in smaller pieces, and gradients added up
NOT_WORTH_NAMING = 0.005  # of the peak
EXACT, OPTIMIZED = "same results to rounding", "memory_optimized_swiglu"


class StepCase(NamedTuple):
    """Settings that a step's memory depends on."""

    config: ModelConfig
    optimizer: str
    step: StepSettings

    def change(self, architecture: dict[str, Any] | None = None, **settings: Any) -> "StepCase":
        """The case with other options; a ValueError for a combination that the model refuses."""
        config = dataclasses.replace(self.config, **architecture or {})
        return self._replace(config=config, step=dataclasses.replace(self.step, **settings))

    def memory(self) -> StepMemory:
        """Memory of a step, without optimizer state."""
        return step_memory(self.config, self.step.single_process)

    def work(self) -> int:
        """FLOPs of a step, recomputation included, per row."""
        length, measured = self.step.context_length, self.step.measured
        return step_flops(self.config, tokens=length, context_length=length, measured=measured).hardware


class Saving(NamedTuple):
    """A setting, the bytes by which it lowers the peak, its extra arithmetic as a fraction of the step's, a remark."""

    setting: str
    estimated_bytes_saved: int
    estimated_extra_work: float
    note: str


class MemoryAdvice(NamedTuple):
    """The peak of the step as it is (a report), what each setting would save, and what the estimate leaves out."""

    current: Breakdown
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
) -> tuple[str, Breakdown]:
    """The report as text and as plain values; settings are judged only for a ``LanguageModel``.

    ``metered`` is the meter of the step, if the step was sampled; ``counters`` are bytes by phase, from the gauge.
    """
    report: Breakdown = {"step": step, "rank": trainer.global_rank, "counters": counters}
    where = ""
    meter = metered
    source = "measured"
    title = "Live at the peak of the step, measured"
    if meter is None:
        meter = AttributedMeter(pl_module, trainer.optimizers, batch)
        meter.close()
        source = "held: counted; activations and temporary: not metered in this step"
        title = "Live for certain: what is held between steps (this step was not sampled)"
    elif meter.failed_in is not None:
        where = f", in {meter.failed_in[0]} ({meter.failed_in[1]})"
        report["failed_in"] = list(meter.failed_in)
    report |= {"source": source, **step_breakdown(meter.timeline(), top)}
    blocks: list[Any] = [f"Out of memory in step {step} of rank {trainer.global_rank}{where}."]
    if highest := max(counters.values(), default=0):
        counter = "allocator" if trainer.strategy.root_device.type == "cuda" else "system"
        blocks.append(f"Peak in use, by the {counter}: {short_mib(highest)} MiB.")
    blocks.append(table_of(report["peak"], title, top))
    case = _case_of(trainer, pl_module, batch)
    if case and (prediction := advise(case)):
        if metered is None:
            title = "At the peak of a whole step, estimated, without optimizer state"
            blocks.append(table_of(prediction.current["peak"], title, top))
            report["estimated"] = prediction.current
        savings = cheapest(prediction.savings)
        report["settings"] = [saving._asdict() for saving in savings]
        blocks += [*prediction.remarks, *_advice(savings)]
    console = Console(file=(out := io.StringIO()), width=110, highlight=False)
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, str))
    return out.getvalue().rstrip(), report


def advise(case: StepCase) -> MemoryAdvice | None:
    """The step's peak by the accounting, and what settings would save; ``None`` for what it does not cover."""
    remarks = []
    unknown = parts_to_measure(case.config)
    try:
        if case.step.strategy != "ddp" and case.step.world_size > 1:
            remarks.append("The estimate counts whole parameters, of which FSDP2 leaves each process a share.")
        if unknown:
            case = case.change(measured=measure_parts(case.config, case.step.precision, case.step.context_length))
        memory = case.memory()
        work = case.work()
    except (ValueError, RuntimeError):
        return None
    savings = []
    for setting, architecture, changes, note in candidates(case):
        with contextlib.suppress(ValueError):  # a combination that the model refuses
            changed = case.change(architecture, **changes)
            saved = memory.peak - changed.memory().peak
            if saved > NOT_WORTH_NAMING * memory.peak:
                extra = HALVING_COSTS if "rows" in changes else changed.work() / work - 1
                savings.append(Saving(setting, saved, extra, note))
    if case.optimizer == "AdamW" and not unknown and (muon := _muon(case, work)).estimated_bytes_saved > 0:
        savings.append(muon)
    table = {(category, part or "model"): size for (category, part), size in memory.at_peak.items()}
    saved_table = {("activations", part): size for part, size in memory.saved.items()}
    points = {"peak": MemorySample(0, memory.peak_point, table), "saved": MemorySample(0, "backward", saved_table)}
    return MemoryAdvice({name: point_breakdown(point) for name, point in points.items()}, savings, remarks)


def cheapest(savings: Sequence[Saving], most: int = 3) -> list[Saving]:
    """Least arithmetic per byte first, among those that cost none the largest; of each option the cheapest value."""

    def price(saving: Saving) -> tuple[float, int]:
        size = saving.estimated_bytes_saved
        return max(0.0, saving.estimated_extra_work) / size, -size

    options: dict[str, Saving] = {}
    for saving in sorted(savings, key=price):
        options.setdefault(saving.setting.rpartition(" ")[0], saving)
    return list(options.values())[:most]


def candidates(case: StepCase) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """Settings to try, each with its changes to the architecture and to the settings of the step, and a remark."""
    config = case.config
    rows = case.step.rows
    chunks = case.step.loss_chunks
    exact = EXACT
    halved = {"rows": rows // 2, "accumulation": 2 * case.step.accumulation}
    tokens = rows * case.step.context_length
    if rows > 1:
        yield f"data.micro_batch_size {rows // 2}", {}, halved, "same global batch, accumulated"
    if chunks == 0:
        yield "model.loss_chunks null", {}, {"loss_chunks": None}, exact
    elif chunks is not None or tokens > 512:
        more = max(2 * (chunks or 1), tokens // 256)
        yield f"model.loss_chunks {more}", {}, {"loss_chunks": more}, exact
    if config.mlp in SWIGLUS:
        is_optimized = config.mlp == OPTIMIZED
        option = "checkpoint_level" if is_optimized else f"mlp {OPTIMIZED} with checkpoint_level"
        for level in range(min(config.checkpoint_levels) + 1 if is_optimized else 0, 3):
            yield f"model.architecture.{option} {level}", {"mlp": OPTIMIZED, "checkpoint_level": level}, {}, exact
    if config.recompute == "none":
        for part in ("attention", "block"):
            yield f"model.architecture.recompute {part}", {"recompute": part}, {}, exact
    if case.step.precision == "32-true":
        yield "trainer.precision bf16-mixed", {}, {"precision": "bf16-mixed"}, "changes the numerics"


def _muon(case: StepCase, work: int) -> Saving:
    """One moment of the matrices' dtype instead of two of AdamW's, for the arithmetic of an orthogonalization a step.

    ``work`` is that of one row. Processes that shard the matrices share both.
    """
    config, step = case.config, case.step
    itemsize = item_sizes(step.precision)[0]
    sharers = step.world_size if step.strategy != "ddp" else 1
    saved = (2 * (step.state_itemsize or itemsize) - itemsize) * hidden_matrix_parameters(config) // sharers
    matrices = Dimensions.of(config).matrices().values()
    shapes = [(min(shape), max(shape)) for shapes_of_part in matrices for shape in shapes_of_part.values()]
    extra = sum(5 * (4 * low**2 * high + 2 * low**3) for low, high in shapes)  # five Newton-Schulz steps
    note = "changes the training, tune the learning rate"
    setting = "model.optimizer lightning_llm.optim.MuonAdamW"
    extra_work = config.num_hidden_layers * extra / sharers / (step.rows * step.accumulation * work)
    return Saving(setting, saved, extra_work, note)


def _advice(savings: list[Saving]) -> list[str]:
    if not savings:
        return ["No setting of the model or the batch would save memory."]
    lines = ["The cheapest settings to change, by estimate (least arithmetic per byte first):"]
    for place, (setting, size, extra, note) in enumerate(savings, 1):
        price = f"{extra:+.1%} arithmetic" if extra else "no more arithmetic"
        lines.append(f"  {place}. {setting}: saves {short_mib(size)} MiB, {price}; {note}")
    return lines


def _case_of(trainer: Trainer, pl_module: LightningModule, batch: Any) -> StepCase | None:
    config = getattr(pl_module, "architecture", None)
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(config, ModelConfig) or ids is None or ids.dim() != 2:
        return None
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    step = settings_of(
        trainer,
        rows=ids.shape[0],
        context_length=ids.shape[1],
        loss_chunks=getattr(pl_module, "loss_chunks", None),
        accumulation=trainer.accumulate_grad_batches,
        document_mask="documents" in batch,
        state_itemsize=STATE_BYTES.get(optimizer.defaults.get("state_dtype")) if optimizer else None,
    )
    if step.precision.startswith("16"):  # float16 has as many bytes as bfloat16, which the accounting covers
        step = dataclasses.replace(step, precision=f"bf{step.precision}")
    return StepCase(config, type(optimizer).__name__ if optimizer else "", step)
