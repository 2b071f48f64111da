"""A ladder: an experiment with ``sizes``, and what its differences say of a larger one. No torch.

At each size the whole experiment is done, in ``OUT/sizes/SIZE``, with its own plan, null variant and report, and with a
fixed number of pairs: a stop at a look exaggerates. ``OUT/ladder.json`` holds what was asked for and the counted FLOPs
of each size; it never changes. Before a further size is trained, ``OUT/predictions/SIZE.json`` holds what is predicted
of it, and the plan of that size the hash of it.

With ``tune``, the smallest size is tuned as any experiment is. At the larger ones, each variant has the value that
``size`` sets there, times its tuned value over its own value at the smallest.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.plan import digest
from lightning_llm.ablate.report.record import LearnedDrift, Predicted
from lightning_llm.accounting.sizing import parse_size
from lightning_llm.io.records import Kind, read_record, write_record
from lightning_llm.io.shell import shell_path
from lightning_llm.statistics.extrapolation import FEWEST_SIZES, MOST_COMPUTE

LADDER = "ladder.json"
SIZES = "sizes"
PREDICTIONS = "predictions"
VERSION = 2  # of ladder.json


class LadderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``ladder.json``.

    Attributes:
        experiment: What was asked for.
        computes: FLOPs of a baseline's run, of each size and of the predicted one.
        version: Of this record.
    """

    experiment: Experiment
    computes: dict[str, float]
    version: int = VERSION


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for a size, stored before it was trained: the content of ``predictions/SIZE.json``.

    Attributes:
        size: As it is written.
        compute: FLOPs of a run of the baseline.
        pairs: That it was to have.
        variants: By name; ``None``: nothing could be predicted.
        drift: From size to size, as it was learned then; ``None``: nothing could be predicted.
        plans: The hash of the plan of each size that it rests on.
    """

    size: str
    compute: float
    pairs: int
    variants: dict[str, Predicted | None]
    drift: LearnedDrift | None
    plans: dict[str, str]

    @property
    def hash(self) -> str:
        """The SHA-256 of it."""
        return digest(msgspec.to_builtins(self))


def folder_of_size(ladder: Experiment, size: str) -> Path:
    """The folder of the experiment of a size."""
    return Path(ladder.folder) / SIZES / size


def pairs_of(ladder: Experiment) -> int:
    """How many pairs each size has; it never depends on what was found."""
    return ladder.looks[-1]


def at_size(ladder: Experiment, size: str) -> Experiment:
    """The experiment of a size; only the smallest one is tuned."""
    return replace(
        ladder,
        name=f"{ladder.name} {size}",
        out=str(folder_of_size(ladder, size)),
        sizes=(),
        predict=None,
        tune=ladder.tune if size == ladder.sizes[0] else None,
        options={**ladder.options, "size": size},
    )


def with_further(ladder: Experiment, size: str, trained: list[str]) -> Experiment:
    """The ladder of all sizes below a further one, which is predicted.

    Args:
        ladder: Of the folder.
        size: The further one.
        trained: Those that were added before.

    Raises:
        ValueError: It is not above them, or there are too few for a prediction.
    """
    smaller = (*ladder.sizes, *(added for added in trained if added != size))
    if parse_size(size) <= parse_size(smaller[-1]):
        raise ValueError(f"--size {size} must be above the sizes of the ladder, {', '.join(smaller)}")
    if len(smaller) < FEWEST_SIZES:
        raise ValueError(f"--size {size}: a prediction needs {FEWEST_SIZES} sizes or more, got {len(smaller)}")
    return replace(ladder, sizes=smaller, predict=size)


def with_tuned(experiment: Experiment, option: str, values: Mapping[str, float]) -> Experiment:
    """The experiment of a larger size, in which the variants have these values of the option."""
    variants = {name: {**options, option: values[name]} for name, options in experiment.variants.items()}
    return replace(experiment, options={**experiment.options, option: values[BASELINE]}, variants=variants)


def check_reach(ladder: Experiment, computes: Mapping[str, float]) -> None:
    """Refuse a size that no prediction reaches.

    Raises:
        ValueError: It has too many times the compute of the largest size.
    """
    largest = computes[ladder.sizes[-1]]
    if ladder.predict is not None and computes[ladder.predict] > MOST_COMPUTE * largest * (1 + 1e-9):
        times = f"{computes[ladder.predict] / largest:.3g} times the FLOPs of {ladder.sizes[-1]}"
        problem = f"{times}, expected at most {MOST_COMPUTE:g} times"
        raise ValueError(f"predict {ladder.predict} has {problem}: add a size between")


# ---- what is stored


def freeze_ladder(ladder: Experiment, computes: Mapping[str, float]) -> None:
    """Write what was asked for, with the FLOPs of a baseline's run at each size and at the predicted one."""
    write_record(Path(ladder.folder) / LADDER, LadderRecord(experiment=ladder, computes=dict(computes)))


def read_ladder(out: Path) -> tuple[Experiment, dict[str, float]]:
    """The ladder of a folder, and the FLOPs of a baseline's run at each of its sizes, by size.

    Raises:
        ValueError: There is none, or it is of an earlier version.
    """
    path = out / LADDER
    if not path.is_file():
        raise ValueError(f"{out} holds no {LADDER}: give the folder of a ladder of lightning-llm ablate")
    content = _read(out, path, LadderRecord)
    return replace(content.experiment, out=str(out)), content.computes


def _read(out: Path, path: Path, kind: type[Kind]) -> Kind:
    """A record of a ladder; one of an earlier version is left to the code that wrote it."""
    try:
        return read_record(path, kind)
    except ValueError as error:
        first = next(iter(sorted((out / SIZES).glob("*/code/fit.py"))), out / SIZES / "SIZE" / "code" / "fit.py")
        own = f"python {shell_path(first)} ablate report {shell_path(out)}"
        raise ValueError(f"{error}; if an earlier version wrote it, its own copy of the code reads it: {own}") from None


def prediction_of(ladder: Experiment, size: str) -> Prediction | None:
    """The prediction that was stored before a size was trained; ``None``: there is none.

    Raises:
        ValueError: It is of an earlier version.
    """
    path = Path(ladder.folder) / PREDICTIONS / f"{size}.json"
    return _read(Path(ladder.folder), path, Prediction) if path.exists() else None


def predicted_sizes(ladder: Experiment) -> list[str]:
    """The sizes with a stored prediction, the smallest first."""
    return sorted((path.stem for path in (Path(ladder.folder) / PREDICTIONS).glob("*.json")), key=parse_size)


def store_prediction(ladder: Experiment, prediction: Prediction) -> Prediction:
    """Write a prediction, unless there is one, which nothing rewrites; the one that is stored."""
    stored = prediction_of(ladder, prediction.size)
    if stored is None:
        write_record(Path(ladder.folder) / PREDICTIONS / f"{prediction.size}.json", prediction)
    return stored or prediction
