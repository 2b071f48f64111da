"""A verdict on losses that the user has already: the statistics, words, and plot of ``ablate`` without its runs."""

import dataclasses
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightning_llm.ablate import plots, words
from lightning_llm.ablate.screen import show_verdicts
from lightning_llm.ablate.table import LOSS, BySeed, Losses, Seed, listed, losses_of, number_of, table_of
from lightning_llm.io.atomic import atomic_file
from lightning_llm.io.charts import WIDTH, canvas
from lightning_llm.io.console import Console
from lightning_llm.io.untrusted import shown
from lightning_llm.statistics import verdict as rule
from lightning_llm.statistics.design import FEWEST
from lightning_llm.statistics.verdict import Sample, Verdict

VERSION = 1  # of ``to_dict``
# The sign-flip test takes a millisecond per pair from 21 pairs on.
MOST_RUNS = 10_000
COLUMNS = 100  # of the text
PLOTS = ("png", "svg", "pdf")
FIXED = "The intervals hold if the number of seeds was fixed before any loss was seen."
UNPAIRED = "Planned as unpaired (Welch's t test). Choosing it after seeing the losses makes false findings more likely."


class Frame(Protocol):
    """A data frame, such as one of pandas: a table with named columns."""

    @property
    def columns(self) -> Any:
        """Their names."""

    def to_dict(self, orient: Any) -> Any:
        """Its rows, for ``records``."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Verdicts(Mapping[str, Verdict]):
    """Verdicts on variants, by their names. Printing it prints a table, and a sentence for each variant.

    Attributes:
        verdicts: The numbers of each variant, as ``ablate`` has them.
        report: What words, table, and plot are made of, with the fields of ``report.json``.
    """

    verdicts: dict[str, Verdict]
    report: dict[str, Any]

    def __getitem__(self, name: str) -> Verdict:
        if name not in self.verdicts:
            raise KeyError(f"{name!r} is none of the variants {listed(self.verdicts)}")
        return self.verdicts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    def __str__(self) -> str:
        file = io.StringIO()
        self.show(Console(file=file, width=COLUMNS))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    __repr__ = __str__

    def show(self, console: Console) -> None:
        """Print the table and the sentences.

        Args:
            console: Where to.
        """
        console.print_lines(self.report["title"])
        show_verdicts(self.report, self.report["lines"], console)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per variant with its main numbers, such as for ``pandas.DataFrame``."""
        rows = []
        for name, found in self.verdicts.items():
            low, high = found.interval or (None, None)
            runs = dict(zip(("baseline_runs", "runs"), self.report["variants"][name]["runs"], strict=True))
            numbers = {"difference": found.difference, "low": low, "high": high, "p_adjusted": found.p_adjusted}
            said = {"verdict": found.verdict, "sentence": found.sentence}
            rows.append({"variant": name, **runs, **numbers, **said})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON: settings, and those of each variant."""
        fields = ("metric", "baseline", "delta", "alpha", "unpaired", "seeds", "interval")
        of_row = [field.name for field in dataclasses.fields(Verdict)] + ["runs", "by_seed"]
        rows = self.report["variants"]
        variants = {name: {field: row[field] for field in of_row} for name, row in rows.items()}
        return {"version": VERSION, **{field: self.report[field] for field in fields}, "variants": variants}

    def to_markdown(self) -> str:
        """The table in Markdown."""
        head, rows = words.verdict_table(self.report)
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)

    def to_latex(self) -> str:
        """The table in LaTeX; it needs the package booktabs."""
        head, rows = words.verdict_table(self.report)
        first, *others = (f"{' & '.join(map(_in_latex, line))} \\\\" for line in (head, *rows))
        begin = f"\\begin{{tabular}}{{l{'r' * (len(head) - 2)}l}}"
        end = "\\end{tabular}"
        return "\n".join([begin, "\\toprule", first, "\\midrule", *others, "\\bottomrule", end])

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the differences with their intervals.

        Args:
            path: Where to write the plot, as PNG, SVG, or PDF; ``None``: nowhere.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ValueError: The file's name has another ending.
        """
        ending = None if path is None else Path(path).suffix.removeprefix(".").lower()
        if ending is not None and ending not in PLOTS:
            raise ValueError(f"{path}: a plot must end with {', '.join(f'.{known}' for known in PLOTS)}")
        with canvas(WIDTH, 1.3 + 0.55 * len(self), style={"text.parse_math": False}) as axes:
            plots.forest(axes[0], self.report)
            figure = axes[0, 0].figure
            if path is not None:
                with atomic_file(Path(path)) as file:
                    figure.savefig(file, format=ending)
        return figure


def verdict(
    losses: Mapping[str, Any] | Frame,
    *,
    baseline: str = "baseline",
    metric: str | None = None,
    delta: float | None = None,
    alpha: float = 0.05,
    unpaired: bool = False,
) -> Verdicts:
    """Compare variants with a baseline by the losses of their runs: is each one better, and how certain is that?

    Runs with the same seed are pairs, and the t test is paired, whatever their correlation. The variants share
    ``alpha`` (Bonferroni), so that all intervals hold together. The number of seeds must have been fixed before any
    loss was seen; ``lightning-llm ablate run`` can stop earlier, since it plans its looks.

    Args:
        losses: Losses of each variant, of which lower is better. A sequence has one number per seed, in the same order
            for all variants; a mapping has them by seed. Or a data frame of pandas with the columns ``variant``,
            ``seed``, and the metric, or with one column per variant. NaN, infinite, or ``None``: the run failed.
        baseline: The name of the baseline.
        metric: The column of a data frame; otherwise, what the losses are called. With a minus before it, such as
            ``-accuracy``, higher is better, and the numbers are negated.
        delta: The smallest difference that matters; ``None``: no variant is ``equivalent``.
        alpha: Probability that an interval misses its true difference, over all variants.
        unpaired: Compare without pairs (Welch's t test). Set it only if that was planned, since choosing afterwards
            makes false findings more frequent.

    Raises:
        ValueError: A run has no counterpart, a value is no number, an option is out of range, or a side has one run.
    """
    if isinstance(losses, Mapping):
        given = _of_mapping(losses, metric)
    elif hasattr(losses, "columns") and hasattr(losses, "to_dict"):
        given = _of_frame(losses, metric)
    else:
        raise ValueError(f"losses must be numbers by variant or a data frame, got {shown(losses)}")
    return verdict_of(given, baseline=baseline, delta=delta, alpha=alpha, unpaired=unpaired)


def verdict_of(
    losses: Losses,
    *,
    baseline: str = "baseline",
    delta: float | None = None,
    alpha: float = 0.05,
    unpaired: bool = False,
) -> Verdicts:
    """Compare the variants of a table of losses. Arguments and errors as of :func:`verdict`."""
    seeds, sides = _sides(losses, baseline, unpaired)
    base = sides.pop(baseline)
    samples = {name: Sample(base, side, is_paired=not unpaired) for name, side in sides.items()}
    found = rule.verdicts(samples, delta=delta, alpha=alpha)
    rows = {name: _row(each, samples[name], seeds) for name, each in found.items()}
    title = f"{losses.metric} of {listed(found)}, compared with {baseline}"
    is_numbered = losses.has_seeds and all(isinstance(seed, int) for seed in seeds)
    report = {
        "title": title if losses.source == SOURCE else f"{losses.source}: {title}",
        "lines": [*_constant_lines({baseline: base, **sides}, found), UNPAIRED if unpaired else FIXED],
        "metric": losses.metric,
        "unit": losses.metric,
        "baseline": baseline,
        "delta": delta,
        "alpha": alpha,
        "unpaired": unpaired,
        "half_width": None,
        "seeds": seeds if is_numbered else [],
        "interval": {"each": 1 - alpha / len(found), "together": 1 - alpha},
        "variants": rows,
        # what only an experiment with its own runs has
        "secondary": {},
        "seen": {},
        "reused": {"runs": {}, "variants": False},
        "aa": {"replay_difference": None, "null": None},
        "diverged_runs": {},
    }
    return Verdicts(found, report)


SOURCE = "losses"  # in messages about an argument


def _of_mapping(losses: Mapping[str, Any], metric: str | None) -> Losses:
    """Losses by variant, as a sequence or by seed."""
    by_variant: dict[str, BySeed] = {}
    has_seeds = any(isinstance(values, Mapping) for values in losses.values())
    for name, values in losses.items():
        if has_seeds and not isinstance(values, Mapping):
            raise ValueError(
                f"{SOURCE}: {shown(name)} has no seeds, and another variant has: give seeds for all or none"
            )
        if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
            raise ValueError(f"{SOURCE}: {shown(name)} must have one number per seed, got {shown(values)}")
        by_seed: BySeed = {}
        for seed, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            try:
                by_seed[seed if isinstance(seed, int) else str(seed)] = number_of(value)
            except ValueError as error:
                raise ValueError(f"{SOURCE}: {shown(name)}, seed {shown(seed)}: {error}") from None
        by_variant[str(name)] = by_seed
    return losses_of(by_variant, metric or LOSS, SOURCE, has_seeds=has_seeds)


def _of_frame(frame: Any, metric: str | None) -> Losses:
    """The losses in a data frame; a named index is a column too."""
    names = getattr(getattr(frame, "index", None), "names", ())
    if any(name is not None for name in names):
        frame = frame.reset_index()
    records = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
    places = [f"row {number}" for number in range(len(records))]
    return table_of(records, SOURCE, places, null=math.nan).losses(metric)


def _sides(losses: Losses, baseline: str, unpaired: bool) -> tuple[list[Seed], dict[str, list[float]]]:
    """The seeds of the pairs, none without pairs, and the losses of each variant in their order; checked."""
    source, by_variant = losses.source, losses.by_variant
    if baseline not in by_variant:
        names = listed(by_variant) or "its variants, and it has none"
        raise ValueError(f"baseline (--baseline) must be one of {names}: {source} has no variant {shown(baseline)}")
    if len(by_variant) == 1:
        raise ValueError(f"{source} has only {shown(baseline)}: it needs the losses of a variant too")
    for name, runs in by_variant.items():
        if not runs:
            raise ValueError(f"{source} has no run of {shown(name)}")
        if len(runs) > MOST_RUNS:
            raise ValueError(f"{source} has {len(runs)} runs of {shown(name)}, expected at most {MOST_RUNS}")
    seeds: list[Seed] = []
    if unpaired:
        sides = {name: list(runs.values()) for name, runs in by_variant.items()}
    else:
        for name, runs in by_variant.items():
            _check_pairs(losses, baseline, name, runs)
        seeds = sorted(by_variant[baseline], key=lambda seed: (isinstance(seed, str), seed))
        sides = {name: [runs[seed] for seed in seeds] for name, runs in by_variant.items()}
    single = next((name for name, side in sides.items() if len(side) == 1), None)
    if single is not None:
        found = "one seed per variant" if not unpaired else f"one run of {shown(single)}"
        advice = f"train each variant with {FEWEST} seeds or more; lightning-llm ablate power shows how many"
        raise ValueError(f"{source} has {found}, which does not tell how much runs differ by chance: {advice}")
    return seeds, sides


def _check_pairs(losses: Losses, baseline: str, name: str, runs: BySeed) -> None:
    """Check that a variant and the baseline have the same seeds."""
    seeds = losses.by_variant[baseline]
    if runs.keys() == seeds.keys():
        return
    advice = "write nan for a run that failed; unpaired (--unpaired) is for variants that were planned with other seeds"
    if not losses.has_seeds:
        counts = f"{len(runs)} run{'s' * (len(runs) != 1)} of {shown(name)} and {len(seeds)} of {shown(baseline)}"
        raise ValueError(f"{losses.source} has {counts}, and every pair needs both: {advice}")
    without, with_it = (name, baseline) if seeds.keys() - runs.keys() else (baseline, name)
    missing = [seed for seed in losses.by_variant[with_it] if seed not in losses.by_variant[without]]
    which = f"seed{'s' * (len(missing) > 1)} {listed(missing)}"
    raise ValueError(f"{losses.source} has no run of {shown(without)} with {which}, and {shown(with_it)} has: {advice}")


def _row(found: Verdict, sample: Sample, seeds: Sequence[Any]) -> dict[str, Any]:
    """A variant in a report."""
    values = ([None if math.isnan(value) else value for value in side] for side in (sample.baseline, sample.variant))  # type: ignore[arg-type]
    pairs = zip(seeds, *values, strict=True) if sample.is_paired else ()
    by_seed = [{"seed": seed, "baseline": base, "variant": own} for seed, base, own in pairs]
    row = dataclasses.asdict(found)
    if row["robust"] is not None:  # indices of the pairs that are left: their seeds say more
        left = [pair["seed"] for pair in by_seed if pair["baseline"] is not None]
        row["robust"]["outliers"] = [left[index] for index in row["robust"]["outliers"]]
    runs = [len(sample.baseline), len(sample.variant)]
    return row | {
        "by_seed": by_seed,
        "runs": runs,
        "runs_of_sides": None if sample.is_paired else runs,
        **{"tuned": None, "further_pairs": None, "window_error": None, "secondary": {}},
    }


def _constant_lines(sides: Mapping[str, Sequence[float]], found: Mapping[str, Verdict]) -> list[str]:
    """Lines about sides whose runs are all alike, in comparisons that have an interval."""
    compared = {name for name, each in found.items() if each.interval is not None}
    constant = [name for name, side in sides.items() if np.ptp(side) == 0 and (name in compared or name not in found)]
    doubt = "have the same result. Does the seed reach the program? If not, the intervals lack this noise"
    return [f"All {len(sides[name])} runs of {name} {doubt}." for name in constant if compared]


def _in_markdown(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


_OF_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
_OF_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"<": "$<$", ">": "$>$", "\n": " "}


def _in_latex(cell: str) -> str:
    """Escaped; a minus sign of a number is not a hyphen."""
    text = "".join(_OF_LATEX.get(sign, sign) for sign in cell)
    return " ".join(f"${word}$" if word[:1] in "+-" and word[1:2].isdecimal() else word for word in text.split(" "))
