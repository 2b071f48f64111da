"""The third command on a GPU: steps of two states of the package, interleaved A B B A.

The folder of inputs has a folder ``compared`` with two folders, each with a copy of the package ``lightning_llm``. The
measurement itself is the code of this clone for both.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.baselines import job_of, lacking, measure
from benchmarks.commands import finish
from benchmarks.gpu import training
from benchmarks.gpu.runner import Machine, Part, Task, origin_of
from benchmarks.gpu.training import CAPTURED_EAGER, OURS
from benchmarks.rows import Row
from lightning_llm.io.atomic import write_json
from lightning_llm.io.untrusted import read_json

COMPARED = (("124 M", OURS, 35), ("1.3 B", OURS, 50), ("Shakespeare", CAPTURED_EAGER, 20))
MOST_BYTES = 1 << 30


def tasks(machine: Machine) -> list[Task]:
    """Each measurement four times: of the first state, twice of the second, and of the first."""
    first, second = _states(machine.inputs)
    turns = ((first, 1), (second, 1), (second, 2), (first, 2))
    models = COMPARED[:1] if machine.dry_run else COMPARED
    return [
        Task(f"{model}, {side}, {folder.name}, {n}", seconds, partial(_side, machine, model, side, folder), must=True)
        for model, side, seconds in models
        for folder, n in turns
    ]


def _states(inputs: Path) -> list[Path]:
    """The folders of the two states, by name.

    Raises:
        ValueError: There are not two of them.
    """
    folders = sorted(path.parent for path in (inputs / "compared").glob("*/lightning_llm"))
    if len(folders) != 2:
        raise ValueError(f"{inputs / 'compared'} has {len(folders)} folders with a lightning_llm: it takes two")
    return folders


def _side(machine: Machine, model: str, side: str, folder: Path) -> Iterator[Row]:
    """A row of a side, measured by a process that finds the package in that folder."""
    request = training.request_of(machine, model, "bfloat16")
    if why := lacking(side, request.device):
        yield request.row(side, error=why, is_missing=True, model=model, state=folder.name)
        return
    job = job_of(side, request, training.STAGES[machine.device])
    with tempfile.TemporaryDirectory() as name:
        given, found = Path(name, "job.json"), Path(name, "found.json")
        write_json(given, job)
        finish("benchmarks.gpu.third_list", str(given), str(found), folder=folder)
        result = read_json(found, MOST_BYTES)
    yield training.row_of(machine, request, side, result, model=model, state=folder.name, package=result["package"])


def derive(rows: Iterable[Row]) -> None:
    """Complete the rows by their time over that of the other state, on the same GPU with the same torch and code."""
    rows = [row for row in rows if row.total_s and row.state]
    for row in rows:
        alike = [one for one in rows if _alike(one) == _alike(row)]
        mine = [one.total_s for one in alike if one.state == row.state]
        others = [one.total_s for one in alike if one.state != row.state]
        if others:
            row.over_other = median(mine) / median(others)


def _alike(row: Row) -> tuple[object, ...]:
    return (*origin_of(row), row.model, row.variant)


def main(given: str, found: str) -> None:
    """Measure a job that is in one file, and write what was found to another one."""
    import lightning_llm

    job = json.loads(Path(given).read_text(encoding="utf-8"))
    package = str(Path(lightning_llm.__file__).parents[1])
    write_json(Path(found), {**measure(job), "package": package})


PART = Part(
    name="third",
    tasks=tasks,
    columns={"state": ("state", 1, ""), "over the other": ("over_other", 1, ".3f"), **training.PART.columns},
    draw=training.draw,
    files=training.PART.files,
    complete=derive,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
