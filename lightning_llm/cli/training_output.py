"""Output of a training command: checks, a summary at its start; results, a sample and next commands at its end."""

import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.markup import escape
from rich.table import Table

from lightning_llm.cli.custom_classes import is_custom_class
from lightning_llm.data.datamodule import TokenDataModule, data_attribute, tokenizer_of
from lightning_llm.generation import generate
from lightning_llm.io.console import Console
from lightning_llm.io.options import raise_all
from lightning_llm.io.shell import shell_option, shell_path
from lightning_llm.io.trust import TRUST_CODE, path_of
from lightning_llm.runs.directory import BEST, run_dir_of
from lightning_llm.training.callbacks.progress import StatusFile
from lightning_llm.training.callbacks.run_checkpoints import RunCheckpoints
from lightning_llm.training.callbacks.summary_file import callback_of, write_summary
from lightning_llm.training.callbacks.throughput import TrainingLog
from lightning_llm.training.distributed import is_sharded
from lightning_llm.training.metrics import TRAIN_LOSS_EVAL, VAL_LOSS
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.preflight import Check
from lightning_llm.training.run_length import total_steps

COMPILES = "the first step and the first validation wait until the {} compiled (mode {})"
SAMPLE_TOKENS = 200
BLANK_LINES = re.compile(r"\n([^\S\n]*\n)+")
LONGEST_PROMPT = 20  # characters: some languages put no spaces between words


def print_checks(checks: Sequence[Check]) -> None:
    """The table of ``lightning-llm check``.

    Raises:
        ValueError: With every error found, if any.
    """
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row("[red]error[/]" if check.problem else "ok", f"[bold]{check.name}", escape(check.finding))
    _console().print(table)
    raise_all(check.problem for check in checks if check.problem)
    print("ok")


class TrainingSummary(Callback):
    """Prints model, data and steps before the first step, and the results at the end."""

    def __init__(self) -> None:
        self.console = _console()
        self._started = time.perf_counter()
        self._first_step = 0
        self._has_trained = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()
        self._first_step = trainer.global_step
        self._has_trained = True
        run = run_dir_of(trainer)  # a broadcast: every process must ask
        if not trainer.is_global_zero:
            return
        rows = {
            "model": _describe_model(pl_module),
            "data": _describe_data(trainer.datamodule),  # type: ignore[attr-defined]
            "steps": _describe_steps(trainer),
            "device": _describe_device(trainer),
        }
        if mfu := _describe_peak(trainer):
            rows["mfu"] = mfu
        if getattr(pl_module, "plan", None):
            rows["plan"] = str(pl_module.budget)
        if mode := getattr(pl_module, "compile_mode", None):
            rows["compiler"] = COMPILES.format("model is" if pl_module.compile_scope == "model" else "blocks are", mode)
        rows["run"] = str(run or f"{'barebones' if trainer.barebones else 'fast_dev_run'}: nothing is written")
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(f"[bold]{name}", escape(value))
        self.console.print(table)
        if self._first_step:
            self.console.print(f"Resumed from step {self._first_step}: {escape(str(trainer.ckpt_path))}")

    def finish(self, trainer: Trainer, model: LightningModule, data: Any) -> None:
        """Validate the last step if needed; print the results, and write them as ``summary.json``."""
        seconds = time.perf_counter() - self._started
        steps = trainer.global_step
        if trainer.barebones:  # no metrics and no run directory
            self.console.print(f"\n[bold]result[/]  {steps - self._first_step} steps in {seconds:.1f} s")
            return
        if not self._has_trained:  # it resumed from its last step, where Lightning starts nothing
            self._first_step = steps
            if trainer.is_global_zero:
                resumed = f"Resumed from step {steps}: {escape(str(trainer.ckpt_path))}; " if trainer.ckpt_path else ""
                self.console.print(f"{resumed}no steps are left")
        self._validate_last_step(trainer, model, data)
        run = run_dir_of(trainer)  # a broadcast: every process must ask
        summary = write_summary(trainer, model, data, run)
        if not trainer.is_global_zero:
            return
        newest = Path(summary["checkpoint"]) if summary["checkpoint"] else None
        self._print_results(run, newest, summary, seconds)
        if isinstance(model, LanguageModel) and not is_sharded(model):  # no process could generate alone
            print_sample(self.console, model, data)
        if run is not None:
            self._print_next(run, model, data, is_saved=newest is not None)

    def _validate_last_step(self, trainer: Trainer, model: LightningModule, data: Any) -> None:
        checkpoints = callback_of(trainer, RunCheckpoints)
        saved_step = -1 if checkpoints is None else checkpoints.validated_step  # also of a run that this one resumed
        is_validated = trainer.global_step in (callback_of(trainer, StatusFile).validated_step, saved_step)
        if (not is_validated or not self._has_trained) and is_overridden("val_dataloader", data):
            loggers = trainer.loggers
            trainer.loggers = [] if is_validated else loggers  # the curve already has it
            trainer.validate(model, data, verbose=False)
            trainer.loggers = loggers

    def _print_next(self, run: Path, model: LightningModule, data: Any, *, is_saved: bool) -> None:
        folder = escape(shell_path(run))
        self.console.print("\n[bold]next[/]")
        if is_saved and tokenizer_of(data) is not None:
            custom = getattr(getattr(model, "architecture", None), "custom_parts", ())
            options = f"{_prompt_option(model, data)} --max-new-tokens 200{f' {TRUST_CODE}' if custom else ''}"
            self.console.print(f"  lightning-llm generate {folder}{escape(options)}")
        if is_saved:
            self.console.print(f"  lightning-llm validate --ckpt_path {folder}")
        self.console.print(f"  lightning-llm dashboard {escape(shell_path(run.parent))}")

    def print_metrics(self, trainer: Trainer) -> None:
        """The results of an evaluation: one line per metric."""
        if trainer.is_global_zero:
            for name, value in trainer.callback_metrics.items():
                self.console.print(f"{escape(name):<24}{float(value):.6f}")

    def _print_results(self, run: Path | None, newest: Path | None, summary: dict[str, Any], seconds: float) -> None:
        bits = summary["bits_per_byte"]
        results = ["not validated"]
        if summary[VAL_LOSS] is not None:
            loss = summary[VAL_LOSS]
            perplexity = summary["perplexity"]
            results = [f"validation loss {loss:.4f}{'' if perplexity is None else ' nats/token'}"]
            results += [] if perplexity is None else [f"perplexity {perplexity:.2f}"]
        results += [f"{bits:.4f} bits/byte"] if bits is not None and math.isfinite(bits) else []
        results += [f"training text {summary[TRAIN_LOSS_EVAL]:.4f}"] if summary[TRAIN_LOSS_EVAL] is not None else []
        done = summary["steps"] - self._first_step
        self.console.print(f"\n[bold]result[/]  {', '.join(results)}; {done} steps in {seconds:.1f} s")
        if newest is not None:
            best = f" (best: {BEST})" if newest.with_name(BEST).exists() else ""
            self.console.print(f"[bold]saved[/]   {escape(str(newest))}{best}")
        if run is not None:
            self.console.print(f"[bold]log[/]     {escape(str(run))}")


def print_sample(console: Console, model: LightningModule, data: Any) -> None:
    """Print a sample, or a line that says why there is none: whatever goes wrong here, the model is trained and saved.

    Args:
        console: Where it is printed.
        model: With ``transformer`` or as ``generate`` takes it.
        data: The data module that the model was trained on.
    """
    was_training = model.training
    try:
        if tokenizer_of(data) is None:
            raise ValueError("the data have no tokenizer to print text")
        text = _sample(model.eval(), data)
    except Exception as error:
        console.print(f"\n[bold]no sample[/]  {escape(' '.join(str(error).split()) or type(error).__name__)}")
    else:
        console.print("\n[bold]a sample[/]")
        shown = BLANK_LINES.sub("\n\n", text.strip("\n"))
        console.print(escape(shown) if shown.strip() else "only blank lines")
    finally:
        model.train(was_training)  # a notebook may continue training: Lightning leaves the mode as it finds it


def _sample(model: LightningModule, data: Any) -> str:
    tokenizer = data.tokenizer
    prompt = []
    with suppress(ValueError):  # the tokenizer does not have it
        prompt = tokenizer.encode_prompt("\n")
    prompt = prompt or [int(data.store.tokens("train")[0]) if isinstance(data, TokenDataModule) else 0]
    generator = torch.Generator(model.device).manual_seed(0)
    settings: dict[str, Any] = {"max_new_tokens": SAMPLE_TOKENS, "temperature": 0.8, "top_k": 50}
    (ids,) = generate(model, torch.tensor([prompt], device=model.device), generator=generator, **settings)
    # the model's vocabulary may be rounded up
    known = [number for number in ids.tolist() if number < tokenizer.vocab_size]
    return str(tokenizer.decode(tokenizer.without_begin_of(known)))


def _prompt_option(model: Any, data: Any) -> str:
    """The first word of the validation text as a prompt: the tokenizer has its characters. Of a long one, the start."""
    ids = data.store.tokens("val")[:SAMPLE_TOKENS].tolist() if isinstance(data, TokenDataModule) else []
    text = data.tokenizer.decode(ids).replace("\ufffd", " ")  # a character may be cut at either end
    words = "".join(character if character.isprintable() else " " for character in text).split()
    word = next((word for word in words if word != "--"), text[:1])[:LONGEST_PROMPT]  # argparse drops "--"
    while word and len(data.tokenizer.encode_prompt(word)) > model.transformer.config.max_position_embeddings:
        word = word[:-1]
    return f" {shell_option('--prompt', word)}" if word else ""


def _console() -> Console:
    return Console(markup=True, soft_wrap=True, highlight=False)


def _describe_model(model: Any) -> str:
    parameters = dict(model.named_parameters())
    if not isinstance(model, LanguageModel):
        return f"{path_of(type(model))}: {sum(p.numel() for p in parameters.values()):,} parameters"
    config = model.transformer.config
    embedding = sum(p.numel() for name, p in parameters.items() if "embed" in name or "lm_head" in name)
    name = f"{path_of(type(model))}: " if is_custom_class(type(model)) else ""
    count = f"{sum(p.numel() for p in parameters.values()):,} parameters ({embedding:,} in embedding and head)"
    size = f"{config.num_hidden_layers} layers, {config.hidden_size} wide, {config.num_attention_heads} heads"
    return f"{name}{count}: {size}, {config.mlp}, vocabulary {config.vocab_size}"


def _describe_data(data: Any) -> str:
    if not isinstance(data, TokenDataModule):
        return path_of(type(data))
    lines = []
    shares = sum(source.weight for source in data.sources)
    for source in data.sources:
        train, val = (source.store.splits[split].tokens for split in ("train", "val"))
        share = f"{source.weight / shares:.0%} from " if len(data.sources) > 1 else ""
        lines.append(f"{share}{source.store.path}: {train:,} training and {val:,} validation tokens")
    return "\n".join(lines)


def _describe_steps(trainer: Trainer) -> str:
    data = trainer.datamodule  # type: ignore[attr-defined]
    accumulation = f" in {n} micro-batches" if (n := trainer.accumulate_grad_batches) > 1 else ""
    is_token_data = isinstance(data, TokenDataModule)
    tokens = data_attribute(data, "tokens_per_step")
    size = "" if tokens is None else f"of {tokens:,} tokens"
    size += f" ({data.global_batch_size} × {data.context_length}{accumulation})" if is_token_data else accumulation
    if (steps := total_steps(trainer)) is None:
        return f"{size}, until max_time or a signal ends the run".removeprefix(", ")
    return f"{steps:,} {size}" + (f": {steps / data.steps_per_epoch:.2f} epochs" if is_token_data else "")


def _describe_device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    reason = getattr(trainer, "precision_reason", "as asked for")
    return f"{trainer.world_size} × {device.type} ({name}), precision {trainer.precision} ({reason})"


def _describe_peak(trainer: Trainer) -> str:
    log = callback_of(trainer, TrainingLog)
    if trainer.strategy.root_device.type == "cpu" and getattr(log, "peak_tflops", None) is None:
        return ""  # no peak of a CPU is known, and nobody asks for it
    return "not asked for" if log is None or log.utilization is None else str(log.utilization.note)
