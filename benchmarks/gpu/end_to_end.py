"""Part c: ``fit`` from end to end: Shakespeare, resuming, FSDP2, saving, the profiler, generation.

The text is ``tinyshakespeare.txt`` in the folder of inputs.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, generate, runs
from benchmarks.charts import LOWER, Measure, bar_plot
from benchmarks.commands import ROOT
from benchmarks.digest import digest
from benchmarks.gpu.runner import Machine, Part, Task, with_target
from benchmarks.rows import Row, columns
from benchmarks.runs import fit
from lightning_llm.io.units import GIB

CONFIG = "shakespeare-char-gpu.yaml"
COMPILED = "--model.compile_mode=default"
TARGETS = {"best_val_loss": 1.47, "training_s": 60.0}
TOY = ["hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2", "max_position_embeddings=16"]


def tasks(machine: Machine) -> list[Task]:
    """The measurements, by priority."""
    steps = 4 if machine.dry_run else 200
    shorter = ["--trainer.max_steps=2000", COMPILED]
    asynchronous = {"asynchronous": True, "every_n_steps": steps // 4}
    sampled = {"every_n_steps": steps // 2, **({} if machine.dry_run else {"snapshot_at": steps // 2})}
    fsdp = [f"--config={ROOT / 'configs' / 'fsdp.yaml'}", "--trainer.devices=1", f"--trainer.max_steps={steps}"]
    saving = machine.request(checkpoint.BENCH, "1" if machine.dry_run else "124", "float32", rounds=5)

    def task(name: str, seconds: float, run: Callable[..., Iterator[Row]], *given: Any, must: bool = False) -> Task:
        return Task(name, seconds, partial(run, machine, name, *given), must)

    return [
        task("2,000 steps, compiled", 100, _train, shorter, TARGETS, must=True),
        task("resume, deterministic", 60, _resume, steps, ["--trainer.deterministic=true"], must=True),
        task("resume", 60, _resume, steps, []),
        task("FSDP2, one process", 30, _train, fsdp),
        task("asynchronous saving", 30, _callback, steps, "RunCheckpoints", asynchronous, must=True),
        task("memory profiler", 30, _callback, steps, "MemoryProfiler", sampled, must=True),
        Task("saving", 40, partial(checkpoint.run, saving), must=True),
        Task("generation", 60, partial(_generation, machine)),
        task("the config as it is", 150, _train, [], TARGETS),
    ]


def _words(machine: Machine, words: Sequence[str]) -> list[str]:
    """The options of ``fit``: in a dry run, of a tiny model and few steps."""
    text = machine.inputs / "tinyshakespeare.txt"
    if not text.is_file():
        raise FileNotFoundError(f"{text} is not there: it is the text to train on")
    options = [f"--config={ROOT / 'configs' / CONFIG}", f"--data.path={text.absolute()}", "--seed_everything=1", *words]
    if not machine.dry_run:
        return [*options, "--trainer.accelerator=gpu"]
    sizes = [f"--model.architecture.{size}" for size in TOY]
    few = ["--data.context_length=16", "--data.global_batch_size=4", "--trainer.val_check_interval=2"]
    few += ["--trainer.limit_val_batches=2", "--trainer.max_steps=4", "--trainer.accelerator=cpu"]
    return [*(word for word in options if word != COMPILED), *sizes, *few]


def _row(machine: Machine, name: str, summary: dict[str, Any], seconds: float, **fields: Any) -> Row:
    facts = {name: summary.get(name) for name in ("best_val_loss", "val_loss", "steps", "attention")}
    facts |= {"training_s": summary["seconds"], "peak_gib": summary["peak_memory_gib"], "dtype": summary["precision"]}
    speed = summary["tokens"] / summary["seconds"]
    return machine.row(name, [seconds], shape=CONFIG, tokens_per_s=speed, **facts, **fields)


def _train(machine: Machine, name: str, words: Sequence[str], targets: dict[str, float] | None = None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        yield _row(machine, name, *fit(_words(machine, words), folder), targets=targets)


def _resume(machine: Machine, name: str, steps: int, words: Sequence[str]) -> Iterator[Row]:
    """Whether a run that resumes from half of its steps ends with the bits of the whole run."""
    half = steps // 2
    options = _words(machine, [*words, f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={half}"])
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        whole, _ = fit(options, folder)
        (saved,) = Path(folder).glob("runs/*/*/checkpoints")
        bits = digest(saved / f"step-{steps:08}.ckpt")
        resumed, seconds = fit([*options, f"--ckpt_path={saved / f'step-{half:08}.ckpt'}"], folder)
        same = bits == digest(saved / f"step-{steps:08}.ckpt")
        apart = abs(whole["val_loss"] - resumed["val_loss"])
        yield _row(machine, name, resumed, seconds, same_bits=same, val_loss_difference=apart)


def _callback(machine: Machine, name: str, steps: int, callback: str, options: dict[str, Any]) -> Iterator[Row]:
    """A short run with a callback of ours."""
    plain = {"class_path": f"lightning_llm.training.callbacks.{callback}", "init_args": options}
    words = [f"--trainer.callbacks+={json.dumps(plain)}", f"--trainer.max_steps={steps}"]
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        row = _row(machine, name, *fit(_words(machine, words), folder))
        if reports := sorted(Path(folder).glob("runs/*/*/memory/step-*.json")):
            row.metered_bytes = json.loads(reports[0].read_text(encoding="utf-8"))["peak"]["bytes"]
        row.files = sorted(path.name for path in Path(folder).glob("runs/*/*/*/step-*"))
        yield row


def _generation(machine: Machine) -> Iterator[Row]:
    shape = "1x2x2x16x65x4x4" if machine.dry_run else generate.BENCH.shapes[1]
    dtype = "float32" if machine.dry_run else "bfloat16"
    request = machine.request(generate.BENCH, shape, dtype, rounds=3, budget_s=40.0)
    yield from generate.run(request)
    if not find_spec("transformers"):
        yield request.row("transformers", error="transformers is not installed", is_missing=True)


PART = Part(
    name="fit",
    tasks=tasks,
    columns={
        **with_target("best loss", "best_val_loss", 1, ".4f"),
        **with_target("training s", "training_s", 1, ".1f"),
        **columns("s", "tokens/s"),
        "peak GiB": ("peak_gib", 1, ".2f"),
        "MB/s to disk": ("bytes_per_s", 1e-6, ",.0f"),
        "same bits": (lambda row: None if row.same_bits is None else ("no", "yes")[row.same_bits], 1, ""),
        "metered GiB": ("metered_bytes", 1 / GIB, ".2f"),
    },
    draw=bar_plot(Measure("total_s", 1, f"seconds{LOWER}"), by=("shape",), log=True),
    files=(*runs.BENCH.files, "lightning_llm/training", "lightning_llm/checkpoints", "lightning_llm/generation"),
)
