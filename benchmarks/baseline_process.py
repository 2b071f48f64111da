"""One side of ``python -m benchmarks baselines``, in a process of its own: trains some steps and returns their seconds.

Ours runs through the Trainer with all its defaults, on a token store; the others in the plain loop of their users: the
model's own loss, autocast, clipping at 1, torch's AdamW as their trainers set it up (litgpt's also compiles the model:
``litgpt (compiled)``).
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lightning_llm.bench.harness import Sizes, llama, make_store, model_config
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.measure.resident import high_water_bytes, resident_bytes, restart_high_water
from lightning_llm.training.callbacks.memory import GIB, MemoryProfiler
from lightning_llm.training.execution import keep_freed_memory
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer

Found = tuple[list[float], int | None]  # seconds of each step; the peak by CUDA's allocator, on CUDA

WARM_UP = 2  # steps
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}


def ours(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """Each step of ``fit``, including all that happens between the ends of two steps."""
    context, rows = sizes["context"], sizes["rows"]
    with tempfile.TemporaryDirectory(prefix="bench-baselines-") as name, open(os.devnull, "w") as nowhere:
        store = make_store(Path(name, "store"), vocab=sizes["vocab"], tokens=(context + 1) * rows * 4)
        data = TokenDataModule(store=store, context_length=context, global_batch_size=rows)
        ends, profiler = _Ends(), MemoryProfiler()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            trainer = Trainer(
                precision=PRECISIONS[dtype],
                default_root_dir=name,
                callbacks=[ends, profiler],
                max_steps=WARM_UP + steps,
                accelerator=device,
                devices=1,
                log_every_n_steps=min(10, WARM_UP + steps),
                limit_val_batches=0,
                gradient_clip_val=1.0,
            )
            model = LanguageModel(model_config(sizes), compile_mode="default" if compiled else None)
            trainer.fit(model, datamodule=data)
    seconds = [end - start for start, end in zip(ends.times[WARM_UP - 1 :], ends.times[WARM_UP:], strict=False)]
    # the profiler restarts CUDA's own high-water at each phase, and knows the highest
    return seconds, int(profiler.highest_gib * GIB) if device == "cuda" else None


class _Ends(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def transformers(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """``LlamaForCausalLM`` of the installed transformers."""
    model = llama(model_config(sizes), use_cache=False)
    run = torch.compile(model) if compiled else model

    def loss(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = run(input_ids=ids, labels=ids).loss  # it shifts the labels itself
        return found

    return _plain_loop(model, loss, sizes, dtype, device, steps, fused=True)


def litgpt(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """The model and the loss of litgpt, as its ``pretrain`` puts them together."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        block_size=sizes["context"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        n_embd=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        vocab_size=sizes["vocab"],
        padded_vocab_size=sizes["vocab"],
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    model = GPT(config)
    run = torch.compile(model) if compiled else model

    def loss(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = chunked_cross_entropy(run(ids), targets, chunk_size=0)
        return found

    return _plain_loop(model, loss, sizes, dtype, device, steps, fused=device == "cuda")


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
    taken = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        for weight in weights:
            x, dy = inputs[weight.shape[1]], outputs[weight.shape[0]]
            torch.mm(x, weight.T)
            torch.mm(dy, weight)
            torch.mm(dy.T, x)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken[WARM_UP:], torch.cuda.max_memory_allocated() if device == "cuda" else None


def _plain_loop(
    model: torch.nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    sizes: Sizes,
    dtype: str,
    device: str,
    steps: int,
    *,
    fused: bool,
) -> Found:
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    taken = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        ids = torch.randint(sizes["vocab"], (sizes["rows"], sizes["context"]), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(ids, ids.roll(-1, 1))
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value.item()
        taken.append(time.perf_counter() - start)
    return taken[WARM_UP:], torch.cuda.max_memory_allocated() if device == "cuda" else None


SIDES = {"ours": ours, "transformers": transformers, "litgpt": litgpt, "products": matmuls}


def measure(job: dict[str, Any]) -> dict[str, float]:
    """The median seconds and the peak bytes of one side."""
    device = job["device"]
    if job["keep_freed_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    restart_high_water()
    before = resident_bytes()
    seconds, peak = SIDES[job["side"]](job["sizes"], job["dtype"], device, job["steps"], compiled=job["compiled"])
    if peak is None:
        peak = high_water_bytes() - before
    return {"median_s": statistics.median(seconds), "peak_bytes": peak}
