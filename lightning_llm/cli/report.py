"""What a run says for itself: a summary at its start; results, a sample and the next commands at its end."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.markup import escape
from rich.table import Table

from lightning_llm.checkpoints.reading import BEST
from lightning_llm.checkpoints.run_directory import FINISHED, run_dir_of, write_status
from lightning_llm.cli.runs import SUMMARY
from lightning_llm.cli.sample import print_sample
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.callbacks.checkpoints import RunCheckpoints
from lightning_llm.training.callbacks.memory import MemoryProfiler
from lightning_llm.training.callbacks.throughput import TrainingLog
from lightning_llm.training.distributed import is_sharded
from lightning_llm.training.execution import record
from lightning_llm.training.schedule import total_steps

COMPILES = "the first step and the first validation wait until the blocks are compiled (mode {})"


class RunReport(Callback):
    """Prints model, data and steps before the first step, and knows what to say at the end."""

    def __init__(self) -> None:
        self.console = Console(markup=True, soft_wrap=True, highlight=False)
        self._started = time.perf_counter()
        self._first_step = 0
        self._has_trained = False
        self._validated_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The summary at the start."""
        self._started, self._first_step, self._has_trained = time.perf_counter(), trainer.global_step, True
        run = run_dir_of(trainer)  # a broadcast: every process must ask
        if not trainer.is_global_zero:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        table = Table.grid(padding=(0, 2))
        for name, value in (
            ("model", _describe_model(pl_module)),
            ("data", _describe_data(data)),
            ("steps", _describe_steps(trainer)),
            ("device", _describe_device(trainer)),
            ("mfu", _describe_peak(trainer)),
            *((("plan", pl_module.budget),) if getattr(pl_module, "plan", None) else ()),
            *((("compiler", COMPILES.format(mode)),) if (mode := getattr(pl_module, "compile_mode", None)) else ()),
            ("run", run or f"{'barebones' if trainer.barebones else 'fast_dev_run'}: nothing is written"),
        ):
            table.add_row(f"[bold]{name}", escape(str(value)))
        self.console.print(table)
        if self._first_step:
            self.console.print(f"Resumed from step {self._first_step}: {escape(str(trainer.ckpt_path))}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the step: at the end of a run it is not validated twice."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def finish(self, trainer: Trainer, model: LightningModule, data: Any) -> None:
        """The results: printed, and written as ``summary.json`` into the run directory."""
        seconds = time.perf_counter() - self._started
        if trainer.barebones:  # no metrics and no run directory
            self.console.print(f"\n[bold]result[/]  {trainer.global_step - self._first_step} steps in {seconds:.1f} s")
            return
        checkpoints = next((c for c in trainer.callbacks if isinstance(c, RunCheckpoints)), None)  # type: ignore[attr-defined]
        steps = trainer.global_step
        known = -1 if checkpoints is None else checkpoints.validated_step  # also of a run that this one resumed
        is_validated = steps in (self._validated_step, known)
        if not self._has_trained:  # it went on from its last step, where Lightning starts nothing
            self._first_step = steps
            if trainer.is_global_zero:
                resumed = f"Resumed from step {steps}: {escape(str(trainer.ckpt_path))}; " if trainer.ckpt_path else ""
                self.console.print(f"{resumed}no step is left to do")
        if not is_validated or not self._has_trained:
            loggers = trainer.loggers
            trainer.loggers = [] if is_validated else loggers  # it is in the curve already
            trainer.validate(model, data, verbose=False)
            trainer.loggers = loggers
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        run = run_dir_of(trainer)  # a broadcast: every process must ask
        if not trainer.is_global_zero:
            return
        profiler = next((c for c in trainer.callbacks if isinstance(c, MemoryProfiler)), None)  # type: ignore[attr-defined]
        newest = None if checkpoints is None else checkpoints.newest
        summary = {
            "val_loss": metrics.get("val_loss"),  # none with trainer.limit_val_batches 0
            "perplexity": metrics.get("val_perplexity"),
            "bits_per_byte": metrics.get("val_bits_per_byte"),
            "train_loss": metrics.get("train_loss_eval"),
            "best_val_loss": None if checkpoints is None else checkpoints.best_loss,
            "steps": steps,
            "tokens": steps * data.tokens_per_step,
            "seconds": round(seconds, 3),
            **record(trainer),
            "peak_memory_gib": None if profiler is None else profiler.highest_gib,
            "checkpoint": None if newest is None else str(newest),
        }
        if run is not None:
            write_json(run / SUMMARY, summary)
            write_status(run, FINISHED, step=steps, val_loss=summary["val_loss"])
        self._print_results(run, newest, summary)
        if not is_sharded(model):  # no process could generate alone
            print_sample(self.console, model, data)
        if run is not None:
            self._print_next_commands(run, newest)

    def print_metrics(self, trainer: Trainer) -> None:
        """What an evaluation found: a line for each metric."""
        if trainer.is_global_zero:
            for name, value in trainer.callback_metrics.items():
                self.console.print(f"{escape(name):<24}{float(value):.6f}")

    def _print_results(self, run: Path | None, newest: Path | None, summary: dict[str, Any]) -> None:
        bits = summary["bits_per_byte"]
        words = ["not validated"]
        if summary["val_loss"] is not None:
            words = [f"validation loss {summary['val_loss']:.4f} nats/token", f"perplexity {summary['perplexity']:.2f}"]
        words += [f"{bits:.4f} bits/byte"] if bits is not None and math.isfinite(bits) else []
        words += [f"training text {summary['train_loss']:.4f}"] if summary["train_loss"] is not None else []
        done = summary["steps"] - self._first_step
        self.console.print(f"\n[bold]result[/]  {', '.join(words)}; {done} steps in {summary['seconds']:.1f} s")
        if newest is not None:
            best = newest.with_name(BEST)
            self.console.print(
                f"[bold]saved[/]   {escape(str(newest))}" + (f" (best: {BEST})" if best.exists() else "")
            )
        if run is not None:
            self.console.print(f"[bold]log[/]     {escape(str(run))}")

    def _print_next_commands(self, run: Path, newest: Path | None) -> None:
        self.console.print("\n[bold]next[/]")
        if newest is not None:
            self.console.print(f'  lightning-llm generate {escape(str(run))} --prompt "…" --max-new-tokens 200')
            self.console.print(f"  lightning-llm validate --ckpt_path {escape(str(run))}")
        self.console.print(f"  lightning-llm dashboard {escape(str(run.parent))}")


def _describe_model(model: LightningModule) -> str:
    config: ModelConfig = model.transformer.config  # type: ignore[assignment, union-attr]
    total = sum(p.numel() for p in model.parameters())
    embedding = sum(p.numel() for name, p in model.named_parameters() if "embed" in name or "lm_head" in name)
    return (
        f"{total:,} parameters ({embedding:,} in embedding and head): {config.num_hidden_layers} layers, "
        f"{config.hidden_size} wide, {config.num_attention_heads} heads, {config.mlp}, vocabulary {config.vocab_size}"
    )


def _describe_data(data: Any) -> str:
    lines, shares = [], sum(source.weight for source in data.sources)
    for source in data.sources:
        train, val = (source.store.splits[split].tokens for split in ("train", "val"))
        share = f"{source.weight / shares:.0%} from " if len(data.sources) > 1 else ""
        lines.append(f"{share}{source.store.path}: {train:,} training and {val:,} validation tokens")
    return "\n".join(lines)


def _describe_steps(trainer: Trainer) -> str:
    data = trainer.datamodule  # type: ignore[attr-defined]
    accumulation = f" in {n} micro-batches" if (n := trainer.accumulate_grad_batches) > 1 else ""
    size = f"of {data.tokens_per_step:,} tokens ({data.global_batch_size} × {data.context_length}{accumulation})"
    steps = total_steps(trainer)
    if steps is None:
        return f"{size}, until max_time or a signal ends the run"
    return f"{steps:,} {size}: {steps / data.steps_per_epoch:.2f} epochs"


def _describe_device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    reason = getattr(trainer, "precision_reason", "as asked for")
    return f"{trainer.world_size} × {device.type} ({name}), precision {trainer.precision} ({reason})"


def _describe_peak(trainer: Trainer) -> str:
    log = next((c for c in trainer.callbacks if isinstance(c, TrainingLog)), None)  # type: ignore[attr-defined]
    return "not asked for" if log is None or log.utilisation is None else log.utilisation.note
