"""Lines about a plan, and the words and digits of numbers that plans and reports share."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan, PlannedVariant
from lightning_llm.statistics.batch import LOOKS, POWER
from lightning_llm.statistics.scales import Scale, differing_scales

UNEQUAL = 0.01  # parameters that differ by more are reported


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


def pairs_in_words(count: int) -> str:
    """Such as ``4 pairs``."""
    return f"{count} pair{'s' * (count != 1)}"


def saved_in_words(seeds: int, interval: Sequence[int]) -> str:
    """How many more seeds per variant a comparison without pairs would need."""
    low, high = interval
    if seeds < 0:
        return f"pairing cost up to {-seeds} seed{'s' * (seeds != -1)} per variant"
    return f"pairing saved {seeds} ({low} to {high}) seeds per variant"


def parameter_lines(plan: Plan) -> list[str]:
    """The parameters of each variant, its steps if they differ, and a line if parameters are not equal."""
    planned = {name: plan.variants[name] for name in (BASELINE, *plan.experiment.variants)}
    counts = {name: variant.facts.get("parameters") for name, variant in planned.items()}
    counted = (f"{name} {'unknown' if count is None else format(count, ',')}" for name, count in counts.items())
    steps = {name: variant.steps for name, variant in planned.items()}
    matched = ", ".join(f"{name} {count:,}" for name, count in steps.items() if count is not None)
    return [
        f"parameters: {', '.join(counted)}",
        *([f"steps: {matched}"] if len({*steps.values()}) > 1 else []),
        *unequal_lines(counts, is_plain=plan.is_plain),
        *_unequal_scales(planned),
    ]


def start_in_words(plan: Plan, looks: Sequence[int], slots: int, done: int) -> str:
    """The line about what begins now: variants, looks, how many runs at a time, and how many had ended before."""
    experiment = plan.experiment
    threads = plan.record.threads
    variants = len(experiment.variants)
    runs = f"{slots} at a time, {threads} thread{'s' * (threads != 1)} each"
    summary = f"{variants} variant{'s' * (variants != 1)}, {tested_in_words(looks)}, {runs}"
    ended = f"; it continues: {done} run{'s' * (done != 1)} had ended" if done else ""
    return f"{experiment.name}: {summary}: {plan.out}{ended}"


def power_in_words(power: Mapping[float, float], scale: float) -> str:
    """Such as ``of 0.006 in 7%, of 0.012 in 74%``: shares by the size of an improvement, in units of the scale."""
    return ", ".join(f"of {size * scale:.2g} in {100 * share:.0f}%" for size, share in power.items())


def power_of_batch(pair_sd: float, unit: str) -> str:
    """How likely a useful idea of a batch is adopted, by the spread of a pair."""
    shares = power_in_words(POWER, pair_sd)
    batch = f"at most {LOOKS[-1]} pairs of each idea, where two of twenty are useful"
    return f"A batch adopts improvements in these cases: {shares}, in {unit}, with {batch}."


def unequal_lines(counts: Mapping[str, int | None], *, is_plain: bool = False) -> list[str]:
    """A line if the parameters of variants differ from the baseline's by more than 1%.

    Args:
        counts: By name of a variant.
        is_plain: Whether the model is a plain LightningModule, of which no option can be solved for.
    """
    unequal = []
    for name, count in counts.items():
        if share := parameter_excess(count, counts[BASELINE]):
            unequal.append(f"{name} has {100 * abs(share):.3g}% {'more' if share > 0 else 'fewer'}")
    advice = "" if is_plain else f"; --match parameters={ARCHITECTURE_PREFIX}intermediate_size makes them equal"
    return [f"{', '.join(unequal)} parameters than the baseline{advice}."] if unequal else []


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


def signed(value: float | None, digits: int = 4) -> str:
    """A difference with its sign, and with four decimal places or others."""
    return "–" if value is None else f"{value:+.{digits}f}"


def bounds(interval: Sequence[float] | None, digits: int = 4) -> str:
    """Both ends of an interval, such as ``-0.0010 to +0.0031``."""
    return "–" if interval is None else f"{signed(interval[0], digits)} to {signed(interval[1], digits)}"


def milliseconds(seconds: float) -> str:
    """In milliseconds, with the digits that a timing has."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def percent(share: float) -> str:
    """A share as a percentage, such as ``98.75%``."""
    return f"{100 * share:.4g}%"
