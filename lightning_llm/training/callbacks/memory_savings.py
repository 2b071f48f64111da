"""What a setting would save: one step with it, run without storage, in a process of its own.

Fake tensors have shapes but no memory, so that a step of any size can be metered anywhere: the meter then reads what it
would read in a real step on a CPU, to the byte. On CUDA other kernels choose other buffers: there it is an estimate.
A process of its own, since tensors without storage would otherwise stay behind in caches of this one.

    python -m lightning_llm.training.callbacks.memory_savings < run.json
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

TIMEOUT_S = 120
HALVING_COSTS = 0.02  # assumed: the same arithmetic in smaller pieces, and gradients added up
NOT_WORTH_NAMING = 0.005  # of the peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a step depends on: the architecture's fields, the micro-batch (batch, seq), how it is computed."""

    architecture: dict[str, Any]
    batch: int
    seq: int
    loss_chunks: int | None
    precision: str
    optimizer: str


@dataclasses.dataclass(frozen=True)
class Saving:
    """A setting, the bytes by which it lowers the peak, its arithmetic as a fraction of the step's, a remark."""

    setting: str
    bytes: int
    extra_work: float
    note: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the word ``estimated`` goes with the number."""
        return {
            "setting": self.setting,
            "estimated_bytes_saved": self.bytes,
            "estimated_extra_work": self.extra_work,
            "note": self.note,
        }


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The step as it is (a report), and what each setting would save."""

    current: dict[str, Any]
    savings: list[Saving]


def estimate(run: Run) -> Estimate | None:
    """In a process of its own, without a GPU; ``None`` if it fails or takes longer than ``TIMEOUT_S``."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(dataclasses.asdict(run), allow_nan=False),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Estimate(found["current"], [Saving(**saving) for saving in found["savings"]])


def cheapest(savings: Sequence[Saving], most: int = 3) -> list[Saving]:
    """Least arithmetic for a byte first, among those that cost none the largest; of each option the cheapest value."""
    ordered = sorted(savings, key=lambda saving: (max(0.0, saving.extra_work) / saving.bytes, -saving.bytes))
    options: dict[str, Saving] = {}
    for saving in ordered:
        options.setdefault(saving.setting.rpartition(" ")[0], saving)
    return list(options.values())[:most]


def candidates(run: Run) -> Iterator[tuple[str, Run, str]]:
    """Settings to try, each with the run that it makes and a remark."""
    exact = "same results to rounding"
    if run.batch > 1:
        half = run.batch // 2
        yield f"data.micro_batch_size {half}", dataclasses.replace(run, batch=half), "same global batch, accumulated"
    if run.loss_chunks == 0:
        yield "model.loss_chunks null", dataclasses.replace(run, loss_chunks=None), exact
    elif run.loss_chunks is not None or run.batch * run.seq > 512:
        chunks = max(2 * (run.loss_chunks or 1), run.batch * run.seq // 256)
        yield f"model.loss_chunks {chunks}", dataclasses.replace(run, loss_chunks=chunks), exact
    for name, change in _changes(run.architecture):
        yield name, dataclasses.replace(run, architecture={**run.architecture, **change}), exact
    if run.precision == "32-true":
        yield "trainer.precision bf16-mixed", dataclasses.replace(run, precision="bf16-mixed"), "changes the numerics"


def _changes(architecture: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    mlp, level, prefix = architecture["mlp"], architecture["checkpoint_level"], "model.architecture."
    levels = level if isinstance(level, list) else [level]
    if mlp in ("swiglu", "memory_optimized_swiglu"):
        lowest = min(levels) if mlp == "memory_optimized_swiglu" else -1
        word = (
            f"{prefix}mlp memory_optimized_swiglu with checkpoint_level" if lowest < 0 else f"{prefix}checkpoint_level"
        )
        for higher in range(lowest + 1, 3):
            if (higher < 2 or architecture["norm"] == "rmsnorm") and not architecture["mlp_bias"]:
                yield f"{word} {higher}", {"mlp": "memory_optimized_swiglu", "checkpoint_level": higher}
    if architecture["recompute"] == "none":
        for part in ("attention", "block"):
            yield f"{prefix}recompute {part}", {"recompute": part}


def _measure(run: Run, top: int = 10) -> tuple[dict[str, Any], int]:
    """The report of a step of fake tensors, to be called under a fake mode; and its floating-point operations."""
    import torch
    from torch.nn import functional as F

    from lightning_llm.measure.attribution import AttributedMeter
    from lightning_llm.model.config import ModelConfig
    from lightning_llm.model.transformer import Transformer
    from lightning_llm.ops.losses import linear_cross_entropy
    from lightning_llm.training.callbacks.memory_report import step_report

    half = torch.float16 if run.precision.startswith("16") else torch.bfloat16
    model = Transformer(ModelConfig(**run.architecture))
    if run.precision.endswith("-true") and not run.precision.startswith("32"):
        model = model.to(half)
    ids = torch.zeros(run.batch, run.seq, dtype=torch.int64)
    meter = AttributedMeter(model, inputs=ids)
    meter.begin("forward")
    counter = _counter()
    with meter, counter:
        with torch.autocast("cpu", dtype=half, enabled=run.precision.endswith("-mixed")):
            hidden = model(ids)
            if run.loss_chunks == 0:
                loss = F.cross_entropy(model.lm_head(hidden).flatten(0, -2).float(), ids.flatten())
            else:
                head = model.lm_head
                loss = linear_cross_entropy(hidden, head.weight, ids, bias=head.bias, num_chunks=run.loss_chunks)
        meter.begin("backward")
        loss.backward()  # type: ignore[no-untyped-call]
    meter.close()
    return step_report(meter.timeline(), top), counter.operations


def _counter() -> Any:
    """Counts the arithmetic of matrix products, in place or not, and answers for values, which fake tensors lack."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        operations = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:  # is a target wrong? no; the loss's gradient is one
                return False if args[0].dtype == torch.bool else 1
            name = func._schema.name.removeprefix("aten::").rstrip("_")
            if name in ("mm", "bmm", "addmm", "baddbmm"):
                left, right = args[-2:] if name.endswith("addmm") else args[:2]
                self.operations += 2 * left.numel() * right.shape[-1]
            elif "scaled_dot_product" in name:
                query, key = args[1:3] if name.endswith("backward") else args[:2]
                self.operations += (10 if name.endswith("backward") else 4) * query.numel() * key.shape[-2]
            return func(*args, **(kwargs or {}))

    return Counter()  # type: ignore[no-untyped-call]


def _muon(run: Run, work: int) -> Iterator[Saving]:
    """One moment instead of two for the matrices inside the layers, for the arithmetic of the orthogonalisation."""
    from lightning_llm.model.config import ModelConfig
    from lightning_llm.model.transformer import Transformer

    if run.optimizer != "AdamW":
        return
    shapes = [p.shape for p in Transformer(ModelConfig(**run.architecture)).layers.parameters() if p.dim() == 2]
    numbers = sum(rows * columns for rows, columns in shapes)
    extra = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)  # five Newton-Schulz steps
    note = "changes the training, tune the learning rate"
    yield Saving("model.optimizer lightning_llm.optim.MuonAdamW", 4 * numbers, extra / work, note)


def _main() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    run = Run(**json.load(sys.stdin))
    savings = []
    with FakeTensorMode():
        current, work = _measure(run)
        peak = current["peak"]["bytes"]
        for setting, changed, note in candidates(run):
            with contextlib.suppress(ValueError):  # a combination that the model refuses
                report, its_work = _measure(changed)
                saved = peak - report["peak"]["bytes"]
                if changed.batch != run.batch:
                    its_work = round(work * (1 + HALVING_COSTS))
                if saved > NOT_WORTH_NAMING * peak:
                    savings.append(Saving(setting, saved, its_work / work - 1, note))
        savings += _muon(run, work)
    found = {"current": current, "savings": [dataclasses.asdict(saving) for saving in savings]}
    json.dump(found, sys.stdout, allow_nan=False)


if __name__ == "__main__":
    _main()
