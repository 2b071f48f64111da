"""``lightning-llm estimate --config FILE``: parameters, memory, FLOPs and time of a run, before it runs. No torch.

Everything is computed from the config; docs/accounting.md derives the formulas and says what is not covered.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.accounting.flops import step_flops
from lightning_llm.accounting.hardware import find_device
from lightning_llm.accounting.memory import StepMemory, largest_batch, step_memory
from lightning_llm.accounting.parameters import parameter_terms, parameters_by_part
from lightning_llm.cli.parser import OneLineParser, run_tool
from lightning_llm.model.config import ModelConfig

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# Tensors of a parameter's size that an optimiser keeps for each parameter; Muon's matrices have one, the rest two.
STATE_PER_PARAMETER = {"AdamW": 2, "Adam": 2, "MuonAdamW": 2, "SGD": 0, "RMSprop": 1, "Adagrad": 1, "Lion": 1}
ADAMW_FLOPS = 12  # per parameter: decay 1, first average 3, second average 4, root, sum, quotient and update 4
ASSUMED_UTILISATION = 0.4
DATA_DEFAULTS = {"context_length": 256, "global_batch_size": 32}  # those of TokenDataModule

Section = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _estimate, TypeError, yaml.YAMLError)


def _estimate(options: argparse.Namespace) -> None:
    report = estimate(options)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(text(report, explain=options.explain))


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm estimate", "Parameters, memory, FLOPs and time of a run, from its config.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a config for fit")
    parser.add_argument("--device", metavar="NAME", help="a GPU of the table, such as H200; default: a CPU")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="processes of DDP")
    parser.add_argument("--gradient-views", action="store_true", help="DDP's gradients are views of its buckets")
    parser.add_argument("--precision", metavar="P", help="32-true, bf16-true or bf16-mixed; default: the config's")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="token ids, if the config leaves it to the data")
    parser.add_argument("--micro-batch-size", type=int, metavar="N", help="rows of a forward pass on one device")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps; default: the config's")
    parser.add_argument("--utilisation", type=float, metavar="U", help="model FLOPs per second over the peak, 0 to 1")
    parser.add_argument("--memory", type=byte_size, metavar="SIZE", help="find the largest batch, e.g. 80GiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it")
    parser.add_argument("--explain", action="store_true", help="print the formulas, term by term")
    return parser


def byte_size(words: str) -> int:
    """``80GiB`` as bytes.

    Raises:
        argparse.ArgumentTypeError: No number, or a unit that is not known.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", words.strip())
    if found is None or found[2] not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{words!r} is no size: give a number with one of {', '.join(u for u in UNITS if u)}, such as 80GiB"
        )
    return int(float(found[1]) * UNITS[found[2]])


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as plain values.

    Raises:
        ValueError: A setting that is wrong or not covered, a device that is not listed, or memory that is too little.
    """
    raw = yaml.safe_load(options.config.read_text(encoding="utf-8")) or {}
    model, data, trainer = (_section(raw, name) for name in ("model", "data", "trainer"))
    config = _architecture(_section(model, "architecture"), data, options.vocab_size)
    device = None if options.device is None else find_device(options.device)
    precision = options.precision or str(trainer.get("precision", "auto"))
    if precision in ("auto", "None"):
        precision = "32-true" if device is None or "bfloat16" not in device.flops else "bf16-mixed"
    if options.world_size < 1:
        raise ValueError(f"--world-size must be at least 1, got {options.world_size}")
    context = int(data.get("context_length", DATA_DEFAULTS["context_length"]))
    rows_per_step = int(data.get("global_batch_size", DATA_DEFAULTS["global_batch_size"]))
    rows = options.micro_batch_size or data.get("micro_batch_size") or max(1, rows_per_step // options.world_size)
    if rows < 1 or rows_per_step % (rows * options.world_size):
        raise ValueError(
            f"global_batch_size {rows_per_step} is not a multiple of micro-batch size {rows} times "
            f"--world-size {options.world_size}: change one of them"
        )
    optimizer, state = _optimizer(model)
    settings: dict[str, Any] = {
        "context_length": context,
        "precision": precision,
        "device": "cpu" if device is None else "cuda",
        "loss_chunks": model.get("loss_chunks"),
        "accumulation": rows_per_step // (rows * options.world_size),
        "state_per_parameter": state,
    }
    memory = step_memory(config, rows=rows, **settings)
    buckets = memory.gradients if options.world_size > 1 and not options.gradient_views else 0
    counts = parameters_by_part(config)
    flops = step_flops(config, tokens=rows_per_step * context, context_length=context)
    report: dict[str, Any] = {
        "settings": {"rows": rows, "optimizer": optimizer, "world_size": options.world_size, **settings},
        "parameters": {**counts, "all": sum(counts.values())},
        "parameter_terms": parameter_terms(config),
        "memory": _memory(memory, buckets),
        "flops": {
            "tokens": rows_per_step * context,
            "forward": flops.forward,
            "forward_by_part": flops.by_part,
            "backward": flops.backward,
            "recomputed": flops.recomputed,
            "optimizer": ADAMW_FLOPS * sum(counts.values()) if optimizer in ("AdamW", "Adam") else None,
        },
    }
    if device is not None:
        steps = options.steps or int(trainer.get("max_steps") or 0)
        dtype = "float32" if precision == "32-true" else "bfloat16"
        peak = device.flops.get(dtype)
        if peak is None:
            raise ValueError(f"{device.name} has no {dtype} peak in the table: take --precision 32-true")
        report["time"] = _time(flops.model, peak * options.world_size, steps, options.utilisation)
        report["time"] |= {"device": device.name, "dtype": dtype}
    if options.memory is not None:
        report["largest_batch"] = {
            "memory": options.memory,
            "rows": largest_batch(config, options.memory, extra=buckets, **settings),
        }
    return report


def _section(raw: Section, name: str) -> Section:
    found = raw.get(name) if isinstance(raw, dict) else None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} in the config must hold options, got {found!r}")
    return found


def _architecture(fields: Section, data: Section, vocab_size: int | None) -> ModelConfig:
    fields = dict(fields)
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    elif fields.get("vocab_size") is None and data.get("tokenizer") == "bpe":
        fields["vocab_size"] = data.get("vocab_size")
    return ModelConfig(**fields)


def _optimizer(model: Section) -> tuple[str, int]:
    given = model.get("optimizer") or "AdamW"
    path = given.get("class_path", "AdamW") if isinstance(given, dict) else str(given)
    name = path.rpartition(".")[2]
    if name not in STATE_PER_PARAMETER:
        raise ValueError(f"optimizer {path} is not known: its state can be told for {', '.join(STATE_PER_PARAMETER)}")
    arguments = given.get("init_args") or {} if isinstance(given, dict) else {}
    return name, STATE_PER_PARAMETER[name] + (1 if name == "SGD" and arguments.get("momentum") else 0)


def _memory(memory: StepMemory, buckets: int) -> dict[str, Any]:
    working = sum(size for (kind, _), size in memory.at_peak.items() if kind in ("kept", "temporary"))
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer_state": memory.optimizer_state,
        "ddp_buckets": buckets,
        "kept": memory.kept,
        "kept_terms": [
            {"part": part, "formula": formula, "bytes": size, "count": count}
            for (part, formula, size), count in sorted(memory.terms.items(), key=lambda item: -item[0][2] * item[1])
        ],
        "activations_and_temporaries_at_peak": working,
        "gradients_at_peak": memory.at_peak.get(("gradients", ""), 0),
        "peak": memory.peak + buckets,
        "peak_moment": memory.peak_moment,
    }


def _time(flops: int, peak: float, steps: int, utilisation: float | None) -> dict[str, Any]:
    assumed = utilisation is None
    value = ASSUMED_UTILISATION if utilisation is None else utilisation
    if not 0 < value <= 1:
        raise ValueError(f"--utilisation must be above 0 and at most 1, got {value}")
    seconds = flops / (peak * value)
    return {
        "utilisation": value,
        "utilisation_is_assumed": assumed,
        "seconds_per_step": seconds,
        "steps": steps,
        "days": seconds * steps / 86400,
    }


def text(report: dict[str, Any], *, explain: bool) -> str:
    """The report as lines for a terminal."""
    settings, memory, flops = report["settings"], report["memory"], report["flops"]
    lines = [", ".join(f"{name} {value}" for name, value in settings.items()), "", "parameters"]
    lines += [_line(name, f"{count:,}") for name, count in report["parameters"].items()]
    if explain:
        for part, terms in report["parameter_terms"].items():
            lines += [_line(f"{part}: {formula}", f"{count:,}") for formula, count in terms.items()]
    lines += ["", "memory of a step on one device"]
    lines += [_line(name, _mib(memory[name])) for name in ("parameters", "gradients", "optimizer_state", "ddp_buckets")]
    lines += [_line(f"kept, {part}", _mib(size)) for part, size in memory["kept"].items()]
    lines += [_line("activations and temporaries at the peak", _mib(memory["activations_and_temporaries_at_peak"]))]
    lines += [_line("peak", _mib(memory["peak"])), _line("at", memory["peak_moment"])]
    if settings["device"] != "cpu":
        lines += ["for CUDA: tensors alone, without the allocator's rounding; not compared with a GPU yet"]
    if explain:
        lines += ["", "kept for backward, each as count × elements × bytes per element (letters: docs/accounting.md)"]
        for term in memory["kept_terms"]:
            formula = f"{term['part']}: {term['count']} × {term['formula']}"
            lines += [_line(formula, _mib(term["count"] * term["bytes"]))]
    lines += ["", f"FLOPs of a step of {flops['tokens']:,} tokens, and per token"]
    for name in ("forward", "backward", "recomputed", "optimizer"):
        if flops[name] is not None:
            lines += [_line(name, f"{flops[name]:.4g}  {flops[name] / flops['tokens']:.4g}")]
    if "time" in report:
        lines += ["", *_time_lines(report["time"])]
    if "largest_batch" in report:
        found = report["largest_batch"]
        lines += ["", f"largest micro-batch in {_mib(found['memory'])}: {found['rows']} rows"]
    return "\n".join(lines)


def _time_lines(time: dict[str, Any]) -> list[str]:
    how = "assumed" if time["utilisation_is_assumed"] else "as given"
    lines = [f"time on {time['device']} at {time['utilisation']:.0%} of its {time['dtype']} peak ({how})"]
    lines += [_line("seconds per step", f"{time['seconds_per_step']:.4g}")]
    return lines + ([_line(f"days for {time['steps']:,} steps", f"{time['days']:.4g}")] if time["steps"] else [])


def _line(name: str, value: str) -> str:
    return f"  {name:<44} {value:>20}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
