"""What earlier experiments beside a new one say: their noise, and the seeds that they have used. No torch.

Evidence on seeds whose results were known before the question was asked is not fresh, so a plan records them. The
spread of an earlier null variant says what a plan can find before its first run.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_llm.ablate.experiment import BASELINE
from lightning_llm.ablate.plan import PLAN, REPORT, RUNS
from lightning_llm.ablate.power import SPREADS
from lightning_llm.io.untrusted import NUMBER, maybe, read_json, some, validate

MOST = 200  # experiments that are looked at
_REPORT = some({}, {"aa": some({}, {"null_sd": maybe(NUMBER)})})


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


def earlier(out: Path, asked: Any) -> list[Earlier]:
    """The experiments in the same parent folder whose baseline and metric are those of a new one.

    Args:
        out: The folder of the new one.
        asked: What its plan asks for.
    """
    return list(_found(out, asked))


def spread_of(found: Sequence[Earlier]) -> tuple[float, str] | None:
    """The largest known spread, and the name of its experiment."""
    return max(((each.spread, each.name) for each in found if each.spread), default=None)


def spread_in(folder: Path) -> float:
    """The null variant's spread in an experiment.

    Raises:
        ValueError: It has no report with one.
    """
    with suppress(OSError, ValueError):
        if spread := _spread(folder):
            return spread
    raise ValueError(f"{folder} has no {REPORT} with the spread of a null variant: give --spread instead")


def _found(out: Path, asked: Any) -> Iterator[Earlier]:
    folders = sorted(path.parent for path in out.parent.glob(f"*/{PLAN}"))[:MOST]
    for folder in folders:
        if folder.resolve() == out.resolve():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = read_json(folder / PLAN)
            ours, theirs = (each["asked_configs"][BASELINE] for each in (asked, content))
            if ours != theirs or content["metric"] != asked["metric"]:
                continue
            names = (path.name for path in (folder / RUNS).glob(f"{BASELINE},seed=*"))
            seeds = sorted(int(seed) for seed in (name.rpartition("=")[2] for name in names) if seed.isdecimal())
            yield Earlier(folder.name, seeds, _spread(folder))


def _spread(folder: Path) -> float | None:
    if not (folder / REPORT).is_file():
        return None
    report = read_json(folder / REPORT)
    validate(report, _REPORT, folder / REPORT)
    spread: float | None = report.get("aa", {}).get("null_sd")
    return spread if spread is not None and SPREADS[0] <= spread <= SPREADS[1] else None
