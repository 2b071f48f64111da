"""Earlier experiments beside a new one: their noise, and the seeds that they have used. No torch.

Evidence on seeds whose results were known before the question was asked is not fresh, so a plan records them. The
spread of earlier pairs says what a plan can find before its first run.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_llm.ablate.names import BASELINE, NEGATED, NULL, PLAN
from lightning_llm.ablate.plan import REPORT, RUNS, Plan
from lightning_llm.ablate.report.record import ReportRecord
from lightning_llm.io.records import read_record
from lightning_llm.statistics.power import SPREADS

MOST = 200  # experiments that are looked at


class Spread(NamedTuple):
    """Standard deviation of the difference of one pair.

    Attributes:
        value: In the metric's unit.
        source: The folder of the experiment that gave it; empty: the user gave it.
        variant: Its variant that did.
        interval: With 95%; ``None``: not known.
    """

    value: float
    source: str = ""
    variant: str = ""
    interval: Sequence[float] | None = None

    @property
    def whose(self) -> str:
        """The variant in words."""
        return "null variant" if self.variant == NULL else self.variant

    def __str__(self) -> str:
        within = "" if self.interval is None else ", 95% interval {:.3g} to {:.3g}".format(*self.interval)
        return f"{self.value:.4g}" + (f" ({self.whose} of {self.source}{within})" if self.source else "")


class Earlier(NamedTuple):
    """An experiment with the same baseline and metric.

    Attributes:
        name: Of its folder.
        seeds: That its pairs have used.
        spread: The largest of its variants and the null variant; ``None``: not known.
    """

    name: str
    seeds: list[int]
    spread: Spread | None


def earlier(out: Path, config: str, metric: str) -> Iterator[Earlier]:
    """The experiments in the same parent folder whose baseline and metric are those of a new one.

    Args:
        out: The folder of the new one.
        config: The hash of its baseline's config.
        metric: Its metric.
    """
    for folder in siblings(out):
        with suppress(OSError, ValueError):  # an experiment that is damaged, or of an earlier version
            plan = Plan.read(folder)
            if (plan.record.asked.get(BASELINE), plan.experiment.metric) != (config, metric):
                continue
            names = (path.name for path in (folder / RUNS).glob(f"{BASELINE},*seed=*"))  # those of tuning too
            seeds = sorted({int(seed) for seed in (name.rpartition("=")[2] for name in names) if seed.isdecimal()})
            yield Earlier(folder.name, seeds, _spread(folder))


def siblings(out: Path) -> list[Path]:
    """The folders of experiments in the same parent folder, without this one; of very many the last."""
    folders = sorted(path.parent for path in out.parent.glob(f"*/{PLAN}"))[-MOST:]
    return [folder for folder in folders if folder.resolve() != out.resolve()]


def spread_of(experiments: Sequence[Earlier]) -> Spread | None:
    """The largest known spread."""
    return max((experiment.spread for experiment in experiments if experiment.spread), default=None)


def spread_in(folder: Path, metric: str) -> Spread:
    """The largest spread of the variants and the null variant of an experiment.

    Raises:
        ValueError: It has no report with one of this metric.
    """
    if spread := _spread(folder, metric):
        return spread
    raise ValueError(f"{folder} has no {REPORT} with the spread of pairs in {metric}: give --spread instead")


def _spread(folder: Path, metric: str | None = None) -> Spread | None:
    """The largest spread in a report that is there and whole, and of this metric."""
    try:
        report = read_record(folder / REPORT, ReportRecord)
    except (OSError, ValueError):
        return None
    spreads = [
        Spread(row.sd, folder.name, row.variant, None if row.noise is None else row.noise.sd_interval)
        for row in report.rows
        if row.kind in ("null", "result") and row.sd is not None and SPREADS[0] <= row.sd <= SPREADS[1]
    ]
    is_of_metric = metric is None or report.metric == metric.removeprefix(NEGATED)
    return max(spreads, key=lambda spread: spread.value, default=None) if is_of_metric else None
