"""The report of an experiment: its rows and variants, from the plan and from the runs that have ended. No torch.

Every number is a function of the plan and of the runs, except seconds and measured memory.
"""

import dataclasses
import statistics as means
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightning_llm.ablate.curves import curves_of
from lightning_llm.ablate.experiment import Batch
from lightning_llm.ablate.matching import FACTS
from lightning_llm.ablate.names import BASELINE, NULL
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import DIFFS
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.report.from_factors import design_notes, effect_rows
from lightning_llm.ablate.report.record import (
    VERSION,
    Checks,
    Curve,
    Design,
    Mean,
    Pair,
    Row,
    Spent,
    Start,
    TunedVariant,
    Tuning,
    Variant,
    row_of,
)
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.report.words import descriptions
from lightning_llm.ablate.results import Loaded, losses_of, run_seconds, trained_here
from lightning_llm.io.untrusted import MIB, read_text
from lightning_llm.statistics import pairing
from lightning_llm.statistics.design import FEWEST
from lightning_llm.statistics.looks import RESERVE, RHO
from lightning_llm.statistics.power import FurtherPairs, further_pairs
from lightning_llm.statistics.scales import Scale, differing_scales
from lightning_llm.statistics.verdict import Verdict, with_window_error
from lightning_llm.statistics.windows import WindowError, window_error
from lightning_llm.training.metrics import PEAK_MEMORY, SECONDS, VAL_LOSS, unit_of_metric

ENVIRONMENT = ("precision", "device", "threads", "torch", "numpy", "package")


def report_of(loaded: Loaded, *, with_curves: bool = True) -> Report:
    """The report of an experiment as it is now.

    Args:
        loaded: The experiment.
        with_curves: Whether to read the values during training, which takes a while.
    """
    plan = loaded.plan
    experiment = plan.experiment
    variants = {name: _variant(loaded, name) for name in (BASELINE, *experiment.variants)}
    design = _design(loaded)
    options = {name: experiment.variants[name] for name in experiment.variants}
    for name, what in descriptions(design, options, BASELINE).items():
        variants[name].what = what
    return Report(
        version=VERSION,
        kind="experiment",
        name=experiment.name,
        folder=str(plan.out),
        metric=experiment.metric_name,
        unit=plan.unit,
        higher_is_better=experiment.higher_is_better,
        baseline=BASELINE,
        delta=experiment.delta,
        alpha=experiment.alpha,
        half_width=experiment.half_width,
        level=1 - experiment.design.alpha,
        has_ended=not loaded.state.needed,
        rows=_rows(loaded),
        variants=variants,
        notes=[*program_of(plan).notes(loaded.results), *design_notes(len(experiment.factors))],
        design=design,
        checks=_checks(loaded),
        tuning=_tuning(loaded),
        spent=_spent(loaded),
        curves=_curves(loaded, variants) if with_curves else {},
        environment=_environment(loaded),
    )


# ---- rows


def _rows(loaded: Loaded) -> list[Row]:
    """Rows of the effects of factors, of each variant, also tuned and by secondary metrics, and of the null variant."""
    state = loaded.state
    rows = effect_rows(loaded)
    for name in loaded.plan.experiment.variants:
        rows.append(_row(loaded, state.verdicts.get(name), BASELINE, name))
        tuned = None if state.tuned is None else state.tuned.verdicts.get(name)
        if tuned is not None:
            base_name, own_name = (loaded.tuned_name(variant) for variant in (BASELINE, name))
            rows.append(dataclasses.replace(_row(loaded, tuned, base_name, own_name), variant=name, kind="tuned"))
    if state.null is not None and not loaded.null_began_alike:
        null = dataclasses.replace(_row(loaded, state.null, BASELINE, NULL), kind="null", further_pairs=None)
        rows.append(null)
    for name in loaded.plan.experiment.variants:
        found = state.verdicts.get(name)
        rows += [] if found is None else _secondary_rows(loaded, found, name)
    return rows


def _row(loaded: Loaded, found: Verdict | None, baseline: str, variant: str) -> Row:
    """The row of a variant's runs; before the first look, its numbers are ``None``."""
    experiment = loaded.plan.experiment
    seeds = [] if found is None else experiment.seeds(found.pairs)
    losses = losses_of(loaded.results)
    pairs = [Pair(seed, losses.get(RunKey(baseline, seed)), losses.get(RunKey(variant, seed))) for seed in seeds]
    error = None if found is None else _window_error(loaded, baseline, variant, seeds)
    return row_of(
        None if found is None else with_window_error(found, error, experiment.delta),
        by_seed=pairs,
        higher_is_better=experiment.higher_is_better,
        variant=variant,
        baseline=BASELINE,
        metric=experiment.metric_name,
        unit=loaded.plan.unit,
        baseline_mean=_mean(_losses(loaded, baseline)),
        mean=_mean(_losses(loaded, variant)),
        further_pairs=_further_pairs(loaded, found),
        window_error=error,
    )


def _secondary_rows(loaded: Loaded, found: Verdict, variant: str) -> list[Row]:
    """The pairs of a verdict in the metrics that do not decide."""
    rows = []
    seeds = loaded.plan.experiment.seeds(found.pairs)
    for metric, verdict in loaded.secondary(found, BASELINE, variant).items():
        values = [[loaded.metric(RunKey(name, seed), metric) for seed in seeds] for name in (BASELINE, variant)]
        rows.append(
            row_of(
                verdict,
                by_seed=[Pair(seed, base, own) for seed, base, own in zip(seeds, *values, strict=True)],
                variant=variant,
                kind="secondary",
                metric=metric,
                unit=unit_of_metric(metric),
                baseline_mean=_mean([value for value in values[0] if value is not None]),
                mean=_mean([value for value in values[1] if value is not None]),
            )
        )
    return rows


def _window_error(loaded: Loaded, baseline: str, variant: str, seeds: Sequence[int]) -> WindowError | None:
    """Standard errors over the validation windows; ``None``: a run has no record of them, or it failed to train."""
    pairs = [[loaded.results.get(RunKey(name, seed)) for name in (baseline, variant)] for seed in seeds]
    records = [[None if result is None else result.windows() for result in pair] for pair in pairs]
    complete = [(base, other) for base, other in records if base is not None and other is not None]
    if loaded.plan.experiment.metric != VAL_LOSS or len(complete) < len(pairs):
        return None
    return window_error(complete)


def _further_pairs(loaded: Loaded, found: Verdict | None) -> FurtherPairs | None:
    """How many more pairs end a comparison, as a range; ``None``: none can be added, no interval, or no number does."""
    experiment = loaded.plan.experiment
    if found is None or found.has_ended or experiment.factors or isinstance(experiment.stop, Batch):
        return None
    if found.interval is None or found.difference is None or found.sd is None or found.level is None:
        return None
    design = dataclasses.replace(experiment.design, alpha=1 - found.level)
    lost = found.baseline_diverged
    return further_pairs(design, found.difference, found.sd, found.pairs - lost, left_out=lost)


# ---- variants


def _variant(loaded: Loaded, name: str) -> Variant:
    """Facts of a variant from the plan, and the cost of its runs and steps."""
    experiment = loaded.plan.experiment
    planned = loaded.plan.variants[name]
    losses = _losses(loaded, name)
    step = None if loaded.cost is None else loaded.cost.variants.get(name)
    mean = _mean(losses)
    sign = -1 if experiment.higher_is_better else 1
    of_metric = {} if mean is None else {experiment.metric_name: Mean(sign * mean, _sd(losses))}
    is_command = experiment.command is not None  # it tells one hash of all parameters
    facts: dict[str, Any] = {fact: planned.facts.get(fact) for fact in FACTS}
    others = {fact: facts.pop(fact) for fact in FACTS if fact not in Variant.__struct_fields__}
    return Variant(
        options=experiment.variants.get(name, {}),
        runs=len(losses),
        seeds=len(losses),
        means=of_metric,
        steps=planned.steps,
        **facts,
        facts=others,
        solved=planned.solved,
        ratio=planned.ratio,
        start=None if is_command or name == BASELINE else _start(loaded, name),
        step=step,
        training_s=None if step is None else step.step_s * (planned.steps or 0),
        run_seconds=_measured(loaded, name, SECONDS) if is_command else None,
        run_memory_gib=_measured(loaded, name, PEAK_MEMORY) if is_command else None,
    )


def _measured(loaded: Loaded, name: str, field: str) -> float | None:
    """The mean of time or memory over the runs of a variant of a command."""
    summaries = [result.summary for run, result in loaded.results.items() if run.name == name]
    values = [summary[field] for summary in summaries if summary.get(field)]
    return means.fmean(values) if values else None


def _losses(loaded: Loaded, name: str) -> list[float]:
    """Losses of the pairs: the runs of a tuned variant have its name, too, with the seeds of tuning."""
    tuning = () if loaded.plan.tune is None else loaded.plan.tune.all_seeds
    of_name = ((run, result.loss) for run, result in sorted(loaded.results.items()) if run.name == name)
    losses = (loss for run, loss in of_name if run.seed not in tuning)
    return [loss for loss in losses if loss is not None]


def _mean(values: Sequence[float]) -> float | None:
    return means.fmean(values) if values else None


def _sd(values: Sequence[float]) -> float | None:
    return means.stdev(values) if len(values) > 1 else None


def _summary(loaded: Loaded, name: str) -> Mapping[str, Any]:
    """The summary of the first run of a variant, if it has one."""
    result = loaded.results.get(RunKey(name, loaded.plan.experiment.first_seed))
    return {} if result is None else result.summary


def _start(loaded: Loaded, name: str) -> Start | None:
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
    clauses = list(differing_scales(own_scales, base_scales))
    return Start(shared=len(same), parameters=len(values), kept=kept, scales=clauses)


# ---- the experiment


def _design(loaded: Loaded) -> Design:
    plan = loaded.plan
    experiment, record = plan.experiment, plan.record
    command = experiment.command
    revisions = {} if command is None else {name: tree.title for name, tree in command.trees.items()}
    diffs = {name: plan.out / DIFFS / f"{name}.stat" for name in revisions}
    return Design(
        plan=plan.hash,
        program=record.program,
        configs=list(experiment.baseline),
        command="" if command is None else command.text,
        revisions=revisions,
        diffs={name: read_text(path, MIB) for name, path in diffs.items() if path.is_file()},
        text=record.text,
        validation=record.validation,
        looks=list(experiment.looks),
        tested_after=list(loaded.state.looks),
        extensions=msgspec.to_builtins(plan.extensions),
        first_seed=experiment.first_seed,
        seeds=[run.seed for run in sorted(loaded.results) if run.name == BASELINE],
        match=experiment.match,
        match_option=experiment.solved or "",
        rule={"reserve": RESERVE, "spending": RHO, "fewest_pairs": FEWEST},
        seen=record.seen,
        reused=reused_runs(loaded),
        reused_variants=record.reused.variants,
        reused_replay="" if loaded.replay is None else loaded.replay.source,
        threads=record.threads,
        accelerator=record.accelerator,
        commit=record.commit,
    )


def reused_runs(loaded: Loaded) -> dict[str, str]:
    """The runs that other experiments have trained, and the names of these."""
    names = [str(run) for run in sorted(loaded.results) if loaded.plan.is_reused(run)]
    return {name: loaded.plan.record.reused.runs.get(name, "another experiment") for name in names}


def _checks(loaded: Loaded) -> Checks:
    redrawn = pairing.redrawn_part(*(_summary(loaded, name) for name in (BASELINE, NULL)))
    failed = sorted((result for result in loaded.results.values() if result.has_failed), key=lambda each: each.run)
    return Checks(
        replay_difference=None if loaded.replay is None else loaded.replay.difference,
        redrawn="" if redrawn is None else pairing.REDRAWN[redrawn],
        failed_runs={str(result.run): result.failure for result in failed},
    )


def _environment(loaded: Loaded) -> dict[str, Any]:
    """The environment that decides the bits of all runs, as the first one that has finished recorded it."""
    summary = next((result.summary for _, result in sorted(loaded.results.items()) if result.summary), {})
    return {field: summary.get(field) for field in ENVIRONMENT}


def _tuning(loaded: Loaded) -> Tuning | None:
    """Values, mean losses and optimum of each variant, and what they cost; ``None``: nothing is tuned."""
    tune = loaded.plan.tune
    if tune is None:
        return None
    tuned = {
        name: msgspec.convert({"untuned": tune.values[name], **dataclasses.asdict(each)}, TunedVariant)
        for name, each in loaded.state.tuning.items()
    }
    grid = [result for run, result in loaded.results.items() if run.seed in tune.all_seeds]
    return Tuning(
        option=tune.option, seeds=list(tune.all_seeds), variants=tuned, runs=len(grid), run_seconds=run_seconds(grid)
    )


def _spent(loaded: Loaded) -> Spent:
    """Time of the runs that were trained here, and how time and memory of a step were measured."""
    runs = trained_here(loaded.plan, loaded.results)
    spent = Spent(runs=len(runs), run_seconds=run_seconds(runs))
    cost = loaded.cost
    if cost is not None:
        spent.machine, spent.threads, spent.date = cost.machine, cost.threads, cost.date
        spent.torch, spent.rounds, spent.other_cores = cost.torch, cost.rounds, cost.other_cores
    return spent


def _curves(loaded: Loaded, variants: Mapping[str, Variant]) -> dict[str, Curve]:
    experiment = loaded.plan.experiment
    costs = {name: variant.step for name, variant in variants.items() if variant.step is not None}
    sign = -1 if experiment.higher_is_better else 1
    return curves_of(loaded).summaries(variants, costs, experiment.delta, sign)
