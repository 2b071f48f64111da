"""One technique of ``benchmarks techniques`` in a process of its own: trains some steps and returns what it measured.

Its own process, because settings of an allocator cannot be taken back. With ``world`` above 1 it is one of so many,
which find each other by the file ``meeting``. Attention by loops over heads, and by torch's own operators, takes the
place of the package's inside a Transformer, with the same weights.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import step_peak_bytes
from benchmarks.steps import LossModule, process_group, seconds_of
from lightning_llm.measure.gauges import high_water_bytes, resident_bytes, restart_high_water
from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.ops.rotation import rotate_halves
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.clipping import clip_grad_norm_
from lightning_llm.optim.groups import param_groups
from lightning_llm.training.environment import keep_freed_memory

Precision = Literal["float32", "tf32", "bfloat16"]
# Half the distance of neighboring numbers, relative: 24, 11 and 8 significant bits.
UNIT_ROUNDOFF: dict[Precision, float] = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8}
CURVE = 6  # steps whose losses are compared
WARM_UP = 2
LONGEST_GROWTH = 8  # times the batch, where the larger one is looked for
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a step is computed.

    Attributes:
        operators: ``per head``: a loop over heads, scores and mask written out; ``torch``: all heads in one matmul and
            torch's attention and norm; ``ours``: the package's own.
        precision: Of matmuls: float32, TF32, or bf16 by autocast.
        optimizer: ``loop``: a tensor at a time, as is the clipping; ``fused``: many at once.
        chunked_loss: Whether the logits of all tokens never exist at once.
        mlp: As in ``ModelConfig``.
        more_rows: The larger batch that the memory of the standard MLP has room for.
        compiled: Each block, in place.
        cuda_graph: Forward and backward, recorded once and replayed.
        allocator: Settings for training: glibc keeps freed memory; CUDA's allocator has segments that grow.
        all_devices: DDP; on a CPU a process for each core, with one thread.
    """

    operators: Literal["per head", "torch", "ours"] = "per head"
    precision: Precision = "float32"
    optimizer: Literal["loop", "fused"] = "loop"
    chunked_loss: bool = False
    mlp: str = "swiglu"
    more_rows: bool = False
    compiled: bool = False
    cuda_graph: bool = False
    allocator: bool = False
    all_devices: bool = False


class PerHeadAttention(nn.Module):
    """A module for each head, one after another; scores and mask are written out, as a course teaches it."""

    def __init__(self, whole: CausalSelfAttention) -> None:
        super().__init__()
        weights = [proj.weight.detach() for proj in (whole.q_proj, whole.k_proj, whole.v_proj)]
        parts = zip(*(torch.split(weight, whole.head_dim) for weight in weights), strict=True)
        self.heads, self.o_proj = nn.ModuleList(_Head(*part) for part in parts), whole.o_proj

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        return cast(Tensor, self.o_proj(torch.cat([head(x, context.state) for head in self.heads], dim=-1)))


class _Head(nn.Module):
    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(weight.shape[1], weight.shape[0], bias=False) for weight in weights)
        for linear, weight in zip(self.projections, weights, strict=True):
            cast(Tensor, linear.weight).data.copy_(weight)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, head_dim)."""
        query, key, value = (linear(x) for linear in self.projections)
        scores = rotate_halves(query, *cos_sin) @ rotate_halves(key, *cos_sin).mT / math.sqrt(query.shape[-1])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
        return cast(Tensor, scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value)


class TorchAttention(nn.Module):
    """All heads in one matmul for each projection, and ``scaled_dot_product_attention``."""

    def __init__(self, whole: CausalSelfAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = whole.q_proj, whole.k_proj, whole.v_proj, whole.o_proj
        self.head_dim = whole.head_dim

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        heads = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (each.transpose(1, 2) for each in heads)
        query, key = context.rotate(query, key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


def use_plain_operators(model: Transformer, operators: str) -> None:
    """Put attention ``per head`` or of ``torch`` into a model, and torch's norm; ``ours`` changes nothing."""
    if operators == "ours":
        return
    for block in model.layers:
        whole = cast(CausalSelfAttention, block.self_attn)
        block.self_attn = PerHeadAttention(whole) if operators == "per head" else TorchAttention(whole)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                plain = nn.RMSNorm(child.normalized_shape, eps=child.eps)
                plain.weight = child.weight
                setattr(parent, name, plain)


def loss_of(model: Transformer, is_chunked: bool, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, (batch, seq) twice -> scalar, float32."""
    hidden = model(ids)
    if is_chunked:
        return linear_cross_entropy(hidden, model.lm_head.weight, targets)
    return F.cross_entropy(model.logits(hidden).flatten(0, 1).float(), targets.flatten())


class Training:
    """Whole training steps on one batch, which is the same for all techniques except for the repeated rows.

    The MLP of the config is replaced by the technique's; ``context`` is tokens per row, ``period`` how many differ.
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
        self.loss: nn.Module = LossModule(partial(loss_of, model, settings.chunked_loss), model)
        if dist.is_initialized():
            self.loss = DistributedDataParallel(self.loss, gradient_as_bucket_view=True)
        self._initial = [weight.detach().clone() for weight in model.parameters()]
        generator = torch.Generator().manual_seed(1)
        windows = torch.randint(config.vocab_size or 1, (period, context + 1), generator=generator)
        windows = windows.repeat(rows // period, 1).to(device)
        self.batch = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        self.reset()

    def reset(self, shake: float = 0.0) -> None:
        """Back to the initial weights, each moved by ``shake`` of itself, up or down by chance; a new optimizer."""
        signs = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for weight, initial in zip(self.model.parameters(), self._initial, strict=True):
                weight.copy_(initial)
                if shake:
                    chance = torch.randint(0, 2, weight.shape, generator=signs) * 2 - 1
                    weight.mul_(1 + shake * chance.to(weight.device, torch.float64))  # rounded once, at the end
                weight.grad = None
        groups, is_loop = param_groups(self.model), self.settings.optimizer == "loop"
        loop = partial(torch.optim.AdamW, foreach=False, fused=False)
        self.optimizer: torch.optim.Optimizer = (loop if is_loop else AdamW)(groups, **OPTIONS)
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, precision: Precision | None = None) -> float:
        """One step; the loss before it. A precision other than the technique's is for comparing."""
        run = self._replayed if self.settings.cuda_graph else self._forward_backward
        loss = run(precision or self.settings.precision)
        loop = partial(nn.utils.clip_grad_norm_, foreach=False)
        (loop if self.settings.optimizer == "loop" else clip_grad_norm_)(self.model.parameters(), 1.0)
        self.optimizer.step()
        if not self.settings.cuda_graph:  # a recorded backward writes where it has written before
            self.optimizer.zero_grad()
        return loss.item()

    def curve(self, precision: Precision | None = None, shake: float = 0.0) -> list[float]:
        """The losses of the first steps."""
        self.reset(shake)
        return [self.step(precision) for _ in range(CURVE)]

    def peak_bytes(self) -> int | None:
        """The most that a step holds beyond weights, optimizer state and batch; ``None`` where it cannot be seen."""
        if self.device == "cuda":
            self._graph = None  # to play one allocates nothing: what counts is allocated where it is recorded
            self.optimizer.zero_grad()
        elif self.settings.compiled or dist.is_initialized():  # the compiler's buffers and DDP's are out of sight
            return None
        return step_peak_bytes(self.step, self.model, self.optimizer, self.batch)

    def _forward_backward(self, precision: Precision) -> Tensor:
        # "high" is TF32 on CUDA; a CPU knows none
        torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
        try:
            with torch.autocast(self.device, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = self.loss(*self.batch)
            loss.backward()
        finally:
            torch.set_float32_matmul_precision("highest")
        return cast(Tensor, loss.detach())

    def _replayed(self, precision: Precision) -> Tensor:
        if self._graph is None:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):  # libraries choose their kernels before anything is recorded
                    self.optimizer.zero_grad()
                    self._forward_backward(precision)
            torch.cuda.current_stream().wait_stream(aside)
            self.optimizer.zero_grad()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._recorded_loss = self._forward_backward(precision)
        self._graph.replay()
        return self._recorded_loss


def distinct_rows(rows: int) -> int:
    """How many rows of a batch differ; the rest repeats them. The largest divisor up to a quarter, at least one.

    Mean loss and gradients of a batch of any multiple of them are the same: so a larger batch computes the same.
    """
    return max(part for part in range(1, max(1, rows // 4) + 1) if rows % part == 0)


def most_rows(config: ModelConfig, settings: Settings, **sizes: Any) -> int:
    """The rows for which a step needs no more memory than that of the standard MLP does for the given ones."""
    rows, period = int(sizes.pop("rows")), int(sizes["period"])
    most = LONGEST_GROWTH * rows

    def peak(settings: Settings, rows: int) -> float:
        training = Training(config, settings, rows=rows, **sizes)
        training.step()
        return training.peak_bytes() or math.inf

    lean = dataclasses.replace(settings, compiled=False, cuda_graph=False)
    room = peak(dataclasses.replace(lean, mlp="swiglu"), rows)
    while rows + period <= most and peak(lean, rows + period) <= room:
        rows += period
    return rows


def most_apart(these: Sequence[float], those: Sequence[float]) -> float:
    """The largest difference of losses at the same step."""
    return max(abs(one - other) for one, other in zip(these, those, strict=True))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What one process finds: ``median_s``, ``peak_bytes``, ``resident_bytes`` and losses, if asked for."""
    if job["settings"].allocator and job["device"] != "cuda":
        keep_freed_memory()
    rank, world = job["rank"], job["world"]
    with process_group(rank, world, job["device"], job["meeting"]) if world > 1 else nullcontext():
        settings, config, device = job["settings"], job["config"], job["device"]
        sizes = {name: job[name] for name in ("device", "context", "rows")}
        sizes["period"] = distinct_rows(job["first_rows"])
        if job.get("look_for_rows"):
            return {"rows": most_rows(config, settings, **sizes)}
        before = resident_bytes()
        training = Training(config, settings, **sizes)
        result: dict[str, Any] = {}
        if job["check"]:
            exact = result["exact_losses"] = training.curve("float32")
            result["losses"] = training.curve() if settings.precision != "float32" else exact
            shaken = {name: training.curve("float32", UNIT_ROUNDOFF[name]) for name in job["shake"]}
            result["shaken"] = {name: most_apart(exact, losses) for name, losses in shaken.items()}
        training.reset()
        for _ in range(WARM_UP):
            training.step()
        restart_high_water()
        seconds = [seconds_of(training.step, device) for _ in range(job["steps"])]
        resident = torch.cuda.max_memory_reserved() if device == "cuda" else high_water_bytes() - before
        result |= {"median_s": statistics.median(seconds), "resident_bytes": resident}
        return {**result, "peak_bytes": training.peak_bytes()}
