"""The report of an experiment as data: what ``report.json`` holds, and what the screen and the page show. No torch.

Every number is a function of the plan and of the runs, except seconds and measured memory.
"""

import bisect
import dataclasses
import math
import statistics as means
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_llm.ablate.experiment import BASELINE, DELTA, NULL
from lightning_llm.ablate.ratios import TIMED, is_unknown
from lightning_llm.ablate.results import Loaded
from lightning_llm.ablate.scheduler import Rules, Run
from lightning_llm.ablate.tuning import FIRST_SEED
from lightning_llm.io.config_file import read_config
from lightning_llm.io.schema import NUMBER, maybe, open_record, validate
from lightning_llm.statistics.design import FEWEST, NOT_SHOWN
from lightning_llm.statistics.estimates import Array
from lightning_llm.statistics.looks import RESERVE, RHO
from lightning_llm.statistics.power import further_pairs
from lightning_llm.statistics.verdict import UNDECIDED, Verdict
from lightning_llm.statistics.windows import window_error

UNITS = {"val_loss": "nats/token", "bits_per_byte": "bits/byte"}
LOSS = "val_loss"
ENVIRONMENT = ("precision", "device", "threads", "torch", "numpy", "package")
_OF_PLAN = (
    *("name", "metric", "delta", "alpha", "looks", "precision", "first_seed", "match", "solved"),
    *("threads", "accelerator", "commit", "seen"),
)
_VALIDATING = open_record({}, {"trainer": maybe(open_record({}, {"limit_val_batches": maybe(NUMBER)}))})  # of a config
Curve = list[tuple[int, float]]
NO_LOOK: dict[str, Any] = {  # of a variant; its other numbers are null
    **{"verdict": UNDECIDED, "direction": NOT_SHOWN, "has_ended": False, "pairs": 0, "diverged": 0},
    **{"baseline_diverged": 0, "note": "no look yet", "warnings": [], "by_seed": []},
    **{"further_pairs": None, "window_error": None},
}


def report_of(loaded: Loaded) -> dict[str, Any]:
    """The report of an experiment as it is now, as JSON takes it."""
    plan, content, state = loaded.plan, loaded.plan.content, loaded.state
    variants = {name: _variant(loaded, name) for name in content["variants"]}
    lost = [result for result in loaded.results.values() if result.has_diverged]
    return {
        "plan": content["hash"],
        **{field: content[field] for field in _OF_PLAN},
        "unit": UNITS[content["metric"]],
        "interval": {"each": 1 - content["alpha"] / len(variants), "together": 1 - content["alpha"]},
        "rule": {"reserve": RESERVE, "spending": RHO, "fewest_pairs": FEWEST},
        "has_ended": not state.needed,
        "pairs": max((row["pairs"] for row in variants.values()), default=0),
        "added_pairs": [each._asdict() for each in plan.added],
        "seeds": [run.seed for run in sorted(loaded.results) if run.name == BASELINE],
        "validation": _validation(loaded),
        "environment": _environment(loaded),
        "aa": _aa(loaded),
        "baseline": _side(loaded, BASELINE),
        "variants": variants,
        "diverged_runs": {str(result.run): result.reason for result in sorted(lost, key=lambda each: each.run)},
        "tuning": _tuning(loaded),
        "cost": _cost(loaded),
    }


def _environment(loaded: Loaded) -> dict[str, Any]:
    """What decides the bits of all runs, as the first one that has finished recorded it."""
    summary = next((each.summary for _, each in sorted(loaded.results.items()) if each.summary), {})
    return {field: summary.get(field) for field in ENVIRONMENT}


def _aa(loaded: Loaded) -> dict[str, Any]:
    """The baseline compared with itself: the same seed again, and the null variant with its own verdict."""
    null = None if loaded.null_began_alike else loaded.state.null
    row = None if null is None else _numbers(loaded, null, BASELINE, NULL) | {"further_pairs": None}
    sd = None if null is None else null.sd
    return {"replay_difference": loaded.replay_difference, "null_sd": sd, "null": row}


def _variant(loaded: Loaded, name: str) -> dict[str, Any]:
    """A variant without tuning, which scripts read, and under ``tuned`` the same of the tuned sides."""
    state = loaded.state
    tuned = None if state.tuned is None else state.tuned.verdicts.get(name)
    row = _numbers(loaded, state.verdicts.get(name), BASELINE, name) | _side(loaded, name)
    if tuned is None:
        return {**row, "tuned": None}
    base, own = (loaded.tuned_name(side) for side in (BASELINE, name))
    sides = {"baseline_mean": _mean(loaded, base), "mean": _mean(loaded, own)}
    return {**row, "tuned": _numbers(loaded, tuned, base, own) | sides}


def _numbers(loaded: Loaded, found: Verdict | None, baseline: str, variant: str) -> dict[str, Any]:
    """What a verdict says, with the losses that it rests on; before the first look, the numbers are null."""
    if found is None:
        return {**dict.fromkeys(field.name for field in dataclasses.fields(Verdict)), **NO_LOOK}
    losses = {run: each.loss for run, each in loaded.results.items()}
    both = [
        {"seed": seed, "baseline": losses.get(Run(baseline, seed)), "variant": losses.get(Run(variant, seed))}
        for seed in loaded.plan.rules.seeds(found.pairs)
    ]
    more = None if found.has_ended else _further_pairs(loaded.plan.rules, found)
    windows = _window_error(loaded, baseline, variant, loaded.plan.rules.seeds(found.pairs))
    row = dataclasses.asdict(found)
    if row["robust"] is not None:  # places among the pairs that are left: their seeds say more
        seeds = [each["seed"] for each in both if each["baseline"] is not None]
        row["robust"]["outliers"] = [seeds[place] for place in row["robust"]["outliers"]]
    return row | {"by_seed": both, "further_pairs": more, "window_error": windows}


def _window_error(loaded: Loaded, baseline: str, variant: str, seeds: Sequence[int]) -> dict[str, Any] | None:
    """Standard errors over the validation windows; ``None``: a run has no record of them, or has diverged."""
    pairs = [[loaded.results.get(Run(name, seed)) for name in (baseline, variant)] for seed in seeds]
    records = [[None if each is None else each.windows() for each in pair] for pair in pairs]
    known = [(ours, theirs) for ours, theirs in records if ours is not None and theirs is not None]
    if loaded.plan.content["metric"] != LOSS or len(known) < len(pairs):
        return None
    found = window_error(known)
    return None if found is None else dataclasses.asdict(found)


def _further_pairs(rules: Rules, found: Verdict) -> dict[str, Any] | None:
    """How many more pairs end a comparison, as a range; ``None``: no interval yet, or no number of them does."""
    if found.interval is None or found.difference is None or found.sd is None:
        return None
    design = dataclasses.replace(rules.design, level=1 - found.level)
    lost = found.baseline_diverged
    more = further_pairs(design, found.difference, found.sd, found.pairs - lost, left_out=lost)
    return None if more is None else dataclasses.asdict(more)


def _tuning(loaded: Loaded) -> dict[str, Any] | None:
    """Values, mean losses and optimum of each side, and what they cost; ``None``: nothing is tuned."""
    tune = loaded.plan.tune
    if tune is None:
        return None
    found = {
        name: {"untuned": tune.values[name]} | dataclasses.asdict(each) for name, each in loaded.state.tuning.items()
    }
    seeds = range(FIRST_SEED, FIRST_SEED + tune.seeds)
    grid = [each for run, each in loaded.results.items() if run.seed in seeds]
    seconds = sum(each.summary.get("seconds") or 0.0 for each in grid)
    return {"option": tune.option, "seeds": list(seeds), "sides": found, "runs": len(grid), "run_seconds": seconds}


def _side(loaded: Loaded, name: str) -> dict[str, Any]:
    """Mean and standard deviation of the metric over the runs of a side, and what the plan says of its cost."""
    losses = _losses(loaded, name)
    spread = means.stdev(losses) if len(losses) > 1 else None
    side = loaded.plan.content["sides"][name]
    known = ("steps", "parameters", "flops_per_token", "tokens_per_step", "solved", "ratio", *TIMED)
    facts = {field: side.get(field) for field in known}
    return {"mean": _mean(loaded, name), "sd_over_seeds": spread, "runs": len(losses), **facts}


def _losses(loaded: Loaded, name: str) -> list[float]:
    return [each.loss for run, each in sorted(loaded.results.items()) if run.name == name and each.loss is not None]


def _mean(loaded: Loaded, name: str) -> float | None:
    losses = _losses(loaded, name)
    return means.fmean(losses) if losses else None


def _validation(loaded: Loaded) -> str:
    """How much of the validation text each run's metric is of."""
    config = loaded.plan.config(BASELINE)
    options = read_config(config)
    validate(options, _VALIDATING, config)
    limit = (options.get("trainer") or {}).get("limit_val_batches")
    if limit is None or (limit == 1.0 and isinstance(limit, float)):
        return "the whole validation text"
    return (
        f"{limit} batches of the validation text" if isinstance(limit, int) else f"{limit:.0%} of the validation text"
    )


def _cost(loaded: Loaded) -> dict[str, Any]:
    """Time of all runs, and time and memory of each side's step, measured alone; ``sides`` is empty before that."""
    measured = loaded.cost or {}
    sides = {name: dict(side) for name, side in measured.get("sides", {}).items()}
    for name, side in sides.items():
        side["training_s"] = side["step_s"] * loaded.plan.content["sides"][name]["steps"]
    spent = sum(each.summary.get("seconds") or 0.0 for each in loaded.results.values())
    facts = {field: measured.get(field) for field in ("machine", "threads", "date", "torch", "rounds", "other_cores")}
    return {**facts, "runs": len(loaded.results), "run_seconds": spent, "sides": sides}


# ---- curves


@dataclasses.dataclass(frozen=True)
class Curves:
    """Validation losses during training, of the runs that have not diverged.

    Attributes:
        steps: Of the validations of each side.
        losses: Of each side, shape (runs, validations).
        seeds: Of these runs.
    """

    steps: Mapping[str, Sequence[int]]
    losses: Mapping[str, Array]
    seeds: Mapping[str, Sequence[int]]

    def differences(self, name: str) -> tuple[list[int], Any]:
        """Steps of the baseline, and the differences of the pairs there; the variant's are read at equal shares.

        A share of the run is what both sides have in common if their numbers of steps differ.
        """
        both = [seed for seed in self.seeds[BASELINE] if seed in self.seeds.get(name, ())]
        steps, own = (np.array(self.steps[side]) for side in (BASELINE, name))
        rows = [
            np.interp(steps / steps[-1], own / own[-1], self._of(name, seed)) - self._of(BASELINE, seed)
            for seed in both
        ]
        return list(self.steps[BASELINE]), np.array(rows)

    def at_equal_time(
        self, name: str, sides: Mapping[str, Mapping[str, Any]], delta: float | None = None
    ) -> float | None:
        """Mean difference of the validation loss when the faster side ends.

        The slower side is then in the middle of its schedule, so the number favors the faster one. Between two
        validations, the loss is read on a line.

        Args:
            name: Of the variant.
            sides: Their costs, as in the report.
            delta: The smallest difference that matters; ``None``: the default one. One in bits per byte counts as one
                in nats per token, which is at most 1.44 times too lenient.

        Returns:
            ``None`` if a time or loss is not known, or if the lines may be off by more than a quarter of delta.
        """
        both = [seed for seed in self.seeds.get(BASELINE, ()) if seed in self.seeds.get(name, ())]
        if not both or BASELINE not in sides or name not in sides:
            return None
        step_s = {side: sides[side]["step_s"] for side in (BASELINE, name)}
        if is_unknown(sides[name]):
            step_s[name] = step_s[BASELINE]
        end = min(seconds * self.steps[side][-1] for side, seconds in step_s.items())
        if any(end < seconds * self.steps[side][0] for side, seconds in step_s.items()):
            return None  # no loss is known that early
        curves = {side: np.mean([self._of(side, seed) for seed in both], axis=0) for side in step_s}
        read = {side: _interpolated(end / step_s[side], self.steps[side], curve) for side, curve in curves.items()}
        (base, base_error), (ours, our_error) = read.values()
        return ours - base if base_error + our_error <= (delta or DELTA) / 4 else None

    def _of(self, name: str, seed: int) -> Any:
        return self.losses[name][list(self.seeds[name]).index(seed)]


def _interpolated(at: float, steps: Sequence[int], losses: Array) -> tuple[float, float]:
    """The loss at a step, on a line between the two validations a < b around it, and an estimate of its error.

    The error is the next term of Newton's interpolation, ``|f[a, b, c]| (at - a) (b - at)``, with the larger of both
    second divided differences to a neighbor c. It is infinite without a neighbor, and 0 at a validation.
    """
    nearest = min(range(len(steps)), key=lambda n: abs(steps[n] - at))
    if math.isclose(steps[nearest], at, rel_tol=1e-9):
        return float(losses[nearest]), 0.0
    right = bisect.bisect_left(steps, at)
    slopes = np.diff(losses) / np.diff(steps)  # slopes[n] is that from validation n to n + 1
    bends = [
        abs(slopes[n] - slopes[n - 1]) / (steps[n + 1] - steps[n - 1])
        for n in (right - 1, right)
        if 0 < n < len(slopes)
    ]
    error = max(bends, default=math.inf) * (at - steps[right - 1]) * (steps[right] - at)
    return float(np.interp(at, steps, losses)), float(error)


def curves_of(loaded: Loaded) -> Curves:
    """The validation losses of all pairs during training, of sides with the baseline's tokenizer. It takes a while."""
    steps, losses, seeds = dict[str, list[int]](), dict[str, Array](), dict[str, list[int]]()
    sides = loaded.plan.content["sides"]
    for name in (BASELINE, NULL, *loaded.plan.content["variants"]):
        if sides[name]["tokenizer"] != sides[BASELINE]["tokenizer"]:
            continue  # losses per token cannot be compared
        found = dict(_curves(loaded, name))
        lengths = [tuple(step for step, _ in curve) for curve in found.values()]
        common = max(set(lengths), key=lengths.count, default=())  # a resumed run may have validated once more
        kept = {seed: dict(curve) for seed, curve in found.items() if set(common) <= {step for step, _ in curve}}
        if common and kept:
            steps[name], seeds[name] = list(common), list(kept)
            losses[name] = np.array([[curve[step] for step in common] for curve in kept.values()])
    return Curves(steps, losses, seeds)


def _curves(loaded: Loaded, name: str) -> Iterator[tuple[int, Curve]]:
    for run, result in sorted(loaded.results.items()):
        if run.name == name and not result.has_diverged:
            curves = loaded.replayed.get(run) or result.curves()
            if curve := curves.get(LOSS):
                yield run.seed, curve
