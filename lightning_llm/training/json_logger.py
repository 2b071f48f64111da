"""Metrics as JSON lines: one object per entry, in the order they were logged."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lightning_llm.io.atomic import json_text, open_to_append, write_text
from lightning_llm.io.schema import maybe, open_record, validate, whole
from lightning_llm.io.untrusted import MIB, number_in, parse_json, read_text
from lightning_llm.runs.directory import RunDirectory

METRICS = "metrics.jsonl"
LARGEST = 1024 * MIB  # a million entries of a kilobyte
_ENTRY = open_record({}, {"step": maybe(whole())})


class JSONLinesLogger(Logger):
    """Writes ``metrics.jsonl`` into the run directory, one line per entry: ``{"step": 10, "train_loss": 2.31, …}``.

    A NaN or infinite value is null. A line is in the file as soon as it is logged. In the directory of an earlier run,
    it continues that run's file: first it cuts the entries that will be logged again, and all after them.

    This logger chooses the run directory, ``<save_dir>/<name>/version_<n>``; ``default_root_dir`` then has no effect.

    Args:
        save_dir: Folder of all runs.
        name: Folder in ``save_dir`` for runs of one kind.
        version: Folder in ``name`` for this run: a number N for ``version_N``, or a name. Null: a new run gets the
            next free number, and a resumed run keeps its directory.

    Attributes:
        run: Where the Trainer makes the run directory. A new run does not take a given ``version`` that already exists.
    """

    def __init__(self, save_dir: str = "runs", name: str = "run", version: int | str | None = None) -> None:
        super().__init__()
        folder = f"version_{version}" if isinstance(version, int) else version
        self.run = RunDirectory(save_dir, name, folder)
        self._given = None if folder is None else Path(save_dir, name, folder)
        self._version = version
        self._name = name
        self._is_open = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        """The folder of this run, or its number."""
        if self._version is not None:
            return self._version
        name = self.run.path.name.removeprefix("version_")
        return name if (number := number_in(name)) is None else number

    @property
    def log_dir(self) -> str:
        """The folder that it writes to."""
        return str(self._given or self.run.path)

    save_dir = log_dir  # Lightning asks loggers that it does not know for this

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        entry: dict[str, Any] = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        path = Path(self.log_dir, METRICS)
        if not self._is_open:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _cut(path, entry)
            self._is_open = True
        with open_to_append(path) as file:
            file.write(json_text(entry).encode() + b"\n")

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are in ``config.yaml`` in the run directory."""


def _cut(path: Path, entry: Mapping[str, Any]) -> None:
    """Drop the first line that is beyond ``entry``, is logged again with it, or is incomplete, and all after it."""
    kept = []
    now = entry["step"]
    for line in read_text(path, LARGEST).splitlines(keepends=True):
        try:
            earlier = parse_json(line, path)
            validate(earlier, _ENTRY, path, "")
        except ValueError:
            break
        before = earlier.get("step")
        is_again = (earlier.keys() & entry.keys()) - {"step"}
        is_later = None not in (before, now) and (before > now or (before == now and is_again))
        if is_later or not line.endswith("\n"):
            break
        kept.append(line)
    write_text(path, "".join(kept))
