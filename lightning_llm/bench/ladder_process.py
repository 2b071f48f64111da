"""One rung of ``bench ladder``, in a process of its own: trains some steps and prints what was found as JSON.

    python -m lightning_llm.bench.ladder_process '{"config": {…}, "settings": {…}, "rows": 8, …}'

Its own process, because settings of an allocator cannot be taken back. With ``world`` above 1 it is one of so many,
which find each other by the file ``meeting``; the first of them prints.
"""

import json
import math
import statistics
import sys
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_llm.bench.ladder_plain import use_plain_operators
from lightning_llm.bench.ladder_rungs import UNIT_ROUNDOFF, Products, Settings, distinct_rows
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.measure.resident import high_water_bytes, resident_bytes, restart_high_water
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.clipping import clip_grad_norm_
from lightning_llm.optim.grouping import param_groups
from lightning_llm.training.distributed import leave_groups
from lightning_llm.training.execution import keep_freed_memory

CURVE = 6  # steps whose losses are compared
WARM_UP = 2
LONGEST_GROWTH = 8  # times the batch, where the larger one is looked for
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Loss(nn.Module):
    """Mean cross-entropy of a model: what DDP wraps."""

    def __init__(self, model: Transformer, settings: Settings) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """(batch, seq) twice -> scalar, float32."""
        hidden = self.model(ids)
        if self.settings.chunked_loss:
            return linear_cross_entropy(hidden, self.model.lm_head.weight, targets)
        return F.cross_entropy(self.model.logits(hidden).flatten(0, 1).float(), targets.flatten())


class Training:
    """Whole training steps of one rung on one batch, which is the same for all rungs but for the repeated rows.

    Args:
        config: The model; its MLP is the rung's.
        settings: Of the rung.
        device: ``cpu`` or ``cuda``.
        context: Tokens per row.
        rows: Of the batch.
        period: How many rows differ.
    """

    def __init__(
        self, config: ModelConfig, settings: Settings, *, device: str, context: int, rows: int, period: int
    ) -> None:
        self.settings, self.device = settings, device
        torch.manual_seed(0)
        model = Transformer(ModelConfig(**{**config.to_dict(), "mlp": settings.mlp}))
        use_plain_operators(model, settings.operators)
        if settings.compiled:
            model.compile_blocks()
        self.model = model.to(device).train()
        self.loss: nn.Module = Loss(model, settings)
        if dist.is_initialized():
            self.loss = DistributedDataParallel(self.loss, gradient_as_bucket_view=True)
        self._initial = [weight.detach().clone() for weight in model.parameters()]
        windows = torch.randint(
            config.vocab_size or 1, (period, context + 1), generator=torch.Generator().manual_seed(1)
        )
        windows = windows.repeat(rows // period, 1).to(device)
        self.ids, self.targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        self.reset()

    def reset(self, shake: float = 0.0) -> None:
        """Back to the initial weights, each moved by ``shake`` of itself, up or down by chance; a new optimiser."""
        signs = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for weight, initial in zip(self.model.parameters(), self._initial, strict=True):
                weight.copy_(initial)
                if shake:
                    chance = torch.randint(0, 2, weight.shape, generator=signs) * 2 - 1
                    weight.mul_(1 + shake * chance.to(weight.device, torch.float64))  # rounded once, at the end
                weight.grad = None
        groups = param_groups(self.model)
        self.optimizer: torch.optim.Optimizer
        if self.settings.optimizer == "loop":
            self.optimizer = torch.optim.AdamW(groups, **OPTIONS, foreach=False, fused=False)
        else:
            self.optimizer = AdamW(groups, **OPTIONS)
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, products: Products | None = None) -> float:
        """One step; the loss before it. ``products`` other than the rung's are for comparing."""
        run = self._replayed if self.settings.cuda_graph else self._forward_backward
        loss = run(products or self.settings.products)
        parameters = list(self.model.parameters())
        if self.settings.optimizer == "loop":
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        else:
            clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        if not self.settings.cuda_graph:  # a recorded backward writes where it has written before
            self.optimizer.zero_grad()
        return loss.item()

    def curve(self, products: Products | None = None, shake: float = 0.0) -> list[float]:
        """The losses of the first steps."""
        self.reset(shake)
        return [self.step(products) for _ in range(CURVE)]

    def peak_bytes(self) -> int | None:
        """The most that a step holds beyond weights, optimiser state and batch; ``None`` where it cannot be seen."""
        if self.device == "cuda":
            self._graph = None  # to play one allocates nothing: what counts is allocated where it is recorded
            self.optimizer.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()  # libraries' buffers too, which are no part of a step
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return int(torch.cuda.max_memory_allocated() - before)
        if self.settings.compiled or dist.is_initialized():  # the compiler's buffers and DDP's are out of sight
            return None
        state = [item for entry in self.optimizer.state.values() for item in entry.values() if torch.is_tensor(item)]
        held = [*self.model.parameters(), *state, self.ids, self.targets, *self._initial]
        with MemoryMeter(exclude=held) as meter:
            self.step()
        return int(meter.peak_bytes)

    def _forward_backward(self, products: Products) -> Tensor:
        # "high" is TF32 on CUDA; a CPU knows none
        torch.set_float32_matmul_precision("highest" if products == "float32" else "high")
        try:
            with torch.autocast(self.device, torch.bfloat16, enabled=products == "bfloat16"):
                loss = self.loss(self.ids, self.targets)
            loss.backward()
        finally:
            torch.set_float32_matmul_precision("highest")
        return cast(Tensor, loss.detach())

    def _replayed(self, products: Products) -> Tensor:
        if self._graph is None:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):  # libraries choose their kernels before anything is recorded
                    self.optimizer.zero_grad()
                    self._forward_backward(products)
            torch.cuda.current_stream().wait_stream(aside)
            self.optimizer.zero_grad()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._recorded_loss = self._forward_backward(products)
        self._graph.replay()
        return self._recorded_loss


def most_rows(config: ModelConfig, settings: Settings, **sizes: Any) -> int:
    """The rows for which a step needs no more memory than that of the standard MLP does for the given ones."""
    rows, period = int(sizes.pop("rows")), int(sizes["period"])
    most = LONGEST_GROWTH * rows

    def peak(settings: Settings, rows: int) -> float:
        training = Training(config, settings, rows=rows, **sizes)
        training.step()
        return training.peak_bytes() or math.inf

    lean = Settings(**{**vars(settings), "compiled": False, "cuda_graph": False})
    room = peak(Settings(**{**vars(lean), "mlp": "swiglu"}), rows)
    while rows + period <= most and peak(lean, rows + period) <= room:
        rows += period
    return rows


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What a rung's process finds: ``median_s``, ``peak_bytes``, ``resident_bytes`` and losses, if asked for."""
    settings, config, device = Settings(**job["settings"]), ModelConfig(**job["config"]), job["device"]
    sizes = {name: job[name] for name in ("device", "context", "rows")}
    sizes["period"] = distinct_rows(job["first_rows"])
    if job.get("look_for_rows"):
        return {"rows": most_rows(config, settings, **sizes)}
    before = resident_bytes()
    training = Training(config, settings, **sizes)
    found: dict[str, Any] = {}
    if job["check"]:
        found["exact_losses"] = training.curve("float32")
        found["losses"] = training.curve() if settings.products != "float32" else found["exact_losses"]
        found["shaken"] = {
            products: _largest_change(found["exact_losses"], training.curve("float32", UNIT_ROUNDOFF[products]))
            for products in job["shake"]
        }
    training.reset()
    for _ in range(WARM_UP):
        training.step()
    restart_high_water()
    seconds = []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        training.step()  # reads the loss, and so waits for the device
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    resident = torch.cuda.max_memory_reserved() if device == "cuda" else high_water_bytes() - before
    found |= {"median_s": statistics.median(seconds), "resident_bytes": resident}
    found["peak_bytes"] = training.peak_bytes()
    return found


def _largest_change(losses: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))


def main(words: str) -> None:
    """Run what the JSON says; print what was measured."""
    job = json.loads(words)
    device, rank, world = job["device"], job.get("rank", 0), job.get("world", 1)
    if job["settings"]["allocator"] and device == "cpu":
        keep_freed_memory()
    if world > 1:
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        store = dist.FileStore(job["meeting"], world)  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    found = measure(job)
    if world > 1:
        dist.barrier()
        leave_groups()
    if rank == 0:
        print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1])
