"""``lightning-llm estimate --config FILE``: parameters, memory, FLOPs and time of a run, before it runs. No torch.

Everything is computed from the config; docs/accounting.md derives the formulas and lists what is not covered.
"""

import argparse
from typing import Any

from lightning_llm.accounting.counts import parameter_terms, parameters_by_part, step_flops
from lightning_llm.accounting.hardware import shown_duration, shown_size
from lightning_llm.accounting.memory import (
    SharedMemory,
    StepMemory,
    activation_precision,
    most_rows,
    shared_memory,
    step_memory,
    step_points,
)
from lightning_llm.accounting.planner import STATE_BYTES
from lightning_llm.accounting.step_time import matmul_dtype
from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.cli.run_config import RunConfig, add_options, read_run, size_option
from lightning_llm.io.atomic import write_json
from lightning_llm.model.parts import BUILT_IN

ADAMW_FLOPS = 12  # per parameter: decay 1, first average 3, second average 4, root, sum, quotient and update 4
ASSUMED_UTILIZATION = 0.4
HELD = ("parameters", "gradients", "optimizer_state", "ddp_buckets", "gathered")  # gradients from backward to the step


def _options(parser: OneLineParser) -> None:
    add_options(parser)
    add = parser.add_argument
    add("--micro-batch-size", type=int, metavar="N", help="rows of a forward pass on one device")
    add("--steps", type=int, metavar="N", help="optimizer steps (default: the config's)")
    share = "share of the device's peak, 0 to 1 (default: 0.4, assumed)"
    add("--utilization", "--utilisation", type=float, metavar="U", help=share)
    add("--memory", type=size_option, metavar="SIZE", help="find the largest batch that fits, e.g. 80GiB")
    add("--explain", action="store_true", help="print the formulas, term by term")


@tool(_options)
def run_estimate(options: argparse.Namespace) -> None:
    """Estimate parameters, memory, FLOPs and time of a run from its config."""
    report = estimate(options)
    if options.json is not None:
        write_json(options.json, report)
    print(text(report, explain=options.explain))


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as plain values.

    Raises:
        ValueError: An option is wrong or not covered, the device is unknown, or memory is too small.
    """
    run = read_run(options)
    world_size, rows_per_step = run.world_size, run.global_batch_size
    rows = options.micro_batch_size or run.micro_batch_size or max(1, rows_per_step // world_size)
    if rows < 1 or rows_per_step % (rows * world_size):
        raise ValueError(
            f"global_batch_size {rows_per_step} is not a multiple of micro-batch size {rows} times "
            f"--world-size {world_size}: change one of them"
        )
    strategy = run.strategy if world_size > 1 else None
    settings: dict[str, Any] = {
        "context_length": run.context_length,
        "document_mask": run.document_mask,
        "precision": run.precision,
        "device": run.device_kind,
        "loss_chunks": run.loss_chunks,
        "accumulation": rows_per_step // (rows * world_size),
        "state_per_parameter": run.state_per_parameter,
        "state_itemsize": STATE_BYTES[run.state_dtype],
        "measured": run.measured,
    }
    # the state exists during the whole step: shared_memory adds it
    in_trace = {"precision": activation_precision(run.precision, strategy or "ddp"), "state_per_parameter": 0}
    same = ("precision", "accumulation", "state_per_parameter", "state_itemsize", "measured")
    sharing = {name: settings[name] for name in same} | {
        "strategy": run.strategy,
        "world_size": world_size,
        "gradient_views": options.gradient_views,
    }

    memory: StepMemory = step_memory(run.config, rows=rows, **{**settings, **in_trace})
    shared = shared_memory(run.config, memory, **sharing)
    counts = parameters_by_part(run.config, run.measured)
    tokens = rows_per_step * run.context_length
    flops = step_flops(run.config, tokens=tokens, context_length=run.context_length, measured=run.measured)
    of_run = {name: getattr(run, name) for name in ("optimizer", "state_dtype", "world_size")}
    of_run |= {"strategy": strategy, "precision_reason": run.precision_reason}
    report: dict[str, Any] = {
        "settings": {"rows": rows, **of_run, **settings, **_parts(run)},
        "notes": run.notes,
        "parameters": {**counts, "all": sum(counts.values())},
        "parameter_terms": parameter_terms(run.config, run.measured),
        "memory": _memory(memory, shared) | {"needed": run.reserve.around(shared.peak), "reserve": str(run.reserve)},
        "flops": {
            "tokens": tokens,
            "forward": flops.forward,
            "forward_by_part": flops.by_part,
            "backward": flops.backward,
            "recomputed": flops.recomputed,
            "optimizer": ADAMW_FLOPS * sum(counts.values()) if run.optimizer in ("AdamW", "Adam") else None,
        },
    }
    if run.device is not None:
        report["time"] = _time(run, flops.model, options)
    if options.memory is not None:
        available = options.memory if run.device is None else run.device.memory_within(options.memory)

        def needed(rows: int) -> int:
            points = step_points(run.config, rows=rows, **{**settings, **in_trace})
            return run.reserve.around(shared_memory(run.config, points, **sharing).peak)

        largest = most_rows(needed, available)
        report["largest_batch"] = {"memory": available, "rows": largest}
    return report


def _parts(run: RunConfig) -> dict[str, Any]:
    measured = [kind for kind in BUILT_IN if kind in run.measured]
    return {"mlp": run.config.mlp, "mlp_is_measured": "mlp" in measured, "measured": measured}


def _memory(memory: StepMemory, shared: SharedMemory) -> dict[str, Any]:
    working = sum(size for (kind, _), size in memory.at_peak.items() if kind in ("saved", "temporary"))
    terms = sorted(memory.terms.items(), key=lambda item: -item[0][2] * item[1])
    return {
        **{name: getattr(shared, name.removeprefix("ddp_")) for name in HELD},
        "kept": memory.saved,
        "kept_terms": [
            {"part": part, "formula": formula, "bytes": size, "count": count} for (part, formula, size), count in terms
        ],
        "activations_and_temporaries_at_peak": working,
        "gradients_at_peak": memory.at_peak.get(("gradients", ""), 0),
        "peak": shared.peak,
        "peak_moment": shared.peak_point,
    }


def _time(run: RunConfig, flops: int, options: argparse.Namespace) -> dict[str, Any]:
    assert run.device is not None
    dtype = matmul_dtype(run.precision, tf32=run.tf32)
    peak = run.device.peak(dtype)
    utilization = ASSUMED_UTILIZATION if options.utilization is None else options.utilization
    if not 0 < utilization <= 1:
        raise ValueError(f"--utilization must be above 0 and at most 1, got {utilization}")
    steps, seconds = options.steps or run.max_steps, flops / (peak * run.world_size * utilization)
    return {
        "device": run.device.name,
        "dtype": dtype,
        "utilization": utilization,
        "utilization_is_assumed": options.utilization is None,
        "seconds_per_step": seconds,
        "steps": steps,
        "days": seconds * steps / 86400,
    }


def text(report: dict[str, Any], *, explain: bool) -> str:
    """The report as lines for a terminal."""
    settings, memory, flops = report["settings"], report["memory"], report["flops"]
    lines = [in_words(report), ""]
    lines += [_step_in_words(settings)]
    lines += report["notes"]
    if settings["precision_reason"]:
        lines += [f"precision auto is {settings['precision']}: {settings['precision_reason']}"]
    lines += ["", "parameters", *(_line(name, f"{count:,}") for name, count in report["parameters"].items())]
    if explain:
        for part, terms in report["parameter_terms"].items():
            lines += [_line(f"{part}: {formula}", f"{count:,}") for formula, count in terms.items()]
    sizes = {name.replace("_", " "): memory[name] for name in HELD if memory[name] or name != "gathered"}
    sizes |= {f"saved, {part}": size for part, size in memory["kept"].items()}
    for what in ("gradients", "activations_and_temporaries"):
        sizes[f"{what.replace('_', ' ')} at the peak"] = memory[f"{what}_at_peak"]
    sizes["peak"] = memory["peak"]
    lines += ["", "memory of a step on one device", *(_line(name, _mib(size)) for name, size in sizes.items())]
    lines += [_line("at", memory["peak_moment"])]
    if settings["device"] != "cpu":
        lines += ["for CUDA, not compared with a GPU yet"]
    if memory["needed"] > memory["peak"]:
        lines += [_line("of the device, with a reserve", _mib(memory["needed"])), f"  reserve: {memory['reserve']}"]
    if explain:
        lines += ["", "saved for backward, each as count × elements × bytes per element (letters: docs/accounting.md)"]
        for term in memory["kept_terms"]:
            formula = f"{term['part']}: {term['count']} × {term['formula']}"
            lines += [_line(formula, _mib(term["count"] * term["bytes"]))]
    lines += ["", f"FLOPs of a step of {flops['tokens']:,} tokens, and per token"]
    for name in ("forward", "backward", "recomputed", "optimizer"):
        if flops[name] is not None:
            lines += [_line(name, f"{flops[name]:.4g}  {flops[name] / flops['tokens']:.4g}")]
    if time := report.get("time"):
        how = "assumed" if time["utilization_is_assumed"] else "as given"
        lines += ["", f"time on {time['device']} at {time['utilization']:.0%} of its {time['dtype']} peak ({how})"]
        lines += [_line("seconds per step", f"{time['seconds_per_step']:.4g}")]
        lines += [_line(f"days for {time['steps']:,} steps", f"{time['days']:.4g}")] if time["steps"] else []
    if largest := report.get("largest_batch"):
        lines += ["", f"largest micro-batch in {_mib(largest['memory'])}: {largest['rows']} rows"]
    return "\n".join(lines)


def _step_in_words(settings: dict[str, Any]) -> str:
    """What the figures are of, in the words of the config."""
    device = "CPU" if settings["device"] == "cpu" else "GPU"
    words = [
        f"a step: {settings['accumulation']} × {settings['rows']} rows of {settings['context_length']} tokens",
        *(["attention inside documents"] if settings["document_mask"] else []),
        f"precision {settings['precision']}",
        f"optimizer {settings['optimizer']}",
        *([f"its state in {settings['state_dtype']}"] if settings["state_dtype"] else []),
        *([f"loss_chunks {settings['loss_chunks']}"] if settings["loss_chunks"] is not None else []),
        f"on {settings['world_size']} {device}{'s' * (settings['world_size'] > 1)}",
        *([f"strategy {settings['strategy']}"] if settings["strategy"] else []),
    ]
    return ", ".join(words)


def in_words(report: dict[str, Any]) -> str:
    """Parameters, memory and time of a run in one line."""
    parameters, memory = report["parameters"]["all"], shown_size(report["memory"]["peak"])
    each = " on each device" if report["settings"]["world_size"] > 1 else ""
    line = f"The model has {parameters:,} parameters, and training it needs {memory} of memory{each}"
    if (time := report.get("time")) is None:
        return f"{line}. Give --device to estimate the time."
    assumed, seconds = "an assumed " if time["utilization_is_assumed"] else "", time["seconds_per_step"]
    share = f"{assumed}{100 * time['utilization']:.3g} % of the peak of {time['device']}"
    run = f", and {time['steps']:,} steps take {shown_duration(seconds * time['steps'])}" if time["steps"] else ""
    return f"{line}. At {share}, a step takes {shown_duration(seconds)}{run}."


def _line(name: str, value: str) -> str:
    return f"  {name:<44} {value:>20}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
