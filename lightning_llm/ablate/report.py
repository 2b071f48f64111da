"""The report of an experiment as data: what ``report.json`` holds, and what the screen and the page show. No torch.

Every number is a function of the plan and of the runs, except seconds and measured memory.
"""

import dataclasses
import statistics as means
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.matching import FACTS
from lightning_llm.ablate.names import BASELINE, NULL
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import DIFFS
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.results import Loaded, losses_of, run_seconds, trained_here
from lightning_llm.io.untrusted import MIB, read_text
from lightning_llm.statistics import pairing
from lightning_llm.statistics.design import FEWEST, NOT_SHOWN, UNDECIDED
from lightning_llm.statistics.looks import RESERVE, RHO
from lightning_llm.statistics.power import further_pairs
from lightning_llm.statistics.scales import Scale, differing_scales
from lightning_llm.statistics.verdict import Verdict
from lightning_llm.statistics.windows import window_error
from lightning_llm.training.metrics import LOSSES, VAL_LOSS

VERSION = 2  # of report.json
ENVIRONMENT = ("precision", "device", "threads", "torch", "numpy", "package")
OF_EXPERIMENT = ("name", "metric", "delta", "alpha", "half_width", "first_seed", "match", "solved")
OF_PLAN = ("text", "validation", "threads", "accelerator", "commit", "seen")
OF_SECONDARY = ("difference", "interval", "level", "pairs", "sd", "diverged")  # of a metric that does not decide
UNITS = {"seconds": "s", "peak_memory_gib": "GiB"}
NOT_TESTED: dict[str, Any] = {  # of a variant before its first look
    **dict.fromkeys(field.name for field in dataclasses.fields(Verdict)),  # its numbers are null
    **{"verdict": UNDECIDED, "direction": NOT_SHOWN, "has_ended": False, "pairs": 0, "diverged": 0},
    **{"baseline_diverged": 0, "note": "not tested yet", "warnings": [], "by_seed": []},
    **{"further_pairs": None, "window_error": None, "secondary": {}},
}


def report_of(loaded: Loaded) -> dict[str, Any]:
    """The report of an experiment as it is now, as JSON takes it."""
    plan = loaded.plan
    experiment = plan.experiment
    variants = {name: _variant(loaded, name) for name in experiment.variants}
    lost = [result for result in loaded.results.values() if result.has_failed]
    return {
        "version": VERSION,
        "plan": plan.hash,
        "out": str(plan.out),
        "program": plan.record.program,
        **_of_command(loaded),
        **{field: getattr(experiment, field) for field in OF_EXPERIMENT},
        "looks": list(experiment.looks),
        **{field: getattr(plan.record, field) for field in OF_PLAN},
        "unit": unit_of(experiment),
        "secondary": {metric: unit_of_metric(metric) for metric in experiment.secondary},
        "interval": {"each": 1 - experiment.design.alpha, "together": 1 - experiment.alpha},
        "rule": {"reserve": RESERVE, "spending": RHO, "fewest_pairs": FEWEST},
        "has_ended": not loaded.state.needed,
        "pairs": max((row["pairs"] for row in variants.values()), default=0),
        "tested_after": loaded.state.looks,
        "extensions": msgspec.to_builtins(plan.extensions),
        "seeds": [run.seed for run in sorted(loaded.results) if run.name == BASELINE],
        "configs": list(experiment.baseline),
        "environment": _environment(loaded),
        "reused": reused_of(loaded),
        "aa": _aa(loaded),
        "baseline": _of_variant(loaded, BASELINE),
        "variants": variants,
        "diverged_runs": {str(result.run): result.failure for result in sorted(lost, key=lambda result: result.run)},
        "tuning": _tuning(loaded),
        "cost": _cost(loaded),
    }


def unit_of(experiment: Experiment) -> str:
    """The unit of the metric that decides; a command's is known by its name alone."""
    return experiment.metric if experiment.command is not None else unit_of_metric(experiment.metric)


def unit_of_metric(metric: str) -> str:
    """The unit of a metric of ``fit``; of another one, its name."""
    return LOSSES[metric].unit if metric in LOSSES else UNITS.get(metric, metric)


def _of_command(loaded: Loaded) -> dict[str, Any]:
    """The command in place of ``fit``, and what must be known of its runs."""
    command = loaded.plan.experiment.command
    if command is None:
        return {}
    notes = program_of(loaded.plan).notes(loaded.results)
    revisions = {name: tree.title for name, tree in command.trees.items()}
    diffs = {name: loaded.plan.out / DIFFS / f"{name}.stat" for name in revisions}
    stats = {name: read_text(path, MIB) for name, path in diffs.items() if path.is_file()}
    measured = {name: _measured(loaded, name) for name in (BASELINE, *loaded.plan.experiment.variants)}
    shown = {"command": command.text, "revisions": revisions, "diffs": stats}
    return {**shown, "notes": notes, "measured": measured}


def _measured(loaded: Loaded, name: str) -> dict[str, float | None]:
    """The means of time and memory over the runs of a variant of a command."""
    summaries = [result.summary for run, result in loaded.results.items() if run.name == name]
    values = {field: [summary[field] for summary in summaries if summary.get(field)] for field in UNITS}
    return {field: means.fmean(of_runs) if of_runs else None for field, of_runs in values.items()}


def _environment(loaded: Loaded) -> dict[str, Any]:
    """The environment that decides the bits of all runs, as the first one that has finished recorded it."""
    summary = next((result.summary for _, result in sorted(loaded.results.items()) if result.summary), {})
    return {field: summary.get(field) for field in ENVIRONMENT}


def reused_of(loaded: Loaded) -> dict[str, Any]:
    """The runs that other experiments have trained, and the experiment whose baseline ran again."""
    reused = loaded.plan.record.reused
    names = [str(run) for run in sorted(loaded.results) if loaded.plan.is_reused(run)]
    replay = loaded.replay
    return {
        "runs": {name: reused.runs.get(name, "another experiment") for name in names},
        "replay": None if replay is None else replay.source or None,
        "variants": reused.variants,
    }


def _aa(loaded: Loaded) -> dict[str, Any]:
    """The baseline compared with itself: the same seed again, and the null variant with its own verdict."""
    null = None if loaded.null_began_alike else loaded.state.null
    row = None if null is None else _numbers(loaded, null, BASELINE, NULL) | {"further_pairs": None}
    sd = None if null is None else null.sd
    difference = None if loaded.replay is None else loaded.replay.difference
    redrawn = pairing.redrawn_part(*(_summary(loaded, name) for name in (BASELINE, NULL)))
    return {
        "replay_difference": difference,
        "null_sd": sd,
        "null": row,
        "redrawn": None if redrawn is None else pairing.REDRAWN[redrawn],
    }


def _summary(loaded: Loaded, name: str) -> Mapping[str, Any]:
    """The summary of the first run of a variant, if it has one."""
    result = loaded.results.get(RunKey(name, loaded.plan.experiment.first_seed))
    return {} if result is None else result.summary


def _start(loaded: Loaded, name: str) -> dict[str, Any] | None:
    """Initial values that a variant's runs share with the baseline's, and scales that differ."""
    base, own = (_summary(loaded, variant) for variant in (BASELINE, name))
    base_values, values = (summary.get(pairing.INITIAL_VALUES) for summary in (base, own))
    if not base_values or not values:
        return None
    same = [each for each, value in values.items() if base_values.get(each) == value]
    kept = sorted(each for each, rule in (own.get(pairing.INITIAL_RULES) or {}).items() if rule == pairing.KEPT)
    own_scales, base_scales = (
        {role: Scale(*scale) for role, scale in (summary.get(pairing.INITIAL_SCALES) or {}).items()}
        for summary in (own, base)
    )
    clauses = differing_scales(own_scales, base_scales)
    return {"shared": len(same), "parameters": len(values), "kept": kept, "scales": clauses}


def _variant(loaded: Loaded, name: str) -> dict[str, Any]:
    """A variant without tuning, which scripts read, and under ``tuned`` that of the tuned ones."""
    state = loaded.state
    tuned = None if state.tuned is None else state.tuned.verdicts.get(name)
    row = _numbers(loaded, state.verdicts.get(name), BASELINE, name) | _of_variant(loaded, name)
    row["options"] = loaded.plan.experiment.variants[name]
    is_command = loaded.plan.experiment.command is not None  # it tells one hash of all parameters
    row["start"] = None if is_command else _start(loaded, name)
    if tuned is None:
        return {**row, "tuned": None}
    base_name, own_name = (loaded.tuned_name(variant) for variant in (BASELINE, name))
    means_of_both = {"baseline_mean": _mean(loaded, base_name), "mean": _mean(loaded, own_name)}
    return {**row, "tuned": _numbers(loaded, tuned, base_name, own_name) | means_of_both}


def _numbers(loaded: Loaded, verdict: Verdict | None, baseline: str, variant: str) -> dict[str, Any]:
    """Numbers of a verdict, with the losses that it rests on; before the first look they are null."""
    if verdict is None:
        return dict(NOT_TESTED)
    losses = losses_of(loaded.results)
    experiment = loaded.plan.experiment
    seeds = experiment.seeds(verdict.pairs)
    names = {"baseline": baseline, "variant": variant}
    by_seed = [{"seed": seed, **{role: losses.get(RunKey(names[role], seed)) for role in names}} for seed in seeds]
    further = None if verdict.has_ended else _further_pairs(experiment, verdict)
    windows = _window_error(loaded, baseline, variant, seeds)
    row = dataclasses.asdict(verdict)
    if row["robust"] is not None:  # indices of the pairs that are left: their seeds say more
        seeds_left = [pair["seed"] for pair in by_seed if pair["baseline"] is not None]
        row["robust"]["outliers"] = [seeds_left[index] for index in row["robust"]["outliers"]]
    metrics = loaded.secondary(verdict, baseline, variant)
    secondary = {metric: {name: getattr(one, name) for name in OF_SECONDARY} for metric, one in metrics.items()}
    return row | {"by_seed": by_seed, "further_pairs": further, "window_error": windows, "secondary": secondary}


def _window_error(loaded: Loaded, baseline: str, variant: str, seeds: Sequence[int]) -> dict[str, Any] | None:
    """Standard errors over the validation windows; ``None``: a run has no record of them, or it failed to train."""
    pairs = [[loaded.results.get(RunKey(name, seed)) for name in (baseline, variant)] for seed in seeds]
    records = [[None if result is None else result.windows() for result in pair] for pair in pairs]
    complete = [(base, other) for base, other in records if base is not None and other is not None]
    if loaded.plan.experiment.metric != VAL_LOSS or len(complete) < len(pairs):
        return None
    error = window_error(complete)
    return None if error is None else dataclasses.asdict(error)


def _further_pairs(experiment: Experiment, verdict: Verdict) -> dict[str, Any] | None:
    """How many more pairs end a comparison, as a range; ``None``: no interval yet, or no number of them does."""
    if verdict.interval is None or verdict.difference is None or verdict.sd is None:
        return None
    design = dataclasses.replace(experiment.design, alpha=1 - verdict.level)
    lost = verdict.baseline_diverged
    more = further_pairs(design, verdict.difference, verdict.sd, verdict.pairs - lost, left_out=lost)
    return None if more is None else dataclasses.asdict(more)


def _tuning(loaded: Loaded) -> dict[str, Any] | None:
    """Values, mean losses and optimum of each variant, and what they cost; ``None``: nothing is tuned."""
    tune = loaded.plan.tune
    if tune is None:
        return None
    tuning = loaded.state.tuning
    variants = {name: {"untuned": tune.values[name], **dataclasses.asdict(tuned)} for name, tuned in tuning.items()}
    seeds = tune.all_seeds
    grid = [result for run, result in loaded.results.items() if run.seed in seeds]
    seconds = run_seconds(grid)
    return {
        "option": tune.option,
        "seeds": list(seeds),
        "variants": variants,
        "runs": len(grid),
        "run_seconds": seconds,
    }


def _of_variant(loaded: Loaded, name: str) -> dict[str, Any]:
    """Mean and standard deviation of the metric over the runs of a variant, and what the plan says of its cost."""
    losses = _losses(loaded, name)
    planned = loaded.plan.variants[name]
    spread = means.stdev(losses) if len(losses) > 1 else None
    summary = {"mean": _mean(loaded, name), "sd_over_seeds": spread, "runs": len(losses)}
    facts = {fact: planned.facts.get(fact) for fact in FACTS}
    return {**summary, "steps": planned.steps, **facts, "solved": planned.solved, "ratio": planned.ratio}


def _losses(loaded: Loaded, name: str) -> list[float]:
    """Losses of the pairs: the runs of a tuned variant have its name, too, with the seeds of tuning."""
    tuning = () if loaded.plan.tune is None else loaded.plan.tune.all_seeds
    of_name = ((run, result.loss) for run, result in sorted(loaded.results.items()) if run.name == name)
    losses = (loss for run, loss in of_name if run.seed not in tuning)
    return [loss for loss in losses if loss is not None]


def _mean(loaded: Loaded, name: str) -> float | None:
    losses = _losses(loaded, name)
    return means.fmean(losses) if losses else None


def _cost(loaded: Loaded) -> dict[str, Any]:
    """Time of the runs that were trained here, and time and memory of each variant's step, if it was measured."""
    measured: dict[str, Any] = {} if loaded.cost is None else msgspec.to_builtins(loaded.cost)
    costs = {
        name: {**cost, "training_s": cost["step_s"] * (loaded.plan.variants[name].steps or 0)}
        for name, cost in measured.get("variants", {}).items()
    }
    runs = trained_here(loaded.plan, loaded.results)
    facts = {field: measured.get(field) for field in ("machine", "threads", "date", "torch", "rounds", "other_cores")}
    return {**facts, "runs": len(runs), "run_seconds": run_seconds(runs), "variants": costs}
