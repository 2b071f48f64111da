"""The sentences of a report: what was found, with its numbers, and nothing that the numbers do not show."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from lightning_llm.ablate.matching import MATCHES
from lightning_llm.ablate.options import command_line_of
from lightning_llm.ablate.ratios import time_in_words
from lightning_llm.ablate.report.record import (
    NO_VERDICT,
    Design,
    LearnedDrift,
    ReportRecord,
    Row,
    Start,
    StoredPrediction,
    Variant,
)
from lightning_llm.ablate.words import (
    bounds,
    milliseconds,
    not_reused,
    pairs_in_words,
    parameter_excess,
    percent,
    power_in_words,
    reused_lines,
    saved_in_words,
    seeds_in_words,
    signed,
    unequal_lines,
)
from lightning_llm.io.shell import shell_path
from lightning_llm.io.units import MIB, shown_duration
from lightning_llm.statistics.batch import ADOPTED, NOT_ADOPTED
from lightning_llm.statistics.design import BETTER, FAILED_TO_TRAIN, NOT_SHOWN
from lightning_llm.statistics.factorial import ADD_UP, LESS, MORE
from lightning_llm.statistics.stream import POWER
from lightning_llm.training.metrics import METRICS

FURTHER = "Further pairs are a range, since the true difference may be anywhere in its 80% interval."
ABOUT_SECONDARY = (
    "Secondary metrics decide nothing: their intervals are adjusted for variants and looks, not for several metrics."
)
KNOWN = (
    "Not confirmatory: runs of variants were known before this experiment. Confirm with fresh seeds: --first-seed N."
)
SHARED = "To confirm a verdict of an experiment that shares these runs, use fresh seeds: --first-seed N."
ONE_RUN = "A difference of one run has no interval: lightning-llm ablate compares several seeds, until a verdict."
ABOUT_STREAM = (
    "An interval is that of a t test on the pairs that are shown. An idea is given up when its first pairs are bad, so "
    "the interval of a rejected idea describes these pairs, and is no test. Pairs that confirm an idea are fresh; they "
    "may end at a first look, so a gain that was confirmed is a little too large on average."
)
LONGEST_REASON = 60  # characters of a reason that stands for a name
UNFINISHED = "The experiment has not ended."
GUESS = "The other ladders are of characters: with another tokenizer or another recipe, the interval is a guess."
SHORT = {LESS: "less together", MORE: "more together"}  # verdicts in a table
MOST_COMPANY = 0.2  # cores that other programs may use during a measurement "alone"
OF_EFFECT = {"main": "main effect", "interaction": "interaction", "together": "together", "sum": "sum"}
CHOSEN = (
    "Factors that were chosen because they had won must be measured again, with seeds that chose nothing (--first-seed "
    "N): estimates that led to a choice are too large, so their sum is, too."
)
POWER_OF_EFFECTS = (
    "An interaction takes four times the pairs of a main effect of the same size: with two factors, twice the pairs of "
    "a plain comparison."
)
FEWEST_DIGITS, MOST_DIGITS = 4, 10


# ---- numbers


def digits_of(row: Row) -> int:
    """Decimal places of a row's numbers: those of its loss, else enough for two significant digits of its error.

    A cost, or a metric of another program, may be of any size, so its digits follow the interval, else the difference.
    """
    known = METRICS.get(row.metric)
    if known is not None and not known.is_cost:
        return known.digits
    fewest = FEWEST_DIGITS if known is None else known.digits
    scale = 0.0 if row.interval is None else (row.interval[1] - row.interval[0]) / 2
    if row.interval is None and known is None:  # of a cost, a single difference says little
        scale = abs(row.difference or 0.0)
    if not scale or not math.isfinite(scale):
        return fewest
    digits = 1 - math.floor(math.log10(scale))
    if known is None and scale >= 1:
        return max(0, digits)
    return min(MOST_DIGITS, max(fewest, digits))


def difference_of(row: Row) -> str:
    """A row's difference with its sign."""
    return signed(row.difference, digits_of(row))


def interval_of(row: Row) -> str:
    """Both ends of a row's interval."""
    return bounds(row.interval, digits_of(row))


def p_of(row: Row) -> str:
    """A row's adjusted p."""
    p = row.p_adjusted
    return "–" if p is None else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def runs_of(row: Row) -> str:
    """Such as ``4 pairs``, or ``5 and 8 unpaired runs``: those of the baseline first."""
    if row.runs_of_sides is None:
        return pairs_in_words(row.pairs)
    return f"{row.runs_of_sides[0]} and {row.runs_of_sides[1]} unpaired runs"


# ---- what is compared


def about(report: ReportRecord) -> str:
    """The metric, and the text that it is of if that is known."""
    validation = report.design.validation if report.design else ""
    return f"{report.metric} of {validation}" if validation else report.metric


def descriptions(design: Design, options: Mapping[str, Mapping[str, object]], baseline: str) -> dict[str, str]:
    """Descriptions of the baseline (its configs and text) and of the variants (the options that they change).

    Args:
        design: Of the experiment.
        options: Of each variant.
        baseline: Its name.
    """
    base = [design.command or ", ".join(design.configs), f"on {design.text}" if design.text else ""]
    base += [f"of {design.revisions[baseline]}"] if design.revisions else []
    found = {baseline: " ".join(filter(None, base))}
    for name, changed in options.items():
        words = [word.removeprefix("--") for word in command_line_of(changed)]
        code = design.revisions.get(name, "")
        if code and code != design.revisions.get(baseline):
            words.insert(0, code)
        found[name] = ", ".join(words) or ("the same" if design.command else "")
    return {name: what or "see the plan" for name, what in found.items()}


def direction_line(report: ReportRecord) -> str:
    """Line about the sign of a difference, and the smallest one that matters."""
    delta = "no delta" if report.delta is None else f"delta {report.delta:g} {report.unit}"
    better = "higher values are better, so a positive one" if report.higher_is_better else "a negative one"
    other = "idea" if report.kind == "stream" else "variant"
    so = "" if report.higher_is_better else "so "
    return f"{delta}; a difference is {other} minus baseline, {so}{better} is an improvement."


def design_lines(report: ReportRecord) -> list[str]:
    """How variants are compared, and which experiments have used the same seeds."""
    design = report.design
    if design is None:
        return [f"{_capital(direction_line(report))}", *report.notes]
    seeds = f"{_capital(seeds_in_words(design.seeds))}; " if design.seeds else ""
    lines = [_capital(f"{seeds}{direction_line(report)}"), *report.notes]
    seen = not_reused(design.seen, design.reused, design.seeds)
    used = [f"{name} has used {seeds_in_words(seeds)}" for name, seeds in seen.items()]
    lines += [f"Not independent of earlier experiments with this baseline: {'; '.join(used)}."] if used else []
    reused = reused_lines(design.reused)
    advice = KNOWN if design.reused_variants else SHARED
    return [*lines, *reused, advice] if reused else lines


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def simultaneous(share: float) -> str:
    """The sentence about several intervals together."""
    level = percent(share)
    return f"Simultaneous {level} intervals: with a probability of {level}, all of them contain the true differences."


def batch_lines(report: ReportRecord) -> list[str]:
    """Lines about what the verdicts of a batch of ideas promise, and what they do not."""
    rows = list(report.of_kind("result"))
    adopted = [row.variant for row in rows if row.verdict == BETTER]
    named = f": {', '.join(adopted)}" if adopted else ""
    lines = [f"Adopted {len(adopted)} of {len(rows)} ideas{named}."] if report.has_ended else []
    share = f"Over many batches, at most {percent(report.alpha)} of the adopted ideas are useless, in expectation"
    lines.append(f"{share}, if the differences of pairs are about normal.")
    lines.append("The e-values decide (docs/stream.md); an interval is about one idea by itself, and decides nothing.")
    if len(adopted) > 1:
        lines.append("Whether the adopted ideas also help together is another experiment, on fresh seeds: --factor.")
    return lines


def adoption_cells(row: Row, *, has_ended: bool) -> list[str]:
    """The e-value of an idea of a batch, and whether it is adopted, which is known when the batch has ended."""
    if row.e_value is None:
        return ["–", "–"]
    word = ADOPTED if row.verdict == BETTER else NOT_ADOPTED
    return [f"{row.e_value:.3g}", word if has_ended else "–"]


# ---- verdicts


def verdict_lines(report: ReportRecord) -> list[str]:
    """A sentence for each comparison, with what a reader must know about it."""
    lines = [sentence(row, title_of(report, row), report.half_width) for row in report.results]
    lines += [secondary_sentence(row) for row in report.of_kind("secondary")]
    lines += [ABOUT_SECONDARY] if any(report.of_kind("secondary")) else []
    if any(row.further_pairs for row in report.rows) and report.folder:
        lines.append(f"{FURTHER} lightning-llm ablate extend {shell_path(report.folder)} --pairs N adds pairs.")
    return lines


def title_of(report: ReportRecord, row: Row) -> str:
    """The name of a row's variant, with its metric where the results have several."""
    if len({each.metric for each in report.results}) < 2:
        return row.label
    return f"{row.label}, {METRICS[row.metric].title if row.metric in METRICS else row.metric}"


def sentence(row: Row, title: str, half_width: float | None = None) -> str:
    """Finding of a row.

    Args:
        row: Of a report.
        title: The name that it has.
        half_width: Of the interval that ends the comparison; ``None``: a verdict does.
    """
    title = title if row.size is None else f"{title} at {row.size}"
    if not row.is_tested:
        return f"{title}: {row.note}."
    clauses = [f"{title}: {row.sentence}"]
    if row.difference is not None:
        within = "" if row.interval is None else f" ({interval_of(row)})"
        clauses.append(f"difference {difference_of(row)}{share_of(row)}{within} {row.unit} after {runs_of(row)}")
    clauses += [row.note] if row.note else []
    if row.further_pairs is not None:
        low, high = row.further_pairs.low, row.further_pairs.high
        reach = f"{low} or more" if high is None else str(low) if low == high else f"{low} to {high}"
        goal = "a verdict" if half_width is None else f"an interval of ±{half_width:g}"
        clauses.append(f"{reach} further pairs reach {goal} with a probability of 80%")
    return "; ".join([*clauses, *(f"warning: {text}" for text in row.warnings)]) + "."


def share_of(row: Row) -> str:
    """The difference of a cost as a percentage of the baseline's, such as `` (+1.2%)``; of a loss, nothing.

    Where the difference or the baseline prints as 0, there is none either.
    """
    metric = METRICS.get(row.metric)
    if metric is None or not metric.is_cost or row.difference is None or not row.baseline_mean:
        return ""
    is_zero = any(float(f"{value:.{metric.digits}f}") == 0 for value in (row.difference, row.baseline_mean))
    return "" if is_zero else f" ({row.difference / row.baseline_mean:+.1%})"


# ---- combined factors


def effect_lines(report: ReportRecord) -> list[str]:
    """Whether factors add up, in sentences: first all of them, then each effect, and how to read their intervals."""
    rows = report.effects
    lines = [_together_line(report), *(effect_sentence(row) for row in rows if row.kind in ("main", "interaction"))]
    return [*lines, _families_line(report), CHOSEN, POWER_OF_EFFECTS]


def _together_line(report: ReportRecord) -> str:
    """The sentence about all factors, and the sum of each alone."""
    together = next(report.of_kind("together"))
    against = next(report.of_kind("sum"), None)
    if together.difference is None:
        return f"Together: {together.note}."
    within = "no interval" if together.interval is None else interval_of(together)
    clauses = [f"Together {difference_of(together)} ({within}) {together.unit}"]
    if against is None:
        return f"{clauses[0]}."
    if against.difference is None:
        return f"{clauses[0]}; the sum of each alone is not known: {against.note}."
    alone = together.difference - against.difference
    clauses += [f"the sum of each alone is {signed(alone, digits_of(against))}", _off(against, "the sum", "they give ")]
    return f"{'; '.join([*clauses, *filter(None, [against.note])])}."


def _off(row: Row, what: str, they_give: str = "") -> str:
    """By how much effects miss their sum, as far as that is shown.

    Args:
        row: An interaction, or all against the sum.
        what: That may be off.
        they_give: Before a size that is shown.
    """
    assert row.difference is not None
    if row.interval is None:  # the note says why
        return row.sentence
    digits = digits_of(row)
    if row.verdict in (LESS, MORE):
        low, high = sorted(abs(end) for end in row.interval)
        size = f"{abs(row.difference):.{digits}f}"
        ends = f"({low:.{digits}f} to {high:.{digits}f})"
        return f"{they_give}{size} {row.verdict} {ends}"
    if row.verdict == ADD_UP:
        return f"{row.sentence} ({interval_of(row)})"
    return f"{row.sentence}: {what} may be off by {interval_of(row)}"


def effect_sentence(row: Row) -> str:
    """Finding of a main effect, or of an interaction."""
    if row.difference is None:
        return f"{row.label}: {row.note}."
    within = "no interval" if row.interval is None else interval_of(row)
    numbers = f"{difference_of(row)} ({within}) {row.unit}"
    if row.kind == "main":
        found = f"{row.sentence}; difference {numbers}"
    elif row.verdict == NO_VERDICT:
        found = f"{numbers}, by itself and without words"
    else:
        found = _off(row, "their sum")
    return f"{row.label}: {'; '.join(filter(None, (found, row.note)))}."


def _families_line(report: ReportRecord) -> str:
    """The levels of intervals, and what they hold for."""
    levels = {}
    for row in report.effects:
        if row.level is not None and row.verdict != NO_VERDICT:
            levels[row.kind] = percent(row.level)
    names = {"main": "main effects", "interaction": "interactions", "together": "all together", "sum": "the sum"}
    each = ", ".join(f"{names[kind]} {level}" for kind, level in levels.items())
    right = percent(1 - report.alpha)
    return f"Intervals: {each}. Each of these families is right as a whole with a probability of {right}, by itself."


def secondary_sentence(row: Row) -> str:
    """The difference in a metric that does not decide."""
    within = "no interval" if row.interval is None else interval_of(row)
    return f"{row.variant}, secondary: {row.metric} difference {difference_of(row)} ({within}) {row.unit}."


# ---- noise


def noise_lines(report: ReportRecord) -> list[str]:
    """How noisy the runs are, and what pairing did, one line for each fact."""
    lines = [*_check_lines(report)]
    for row in report.of_kind("result"):
        if row.metric != report.metric:
            continue
        lines += [*_pairs_lines(row, report.alpha)]
        variant = report.variants.get(row.variant)
        if variant is not None and variant.start is not None and row.size is None:
            lines += [*_start_lines(row.variant, variant.start)]
    failed = {} if report.checks is None else report.checks.failed_runs
    return lines + [f"{run} {failure}." for run, failure in failed.items()]


def _check_lines(report: ReportRecord) -> Iterator[str]:
    checks, design = report.checks, report.design
    if checks is None or design is None:
        return
    if checks.replay_difference is not None:
        again = f"{checks.replay_difference:.3g} apart" if checks.replay_difference else "bit-identical"
        if checks.replay_difference and design.command:
            again += ", so a seed fixes a run only in part, and pairs share less"
        elif checks.replay_difference and design.accelerator == "cpu":
            again += ", although a CPU should repeat each bit: do not trust small differences"
        source = design.reused_replay
        which = "one seed" if source else f"seed {design.first_seed}"
        place = f"In {source}, the" if source else "The"
        yield f"{place} baseline with {which}, trained twice: {again}."
    for null in report.of_kind("null"):
        if null.interval is None or null.noise is None or null.sd is None:
            continue
        is_right = "as it should be" if null.direction == NOT_SHOWN else "which is false"
        finding = f"{null.sentence}, {is_right}; difference {difference_of(null)}"
        noise = f"standard deviation {_within(null.sd, null.noise.sd_interval)}"
        after = f"({interval_of(null)}) {null.unit} after {null.pairs} pairs; {noise}"
        redrawn = {"attention": "attention layers", "embedding": "embeddings"}.get(checks.redrawn, "MLPs")
        yield f"The null variant (the baseline with other initial {redrawn}): {finding} {after}."


def _start_lines(name: str, start: Start) -> Iterator[str]:
    """Lines about what a pair shares before the first step, and scales that differ."""
    kept = start.kept
    own = f"; its constructor set {len(kept)} ({kept[0]}{', …' * (len(kept) > 1)})" if kept else ""
    yield f"{name}: starts with {start.shared} of {start.parameters} parameters equal to the baseline's{own}."
    yield from (f"{name}: its {clause}." for clause in start.scales)


def _pairs_lines(row: Row, alpha: float) -> Iterator[str]:
    """The spread of the pairs, what pairing did, and the checks of the t test."""
    noise, robust = row.noise, row.robust
    if noise is None or robust is None or row.sd is None:
        return
    beside = f", without pairing {noise.unpaired_sd:.2g}"
    facts = [f"standard deviation of a pair {_within(row.sd, noise.sd_interval)}{beside}"]
    if row.correlation is not None and noise.correlation_interval is not None:
        facts.append(f"correlation {_within(row.correlation, noise.correlation_interval, '.2f')}")
    if noise.seeds_saved is not None and noise.seeds_saved_interval is not None:
        facts.append(saved_in_words(noise.seeds_saved, noise.seeds_saved_interval))
    facts.append(f"median difference {signed(robust.median, digits_of(row))}")
    reach = "" if robust.smallest_p <= alpha else f" (smallest possible: {robust.smallest_p:.2g})"
    facts.append(f"sign-flip p {robust.sign_flip_p:.2g}{reach}, a check that decides nothing")
    if robust.skewness is not None:
        facts.append(f"skewness {robust.skewness:+.1f}")
    if row.window_error is not None:
        errors = f"{row.window_error.pair:.2g} of a pair, {row.window_error.mean:.2g} of the mean"
        facts.append(f"standard error over validation windows {errors}")
    title = row.variant if row.size is None else f"{row.variant} at {row.size}"
    yield f"{title}: {', '.join(facts)}."


def _within(value: float, interval: Sequence[float] | None, digits: str = ".2g") -> str:
    low, high = interval or (value, value)
    return f"{value:{digits}} ({low:{digits}} to {high:{digits}})"


# ---- tuning


def tuning_lines(report: ReportRecord) -> list[str]:
    """The optimum of each variant, whether it is inside the grid, and what tuning took."""
    tuning = report.tuning
    if tuning is None or not tuning.variants:
        return [] if tuning is None else [f"Tuning of {tuning.option} has not ended."]
    optima = []
    for name, variant in tuning.variants.items():
        edge = "" if variant.is_bracketed else ", not bracketed: at the edge of the grid"
        best = f"none, each value has a run that {FAILED_TO_TRAIN}" if variant.best is None else f"{variant.best:g}"
        vertices = [value for value in variant.vertices if value is not None]
        seeds = f", by seed {min(vertices):g} to {max(vertices):g}" if len(vertices) > 1 else ""
        optima.append(f"{name} {best} (untuned {variant.untuned:g}{seeds}{edge})")
    took = f"{tuning.runs} runs took {shown_duration(tuning.run_seconds)}"
    families = f"Untuned and tuned differences each have alpha {report.alpha:g}; both together, up to twice that."
    return [f"Tuned {tuning.option}: {', '.join(optima)}; {took}.", families]


# ---- cost


def cost_lines(report: ReportRecord) -> list[str]:
    """Lines about what was matched, how closely, and what the experiment took."""
    design, spent = report.design, report.spent
    if design is None or spent is None:
        return []
    took = f"{spent.runs} runs took {shown_duration(spent.run_seconds)}"
    if design.command:
        return [*_scaled_lines(report, design.match_option), f"{took}, added up."]
    counts = {name: variant.parameters for name, variant in report.variants.items()}
    lines = matched_lines(report) + unequal_lines(counts, is_plain=report.unit == report.metric)
    steps = {name: variant.step for name, variant in report.variants.items() if variant.step is not None}
    if steps:
        rounds = f"{spent.rounds} interleaved steps, {spent.threads} thread{'s' * (spent.threads != 1)}"
        times = [_cost_of_step(report, name) for name in steps]
        where = f"{_other_programs(spent.other_cores)} on {spent.machine}, {spent.date}"
        lines.append(f"Time and memory of a step: {'; '.join(times)}. {rounds}, {where}.")
    return [*lines, f"{took} of training on a shared machine."]


def _scaled_lines(report: ReportRecord, option: str) -> Iterator[str]:
    """The option of each variant of a command that makes its time equal."""
    for name, variant in report.variants.items():
        if variant.solved is not None:
            took = f"a run took {variant.time_ratio:.2f} times as long as the baseline's (median of a few)"
            yield f"{name}: {option} {variant.solved:g} for equal time, since {took}."


def matched_lines(report: ReportRecord) -> list[str]:
    """Lines about what was matched, how closely, and what that leaves out."""
    design = report.design
    if design is None:
        return []
    match = MATCHES[design.match]
    base = report.variants[report.baseline]
    variants = {name: variant for name, variant in report.variants.items() if name != report.baseline}
    matches, unit = match.closeness_in_words(base, variants)
    rule = f"{match.name} by {design.match_option}" if design.match_option else match.name
    line = f"Matched: {rule} ({', '.join(matches)}{unit})." if matches else f"Matched: {rule}."
    return [line, match.caveat] if match.caveat else [line]


def _other_programs(cores: float | None) -> str:
    """Whether other programs computed during the measurement."""
    if cores is None:
        return "nothing else of the experiment ran"
    return "alone" if cores < MOST_COMPANY else f"while other programs used {cores:.1f} cores"


def _cost_of_step(report: ReportRecord, name: str) -> str:
    step = report.variants[name].step
    if step is None:
        return name
    time = f"{milliseconds(step.step_s)} ms" if name == report.baseline else time_in_words(step)
    return f"{name} {time}" + ("" if step.peak_bytes is None else f", {step.peak_bytes / MIB:.4g} MiB")


# ---- groups of runs


def inequality_lines(name: str, own: Variant, base: Variant) -> list[str]:
    """Lines about parameters and steps of a group of runs that are not those of the first."""
    lines = []
    if share := parameter_excess(own.parameters, base.parameters):
        counts = f"{own.parameters:,} versus {base.parameters:,}"
        lines.append(f"{name}: parameters are not equal: {counts} ({share:+.1%}).")
    if own.steps and base.steps and own.steps != base.steps:
        lines.append(f"{name}: steps are not equal: {own.steps:,} versus {base.steps:,}.")
    return lines


# ---- sizes


def size_lines(report: ReportRecord) -> list[str]:
    """Sentences about predictions and what became of them."""
    sizes = report.sizes
    if sizes is None:
        return []
    lines = []
    if sizes.tuned_option:
        times = ", ".join(f"{name} × {factor:.3g}" for name, factor in sizes.tuned_factors.items())
        tuned = f"{sizes.tuned_option} was tuned at {next(iter(sizes.sizes))}"
        lines.append(f"{tuned}, and at larger sizes multiplies what size sets there: {times}.")
    if sizes.target:
        names = [name for name in report.variants if name != report.baseline]
        lines += [_predicted_line(report, name) for name in names]
        lines += [] if sizes.drift is None else [_drift_line(sizes.drift, report.unit), GUESS]
    lines += [line for prediction in sizes.predictions for line in _outcome_lines(prediction)]
    each, together = percent(report.level), percent(1 - report.alpha)
    differences = f"Intervals of differences: {each} each, {together} for all variants of a size together"
    return [*lines, f"{differences}; predictions: {percent(sizes.level)} for each variant."]


def _predicted_line(report: ReportRecord, name: str) -> str:
    sizes = report.sizes
    assert sizes is not None
    title = f"{name} at {sizes.target} ({sizes.target_compute:.2g} FLOPs)"
    predicted = sizes.predicted.get(name)
    if predicted is None:
        return f"{title}: no prediction, which needs differences that vary, at two sizes, the largest among them."
    meaning = {
        "holds": "holds: the direction is that at the largest size",
        "fades": f"fades: the difference is smaller than {report.delta}",
        "flips": "flips: the direction is the opposite of that at the largest size",
        "unknown": "unknown: no direction is shown there, or at the largest size",
    }[predicted.answer]
    numbers = f"difference {signed(predicted.difference)} ({bounds(predicted.interval)}) {report.unit}"
    observed = f"its {sizes.pairs} pairs should show {bounds(predicted.prediction_interval)}"
    return f"{title}: {meaning}; {numbers}; {observed}."


def _drift_line(drift: LearnedDrift, unit: str) -> str:
    """The sentence about what the predictions rest on."""
    own = f"{drift.own_steps} step{'s' * (drift.own_steps != 1)} from size to size of this ladder"
    other = f" and {drift.other_steps} of {drift.other_ladders} other ladders" if drift.other_steps else ""
    persists = "a difference is taken to persist (too few steps tell whether it shrinks)"
    mean = persists if drift.decay == 1 else f"4 times the compute multiplies a difference by {drift.decay:.2f}"
    moves = (
        f"it moves by chance by {drift.base:.2g} {unit} and {drift.share:.0%} of itself (scales of a t distribution)"
    )
    return f"Predictions: {mean}; {moves}; learned from {own}{other}."


def _outcome_lines(prediction: StoredPrediction) -> Iterator[str]:
    for name, outcome in prediction.variants.items():
        title = f"{name} at {prediction.size}"
        if outcome.predicted is None:
            yield f"{title}: nothing was predicted."
            continue
        predicted = f"predicted {bounds(outcome.predicted.prediction_interval)}"
        if outcome.observed is None:
            failed = "no difference was observed, since a run failed to train"
            yield f"{title}: {predicted}; {failed if outcome.has_ended else 'not observed yet'}."
        else:
            word = "hit" if outcome.is_hit else "miss"
            yield f"{title}: {word}: {predicted}, observed {signed(outcome.observed)}."


# ---- streams


def idea_title(row: Row) -> str:
    """Place and name of an idea; the name of a change of code is a hash, so its reason stands for it."""
    if row.idea is None:
        return row.variant
    is_code = not row.idea.options and bool(row.idea.because)
    name = textwrap.shorten(row.idea.because, LONGEST_REASON, placeholder="…") if is_code else row.variant
    return f"{row.idea.place}. {name}"


def stream_lines(report: ReportRecord) -> list[str]:
    """A stream in sentences."""
    stream = report.stream
    if stream is None:
        return []
    ideas = [row for row in report.rows if row.kind == "result" and row.idea is not None]
    adopted = [idea_title(row) for row in ideas if row.idea and row.idea.place in stream.adopted]
    count = f"{len(ideas)} idea{'s' * (len(ideas) != 1)}"
    lines = [f"{count}, adopted: {', '.join(adopted) or 'none'}; {shown_duration(stream.run_seconds)} of runs."]
    if stream.unfinished:
        command = f"lightning-llm ablate try {shell_path(report.folder)}"
        lines.append(f"{stream.unfinished} has no verdict yet: {command} continues it.")
    if stream.is_final:
        return [*lines, "It is final: report.json has the values of all pairs, and no idea can be tried any more."]
    if stream.next_level is not None:
        looks = " or ".join(map(str, stream.looks))
        lines.append(f"The next idea is adopted if p is at most {stream.next_level:.2g}, after {looks} fresh pairs.")
        lines.append(power_of_stream(tuple(stream.looks), stream.pair_sd, stream.minimal_gain, report.unit))
    about = "If differences are about normal, the expected share of useless ideas among the adopted ones is at most"
    return [*lines, f"{about} {100 * report.alpha:g}%."]


def power_of_stream(looks: Sequence[int], pair_sd: float | None, minimal_gain: float, unit: str) -> str:
    """How likely an idea that helps is adopted, in the unit of the metric once the spread of a pair is known.

    Args:
        looks: Numbers of fresh pairs after which an idea may be adopted.
        pair_sd: Standard deviation of a pair's difference; ``None``: not known yet.
        minimal_gain: Of an adopted idea.
        unit: Of the metric.
    """
    power = POWER[tuple(looks)]
    scale = 1.0 if pair_sd is None else pair_sd
    beyond = f" beyond the minimal gain of {minimal_gain:g}" if minimal_gain else ""
    cases = f"Improvements{beyond} are adopted in these cases: {power_in_words(power, scale)}"
    if pair_sd is None:
        return f"{cases}, in standard deviations of a pair's difference, which the first screen measures."
    return (
        f"{cases}, in {unit}. A pair's difference has a standard deviation of {pair_sd:.2g}, the median of the ideas."
    )
