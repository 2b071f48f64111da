"""``python -m benchmarks baselines``: whole training steps of ours, compared with those of others.

Every side has a process of its own, and they are interleaved: same shape, same precision, same number of threads.
``ours`` goes through `fit`'s Trainer with all its defaults, freed memory kept; the others run as their users run them.
A side with ``(kept)`` after its name runs with freed memory kept as well, ``ours (memory returned)`` without.
``(compiled)`` is by ``torch.compile``: each block of ours (``as one``: the whole model), the whole model of the others
as litgpt's trainer does; the time of compiling is not counted. ``nanogpt`` is ``plain_gpt.py``, ``liger`` is
transformers with Liger-Kernel's operators, on CUDA, all compiled but the head with its loss.

On a CPU each timed step is followed by its matmuls alone (``matmuls.py``), in the same process. The *share* is their
time over that of the step before them: 1 is the limit of a program that multiplies by torch.

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
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch import Callback

from benchmarks.matmuls import matmuls_alone
from benchmarks.plain_gpt import PlainGPT
from benchmarks.steps import plain_step, state_of_gpu, what_ran
from lightning_llm.bench.harness import Bench, Request
from lightning_llm.bench.plots import HIGHER, LOWER, Measure, bar_plot
from lightning_llm.bench.processes import in_fresh_processes
from lightning_llm.bench.rows import Row, columns, ratios
from lightning_llm.bench.workloads import ShapeSizes, llama, make_store, model_config
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.io.units import GIB
from lightning_llm.measure.gauges import high_water_bytes, resident_bytes, restart_high_water
from lightning_llm.measure.timer import PhaseClock, now
from lightning_llm.training.callbacks import inputs
from lightning_llm.training.callbacks.memory_profiler import MemoryProfiler
from lightning_llm.training.environment import keep_freed_memory
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer

SHAPES = {
    "shakespeare": ["6x6x384x1024x256x64x65"],
    "124m": ["12x12x768x2048x1024x8x50304"],
    "1.3b": ["24x16x2048x5504x2048x4x50304"],
}
PACKAGES = {"transformers": ["transformers"], "litgpt": ["litgpt"], "liger": ["transformers", "liger_kernel"]}
STEPS = {"cpu": 3, "cuda": 100}  # of each round, after the warm-up
WARM_UP = {"cpu": 2, "cuda": 12}  # steps; on a GPU at least 0.5 s, since its clocks rise with the load
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}
LITGPT = {  # the sizes in its config
    **{"block_size": "context", "n_layer": "layers", "n_head": "heads", "n_embd": "hidden"},
    **{"intermediate_size": "intermediate", "vocab_size": "vocab", "padded_vocab_size": "vocab"},
}
SHARES = {"share": "matmul_share", "p20": "matmul_share_p20", "p80": "matmul_share_p80"}

LossOf = Callable[[Any, torch.Tensor, torch.Tensor], Any]  # of a model, inputs and targets


class Found(NamedTuple):
    """Of each step after the warm-up the seconds and, on a CPU, those of its matmuls alone; and a peak in bytes.

    The peak is that of CUDA's allocator or, on a CPU, of the whole process, before it multiplies alone. ``gpu`` is the
    state of the GPU while it was busy with the last steps.
    """

    seconds: list[float]
    matmul_seconds: list[float]
    peak_bytes: int
    gpu: dict[str, float]


VARIANTS = {  # the side, whether freed memory is kept, and whether it is compiled
    "transformers": ("transformers", False, False),
    "litgpt": ("litgpt", False, False),
    "nanogpt": ("nanogpt", False, False),
    "ours": ("ours", True, False),
    "transformers (kept)": ("transformers", True, False),
    "litgpt (kept)": ("litgpt", True, False),
    "ours (memory returned)": ("ours", False, False),
    "transformers (compiled)": ("transformers", False, True),
    "litgpt (compiled)": ("litgpt", False, True),
    "nanogpt (compiled)": ("nanogpt", False, True),
    "liger (compiled)": ("liger", False, True),
    "ours (compiled)": ("ours", True, True),
    "ours (compiled as one)": ("ours as one", True, True),
}


def run(request: Request) -> Iterator[Row]:
    """A row for each side; ``ratio`` is its time over ours."""
    here = [name for name in VARIANTS if not lacking(name, request.device)]
    for name in request.variants or ():
        if name in VARIANTS and name not in here:
            raise ValueError(f"variants {name!r}: {lacking(name, request.device)}, or leave it out")
    results_of = request.interleaved({name: partial(run_side, name, request) for name in request.chosen(here)})
    seconds = {name: [one["median_s"] for one in results] for name, results in results_of.items()}
    for name, results in results_of.items():
        shares = [share for one in results for share in one["shares"]]  # of all steps of all rounds
        quantiles = ratios(shares, [1] * len(shares)) if shares else {}
        yield request.row(
            name,
            seconds[name],
            peak_bytes=int(max(one["peak_bytes"] for one in results)),
            tokens_per_s=request.sizes["rows"] * request.sizes["context"] / statistics.median(seconds[name]),
            **(ratios(seconds[name], seconds["ours"]) if "ours" in seconds else {}),
            **{name.replace("ratio", "matmul_share"): value for name, value in quantiles.items()},
        )


def lacking(name: str, device: str) -> str:
    """What a variant lacks here; empty if it can run."""
    side, *_ = VARIANTS[name]
    missing = [package.replace("_", "-") for package in PACKAGES.get(side, []) if find_spec(package) is None]
    if missing:
        return f"{missing[0]} is not installed; python -m pip install {missing[0]}"
    return "its kernels need CUDA; measure it with --device cuda" if (side, device) == ("liger", "cpu") else ""


def run_side(name: str, request: Request, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One variant in a process of its own, as :func:`measure` finds it."""
    job = {"sizes": request.sizes, "dtype": request.dtype, "device": request.device, "steps": STEPS[request.device]}
    how = dict(zip(("side", "keep_freed_memory", "compiled"), VARIANTS[name], strict=True))
    return in_fresh_processes(measure, [{**job, **how}], name=name, environment=environment)[0]


class Steps(Callback):
    """Times the steps after the warm-up and, on a CPU, the matmuls alone after each of them (:func:`matmuls_of`)."""

    def __init__(self, model: Any, sizes: ShapeSizes, dtype: str, device: str, *, cuts_head: bool = False) -> None:
        matmul_dtype = torch.bfloat16 if dtype.startswith("bf") else torch.float32
        self._make_alone = partial(matmuls_alone, model, sizes, matmul_dtype, cuts_head=cuts_head)
        self._alone: Callable[[], None] | None = None
        self._clock, self._device, self._done = PhaseClock(device), device, 0
        self.warm_up = WARM_UP[device]
        self._high_water = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A step has ended, of the Trainer or of a plain loop; the next one begins when this returns."""
        self._done += 1
        self._clock.mark(f"step {self._done}")  # nothing for the first one
        if self._done > self.warm_up and self._device == "cpu":
            if self._alone is None:  # they have buffers too, and are slow at their first call
                self._high_water, self._alone = high_water_bytes(), self._make_alone()
                self._alone()
            self._clock.start()
            self._alone()
            self._clock.mark(f"matmuls {self._done}")
        self._clock.start()

    def found(self, peak_bytes: int) -> Found:
        """What was measured; the peak is that of a GPU's allocator."""
        gpu = state_of_gpu() if self._device == "cuda" else {}  # before it has caught up
        now(self._device)
        taken = self._clock.take()
        kinds = ([s for name, s in taken.items() if name.startswith(kind)] for kind in ("step", "matmuls"))
        seconds, matmul_seconds = kinds
        return Found(seconds[self.warm_up - 1 :], matmul_seconds, self._high_water or peak_bytes, gpu)


def ours(
    sizes: ShapeSizes,
    dtype: str,
    device: str,
    steps: int,
    *,
    compiled: bool = False,
    scope: Literal["blocks", "model"] = "blocks",
    callbacks: Sequence[Callback] = (),
    **fields: Any,
) -> Found:
    """Each step of ``fit``, including all that happens between the ends of two steps.

    No checkpoint is saved and the initial values are not hashed, which at 1.3 billion parameters would take longer than
    the steps. ``dtype`` may be a precision of the Trainer as well, ``scope`` is what is compiled as one, ``callbacks``
    are called after the clock's, and ``fields`` are options of the model.
    """
    context, rows = sizes["context"], sizes["rows"]
    with tempfile.TemporaryDirectory(prefix="bench-baselines-") as name, open(os.devnull, "w") as nowhere:
        store = make_store(Path(name, "store"), vocab=sizes["vocab"], tokens=(context + 1) * rows * 4)
        data = TokenDataModule(store=store, context_length=context, global_batch_size=rows)
        profiler = MemoryProfiler()
        mode: Literal["default"] | None = "default" if compiled else None
        model = LanguageModel(model_config(sizes, **fields), compile_mode=mode, compile_scope=scope)
        timed = Steps(model, sizes, dtype, device, cuts_head=True)
        silent = contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)
        with silent[0], silent[1], patch.object(inputs, "tensor_hash", return_value="not hashed"):
            run: dict[str, Any] = {"max_steps": timed.warm_up + steps, "accelerator": device, "devices": 1}
            run |= {"precision": PRECISIONS.get(dtype, dtype), "log_every_n_steps": min(10, timed.warm_up + steps)}
            run |= {"limit_val_batches": 0, "gradient_clip_val": 1.0, "enable_checkpointing": False}
            trainer = Trainer(**run, default_root_dir=name, callbacks=[timed, *callbacks, profiler])
            trainer.fit(model, datamodule=data)
    # the profiler restarts CUDA's own high-water at each phase, and knows the highest
    return timed.found(int(profiler.highest_gib * GIB))


def _transformers(sizes: ShapeSizes) -> tuple[Any, LossOf]:
    """``LlamaForCausalLM`` of the installed transformers, which shifts the labels itself."""
    return llama(model_config(sizes), use_cache=False), lambda run, ids, _: run(input_ids=ids, labels=ids).loss


def _liger(sizes: ShapeSizes) -> tuple[Any, LossOf]:
    """The same, with Liger-Kernel's norm, rotation, MLP, and head with loss."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return _transformers(sizes)


def _nanogpt(sizes: ShapeSizes) -> tuple[Any, LossOf]:
    """``PlainGPT``, whose MLP has as many parameters as the others'."""
    return PlainGPT(model_config(sizes)), lambda run, ids, targets: run(ids, targets)


def _litgpt(sizes: ShapeSizes) -> tuple[Any, LossOf]:
    """The model and the loss of litgpt, as its ``pretrain`` puts them together."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    parts = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "rotary_percentage": 1.0}
    named = {field: sizes[name] for field, name in LITGPT.items()}
    model = GPT(Config(**named, **parts, parallel_residual=False, bias=False))
    return model, lambda run, ids, targets: chunked_cross_entropy(run(ids), targets, chunk_size=0)


def plain_loop(side: str, sizes: ShapeSizes, dtype: str, device: str, steps: int, *, compiled: bool = False) -> Found:
    """Each step of the plain loop of a side's users."""
    model, loss = PLAIN[side](sizes)
    if compiled:  # torch 2.11 cannot trace Liger-Kernel's head with loss
        (model.model if side == "liger" else model).compile()
    model.to(device).train()
    is_fused = device == "cuda" or side in ("transformers", "liger")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_fused)
    timed = Steps(model, sizes, dtype, device)
    for _ in range(timed.warm_up + steps):
        ids = torch.randint(sizes["vocab"], (sizes["rows"], sizes["context"]), device=device)
        plain_step(partial(loss, model, ids, ids.roll(-1, 1)), model, optimizer, device=device, dtype=dtype)
        optimizer.zero_grad()
        timed.on_train_batch_end()
    return timed.found(torch.cuda.max_memory_allocated() if device == "cuda" else 0)


PLAIN = {"transformers": _transformers, "liger": _liger, "litgpt": _litgpt, "nanogpt": _nanogpt}
SIDES: dict[str, Callable[..., Found]] = {side: partial(plain_loop, side) for side in PLAIN}
SIDES |= {"ours": ours, "ours as one": partial(ours, scope="model")}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """The median seconds and the peak bytes of one side, of each step the share of its matmuls, and what ran.

    Compiled code that meets the limit of recompiles would run eagerly: here that is an error.
    """
    device = job["device"]
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if job["keep_freed_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    restart_high_water()
    before = resident_bytes() if device == "cpu" else 0
    given = (job["sizes"], job["dtype"], device, job["steps"])
    seconds, alone, peak, gpu = SIDES[job["side"]](*given, compiled=job["compiled"])
    shares = [one / step for one, step in zip(alone, seconds, strict=False)]
    ran = {**what_ran(job["sizes"], job["dtype"], device), **gpu}
    return {"median_s": statistics.median(seconds), "peak_bytes": peak - before, "shares": shares, "ran": ran}


BENCH = Bench(
    run=run,
    shapes=["shakespeare"],
    sizes=("layers", "heads", "hidden", "intermediate", "context", "rows", "vocab"),
    named_shapes=SHAPES,
    dtypes=("float32", "bfloat16"),  # the second by autocast
    columns={  # the ratio is of time, over ours
        **columns("total ms", "tokens/s", "ratio", "peak MiB"),
        **{heading: (field, 1, ".2f") for heading, field in SHARES.items()},
    },
    notes=lambda rows: [
        "ratio: time over ours",
        "share: time of the step's matmuls alone over that of the step, with its 20th and 80th percentile",
        f"{torch.get_num_threads()} threads each",
    ],
    draw=bar_plot(
        Measure("tokens_per_s", 1, f"tokens/s{HIGHER}"), Measure("peak_bytes", 1 / GIB, f"peak memory, GiB{LOWER}")
    ),
    allocator="freed memory kept by ours",
    files=("lightning_llm/model", "lightning_llm/ops", "lightning_llm/optim"),
)
