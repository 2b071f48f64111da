"""Write the findings of docs/audit.md from the numbers of public logs in ``docs/experiments/audit.json``.

``python -m benchmarks.public_logs`` writes them; with ``--check``, it exits with status 1 if that changes something.
"""

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.commands import ROOT
from lightning_llm.ablate import audit
from lightning_llm.ablate.log_audit import Audit

NUMBERS, PAGE = ROOT / "docs" / "experiments" / "audit.json", ROOT / "docs" / "audit.md"
BEGIN, END = "<!-- written by benchmarks/public_logs.py -->", "<!-- end of what it writes -->"
Submission = tuple[int, int, list[float]]  # its number, its steps, the loss of each run


def audits(loops: list[dict[str, Any]]) -> Iterator[tuple[str, Audit]]:
    """The audit of each log, as ``lightning-llm ablate audit`` makes it of a file."""
    with tempfile.TemporaryDirectory() as folder:
        for loop in loops:
            file = Path(folder, "results.tsv")
            rows = [("trial", "val_bpb", "status"), *loop["rows"]]
            file.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
            yield loop["name"], audit(file)


def table_of_loops(loops: list[dict[str, Any]]) -> str:
    """A row for each log, and one for their sums."""
    found = list(audits(loops))
    lines = [
        "| log | tries with a value | failed | kept | kept by chance alone | p | decided otherwise |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of in found:
        chance = f"{of.chance_keeps.mean:.1f}, at most {of.chance_keeps.most}"
        p = "<0.0001" if of.chance_keeps.p < 1e-4 else f"{of.chance_keeps.p:.4f}"
        cells = [name, of.tries, of.failed, of.keeps, chance, p, of.unlike_rule]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    each = [of for _, of in found]
    mean = sum(of.chance_keeps.mean for of in each)
    sums = [[of.tries, of.failed, of.keeps, of.unlike_rule] for of in each]
    tries, failed, keeps, otherwise = map(sum, zip(*sums, strict=True))
    lines.append(f"| all | {tries} | {failed} | {keeps} | {mean:.1f} | | {otherwise} |")
    return "\n".join(lines)


def pooled(submissions: list[Submission]) -> tuple[float, int]:
    """Standard deviation of one run, pooled over submissions with several, and its degrees of freedom."""
    several = [losses for *_, losses in submissions if len(losses) > 1]
    freedom = sum(len(losses) - 1 for losses in several)
    return (sum(statistics.variance(losses) * (len(losses) - 1) for losses in several) / freedom) ** 0.5, freedom


def table_of_submissions(submissions: list[Submission]) -> str:
    """Welch's interval for each two submissions with equal steps and several runs, and how often one run misleads."""
    lines = [
        "| steps | runs | difference in mean loss | 95% interval | one run of each has the other order |",
        "|---|---|---|---|---|",
    ]
    several = sorted((steps, number, losses) for number, steps, losses in submissions if len(losses) > 1)
    for (steps, _, a), (steps_b, _, b) in itertools.combinations(several, 2):
        if steps != steps_b:
            continue
        difference = statistics.mean(b) - statistics.mean(a)
        low, high = stats.ttest_ind(b, a, equal_var=False).confidence_interval()
        other = sum((y - x) * difference < 0 for x in a for y in b) / (len(a) * len(b))
        cells = [
            f"{steps:,}",
            f"{len(a)} and {len(b)}",
            f"{difference:+.4f}",
            f"{low:+.4f} to {high:+.4f}",
            f"{other:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with what is written here."""
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    for name, table in (
        ("loops", table_of_loops(numbers["loops"])),
        ("benchmark", table_of_submissions(numbers["benchmark"])),
    ):
        begin = f"{BEGIN.removesuffix('-->')}({name}) -->"
        before, _, rest = page.partition(f"{begin}\n")
        _, _, after = rest.partition(f"\n{END}")
        if not after:
            raise ValueError(f"{PAGE.name} has no place for {name}: {begin}")
        page = f"{before}{begin}\n\n{table}\n\n{END}{after}"
    return page


def main() -> int:
    """Write the tables, or check them."""
    old = PAGE.read_text(encoding="utf-8")
    new = written(old)
    if sys.argv[1:] == ["--check"]:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
