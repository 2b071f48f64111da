"""The report of a folder, whatever it holds: an experiment, one at several sizes, or a stream of ideas. No torch."""

from pathlib import Path

from lightning_llm.ablate.ladder import LADDER, read_ladder
from lightning_llm.ablate.names import STREAM
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.from_sizes import ladder_report
from lightning_llm.ablate.report.from_stream import stream_report
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.stream import Stream


def report_in(folder: str | Path) -> Report:
    """The report of a folder as it is now.

    Raises:
        ValueError: The folder holds no experiment, or an idea of a stream, whose losses are not shown.
    """
    folder = Path(folder)
    if (folder / STREAM).exists():
        return stream_report(Stream.read(folder))
    if (folder / LADDER).exists():
        return ladder_report(*read_ladder(folder))
    return report_of(load_experiment(folder))
