"""A ladder: one experiment at several sizes, and what its differences say of a larger one. No torch.

``sizes`` in an experiment's file makes it a ladder. Each size is an ordinary experiment in ``OUT/sizes/SIZE``, with its
own plan, null variant and report, and with a fixed number of pairs: a stop at a look exaggerates. ``OUT/ladder.json``
holds what was asked for and the counted compute of each size; it never changes. Before a further size is trained,
``OUT/promises/SIZE.json`` holds its prediction, and the plan of that size the hash of it.

With ``tune``, the smallest size is tuned as any experiment is. At the larger ones, each arm has the value that ``size``
sets there, times its tuned value over its own value at the smallest.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_llm.ablate.arm import BASELINE
from lightning_llm.ablate.experiment import LOOKS, MOST_PAIRS, Experiment, experiment_of
from lightning_llm.ablate.plan import read_hashed, write_hashed
from lightning_llm.accounting.sizing import parse_size
from lightning_llm.io.schema import (
    BOOL,
    NUMBER,
    POSITIVE,
    SHA256,
    TEXT,
    by_name,
    check,
    list_of,
    maybe,
    open_record,
    record,
    validate,
    whole,
)
from lightning_llm.statistics.extrapolation import FEWEST_SIZES, MOST_BEYOND

LADDER, SIZES, PROMISES = "ladder.json", "sizes", "promises"
MOST_SIZES = 12
FIXED = ("looks", "half_width")  # keys of an experiment that a ladder has no use for
_SIZE = check("a number of parameters such as 100k", lambda value: type(value) in (str, int))
_KEYS = {"sizes": list_of(_SIZE, MOST_SIZES), "predict": _SIZE, "tokens_per_parameter": POSITIVE, "repeat": BOOL}
_PAIR = check("two numbers", lambda value: isinstance(value, list) and len(value) == 2)
_PREDICTED = record(
    {"difference": NUMBER, "interval": _PAIR, "prediction_interval": _PAIR, "answer": TEXT},
    {"shown_up_to": maybe(NUMBER)},
)
_PROMISE = {"size": TEXT, "compute": POSITIVE, "pairs": whole(2), "variants": by_name(maybe(_PREDICTED), min_fields=0)}
_PROMISE |= {"plans": by_name(SHA256), "hash": SHA256}
_FILE = record({"asked": open_record({}, {}), "computes": by_name(POSITIVE), "hash": SHA256})


@dataclasses.dataclass(frozen=True)
class Ladder:
    """What a user asks for.

    Attributes:
        asked: The keys of its file, with ``name`` and ``out``.
        sizes: The smallest first, as they are written.
        target: The size that is predicted; ``None``: none.
    """

    asked: Mapping[str, Any]
    sizes: tuple[str, ...]
    target: str | None

    @property
    def out(self) -> Path:
        """The folder where all sizes, promises, and the report go."""
        return Path(self.asked["out"])

    @property
    def smallest(self) -> str:
        """The size that is tuned, if any is."""
        return self.sizes[0]

    @property
    def tuned_option(self) -> str | None:
        """The option that is tuned; ``None``: none is."""
        return (self.asked.get("tune") or {}).get("option")

    @property
    def pairs(self) -> int:
        """How many each size has; it never depends on what was found."""
        return int(self.asked.get("pairs") or LOOKS[0])

    def experiment(self, size: str) -> Experiment:
        """The experiment of a size.

        Raises:
            ValueError: The file asks for what no experiment can do.
        """
        left_out = (*_KEYS, "pairs", *(() if size == self.smallest else ("tune",)))
        content = {key: value for key, value in self.asked.items() if key not in left_out}
        size_options = {name: self.asked[name] for name in ("tokens_per_parameter", "repeat") if name in self.asked}
        content["options"] = {**(content.get("options") or {}), "size": size, **size_options}
        content |= {"name": f"{content['name']} {size}", "out": str(self.folder(size)), "looks": [self.pairs]}
        return experiment_of(content, self.asked["name"], content["name"])

    def with_target(self, size: str, trained: list[str]) -> "Ladder":
        """The ladder of all sizes below a further one, which is its target.

        Args:
            size: The further one.
            trained: Those that were added before.

        Raises:
            ValueError: It is not above them, or there are too few for a prediction.
        """
        smaller = [*self.sizes, *(added for added in trained if added != size)]
        if parse_size(size) <= parse_size(smaller[-1]):
            raise ValueError(f"--size {size} must be above the sizes of the ladder, {', '.join(smaller)}")
        if len(smaller) < FEWEST_SIZES:
            raise ValueError(f"--size {size}: a prediction needs {FEWEST_SIZES} sizes or more, got {len(smaller)}")
        return dataclasses.replace(self, sizes=tuple(smaller), target=size)

    def folder(self, size: str) -> Path:
        """Of the experiment of a size."""
        return self.out / SIZES / size


def is_ladder(content: Mapping[str, Any]) -> bool:
    """Whether the content of a file is that of a ladder."""
    return content.get("sizes") is not None


def ladder_of(content: Mapping[str, Any], source: object, name: str) -> Ladder:
    """What a file asks for.

    Args:
        content: Its keys.
        source: Names it in errors.
        name: Of the ladder, if the content has none.

    Raises:
        ValueError: A key is unknown or wrong, or the sizes are not in order.
    """
    content = {key: value for key, value in content.items() if value is not None or key == "delta"}
    validate({key: value for key, value in content.items() if key in _KEYS}, record({}, _KEYS), source)
    if useless := [key for key in FIXED if content.get(key) is not None]:
        raise ValueError(
            f"{source}: a ladder has no {useless[0]}: it has a fixed number of pairs (pairs: 8) at every size"
        )
    pairs = content.get("pairs")
    validate({"pairs": pairs}, record({"pairs": maybe(whole(2, MOST_PAIRS))}), source)
    sizes = [str(size) for size in content["sizes"]]
    target = None if content.get("predict") is None else str(content["predict"])
    numbers = [parse_size(size) for size in (*sizes, *([] if target is None else [target]))]
    if len(sizes) < 1 or any(low >= high for low, high in itertools.pairwise(numbers)):
        listed = ", ".join([*sizes, target or ""])
        raise ValueError(f"{source}: sizes, and predict after them, must increase, got {listed}")
    if target is not None and len(sizes) < FEWEST_SIZES:
        raise ValueError(f"{source}: predict needs {FEWEST_SIZES} sizes or more, got {len(sizes)}")
    asked = {"name": name, **content}
    first = Ladder({"out": "runs/x", **asked}, tuple(sizes), target).experiment(sizes[0])
    own_folder = str(asked.get("out") or dataclasses.replace(first, name=str(asked["name"]), out="").folder)
    return Ladder({**asked, "out": own_folder}, tuple(sizes), target)


def with_tuned(experiment: Experiment, option: str, values: Mapping[str, float]) -> Experiment:
    """The experiment of a larger size, in which the arms have these values of the option."""
    variants = {name: {**options, option: values[name]} for name, options in experiment.variants.items()}
    return dataclasses.replace(experiment, options={**experiment.options, option: values[BASELINE]}, variants=variants)


def check_reach(ladder: Ladder, computes: Mapping[str, float]) -> None:
    """Refuse a target that no prediction reaches.

    Raises:
        ValueError: It has too many times the compute of the largest size.
    """
    target, largest = ladder.target, computes[ladder.sizes[-1]]
    if target is not None and computes[target] > 4**MOST_BEYOND * largest * (1 + 1e-9):
        times = f"{computes[target] / largest:.3g} times the FLOPs of {ladder.sizes[-1]}"
        problem = f"{times}, expected at most {4**MOST_BEYOND:g} times"
        raise ValueError(f"predict {target} has {problem}: add a size between")


# ---- what is stored


def freeze_ladder(ladder: Ladder, computes: Mapping[str, float]) -> None:
    """Write what was asked for, with the FLOPs of a baseline's run at each size and at the target."""
    write_hashed(ladder.out / LADDER, {"asked": dict(ladder.asked), "computes": dict(computes)})


def read_ladder(out: Path) -> tuple[Ladder, dict[str, float]]:
    """The ladder of a folder, and the FLOPs of a baseline's run at each of its sizes, by size.

    Raises:
        ValueError: There is none, or it was changed.
    """
    content = read_hashed(out / LADDER, _FILE, "a ladder")
    ladder = ladder_of(content["asked"], out / LADDER, "ladder")
    return dataclasses.replace(ladder, asked={**ladder.asked, "out": str(out)}), content["computes"]


def promise_of(ladder: Ladder, size: str) -> dict[str, Any] | None:
    """The prediction that was stored before a size was trained; ``None``: there is none.

    Raises:
        ValueError: It was changed.
    """
    path = ladder.out / PROMISES / f"{size}.json"
    return read_hashed(path, record(_PROMISE), "a ladder") if path.exists() else None


def promised_sizes(ladder: Ladder) -> list[str]:
    """The sizes with a promise, the smallest first."""
    return sorted((path.stem for path in (ladder.out / PROMISES).glob("*.json")), key=parse_size)


def store_promise(ladder: Ladder, promise: Mapping[str, Any]) -> str:
    """Write a promise, which nothing rewrites; its hash."""
    path, stored = ladder.out / PROMISES / f"{promise['size']}.json", promise_of(ladder, promise["size"])
    return write_hashed(path, promise) if stored is None else str(stored["hash"])
