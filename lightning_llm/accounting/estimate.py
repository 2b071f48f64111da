"""All figures of a run before it runs, as plain values: parameters, memory, FLOPs and time."""

import dataclasses
from typing import Any, NamedTuple

from lightning_llm.accounting.counts import parameter_terms, parameters_by_part, step_flops
from lightning_llm.accounting.hardware import Device, Reserve, matmul_precision
from lightning_llm.accounting.memory import StepMemory, memory_trace, most_rows, step_memory
from lightning_llm.accounting.parts import parts_to_measure
from lightning_llm.accounting.sharding import RankMemory, rank_memory
from lightning_llm.accounting.sizing import Sizing
from lightning_llm.accounting.step_settings import StepSettings, rows_per_micro_batch
from lightning_llm.io.config_file import Section
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import BUILT_IN, name_of

ADAMW_FLOPS = 12  # per parameter: decay 1, first average 3, second average 4, root, sum, quotient and update 4
ASSUMED_UTILIZATION = 0.4
EXTRAPOLATED = "what the step does depends on values: memory was measured with one row and two, and extrapolated"
# Held across operators; gradients from backward to the step. ZeRO (arXiv:1910.02054) calls the first three so.
MODEL_STATES = ("parameters", "gradients", "optimizer_state", "ddp_buckets", "gathered")


class Optimizer(NamedTuple):
    """Optimizer, and the state that it holds.

    Attributes:
        name: Of its class.
        is_own_adamw: Whether it is this project's, whose state may be bfloat16.
        state_per_parameter: Tensors of state for each parameter; for MuonAdamW the mean over all.
        state_dtype: Of the state; ``None``: the parameter's, or ``state_per_parameter`` accounts for another.
    """

    name: str
    is_own_adamw: bool
    state_per_parameter: float
    state_dtype: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run's cost depends on; ``training/run_config.py`` reads it from configs.

    Attributes:
        raw: The configs as one.
        config: The model.
        device: From the table of devices; ``None`` for a CPU.
        precision_reason: Why the step's precision, if the config leaves it to the machine; else empty.
        tf32: Matmuls of float32 run in TF32.
        is_compiled: ``torch.compile`` compiles the model.
        capture: Forward and backward are CUDA graphs.
        step: All of a step but its rows.
        global_batch_size: Rows of a step of all processes.
        micro_batch_size: Rows of a forward pass; ``None``: all rows of a process.
        max_steps: From the config; 0: it does not say.
        optimizer: What it holds.
        reserve: Memory of each device that tensors do not get.
        sizing: What ``size`` set, if it was given.
        epochs: Then how often the run reads the training text; ``None``: the store does not exist yet.
    """

    raw: Section
    config: ModelConfig
    device: Device | None
    precision_reason: str
    tf32: bool
    is_compiled: bool = False
    capture: bool = False
    step: StepSettings
    global_batch_size: int
    micro_batch_size: int | None
    max_steps: int
    optimizer: Optimizer
    reserve: Reserve
    sizing: Sizing | None = None
    epochs: float | None = None

    @property
    def notes(self) -> list[str]:
        """Notes on figures that no formula describes."""
        names = parts_to_measure(self.config)
        notes = [f"parameters and FLOPs of {kind} {name} were measured" for kind, name in names.items()]
        if name_of(self.config.mlp) == "mixture_of_experts":
            notes.append("each expert is assumed to get the same number of tokens")
        if self.is_compiled:
            notes.append("memory is that of eager code; compiled code needs more or less (docs/accounting.md)")
        if self.capture:
            notes.append("capture: pool not counted")
        return notes

    def step_of(self, rows: int | None) -> StepSettings:
        """The step in micro-batches of so many rows; ``None``: of all rows of a process.

        Raises:
            ValueError: They do not divide the global batch.
        """
        size = self.global_batch_size
        world_size = self.step.world_size
        rows = rows_per_micro_batch(size, rows or None, world_size)
        return dataclasses.replace(self.step, rows=rows, accumulation=size // (rows * world_size))


def estimate(run: RunConfig, *, utilization: float | None = None, memory: int | None = None) -> dict[str, Any]:
    """All figures, as plain values.

    Args:
        run: The run.
        utilization: Share of the device's peak; ``None``: assumed.
        memory: Bytes of a device, to find the largest micro-batch that fits.

    Raises:
        ValueError: An option is wrong or not covered, or memory is too small.
    """
    config = run.config
    step = run.step_of(run.micro_batch_size)

    def needed(rows: int) -> int:
        trace = memory_trace(config, dataclasses.replace(step.single_process, rows=rows))
        return run.reserve.around(rank_memory(config, trace, step).peak)

    counts = parameters_by_part(config, step.measured)
    tokens = run.global_batch_size * step.context_length
    flops = step_flops(config, tokens=tokens, context_length=step.context_length, measured=step.measured)
    traced = step_memory(config, step.single_process)
    of_rank = rank_memory(config, traced, step)
    report: dict[str, Any] = {
        "settings": _settings(run, step),
        "notes": [*run.notes, *([EXTRAPOLATED] if traced.is_extrapolated else [])],
        "parameters": {**counts, "all": sum(counts.values())},
        "parameter_terms": parameter_terms(config, step.measured),
        "memory": _memory(traced, of_rank) | {"needed": run.reserve.around(of_rank.peak), "reserve": str(run.reserve)},
        "flops": {
            "tokens": tokens,
            "forward": flops.forward,
            "forward_by_part": flops.by_part,
            "backward": flops.backward,
            "recomputed": flops.recomputed,
            "optimizer": ADAMW_FLOPS * sum(counts.values()) if run.optimizer.name in ("AdamW", "Adam") else None,
        },
    }
    if run.sizing is not None:
        report["sizing"] = {**dataclasses.asdict(run.sizing), "epochs": run.epochs}
    if run.device is not None:
        report["time"] = _time(run, run.device, flops.model, utilization)
    if memory is not None:
        available = memory if run.device is None else run.device.memory_within(memory)
        report["largest_batch"] = {"memory": available, "rows": most_rows(needed, available)}
    return report


def _settings(run: RunConfig, step: StepSettings) -> dict[str, Any]:
    measured = [kind for kind in BUILT_IN if kind in step.measured]
    settings = {
        **vars(step),
        "optimizer": run.optimizer.name,
        "state_dtype": run.optimizer.state_dtype,
        "precision_reason": run.precision_reason,
        "strategy": step.strategy if step.world_size > 1 else None,
        "mlp": run.config.mlp,
        "mlp_is_measured": "mlp" in measured,
        "measured": measured,
    }
    return {name: value for name, value in settings.items() if name != "gradient_views"}


def _memory(memory: StepMemory, of_rank: RankMemory) -> dict[str, Any]:
    working = sum(size for (kind, _), size in memory.at_peak.items() if kind in ("activations", "temporary"))
    held = {("optimizer_state", ""): of_rank.optimizer_state, ("ddp_buckets", ""): of_rank.buckets}
    at_peak = sorted({**memory.at_peak, **held}.items(), key=lambda item: -item[1])
    return {
        **{name: getattr(of_rank, name.removeprefix("ddp_")) for name in MODEL_STATES},
        "saved": memory.saved,
        "at_peak": [{"category": category, "part": part, "bytes": size} for (category, part), size in at_peak if size],
        "activations_and_temporaries_at_peak": working,
        "gradients_at_peak": sum(size for (category, _), size in memory.at_peak.items() if category == "gradients"),
        "peak": of_rank.peak,
        "peak_point": of_rank.peak_point,
    }


def _time(run: RunConfig, device: Device, flops: int, utilization: float | None) -> dict[str, Any]:
    dtype = matmul_precision(run.step.precision, tf32=run.tf32)
    peak = device.peak(dtype)
    share = ASSUMED_UTILIZATION if utilization is None else utilization
    if not 0 < share <= 1:
        raise ValueError(f"--utilization must be above 0 and at most 1, got {share}")
    steps = run.max_steps
    seconds = flops / (peak * run.step.world_size * share)
    return {
        "device": device.name,
        "dtype": dtype,
        "utilization": share,
        "utilization_is_assumed": utilization is None,
        "seconds_per_step": seconds,
        "steps": steps,
        "days": seconds * steps / 86400,
    }
