"""What earlier experiments beside a new one say: their noise, and the seeds that they have used. No torch.

Evidence on seeds whose results were known before the question was asked is not fresh, so a plan records them. The
spread of an earlier null variant says what a plan can find before its first run.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_llm.ablate.arm import BASELINE
from lightning_llm.ablate.plan import PLAN, REPORT, RUNS
from lightning_llm.io.schema import NUMBER, maybe, open_record, validate
from lightning_llm.io.untrusted import read_json
from lightning_llm.statistics.power import SPREADS

MOST = 200  # experiments that are looked at
_REPORT = open_record({}, {"aa": open_record({}, {"null_sd": maybe(NUMBER)})})


@dataclasses.dataclass(frozen=True)
class Earlier:
    """An experiment with the same baseline and metric.

    Attributes:
        name: Of its folder.
        seeds: That its pairs have used.
        spread: Standard deviation of the null variant's differences; ``None``: not known.
    """

    name: str
    seeds: list[int]
    spread: float | None


def earlier(out: Path, config: str, metric: str) -> list[Earlier]:
    """The experiments in the same parent folder whose baseline and metric are those of a new one.

    Args:
        out: The folder of the new one.
        config: The hash of its baseline's config.
        metric: Its metric.
    """
    return list(_like(out, config, metric))


def spread_of(experiments: Sequence[Earlier]) -> tuple[float, str] | None:
    """The largest known spread, and the name of its experiment."""
    return max(((known.spread, known.name) for known in experiments if known.spread), default=None)


def spread_in(folder: Path, metric: str) -> float:
    """The null variant's spread in an experiment.

    Raises:
        ValueError: It has no report with one of this metric.
    """
    if spread := _spread(folder, metric):
        return spread
    raise ValueError(f"{folder} has no {REPORT} with the spread of a null variant in {metric}: give --spread instead")


def _like(out: Path, config: str, metric: str) -> Iterator[Earlier]:
    folders = sorted(path.parent for path in out.parent.glob(f"*/{PLAN}"))[:MOST]
    for folder in folders:
        if folder.resolve() == out.resolve():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = read_json(folder / PLAN)
            if (content["asked_configs"][BASELINE], content["metric"]) != (config, metric):
                continue
            names = (path.name for path in (folder / RUNS).glob(f"{BASELINE},*seed=*"))  # those of tuning too
            seeds = sorted({int(seed) for seed in (name.rpartition("=")[2] for name in names) if seed.isdecimal()})
            yield Earlier(folder.name, seeds, _spread(folder))


def _spread(folder: Path, metric: str | None = None) -> float | None:
    """Of a report that is there and whole, and of this metric."""
    try:
        report = read_json(folder / REPORT)
        validate(report, _REPORT, folder / REPORT)
    except (OSError, ValueError):
        return None
    if metric is not None and report.get("metric") != metric:
        return None
    spread: float | None = report.get("aa", {}).get("null_sd")
    return spread if spread is not None and SPREADS[0] <= spread <= SPREADS[1] else None
