"""One side of ``bench peers``, in a process of its own: trains some steps and prints their seconds as JSON.

    python -m lightning_llm.bench.peer_process '{"side": "ours", "shape": "6x6x384x1024x256x64x65", …}'

Ours runs through the Trainer with all its defaults, on a token store; the others in the plain loop of their users: the
model's own loss, autocast, clipping at 1, torch's AdamW as their trainers set it up (litgpt's also compiles the model:
``litgpt (compiled)``).
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.measure.resident import high_water_bytes, resident_bytes, restart_high_water
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.callbacks.memory import GIB, MemoryProfiler
from lightning_llm.training.execution import keep_freed_memory
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer

Found = tuple[list[float], int | None]  # seconds of each step; the peak by CUDA's allocator, on CUDA

WARM_UP = 2  # steps
NAMES = ("layers", "heads", "hidden", "intermediate", "context", "rows", "vocab")
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-style model and of a micro-batch."""

    layers: int
    heads: int
    hidden: int
    intermediate: int
    context: int
    rows: int
    vocab: int

    @staticmethod
    def of(text: str) -> "Shape":
        """From numbers with an x between them.

        Raises:
            ValueError: There are not seven of them.
        """
        parts = text.split("x")
        if len(parts) != len(NAMES) or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"shapes {text!r} must be {' x '.join(NAMES)}, such as 6x6x384x1024x256x64x65")
        return Shape(*map(int, parts))

    def fields(self) -> dict[str, Any]:
        """The sizes of the model by the names that its config has here and in transformers."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
        }

    def model_config(self, **fields: Any) -> ModelConfig:
        """The model; ``fields`` are those beside its sizes.

        Raises:
            ValueError: The sizes do not fit together.
        """
        return ModelConfig(**{**self.fields(), **fields})


def ours(shape: Shape, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """Each step of ``fit``, whatever happens between two ends of a step included."""
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as name, open(os.devnull, "w") as nowhere:
        _make_store(Path(name, "store"), shape)
        data = TokenDataModule(
            store=str(Path(name, "store")), context_length=shape.context, global_batch_size=shape.rows
        )
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
            trainer.fit(
                LanguageModel(shape.model_config(), compile_mode="default" if compiled else None), datamodule=data
            )
    seconds = [end - start for start, end in zip(ends.times[WARM_UP - 1 :], ends.times[WARM_UP:], strict=False)]
    # the profiler begins CUDA's own high-water anew at each phase, and knows the highest
    return seconds, int(profiler.highest_gib * GIB) if device == "cuda" else None


class _Ends(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def _make_store(path: Path, shape: Shape) -> None:
    count = (shape.context + 1) * shape.rows * 4
    dtype = np.uint16 if shape.vocab <= 2**16 else np.uint32
    ids = np.random.default_rng(0).integers(0, shape.vocab, count).astype(dtype)
    tokenizer = Tokenizer.train_byte().to_str()
    with TokenStoreWriter(
        path, vocab_size=shape.vocab, tokenizer=tokenizer, source={"fingerprint": "random"}
    ) as writer:
        for split, part in (("train", ids), ("val", ids[: 2 * shape.context])):
            writer.write(split, part, text_bytes=len(part), documents=1)


def transformers(shape: Shape, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """``LlamaForCausalLM`` of the installed transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**shape.fields(), use_cache=False))
    run = torch.compile(model) if compiled else model

    def loss(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = run(input_ids=ids, labels=ids).loss  # it shifts the labels itself
        return found

    return _plain_loop(model, loss, shape, dtype, device, steps, fused=True)


def litgpt(shape: Shape, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """The model and the loss of litgpt, as its ``pretrain`` puts them together."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        block_size=shape.context,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.hidden,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab,
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

    return _plain_loop(model, loss, shape, dtype, device, steps, fused=device == "cuda")


def products(shape: Shape, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """Only the products with weights, forward and both of backward: no attention, nothing between them, no optimiser.

    What a step takes that has nothing else to do: no program that multiplies by ``torch.mm`` is faster.
    """
    assert not compiled, "there is nothing to compile"
    tokens, hidden, wide = shape.rows * shape.context, shape.hidden, shape.intermediate
    layer = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * wide), (wide, hidden)]
    pairs = layer * shape.layers + [(hidden, shape.vocab)]
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
    shape: Shape,
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
        ids = torch.randint(shape.vocab, (shape.rows, shape.context), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(ids, ids.roll(-1, 1))
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value.item()
        taken.append(time.perf_counter() - start)
    return taken[WARM_UP:], torch.cuda.max_memory_allocated() if device == "cuda" else None


SIDES = {"ours": ours, "transformers": transformers, "litgpt": litgpt, "products": products}


def main(words: str) -> None:
    """Run what the JSON says; print what was measured."""
    job = json.loads(words)
    device = job["device"]
    if job["keep_freed_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    restart_high_water()
    before = resident_bytes()
    shape = Shape.of(job["shape"])
    seconds, peak = SIDES[job["side"]](shape, job["dtype"], device, job["steps"], compiled=job["compiled"])
    if peak is None:
        peak = high_water_bytes() - before
    print(json.dumps({"median_s": statistics.median(seconds), "peak_bytes": peak}, allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1])
