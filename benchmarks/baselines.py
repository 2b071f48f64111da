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
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch import Callback

from benchmarks.charts import HIGHER, LOWER, Measure, bar_plot
from benchmarks.cpu_clock import age_of_process
from benchmarks.harness import Bench, Request
from benchmarks.matmuls import matmuls_alone
from benchmarks.plain_gpt import PlainGPT
from benchmarks.profiles import Profile
from benchmarks.rows import Row, columns, ratios
from benchmarks.steps import CLIP, plain_step, what_ran
from benchmarks.workloads import ShapeSizes, llama, make_store, model_config
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.io.units import GIB
from lightning_llm.measure.gauges import high_water_bytes, resident_bytes, restart_high_water
from lightning_llm.measure.timer import PhaseClock, now
from lightning_llm.same.processes import in_fresh_processes
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
    """Times of the steps of one side.

    Attributes:
        seconds: Of each timed step.
        matmul_seconds: On a CPU, of each timed step's matmuls alone.
        peak_bytes: By CUDA's allocator or, on a CPU, of the whole process, before it multiplies alone.
        window: When the timed steps began and ended, in seconds since 1970.
        first_step_s: From the start of the process to the end of its first step; ``None`` if it is not Linux.
        host_seconds: Of each step that began with an empty queue, the host's time by phase.
        profile: The kernels of the profiled steps; ``None`` without such steps.
    """

    seconds: list[float]
    matmul_seconds: list[float]
    peak_bytes: int
    window: tuple[float, float]
    first_step_s: float | None
    host_seconds: list[dict[str, float]]
    profile: dict[str, Any] | None


class Stages(NamedTuple):
    """How many steps follow the warm-up: timed ones, some from an empty queue, and profiled ones."""

    timed: int
    host: int = 0
    profiled: int = 0


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
    "ours, standard MLP (compiled)": ("ours, standard MLP", True, True),
    "ours (captured)": ("ours captured", True, False),
    "ours (compiled, captured)": ("ours captured", True, True),
}


def run(request: Request) -> Iterator[Row]:
    """A row for each side; ``ratio`` is its time over ours."""
    here = [name for name in VARIANTS if not lacking(name, request.device)]
    for name in request.variants or ():
        if name in VARIANTS and name not in here:
            raise ValueError(f"variants {name!r}: {lacking(name, request.device)}, or leave it out")
    results_of = request.interleaved({name: partial(run_side, name, request) for name in request.chosen(here)})
    seconds = {name: [statistics.median(one["seconds"]) for one in results] for name, results in results_of.items()}
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
    needs_cuda = side in ("liger", "ours captured")
    return "it needs CUDA; measure it with --device cuda" if needs_cuda and device == "cpu" else ""


def run_side(name: str, request: Request, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One variant in a process of its own, as :func:`measure` finds it."""
    job = job_of(name, request, Stages(STEPS[request.device]))
    return in_fresh_processes(measure, [job], name=name, environment=environment)[0]


def job_of(name: str, request: Request, stages: Stages, **fields: Any) -> dict[str, Any]:
    """What :func:`measure` is called with; the fields are options of our model."""
    job = {"sizes": request.sizes, "dtype": request.dtype, "device": request.device, "stages": stages, "fields": fields}
    return {**job, **dict(zip(("side", "keep_freed_memory", "compiled"), VARIANTS[name], strict=True))}


class Steps(Callback):
    """Measures steps after a warm-up, stage by stage, as the Trainer or a plain loop runs them.

    On a CPU, each timed step is followed by its matmuls alone (:func:`matmuls_of`).
    """

    def __init__(
        self, model: Any, sizes: ShapeSizes, dtype: str, device: str, stages: Stages, *, cuts_head: bool = False
    ) -> None:
        matmul_dtype = torch.bfloat16 if dtype.startswith("bf") else torch.float32
        self._make_alone = partial(matmuls_alone, model, sizes, matmul_dtype, cuts_head=cuts_head)
        self._alone: Callable[[], None] | None = None
        self._clock, self._host = PhaseClock(device), PhaseClock()
        self._device, self._done = device, 0
        self._warm_up, self._stages = WARM_UP[device], stages
        self.total = self._warm_up + sum(stages)
        self._timed_end = self._warm_up + stages.timed
        self._host_end = self._timed_end + stages.host
        self._profile = Profile(device, stages.profiled)
        self._high_water = 0
        self._first_step_s: float | None = None
        self._window = [0.0, 0.0]
        self._seconds: dict[str, float] = {}
        self._host_seconds: list[dict[str, float]] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A step has ended; the next one begins when this returns."""
        self._done += 1
        if self._done == 1:
            now(self._device)
            with contextlib.suppress(OSError):  # only Linux has /proc
                self._first_step_s = age_of_process()
        if self._warm_up < self._done <= self._timed_end:
            self._clock.mark(f"step {self._done}")
            if self._device == "cpu":
                self._time_matmuls()
        elif self._timed_end < self._done <= self._host_end:
            self._host.mark("optimizer")
            self._host_seconds.append(self._host.take())
        if self._done == self._warm_up:
            self._window[0] = time.time()
        if self._done == self._timed_end:
            now(self._device)
            self._window[1] = time.time()
            self._seconds = self._clock.take()
        if self._timed_end <= self._done < self._host_end:
            now(self._device)  # the queue is empty
            self._host.start()
        if self._done == self._host_end:
            self._profile.start()
        if self._done == self.total:
            self._profile.stop()
        self._clock.start()

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        """The host has launched the forward pass."""
        if self._is_host_step:
            self._host.mark("forward")

    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        """The host has launched the backward pass."""
        if self._is_host_step:
            self._host.mark("backward")

    @property
    def _is_host_step(self) -> bool:
        return self._timed_end <= self._done < self._host_end

    def _time_matmuls(self) -> None:
        if self._alone is None:  # they have buffers too, and are slow at their first call
            self._high_water, self._alone = high_water_bytes(), self._make_alone()
            self._alone()
        self._clock.start()
        self._alone()
        self._clock.mark(f"matmuls {self._done}")

    def found(self, peak_bytes: int) -> Found:
        """What was measured; the peak is that of a GPU's allocator."""
        kinds = ([s for name, s in self._seconds.items() if name.startswith(kind)] for kind in ("step", "matmuls"))
        seconds, matmul_seconds = kinds
        return Found(
            seconds,
            matmul_seconds,
            self._high_water or peak_bytes,
            (self._window[0], self._window[1]),
            self._first_step_s,
            self._host_seconds,
            self._profile.found(),
        )


def ours(
    sizes: ShapeSizes,
    dtype: str,
    device: str,
    stages: Stages,
    *,
    compiled: bool = False,
    scope: Literal["blocks", "model"] = "blocks",
    capture: bool = False,
    **fields: Any,
) -> Found:
    """Each step of ``fit``, including all that happens between the ends of two steps.

    No checkpoint is saved, the initial values are not hashed, and the model is not moved to the CPU at the end: at 1.3
    billion parameters, these would take longer than the steps. ``dtype`` may be a precision of the Trainer as well,
    ``scope`` is what is compiled as one, ``capture`` is the Trainer's, and ``fields`` are options of the model.
    """
    context, rows = sizes["context"], sizes["rows"]
    with tempfile.TemporaryDirectory(prefix="bench-baselines-") as name, open(os.devnull, "w") as nowhere:
        mode: Literal["default"] | None = "default" if compiled else None
        model = LanguageModel(model_config(sizes, **fields), compile_mode=mode, compile_scope=scope)
        timed = Steps(model, sizes, dtype, device, stages, cuts_head=True)
        # a window of its own for each row of each step: the power that a GPU takes depends on the data
        store = make_store(Path(name, "store"), vocab=sizes["vocab"], tokens=(context + 1) * rows * timed.total)
        data = TokenDataModule(store=store, context_length=context, global_batch_size=rows)
        profiler = MemoryProfiler()
        silent = contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)
        with silent[0], silent[1], patch.object(inputs, "tensor_hash", return_value="not hashed"):
            run: dict[str, Any] = {"max_steps": timed.total, "accelerator": device, "devices": 1}
            run |= {"precision": PRECISIONS.get(dtype, dtype), "log_every_n_steps": min(10, timed.total)}
            run |= {"limit_val_batches": 0, "gradient_clip_val": 1.0, "enable_checkpointing": False}
            run |= {"capture": True} if capture else {}
            trainer = Trainer(**run, default_root_dir=name, callbacks=[timed, profiler])
            with patch.object(trainer.strategy, "teardown"):
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


def plain_loop(
    side: str, sizes: ShapeSizes, dtype: str, device: str, stages: Stages, *, compiled: bool = False
) -> Found:
    """Each step of the plain loop of a side's users."""
    model, loss = PLAIN[side](sizes)
    if compiled:  # torch 2.11 cannot trace Liger-Kernel's head with loss
        (model.model if side == "liger" else model).compile()
    model.to(device).train()
    is_fused = device == "cuda" or side in ("transformers", "liger")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_fused)
    timed = Steps(model, sizes, dtype, device, stages)

    def loss_of(ids: torch.Tensor) -> Any:
        value = loss(model, ids, ids.roll(-1, 1))
        timed.on_before_backward()
        return value

    def clip(*given: Any) -> None:
        timed.on_after_backward()
        CLIP(*given)

    for _ in range(timed.total):
        ids = torch.randint(sizes["vocab"], (sizes["rows"], sizes["context"]), device=device)
        plain_step(partial(loss_of, ids), model, optimizer, device=device, dtype=dtype, clip=clip)
        optimizer.zero_grad()
        timed.on_train_batch_end()
    return timed.found(torch.cuda.max_memory_allocated() if device == "cuda" else 0)


PLAIN = {"transformers": _transformers, "liger": _liger, "litgpt": _litgpt, "nanogpt": _nanogpt}
SIDES: dict[str, Callable[..., Found]] = {side: partial(plain_loop, side) for side in PLAIN}
SIDES |= {"ours": ours, "ours as one": partial(ours, scope="model"), "ours captured": partial(ours, capture=True)}
SIDES |= {"ours, standard MLP": partial(ours, mlp="swiglu")}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What :class:`Found` has of one side; the share of its matmuls in each step, and what ran.

    Compiled code that meets the limit of recompiles would run eagerly: here that is an error.
    """
    device = job["device"]
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if job["keep_freed_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    restart_high_water()
    before = resident_bytes() if device == "cpu" else 0
    given = (job["sizes"], job["dtype"], device, Stages(*job["stages"]))
    found = SIDES[job["side"]](*given, compiled=job["compiled"], **job["fields"])
    shares = [one / step for one, step in zip(found.matmul_seconds, found.seconds, strict=False)]
    ran = what_ran(job["sizes"], job["dtype"], device)
    return {**found._asdict(), "peak_bytes": found.peak_bytes - before, "shares": shares, "ran": ran}


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
