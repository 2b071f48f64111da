"""The report in words: lines that the screen and the page share.

Every sentence says what was found, with its number, and nothing that the numbers do not show.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX, MATCHES
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.options import command_line_of
from lightning_llm.ablate.plan import Plan, PlannedVariant
from lightning_llm.ablate.ratios import time_in_words
from lightning_llm.ablate.table import NEGATED
from lightning_llm.io.shell import shell_path
from lightning_llm.io.units import MIB, shown_duration
from lightning_llm.statistics.design import FAILED_TO_TRAIN, NOT_SHOWN
from lightning_llm.statistics.scales import Scale, differing_scales

FURTHER = "Further pairs are a range, since the true difference may be anywhere in its 80% interval."
ABOUT_SECONDARY = (
    "Secondary metrics decide nothing: their intervals are adjusted for variants and looks, not for several metrics."
)
UNEQUAL = 0.01  # parameters that differ by more are reported
KNOWN = (
    "Not confirmatory: runs of variants were known before this experiment. Confirm with fresh seeds: --first-seed N."
)
SHARED = "To confirm a verdict of an experiment that shares these runs, use fresh seeds: --first-seed N."
MOST_COMPANY = 0.2  # cores that other programs may use during a measurement "alone"


def labeled(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The variants, each followed by itself with both tuned."""
    rows = []
    for name, row in report["variants"].items():
        rows += [(name, row), (f"{name}, tuned", row["tuned"])] if row["tuned"] else [(name, row)]
    return rows


def is_tested(row: Mapping[str, Any]) -> bool:
    """Whether a variant has had a look."""
    return row["level"] is not None


def cells(row: Mapping[str, Any]) -> list[str]:
    """Pairs, difference, interval, adjusted p and verdict of a variant, for a table."""
    if not is_tested(row):
        return ["–"] * 5
    p = row["p_adjusted"]
    p = "–" if p is None else "<0.0001" if p < 1e-4 else f"{p:.4f}"
    runs = row.get("runs_of_sides")
    count = str(row["pairs"]) if runs is None else " and ".join(map(str, runs))
    return [count, signed(row["difference"]), bounds(row["interval"]), p, row["verdict"]]


def verdict_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table of verdicts."""
    are_pairs = all(row.get("runs_of_sides") is None for row in report["variants"].values())
    interval = f"{percent(report['interval']['each'])} interval"
    head = ["variant", "pairs" if are_pairs else "runs", "difference", interval, "p adj.", "verdict"]
    return head, [[name, *cells(row)] for name, row in labeled(report)]


def simultaneous(share: float) -> str:
    """The sentence about several intervals together."""
    level = percent(share)
    return f"Simultaneous {level} intervals: with a probability of {level}, all of them contain the true differences."


def together(report: Mapping[str, Any]) -> float | None:
    """The probability with which all intervals are right. ``None``: there are not several."""
    count = sum(row["interval"] is not None for row in report["variants"].values())
    return float(report["interval"]["together"]) if count > 1 else None


# ---- what is compared


def compared(report: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of the variants: the configs and text of the baseline, and the options that variants change."""
    command = report.get("command")
    base = [command or ", ".join(report["configs"]), f"on {report['text']}" if report["text"] else ""]
    revisions = report.get("revisions", {})
    base += [f"of {revisions[BASELINE]}"] if revisions else []
    descriptions = {BASELINE: " ".join(filter(None, base))}
    for name, row in report["variants"].items():
        words = [word.removeprefix("--") for word in command_line_of(row["options"])]
        descriptions[name] = ", ".join(words) or revisions.get(name) or ("the same" if command else "")
    return {name: what or "see the plan" for name, what in descriptions.items()}


def metric_of(report: Mapping[str, Any]) -> str:
    """The metric, and the text that it is of if that is known."""
    return f"{report['metric']} of {report['validation']}" if report["validation"] else str(report["metric"])


def design_lines(report: Mapping[str, Any]) -> list[str]:
    """How variants are compared, and which experiments have used the same seeds."""
    delta = "no delta" if report["delta"] is None else f"delta {report['delta']:g} {report['unit']}"
    seeds = f"{seeds_in_words(report['seeds'])}; " if report["seeds"] else ""
    lines = [f"{seeds}{delta}; a difference is variant minus baseline, so a negative one is better."]
    lines += _about_sign(report["metric"]) + report.get("notes", [])
    seen = not_reused(report["seen"], report["reused"]["runs"], report["seeds"])
    used = [f"{name} has used {seeds_in_words(seeds)}" for name, seeds in seen.items()]
    lines += [f"Not independent of earlier experiments with this baseline: {'; '.join(used)}."] if used else []
    reused = reused_lines(report["reused"]["runs"])
    advice = KNOWN if report["reused"]["variants"] else SHARED
    return [*lines, *reused, advice] if reused else lines


def _about_sign(metric: str) -> list[str]:
    """A sentence about a metric of which higher is better, and which is compared with its sign changed."""
    name = metric.removeprefix(NEGATED)
    return [] if name == metric else [f"{metric} is minus {name}, so +0.01 means that {name} is lower by 0.01."]


def not_reused(seen: Mapping[str, list[int]], runs: Mapping[str, str], seeds: Sequence[int]) -> dict[str, list[int]]:
    """The seeds that this and earlier experiments have used, without those whose baseline run is shared on purpose.

    Args:
        seen: The seeds of earlier experiments, by their names.
        runs: The reused ones.
        seeds: Of this experiment.
    """
    used = {seed for seed in seeds if str(RunKey(BASELINE, seed)) not in runs}
    shared = {name: sorted(used.intersection(others)) for name, others in seen.items()}
    return {name: others for name, others in shared.items() if others}


def reused_lines(runs: Mapping[str, str]) -> list[str]:
    """Lines that say which runs other experiments have trained; ``runs`` maps each run to its experiment."""
    seeds: dict[str, dict[str, list[int]]] = {}
    for run, source in runs.items():
        name, _, seed = run.rpartition(",seed=")
        seeds.setdefault(source, {}).setdefault(name, []).append(int(seed))
    lines = []
    for source, by_name in seeds.items():
        runs_of_source = (f"{name} {seeds_in_words(sorted(used))}" for name, used in by_name.items())
        lines.append(f"Reused from {source}: {'; '.join(runs_of_source)}.")
    return lines


def left_lines(reused: Mapping[str, str], ended: int, needed: int) -> list[str]:
    """Lines that say which runs are reused, and how many are left to train; empty if nothing is reused."""
    lines = [f"{needed} of {ended + needed} runs are left to train."] if reused and needed else []
    return reused_lines(reused) + lines


# ---- verdicts


def verdict_lines(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each variant, with what a reader must know about it."""
    rows = labeled(report)
    lines = [_sentence(name, row, report) for name, row in rows]
    lines += [*_secondary_lines(rows, report["secondary"])]
    if any(row["further_pairs"] for _, row in rows):
        command = f"lightning-llm ablate extend {shell_path(report['out'])} --pairs N"
        lines.append(f"{FURTHER} {command} adds pairs.")
    return lines


def _sentence(name: str, row: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    if not is_tested(row):
        return f"{name}: {row['note']}."
    clauses = [f"{name}: {row['sentence']}"]
    if row["difference"] is not None:
        within = "" if row["interval"] is None else f" ({bounds(row['interval'])})"
        runs = _runs_in_words(row)
        clauses.append(f"difference {signed(row['difference'])}{within} {report['unit']} after {runs}")
    clauses += [row["note"]] if row["note"] else []
    goal = "a verdict" if report["half_width"] is None else f"an interval of ±{report['half_width']:g}"
    clauses += [_further_in_words(row["further_pairs"], goal)] if row["further_pairs"] else []
    return "; ".join([*clauses, *(f"warning: {text}" for text in row["warnings"])]) + "."


def _runs_in_words(row: Mapping[str, Any]) -> str:
    """Such as ``4 pairs``, or ``5 and 8 unpaired runs``: those of the baseline first."""
    if (runs := row.get("runs_of_sides")) is None:
        return pairs_in_words(row["pairs"])
    return f"{runs[0]} and {runs[1]} unpaired runs"


def _secondary_lines(rows: Sequence[tuple[str, Mapping[str, Any]]], units: Mapping[str, str]) -> Iterator[str]:
    """The differences in the metrics that do not decide."""
    for name, row in rows:
        for metric, found in row["secondary"].items():
            within = "no interval" if found["interval"] is None else bounds(found["interval"])
            yield f"{name}, secondary: {metric} difference {signed(found['difference'])} ({within}) {units[metric]}."
    if any(row["secondary"] for _, row in rows):
        yield ABOUT_SECONDARY


def _further_in_words(further: Mapping[str, int | None], goal: str) -> str:
    """How many more pairs would reach the goal, as a range."""
    low, high = further["low"], further["high"]
    reach = f"{low} or more" if high is None else str(low) if low == high else f"{low} to {high}"
    return f"{reach} further pairs reach {goal} with a probability of 80%"


# ---- noise


def noise_lines(report: Mapping[str, Any]) -> list[str]:
    """How noisy the runs are, and what pairing did, one line for each fact."""
    lines = [*_aa_lines(report)]
    for name, row in report["variants"].items():
        lines += [*_pairs_lines(name, row, report["alpha"]), *_start_lines(name, row.get("start"))]
    return lines + [f"{run} {failure}." for run, failure in report["diverged_runs"].items()]


def _aa_lines(report: Mapping[str, Any]) -> Iterator[str]:
    aa = report["aa"]
    unit = report["unit"]
    if (difference := aa["replay_difference"]) is not None:
        again = f"{difference:.3g} apart" if difference else "bit-identical"
        if difference and report.get("command"):
            again += ", so a seed fixes a run only in part, and pairs share less"
        elif difference and report["accelerator"] == "cpu":
            again += ", although a CPU should repeat each bit: do not trust small differences"
        replay = report["reused"]["replay"]
        which = (
            f"The baseline with seed {report['first_seed']}, trained twice"
            if replay is None
            else f"In {replay}, the baseline with one seed, trained twice"
        )
        yield f"{which}: {again}."
    if (null := aa["null"]) is not None and null["interval"] is not None:
        is_right = "as it should be" if null["direction"] == NOT_SHOWN else "which is false"
        finding = f"{null['sentence']}, {is_right}; difference {signed(null['difference'])}"
        noise = f"standard deviation {_with_interval(null['sd'], null['noise']['sd_interval'])}"
        after = f"({bounds(null['interval'])}) {unit} after {null['pairs']} pairs; {noise}"
        redrawn = {"attention": "attention layers", "embedding": "embeddings"}.get(aa.get("redrawn"), "MLPs")
        yield f"The null variant (the baseline with other initial {redrawn}): {finding} {after}."


def _start_lines(name: str, start: Mapping[str, Any] | None) -> Iterator[str]:
    """Lines about what a pair shares before the first step, and scales that differ."""
    if start is None:
        return
    kept = start["kept"]
    own = f"; its constructor set {len(kept)} ({kept[0]}{', …' * (len(kept) > 1)})" if kept else ""
    yield f"{name}: starts with {start['shared']} of {start['parameters']} parameters equal to the baseline's{own}."
    yield from (f"{name}: its {clause}." for clause in start["scales"])


def _pairs_lines(name: str, row: Mapping[str, Any], alpha: float) -> Iterator[str]:
    noise = row["noise"]
    robust = row["robust"]
    if noise is None:
        return
    facts = _of_pairing(row, noise)
    facts.append(f"median difference {signed(robust['median'])}")
    reach = "" if robust["smallest_p"] <= alpha else f" (smallest possible: {robust['smallest_p']:.2g})"
    facts.append(f"sign-flip p {robust['sign_flip_p']:.2g}{reach}")
    if robust["skewness"] is not None:
        facts.append(f"skewness {robust['skewness']:+.1f}")
    if (windows := row["window_error"]) is not None:
        errors = f"{windows['pair']:.2g} of a pair, {windows['mean']:.2g} of the mean"
        facts.append(f"standard error over validation windows {errors}")
    yield f"{name}: {', '.join(facts)}."


def _of_pairing(row: Mapping[str, Any], noise: Mapping[str, Any]) -> list[str]:
    """The spread of the pairs, and what pairing did, with their intervals."""
    unpaired = noise.get("unpaired_sd")  # reports of earlier versions have none
    beside = "" if unpaired is None else f", without pairing {unpaired:.2g}"
    facts = [f"standard deviation of a pair {_with_interval(row['sd'], noise['sd_interval'])}{beside}"]
    if row["correlation"] is not None and noise["correlation_interval"] is not None:
        facts.append(f"correlation {_with_interval(row['correlation'], noise['correlation_interval'], '.2f')}")
    if (saved := noise["seeds_saved"]) is not None:
        facts.append(saved_in_words(saved, noise["seeds_saved_interval"]))
    return facts


def pairs_in_words(count: int) -> str:
    """Such as ``4 pairs``."""
    return f"{count} pair{'s' * (count != 1)}"


def saved_in_words(seeds: int, interval: Sequence[int]) -> str:
    """How many more seeds per variant a comparison without pairs would need."""
    low, high = interval
    if seeds < 0:
        return f"pairing cost up to {-seeds} seed{'s' * (seeds != -1)} per variant"
    return f"pairing saved {seeds} ({low} to {high}) seeds per variant"


def _with_interval(value: float, interval: Sequence[float] | None, digits: str = ".2g") -> str:
    low, high = interval or (value, value)
    return f"{value:{digits}} ({low:{digits}} to {high:{digits}})"


# ---- tuning


def tuning_lines(report: Mapping[str, Any]) -> list[str]:
    """The optimum of each variant, whether it is inside the grid, and what tuning took."""
    tuning = report["tuning"]
    if tuning is None or not tuning["variants"]:
        return [] if tuning is None else [f"Tuning of {tuning['option']} has not ended."]
    optima = []
    for name, variant in tuning["variants"].items():
        edge = "" if variant["is_bracketed"] else ", not bracketed: at the edge of the grid"
        best = (
            f"none, each value has a run that {FAILED_TO_TRAIN}" if variant["best"] is None else f"{variant['best']:g}"
        )
        vertices = [value for value in variant["vertices"] if value is not None]
        seeds = f", by seed {min(vertices):g} to {max(vertices):g}" if len(vertices) > 1 else ""
        optima.append(f"{name} {best} (untuned {variant['untuned']:g}{seeds}{edge})")
    took = f"{tuning['runs']} runs took {shown_duration(tuning['run_seconds'])}"
    families = f"Untuned and tuned differences each have alpha {report['alpha']:g}; both together, up to twice that."
    return [f"Tuned {tuning['option']}: {', '.join(optima)}; {took}.", families]


# ---- cost


def cost_lines(report: Mapping[str, Any]) -> list[str]:
    """Lines about what was matched, how closely, and what the experiment took."""
    cost = report["cost"]
    rows = {BASELINE: report["baseline"], **report["variants"]}
    if report.get("command"):
        return [
            *_scaled_lines(report),
            f"{cost['runs']} runs took {shown_duration(cost['run_seconds'])}, added up.",
        ]
    lines = matched_lines(report) + _unequal({name: row["parameters"] for name, row in rows.items()})
    if cost["variants"]:
        rounds = f"{cost['rounds']} interleaved steps, {cost['threads']} thread{'s' * (cost['threads'] != 1)}"
        times = [_cost_of_variant(name, variant) for name, variant in cost["variants"].items()]
        where = f"{_other_programs(cost)} on {cost['machine']}, {cost['date']}"
        lines.append(f"Time and memory of a step: {'; '.join(times)}. {rounds}, {where}.")
    lines.append(f"{cost['runs']} runs took {shown_duration(cost['run_seconds'])} of training on a shared machine.")
    return lines


def _scaled_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The option of each variant of a command that makes its time equal."""
    for name, row in report["variants"].items():
        if row["solved"] is not None:
            took = f"a run took {row['time_ratio']:.2f} times as long as the baseline's (median of a few)"
            yield f"{name}: {report['solved']} {row['solved']:g} for equal time, since {took}."


def matched_lines(report: Mapping[str, Any]) -> list[str]:
    """Lines about what was matched, how closely, and what that leaves out."""
    match = MATCHES[report["match"]]
    matches, unit = match.closeness_in_words(report)
    rule = f"{match.name} by {report['solved']}" if report["solved"] else match.name
    line = f"Matched: {rule} ({', '.join(matches)}{unit})." if matches else f"Matched: {rule}."
    return [line, match.caveat] if match.caveat else [line]


def _other_programs(cost: Mapping[str, Any]) -> str:
    """Whether other programs computed during the measurement."""
    others = cost["other_cores"]
    if others is None:
        return "nothing else of the experiment ran"
    return "alone" if others < MOST_COMPANY else f"while other programs used {others:.1f} cores"


def _cost_of_variant(name: str, variant: Mapping[str, Any]) -> str:
    time = f"{milliseconds(variant['step_s'])} ms" if name == BASELINE else time_in_words(variant)
    return f"{name} {time}" + ("" if variant["peak_bytes"] is None else f", {variant['peak_bytes'] / MIB:.4g} MiB")


def mean_loss(report: Mapping[str, Any], name: str) -> float | None:
    """The baseline's mean, and that plus the paired difference for a variant, which may have other seeds."""
    mean: float | None = report["baseline"]["mean"]
    if name == BASELINE or mean is None:
        return mean
    difference = report["variants"][name]["difference"]
    return None if difference is None else mean + difference


# ---- plans


def parameter_lines(plan: Plan) -> list[str]:
    """The parameters of each variant, and a line if they are not equal."""
    planned = {name: plan.variants[name] for name in (BASELINE, *plan.experiment.variants)}
    counts = {name: variant.facts.get("parameters") for name, variant in planned.items()}
    counted = (f"{name} {'unknown' if count is None else format(count, ',')}" for name, count in counts.items())
    return [f"parameters: {', '.join(counted)}", *_unequal(counts), *_unequal_scales(planned)]


def start_in_words(plan: Plan, looks: Sequence[int], slots: int, done: int) -> str:
    """The line about what begins now: variants, looks, how many runs at a time, and how many had ended before."""
    experiment = plan.experiment
    threads = plan.record.threads
    variants = len(experiment.variants)
    runs = f"{slots} at a time, {threads} thread{'s' * (threads != 1)} each"
    summary = f"{variants} variant{'s' * (variants != 1)}, {tested_in_words(looks)}, {runs}"
    ended = f"; it continues: {done} run{'s' * (done != 1)} had ended" if done else ""
    return f"{experiment.name}: {summary}: {plan.out}{ended}"


def _unequal(counts: Mapping[str, int | None]) -> list[str]:
    """A line if the parameters of variants differ from the baseline's by more than 1%."""
    unequal = []
    for name, count in counts.items():
        if share := parameter_excess(count, counts[BASELINE]):
            unequal.append(f"{name} has {100 * abs(share):.3g}% {'more' if share > 0 else 'fewer'}")
    advice = f"--match parameters={ARCHITECTURE_PREFIX}intermediate_size makes them equal"
    return [f"{', '.join(unequal)} parameters than the baseline; {advice}."] if unequal else []


def _unequal_scales(planned: Mapping[str, PlannedVariant]) -> Iterator[str]:
    """A line for each variant and role whose initial weights have another scale than the baseline's."""
    scales = {
        name: {role: Scale(*scale) for role, scale in (variant.scales or {}).items()}
        for name, variant in planned.items()
    }
    for name, own in scales.items():
        yield from (f"{name}: its {clause}." for clause in differing_scales(own, scales[BASELINE]))


def parameter_excess(count: int | None, base_count: int | None) -> float:
    """By what share there are more parameters; 0 where they are as good as equal, or one number is not known."""
    if not count or not base_count or abs(count - base_count) <= UNEQUAL * base_count:
        return 0.0
    return count / base_count - 1


def tested_in_words(looks: Sequence[int]) -> str:
    """Such as ``tested after 4, 8, and 12 pairs``; these numbers are the looks."""
    *earlier, last = map(str, looks)
    few = f"{', '.join(earlier)}{',' * (len(earlier) > 1)} and " if earlier else ""
    return f"tested after {few}{last} pairs"


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Such as ``seeds 0 to 7``."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    is_range = seeds[-1] - seeds[0] == len(seeds) - 1
    return f"seeds {seeds[0]} to {seeds[-1]}" if is_range else f"seeds {', '.join(map(str, seeds))}"


# ---- numbers


def difference_of(pair: Mapping[str, Any]) -> float | None:
    """The variant's loss less the baseline's; ``None``: one of them failed to train."""
    is_known = pair["baseline"] is not None and pair["variant"] is not None
    return pair["variant"] - pair["baseline"] if is_known else None


def signed(value: float | None) -> str:
    """A difference with four digits."""
    return "–" if value is None else f"{value:+.4f}"


def bounds(interval: Sequence[float] | None) -> str:
    """Both ends of an interval, such as ``-0.0010 to +0.0031``."""
    return "–" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def milliseconds(seconds: float) -> str:
    """In milliseconds, with the digits that a timing has."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def percent(share: float) -> str:
    """A share as a percentage, such as ``98.75%``."""
    return f"{100 * share:.4g}%"
