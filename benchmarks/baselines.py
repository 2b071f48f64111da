"""``python -m benchmarks baselines``: whole training steps of ours, compared with those of transformers and litgpt.

Every side has a process of its own, and they are interleaved: same shape, same precision, same number of threads.
``ours`` goes through `fit`'s Trainer with all its defaults, freed memory kept; the others run as their users run them.
A side with ``(kept)`` after its name runs with freed memory kept as well, ``ours (memory returned)`` without.
``(compiled)`` is by ``torch.compile``: the blocks of ours, the whole model of the others as litgpt's trainer does; the
time of compiling is not counted. ``matmuls alone`` is no model: a step's matmuls with weights and nothing else, which
no program can undercut that computes them with torch.

Ours runs on a token store; the others in the plain loop of their users: the model's own loss, autocast, clipping at 1,
torch's AdamW as their trainers set it up.
"""

import contextlib
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback

from lightning_llm.bench.harness import Request, Row, Sizes, columns, llama, make_store, model_config, ratios
from lightning_llm.bench.plots import HIGHER, LOWER, Measure, bar_plot
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.measure.gauges import high_water_bytes, in_fresh_processes, resident_bytes, restart_high_water
from lightning_llm.measure.timer import now, seconds_of
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
    "ours": Variant("ours", keep_freed_memory=True),
    "transformers (kept)": Variant("transformers", keep_freed_memory=True),
    "litgpt (kept)": Variant("litgpt", keep_freed_memory=True),
    "ours (memory returned)": Variant("ours"),
    "transformers (compiled)": Variant("transformers", compiled=True),
    "litgpt (compiled)": Variant("litgpt", compiled=True),
    "ours (compiled)": Variant("ours", keep_freed_memory=True, compiled=True),
    "matmuls alone": Variant("products", keep_freed_memory=True),
}


def run(asked: Request) -> Iterator[Row]:
    """A row for each side; ``ratio`` is its time over ours."""
    own = ("ours", "products")
    here = [name for name, how in VARIANTS.items() if how.side in own or importlib.util.find_spec(how.side)]
    for name in asked.variants or ():
        if name in VARIANTS and name not in here:
            side = VARIANTS[name].side
            fix = f"{side} is not installed; python -m pip install {side}, or leave it out"
            raise ValueError(f"variants {name!r}: {fix}")
    found = asked.interleaved({name: partial(_run_side, name, asked) for name in asked.chosen(here)})
    seconds = {name: [one["median_s"] for one in results] for name, results in found.items()}
    for name, results in found.items():
        yield asked.row(
            name,
            seconds[name],
            peak_bytes=int(max(one["peak_bytes"] for one in results)),
            tokens_per_s=asked.sizes["rows"] * asked.sizes["context"] / statistics.median(seconds[name]),
            **(ratios(seconds[name], seconds["ours"]) if "ours" in seconds else {}),
        )


def _run_side(name: str, asked: Request) -> dict[str, float]:
    job = {"sizes": asked.sizes, "dtype": asked.dtype, "device": asked.device, "steps": STEPS[asked.device]}
    return in_fresh_processes(measure, [{**job, **VARIANTS[name]._asdict()}], name=name)[0]


def notes(rows: Sequence[Row]) -> list[str]:
    """What the ratio is, and the threads of a side."""
    return ["ratio: time over ours", f"{torch.get_num_threads()} threads each"]


# ---- the sides, each in a process of its own


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
        self.times.append(now("cuda" if torch.cuda.is_available() else "cpu"))


def transformers(sizes: Sizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """``LlamaForCausalLM`` of the installed transformers, which shifts the labels itself."""
    model = llama(model_config(sizes), use_cache=False)

    def loss(run: Any, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return run(input_ids=ids, labels=ids).loss

    return _plain_loop(model, loss, sizes, dtype, device, steps, compiled=compiled, fused=True)


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
        value.item()

    return _timed(step, device, steps)


def _timed(step: Callable[[], None], device: str, steps: int) -> Found:
    seconds = [seconds_of(step, device) for _ in range(WARM_UP + steps)][WARM_UP:]
    return seconds, torch.cuda.max_memory_allocated() if device == "cuda" else None


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
    peak = high_water_bytes() - before if peak is None else peak
    return {"median_s": statistics.median(seconds), "peak_bytes": peak}
