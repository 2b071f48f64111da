"""``python -m benchmarks baselines``: whole training steps of ours, compared with those of others.

Every side has a process of its own, and they are interleaved: same shape, same precision, same number of threads.
``ours`` goes through `fit`'s Trainer with all its defaults, freed memory kept; the others run as their users run them.
A side with ``(kept)`` after its name runs with freed memory kept as well, ``ours (memory returned)`` without.
``(compiled)`` is by ``torch.compile``: the blocks of ours, the whole model of the others as litgpt's trainer does; the
time of compiling is not counted. ``matmuls alone`` is no model: only the matmuls of a step with weights, which no
program can undercut that computes them with torch. ``nanogpt`` is ``plain_gpt.py``, ``liger`` is transformers with
Liger-Kernel's operators, on CUDA.

Ours runs on a token store; the others in the plain loop of their users: the model's own loss, autocast, clipping at 1,
torch's AdamW as their trainers set it up. They never read a loss, which on CUDA would wait for the device.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback

from benchmarks.plain_gpt import PlainGPT
from lightning_llm.bench.harness import Request, Row, Sizes, columns, llama, make_store, model_config, ratios
from lightning_llm.bench.plots import HIGHER, LOWER, Measure, bar_plot
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.measure.gauges import high_water_bytes, in_fresh_processes, resident_bytes, restart_high_water
from lightning_llm.measure.timer import PhaseClock, now
from lightning_llm.training.callbacks.memory_profiler import GIB, MemoryProfiler
from lightning_llm.training.execution import keep_freed_memory
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer

NAMES = ("layers", "heads", "hidden", "intermediate", "context", "rows", "vocab")
SHAPES = {
    "shakespeare": ["6x6x384x1024x256x64x65"],
    "124m": ["12x12x768x2048x1024x8x50304"],
    "1.3b": ["24x16x2048x5504x2048x4x50304"],
}
FILES = ("lightning_llm/model", "lightning_llm/ops", "lightning_llm/optim")
PACKAGES = {"transformers": ["transformers"], "litgpt": ["litgpt"], "liger": ["transformers", "liger_kernel"]}
DEFAULT_SHAPES = ["shakespeare"]
ALLOCATOR = "freed memory kept by ours"
DTYPES = ("float32", "bfloat16")  # the second by autocast
STEPS = {"cpu": 3, "cuda": 30}  # of each round, after the warm-up
WARM_UP = 2  # steps
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}
LITGPT = {  # the sizes in its config
    **{"block_size": "context", "n_layer": "layers", "n_head": "heads", "n_embd": "hidden"},
    **{"intermediate_size": "intermediate", "vocab_size": "vocab", "padded_vocab_size": "vocab"},
}
COLUMNS = columns("total ms", "tokens/s", "ratio", "peak MiB")  # the ratio is of time, over ours
draw = bar_plot(
    Measure("tokens_per_s", 1, f"tokens/s{HIGHER}"), Measure("peak_bytes", 1 / GIB, f"peak memory, GiB{LOWER}")
)

Found = tuple[list[float], int | None]  # seconds of each step; the peak by CUDA's allocator, on CUDA
LossOf = Callable[[Any, torch.Tensor, torch.Tensor], Any]  # of a model, inputs and targets


class Variant(NamedTuple):
    """How a side runs."""

    side: str
    keep_freed_memory: bool = False
    compiled: bool = False


VARIANTS = {
    "transformers": Variant("transformers"),
    "litgpt": Variant("litgpt"),
    "nanogpt": Variant("nanogpt"),
    "ours": Variant("ours", keep_freed_memory=True),
    "transformers (kept)": Variant("transformers", keep_freed_memory=True),
    "litgpt (kept)": Variant("litgpt", keep_freed_memory=True),
    "ours (memory returned)": Variant("ours"),
    "transformers (compiled)": Variant("transformers", compiled=True),
    "litgpt (compiled)": Variant("litgpt", compiled=True),
    "nanogpt (compiled)": Variant("nanogpt", compiled=True),
    "liger (compiled)": Variant("liger", compiled=True),
    "ours (compiled)": Variant("ours", keep_freed_memory=True, compiled=True),
    "matmuls alone": Variant("products", keep_freed_memory=True),
}


def run(asked: Request) -> Iterator[Row]:
    """A row for each side; ``ratio`` is its time over ours."""
    here = [name for name in VARIANTS if not lacking(name, asked.device)]
    for name in asked.variants or ():
        if name in VARIANTS and name not in here:
            raise ValueError(f"variants {name!r}: {lacking(name, asked.device)}, or leave it out")
    found = asked.interleaved({name: partial(run_side, name, asked) for name in asked.chosen(here)})
    seconds = {name: [one["median_s"] for one in results] for name, results in found.items()}
    for name, results in found.items():
        yield asked.row(
            name,
            seconds[name],
            peak_bytes=int(max(one["peak_bytes"] for one in results)),
            tokens_per_s=asked.sizes["rows"] * asked.sizes["context"] / statistics.median(seconds[name]),
            **(ratios(seconds[name], seconds["ours"]) if "ours" in seconds else {}),
        )


def lacking(name: str, device: str) -> str:
    """What a variant lacks here; empty if it can run."""
    side = VARIANTS[name].side
    missing = [package.replace("_", "-") for package in PACKAGES.get(side, []) if find_spec(package) is None]
    if missing:
        return f"{missing[0]} is not installed; python -m pip install {missing[0]}"
    return "its kernels need CUDA; measure it with --device cuda" if (side, device) == ("liger", "cpu") else ""


def run_side(name: str, asked: Request, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """One variant in a process of its own: the median seconds of a step, and its peak in bytes."""
    job = {"sizes": asked.sizes, "dtype": asked.dtype, "device": asked.device, "steps": STEPS[asked.device]}
    jobs = [{**job, **VARIANTS[name]._asdict()}]
    return in_fresh_processes(measure, jobs, name=name, environment=environment)[0]


def notes(rows: Sequence[Row]) -> list[str]:
    """What the ratio is, and the threads of a side."""
    return ["ratio: time over ours", f"{torch.get_num_threads()} threads each"]


# ---- the sides, each in a process of its own


def ours(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False, **fields: Any) -> Found:
    """Each step of ``fit``, including all that happens between the ends of two steps.

    ``dtype`` may be a precision of the Trainer as well, and ``fields`` are options of the model.
    """
    context, rows = sizes["context"], sizes["rows"]
    with tempfile.TemporaryDirectory(prefix="bench-baselines-") as name, open(os.devnull, "w") as nowhere:
        store = make_store(Path(name, "store"), vocab=sizes["vocab"], tokens=(context + 1) * rows * 4)
        data = TokenDataModule(store=store, context_length=context, global_batch_size=rows)
        clock, profiler = _StepClock(device), MemoryProfiler()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            trainer = Trainer(
                precision=PRECISIONS.get(dtype, dtype),
                default_root_dir=name,
                callbacks=[clock, profiler],
                max_steps=WARM_UP + steps,
                accelerator=device,
                devices=1,
                log_every_n_steps=min(10, WARM_UP + steps),
                limit_val_batches=0,
                gradient_clip_val=1.0,
            )
            model = LanguageModel(model_config(sizes, **fields), compile_mode="default" if compiled else None)
            trainer.fit(model, datamodule=data)
    # the profiler restarts CUDA's own high-water at each phase, and knows the highest
    return clock.seconds()[WARM_UP - 1 :], int(profiler.highest_gib * GIB) if device == "cuda" else None


class _StepClock(Callback):
    """Seconds from the end of each step to the end of the next one, by the device."""

    def __init__(self, device: str) -> None:
        self.clock, self.device, self.steps = PhaseClock(device), device, 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.mark(str(self.steps)) if self.steps else self.clock.start()
        self.steps += 1

    def seconds(self) -> list[float]:
        now(self.device)
        return list(self.clock.take().values())


def transformers(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """``LlamaForCausalLM`` of the installed transformers, which shifts the labels itself."""
    model = llama(model_config(sizes), use_cache=False)

    def loss(run: Any, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return run(input_ids=ids, labels=ids).loss

    return _plain_loop(model, loss, sizes, dtype, device, steps, compiled=compiled, fused=True)


def liger(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """The same, with Liger-Kernel's norm, rotation, MLP, and head with loss."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return transformers(sizes, dtype, device, steps, compiled=compiled)


def nanogpt(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """``PlainGPT``, whose MLP has as many parameters as the others'."""
    return _plain_loop(
        PlainGPT(model_config(sizes)), _call, sizes, dtype, device, steps, compiled=compiled, fused=device == "cuda"
    )


def _call(run: Any, ids: torch.Tensor, targets: torch.Tensor) -> Any:
    return run(ids, targets)


def litgpt(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """The model and the loss of litgpt, as its ``pretrain`` puts them together."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        **{field: sizes[name] for field, name in LITGPT.items()},
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )

    def loss(run: Any, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return chunked_cross_entropy(run(ids), targets, chunk_size=0)

    return _plain_loop(GPT(config), loss, sizes, dtype, device, steps, compiled=compiled, fused=device == "cuda")


def matmuls(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """Only the matmuls with weights, forward and both of backward: no attention, nothing between them, no optimizer.

    What a step takes that has nothing else to do: no program that multiplies by ``torch.mm`` is faster.
    """
    assert not compiled, "there is nothing to compile"
    tokens, hidden, wide = sizes["rows"] * sizes["context"], sizes["hidden"], sizes["intermediate"]
    layer = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * wide), (wide, hidden)]
    pairs = layer * sizes["layers"] + [(hidden, sizes["vocab"])]
    made = partial(torch.randn, device=device, dtype=getattr(torch, dtype))
    inputs = {width: made(tokens, width) for width, _ in set(pairs)}
    outputs = {width: made(tokens, width) for _, width in set(pairs)}
    weights = [made(after, before) for before, after in pairs]

    def step() -> None:
        for weight in weights:
            x, dy = inputs[weight.shape[1]], outputs[weight.shape[0]]
            torch.mm(x, weight.T)
            torch.mm(dy, weight)
            torch.mm(dy.T, x)

    return _timed(step, device, steps)


def _plain_loop(
    model: Any, loss: LossOf, sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool, fused: bool
) -> Found:
    run = torch.compile(model) if compiled else model
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)

    def step() -> None:
        ids = torch.randint(sizes["vocab"], (sizes["rows"], sizes["context"]), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(run, ids, ids.roll(-1, 1))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step, device, steps)


def _timed(step: Callable[[], None], device: str, steps: int) -> Found:
    clock = PhaseClock(device)
    clock.start()
    for number in range(WARM_UP + steps):
        step()
        clock.mark(str(number))
    now(device)
    return list(clock.take().values())[WARM_UP:], torch.cuda.max_memory_allocated() if device == "cuda" else None


SIDES: dict[str, Callable[..., Found]] = {
    **{"ours": ours, "transformers": transformers, "liger": liger, "litgpt": litgpt, "nanogpt": nanogpt},
    "products": matmuls,
}


def measure(job: dict[str, Any]) -> dict[str, float]:
    """The median seconds and the peak bytes of one side."""
    device = job["device"]
    if job["keep_freed_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    restart_high_water()
    before = resident_bytes()
    seconds, peak = SIDES[job["side"]](job["sizes"], job["dtype"], device, job["steps"], compiled=job["compiled"])
    peak = high_water_bytes() - before if peak is None else peak
    return {"median_s": statistics.median(seconds), "peak_bytes": peak}
