"""``lightning-llm estimate --config FILE``: parameters, memory, FLOPs and time of a run, before it runs.

Memory is traced on tensors without values, the rest computed from the config; docs/accounting.md says how.
"""

import argparse
import dataclasses
from itertools import starmap
from pathlib import Path
from typing import Any

from lightning_llm.accounting.estimate import MODEL_STATES, estimate
from lightning_llm.accounting.step_settings import STRATEGIES
from lightning_llm.cli.subcommand import OneLineParser, size_option, subcommand
from lightning_llm.io.atomic import write_json
from lightning_llm.io.trust import add_trust_option
from lightning_llm.io.units import shown_duration, shown_mib, shown_size
from lightning_llm.training.run_config import RunOptions, read_run


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which run, on which device."""
    add = parser.add_argument
    configs = "a config for fit, or the config.yaml of a run; repeatable"
    add("--config", "-c", required=True, action="append", metavar="FILE", help=configs)
    add("--gpu", metavar="NAME", help="the GPU to compute for: its name or a part of it, such as h100 (default: a CPU)")
    add("--world-size", type=int, metavar="N", help="processes (default: the config's, or 1)")
    add("--strategy", choices=STRATEGIES, help="how processes share the model (default: the config's)")
    add("--gradient-views", action="store_true", help="gradients are views of DDP's buckets, without a copy")
    add("--precision", metavar="P", help="32-true, bf16-true or bf16-mixed (default: the config's)")
    add("--vocab-size", type=int, metavar="N", help="vocabulary size, if neither config, run, store nor text has it")
    add("--state-dtype", choices=("bfloat16",), help="dtype of AdamW's averages (default: the config's)")
    free = (
        "memory of each device that the plan leaves free (default: the config's; on a GPU for context, libraries, gaps)"
    )
    add("--reserve", type=size_option, metavar="SIZE", help=free)
    add("--size", metavar="N", help="set model and training by this number of parameters, such as 100k")
    each = "with --size: tokens of the run for each parameter (default: the config's, or 10)"
    add("--tokens-per-parameter", "--tokens_per_parameter", type=float, metavar="N", help=each)
    add("--repeat", action="store_true", help="with --size: accept more than 4 epochs over the data")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add_trust_option(parser, "import and measure classes outside lightning_llm")


def _options(parser: OneLineParser) -> None:
    add_run_options(parser)
    add = parser.add_argument
    add("--micro-batch-size", type=int, metavar="N", help="rows of one forward pass on a device")
    add("--steps", type=int, metavar="N", help="optimizer steps (default: the config's)")
    share = "share of the device's peak, 0 to 1 (default: 0.4, assumed)"
    add("--utilization", type=float, metavar="U", help=share)
    add("--memory", type=size_option, metavar="SIZE", help="find the largest batch that fits, e.g. 80GiB")
    add("--explain", action="store_true", help="print the parameters term by term, and what is live at the peak")


@subcommand(_options)
def run_estimate(options: argparse.Namespace) -> None:
    """Estimate parameters, memory, FLOPs, and time of a run from its config."""
    run = read_run(RunOptions.of(options))
    rows, steps = options.micro_batch_size or run.micro_batch_size, options.steps or run.max_steps
    run = dataclasses.replace(run, micro_batch_size=rows, max_steps=steps)
    report = estimate(run, utilization=options.utilization, memory=options.memory)
    if options.json is not None:
        write_json(options.json, report)
    print(text(report, explain=options.explain))


def text(report: dict[str, Any], *, explain: bool) -> str:
    """The report as lines for a terminal."""
    settings = report["settings"]
    memory = report["memory"]
    flops = report["flops"]
    lines = [in_words(report), "", _step_in_words(settings), *report["notes"]]
    if sized := report.get("sizing"):
        lines += ["", f"size {sized['size']:,} sets, from the base config"]
        lines += [_line(name, f"{value:,}") for name, value in sized["options"].items()]
        epochs = "known when the store exists" if sized["epochs"] is None else f"{sized['epochs']:.2f}"
        rows = {"parameters without embeddings and head": f"{sized['parameters']:,}", "tokens": f"{sized['tokens']:,}"}
        rows |= {"epochs over the training text": epochs, "FLOPs of the run, head included": f"{sized['flops']:.4g}"}
        lines += ["what follows from it", *starmap(_line, rows.items())]
    if settings["precision_reason"]:
        lines += [f"precision auto is {settings['precision']}: {settings['precision_reason']}"]
    lines += ["", "parameters", *(_line(name, f"{count:,}") for name, count in report["parameters"].items())]
    if explain:
        for part, terms in report["parameter_terms"].items():
            lines += [_line(f"{part}: {formula}", f"{count:,}") for formula, count in terms.items()]
    sizes = {name.replace("_", " "): memory[name] for name in MODEL_STATES if memory[name] or name != "gathered"}
    sizes |= {f"saved, {part}": size for part, size in memory["saved"].items()}
    for what in ("gradients", "activations_and_temporaries"):
        sizes[f"{what.replace('_', ' ')} at the peak"] = memory[f"{what}_at_peak"]
    sizes["peak"] = memory["peak"]
    lines += ["", "memory of a step on one device", *(_line(name, shown_mib(size)) for name, size in sizes.items())]
    lines += [_line("at", memory["peak_point"])]
    if memory["needed"] > memory["peak"]:
        needed = _line("of the device, with a reserve", shown_mib(memory["needed"]))
        lines += [needed, f"  reserve: {memory['reserve']}"]
    if explain:
        lines += ["", "live at the peak, by category and part of the model"]
        for entry in memory["at_peak"]:
            name = f"{entry['category'].replace('_', ' ')}{', ' if entry['part'] else ''}{entry['part']}"
            lines += [_line(name, shown_mib(entry["bytes"]))]
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
        lines += ["", f"largest micro-batch in {shown_mib(largest['memory'])}: {largest['rows']} rows"]
    return "\n".join(lines)


def _step_in_words(settings: dict[str, Any]) -> str:
    """Step that the figures describe, in the words of the config."""
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
    parameters = report["parameters"]["all"]
    memory = shown_size(report["memory"]["peak"])
    each = " on each device" if report["settings"]["world_size"] > 1 else ""
    line = f"The model has {parameters:,} parameters, and training it needs {memory} of memory{each}"
    if (time := report.get("time")) is None:
        return f"{line}. Give --gpu to estimate the time."
    seconds = time["seconds_per_step"]
    assumed = "an assumed " if time["utilization_is_assumed"] else ""
    share = f"{assumed}{100 * time['utilization']:.3g} % of the peak of {time['device']}"
    run = f", and {time['steps']:,} steps take {shown_duration(seconds * time['steps'])}" if time["steps"] else ""
    return f"{line}. At {share}, a step takes {shown_duration(seconds)}{run}."


def _line(name: str, value: str) -> str:
    return f"  {name:<44} {value:>20}"
