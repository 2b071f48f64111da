"""What a user asks for: a baseline, variants of it, and how they are compared.

The *baseline* is an ordinary config of ``fit``. A *variant* changes options of it. A *pair* is a run of each with the
same seed. A *look* is a planned number of pairs that gives verdicts. ``delta`` is the smallest difference that matters.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import yaml

from lightning_llm.ablate.tuning import FIRST_SEED, MOST_EXTENSIONS
from lightning_llm.io.schema import TEXT, by_name, check, list_of, maybe, record, validate, whole
from lightning_llm.io.untrusted import SLASH, file_name, printable, shown

BASELINE, AGAIN, NULL = "baseline", "baseline-again", "null"
METRICS = ("val_loss", "bits_per_byte")
LOOKS = (8, 12, 16)
DELTA, ALPHA = 0.005, 0.05
TOKENS, FLOPS, TIME, PARAMETERS = "tokens", "flops", "time", "parameters"
MATCHES = (TOKENS, FLOPS, TIME)
CLOSE = 0.005  # how far apart equal numbers of parameters may be, as a share
MOST_PAIRS = 1000
LAST_SEED = 2**31  # so that each seed fits in 32 bits
MOST_VARIANTS = 500
MOST_RUNS = 100_000  # with those of tuning; an experiment has a hundred
MOST_LOOKS = 20  # boundaries of 61 take 5 s and 759 MB
FACTORS, TUNING_SEEDS = (0.5, 0.71, 1.0, 1.41, 2.0), 2
# Set by the experiment, so that neither options nor variants can
OWN_OPTIONS = ("seed_everything", "data.seed", "ckpt_path", "trainer.run_dir", "trainer.default_root_dir")

Options = dict[str, Any]  # by dotted names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a user asks for.

    Attributes:
        name: Of the experiment.
        baseline: Configs of ``fit``; later ones override earlier ones.
        options: For all runs.
        variants: The options of each, by name.
        metric: Lower is better: ``val_loss`` (nats per token) or ``bits_per_byte``, of a run's summary.
        delta: The smallest difference that matters; ``None``: no verdict is ``equivalent``.
        alpha: Probability of a false answer, over all variants, looks and added pairs; tuned sides have another one.
        looks: Numbers of pairs.
        precision: The half-width of the interval at which a comparison ends; ``None``: it ends with a verdict.
        first_seed: Of the pairs; the others follow.
        match: What is equal on both sides: ``tokens``, ``flops``, ``time`` or ``parameters``.
        solved: With ``parameters``, the option of the variants that is solved for.
        tune: The ``option`` that is tuned for each side, the ``factors`` of its grid, and how many ``seeds``.
        out: The folder of the experiment.
    """

    name: str
    baseline: tuple[str, ...]
    variants: Mapping[str, Options]
    options: Options = dataclasses.field(default_factory=dict)
    metric: str = METRICS[0]
    delta: float | None = DELTA
    alpha: float = ALPHA
    looks: tuple[int, ...] = LOOKS
    precision: float | None = None
    first_seed: int = 0
    match: str = TOKENS
    solved: str | None = None
    tune: dict[str, Any] | None = None
    out: str = ""

    @property
    def folder(self) -> str:
        """Where everything goes."""
        return self.out or f"runs/{file_name(self.name)}"


NAME = check(
    "one line without control characters",
    lambda value: isinstance(value, str) and value == printable(value) and not {"\n", "\t"} & set(value),
)
_TUNED = check(
    "a number of the model that changes no initial value, such as model.optimizer.init_args.lr",
    lambda value: isinstance(value, str) and value.startswith("model.") and not value.startswith("model.architecture."),
)
_FACTORS = check(
    "at least three increasing numbers above 0, each at least 1 % above the one before",
    lambda value: _are_factors(value),
)
_OPTIONS = check("options by dotted name", lambda value: isinstance(value, dict) and all(map(_is_text, value)))
_NUMBER = check("a number above 0 and below a million", lambda value: type(value) in (int, float) and 0 < value < 1e6)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _texts(value: Any, name: str) -> Any:
    return list_of(TEXT)([value] if isinstance(value, str) else value, name)


LOOKS_KIND = check(
    f"at most {MOST_LOOKS} increasing numbers of pairs, such as {list(LOOKS)}", lambda value: _are_looks(value)
)
SEED = whole(0, LAST_SEED)
RULES = {  # what a file and a plan have in common
    "name": NAME,
    "variants": by_name(_OPTIONS),
    "metric": check(" or ".join(METRICS), lambda value: value in METRICS),
    "delta": maybe(_NUMBER),
    "alpha": check("a number above 0 and below 0.5", lambda value: type(value) is float and 0 < value < 0.5),
    "looks": LOOKS_KIND,
    "precision": maybe(_NUMBER),
}
TUNE = {"option": _TUNED, "factors": _FACTORS, "seeds": whole(1, MOST_PAIRS)}
_FILE = record(
    {"baseline": _texts, "variants": RULES["variants"]},
    {
        **RULES,
        "options": maybe(_OPTIONS),
        "pairs": whole(1, MOST_PAIRS),
        "seeds": record({"first": SEED}),
        "match": check(
            f"{', '.join(MATCHES)} or {PARAMETERS}: {{option: model.architecture.NAME}}",
            lambda value: value in MATCHES or _solved(value) is not None,
        ),
        "tune": maybe(record({"option": _TUNED}, TUNE)),
        "out": TEXT,
    },
)


def _are_looks(value: object) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MOST_LOOKS
        and all(type(each) is int and 1 <= each <= MOST_PAIRS for each in value)
        and sorted(set(value)) == value
    )


def _are_factors(value: object) -> bool:
    if not isinstance(value, list) or not all(type(each) in (int, float) and 0 < each < math.inf for each in value):
        return False
    return len(value) > 2 and all(high >= 1.01 * low for low, high in itertools.pairwise(value))


def _solved(match: object) -> str | None:
    """The option of ``{parameters: {option: …}}``."""
    inner = match.get(PARAMETERS) if isinstance(match, dict) and len(match) == 1 else None
    option = inner.get("option") if isinstance(inner, dict) and len(inner) == 1 else None
    return option if isinstance(option, str) and option.startswith("model.architecture.") else None


def experiment_of(content: Mapping[str, Any], source: object, name: str) -> Experiment:
    """What a file, or the options in its place, ask for.

    Args:
        content: The keys of an experiment file.
        source: Names it in errors.
        name: Of the experiment, if the content has none.

    Raises:
        ValueError: A key is unknown or wrong; a name cannot be that of a folder.
    """
    validate({"name": name, **content}, _FILE, source)
    given = {key: value for key, value in content.items() if value is not None or key == "delta"}
    variants = {key: flat_options(value) for key, value in given["variants"].items()}
    check_names(variants, source)
    baseline, match = given["baseline"], given.get("match", TOKENS)
    kept = ("metric", "delta", "alpha", "precision", "out")
    asked: dict[str, Any] = {key: given[key] for key in kept if key in given}
    asked["first_seed"] = first = given.get("seeds", {}).get("first", 0)
    asked |= {"looks": _looks(given, source), "options": flat_options(given.get("options", {}))}
    asked |= {"solved": _solved(match), "match": PARAMETERS if isinstance(match, dict) else match}
    if (tune := given.get("tune")) is not None:
        factors = [float(factor) for factor in tune.get("factors", FACTORS)]
        asked["tune"] = {"option": tune["option"], "factors": factors, "seeds": tune.get("seeds", TUNING_SEEDS)}
        if problem := seeds_in_tuning(first, asked["looks"][-1], asked["tune"]["seeds"]):
            raise ValueError(f"{source}: {problem}: give fewer pairs or another seeds.first")
    check_runs(variants, asked["looks"], asked.get("tune"), source)
    for options, where in ((asked["options"], "options"), *((v, f"variants.{k}") for k, v in variants.items())):
        if own := [option for option in options if option in OWN_OPTIONS]:
            raise ValueError(f"{source}: {where}: {own[0]} is set by the experiment: leave it out")
    files = (baseline,) if isinstance(baseline, str) else tuple(baseline)
    return Experiment(name=given.get("name", name), baseline=files, variants=variants, **asked)


def check_names(variants: Iterable[str], source: object) -> None:
    """Reject a variant whose name is that of no folder, or of another side."""
    for variant in variants:
        if variant in (BASELINE, AGAIN, NULL) or folder_name(variant) != variant or variant[0] == ".":
            problem = (
                f"must be the name of a folder without commas or backslashes, and not {BASELINE}, {AGAIN} or {NULL}"
            )
            raise ValueError(f"{source}: the variant {shown(variant)} {problem}")


def check_runs(variants: Sized, looks: Sequence[int], tune: Mapping[str, Any] | None, source: object) -> None:
    """Reject an experiment of more runs than anyone trains."""
    each = looks[-1] + (0 if tune is None else tune["seeds"] * (len(tune["factors"]) + MOST_EXTENSIONS))
    if (runs := (len(variants) + 2) * each) > MOST_RUNS:
        raise ValueError(f"{source}: variants, looks and tune ask for {runs} runs, expected at most {MOST_RUNS}")
    if len(variants) > MOST_VARIANTS:
        raise ValueError(f"{source} has {len(variants)} variants, expected at most {MOST_VARIANTS}")


def seeds_in_tuning(first: int, pairs: int, tuning_seeds: int) -> str:
    """Whether pairs would use the seeds of tuning, in words; empty if not."""
    last = FIRST_SEED + tuning_seeds - 1
    if first > last or first + pairs <= FIRST_SEED:
        return ""
    return f"seeds {FIRST_SEED} to {last} belong to tuning, and {pairs} pairs use {first} to {first + pairs - 1}"


def _looks(given: Mapping[str, Any], source: object) -> tuple[int, ...]:
    """The looks, cut to the number of pairs if there is one: fewer than at the first look are a pilot."""
    looks, most = list(given.get("looks", LOOKS)), given.get("pairs")
    if most is not None:
        looks = [look for look in looks if look < most] + [most]
    if looks[-1] == 1:
        word = "looks [1]" if most is None else "pairs 1"
        raise ValueError(f"{source}: {word}: one pair has no interval: give at least 2")
    if looks[0] == 1:
        raise ValueError(f"{source}: looks {looks}: one pair has no interval: the first look needs at least 2")
    return tuple(looks)


def flat_options(options: Mapping[str, Any], prefix: str = "") -> Options:
    """Options by dotted names; those of a class (``class_path``) stay together."""
    found: Options = {}
    for name, value in options.items():
        is_section = isinstance(value, dict) and bool(value) and "class_path" not in value
        is_section = is_section and all(map(_is_text, value))
        found |= flat_options(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return found


def varied(words: Sequence[str]) -> dict[str, Options]:
    """Variants from ``KEY=VALUE`` words, named by their values.

    A value that says nothing alone (a number, ``true``), or that two options have, is named with the option's last
    word. An import path is named by its last word.

    Raises:
        ValueError: A word has no ``=``, or two give one name.
    """
    options = [_option(word) for word in words]
    short = [_short(value) for _, value in options]
    found: dict[str, Options] = {}
    for (option, value), word in zip(options, short, strict=True):
        is_enough = short.count(word) == 1 and word[0].isalpha() and yaml.safe_load(word) == word
        name = word if is_enough else f"{option.rpartition('.')[2]}={word}"
        name = folder_name(name)
        if name in (*found, BASELINE, AGAIN, NULL):
            name = folder_name(f"{option.rpartition('.')[2]}={value}")
        if name in found:
            raise ValueError(f"--vary {option}={value}: the variant {name} is given twice")
        found[name] = {option: value}
    return found


def folder_name(text: str) -> str:
    """The name of a variant's folders: a comma would begin its seed, a backslash is in no plain name of a file."""
    return file_name(text.replace(",", ";")).replace("\\", SLASH)


def _option(word: str) -> tuple[str, str]:
    option, equals, value = word.partition("=")
    if not equals or not option or not value:
        raise ValueError(f"--vary {shown(word)} must be OPTION=VALUE, such as model.architecture.mlp=gelu")
    return option, value


def _short(value: str) -> str:
    """An import path's last word; another value as it is."""
    return value.rpartition(".")[2] if all(map(str.isidentifier, value.split("."))) else value
