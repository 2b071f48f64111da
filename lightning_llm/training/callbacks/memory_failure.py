"""What is said when memory has run out: what was live, and which settings would have helped."""

import io
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_llm.io.console import Console
from lightning_llm.measure.attribution import AttributedMeter
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.callbacks.memory_report import Report, mib, step_report, table_of
from lightning_llm.training.callbacks.memory_savings import Run, Saving, cheapest, estimate

WIDTH = 110


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
        batch: The micro-batch at hand, if any.
        metered: The meter of the step, if the step was sampled.
        counters: Bytes by phase, from the gauge.
        step: Which one failed.
        top: Modules to list.
    """
    report: Report = {"step": step, "rank": trainer.global_rank, "counters": counters}
    run = _run_of(trainer, pl_module, batch)
    found = None if run is None else estimate(run)
    where = ""
    if metered is not None:
        report |= {"source": "measured", **step_report(metered.timeline(), top)}
        if metered.failed_in is not None:
            where = f", in {metered.failed_in[0]} ({metered.failed_in[1]})"
            report["failed_in"] = list(metered.failed_in)
        title = "Live at the highest point of the step, measured"
    else:
        held = AttributedMeter(pl_module, trainer.optimizers, batch)
        held.close()
        report |= {"source": "held: counted; activations and temporary: not metered in this step"}
        report |= step_report(held.timeline(), top)
        title = "Live for certain: what is held between steps (this step was not sampled)"
    blocks: list[Any] = [f"Out of memory in step {step} of rank {trainer.global_rank}{where}."]
    if highest := max(counters.values(), default=0):
        blocks.append(f"In use at most, by the {'allocator' if _is_cuda(trainer) else 'system'}: {mib(highest)} MiB.")
    blocks.append(table_of(report["peak"], title, top))
    if found is not None:
        if metered is None:
            blocks.append(
                table_of(found.current["peak"], "At the peak of a whole step, estimated, without optimiser state", top)
            )
            report["estimated"] = found.current
        savings = cheapest(found.savings)
        report["settings"] = [saving.as_dict() for saving in savings]
        blocks += _advice(savings)
    return _rendered(blocks), report


def _advice(savings: list[Saving]) -> list[str]:
    if not savings:
        return ["No setting of the model or the batch would save memory."]
    lines = ["The cheapest settings to change, by estimate (a run without storage; least time for a byte first):"]
    for place, saving in enumerate(savings, 1):
        price = f"{saving.extra_work:+.1%} arithmetic" if saving.extra_work else "no more arithmetic"
        lines.append(f"  {place}. {saving.setting}: saves {mib(saving.bytes)} MiB, {price}; {saving.note}")
    return lines


def _run_of(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Run | None:
    architecture = getattr(pl_module, "architecture", None)
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(architecture, ModelConfig) or ids is None or ids.dim() != 2:
        return None
    optimizer = type(trainer.optimizers[0]).__name__ if trainer.optimizers else ""
    return Run(
        architecture=architecture.to_dict(),
        batch=ids.shape[0],
        seq=ids.shape[1],
        loss_chunks=getattr(pl_module, "loss_chunks", None),
        precision=str(trainer.precision),
        optimizer=optimizer,
    )


def _is_cuda(trainer: Trainer) -> bool:
    return bool(trainer.strategy.root_device.type == "cuda")


def _rendered(blocks: list[Any]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False)
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, str))
    return out.getvalue().rstrip()
