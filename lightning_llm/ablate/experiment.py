"""What a user asks for: a baseline, variants of it, and how they are compared.

The *baseline* is an ordinary config of ``fit``. A *variant* changes options of it. A *pair* is a run of each with the
same seed. A *look* is a planned number of pairs that gives verdicts. ``delta`` is the smallest difference that matters.

:class:`Experiment` is the only description of one: what a file says becomes one, a plan holds its fields, and
scheduling and reports read it. A field that a plan holds has its schema beside it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_llm.ablate.arm import AGAIN, BASELINE, NULL
from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX, MATCHES, Tokens, matches_in_words
from lightning_llm.ablate.options import SET_BY_EXPERIMENT, Options, flat_options, folder_name, has_names
from lightning_llm.ablate.tuning import FIRST_SEED, MOST_EXTENSIONS
from lightning_llm.io.schema import TEXT, Schema, by_name, check, list_of, maybe, one_of, record, validate, whole
from lightning_llm.io.untrusted import file_name, printable, shown
from lightning_llm.statistics.design import Design
from lightning_llm.training.metrics import LOSSES

METRICS = tuple(LOSSES)
LOOKS = (8, 12, 16)
DELTA, ALPHA = 0.005, 0.05
MOST_PAIRS = 1000
LAST_SEED = 2**31  # so that each seed fits in 32 bits
MOST_VARIANTS = 500
MOST_RUNS = 100_000  # with those of tuning; an experiment has a hundred
MOST_LOOKS = 20  # boundaries of 61 take 5 s and 759 MB
FACTORS, TUNING_SEEDS = (0.5, 0.71, 1.0, 1.41, 2.0), 2

# ---- schemas


def _texts(value: Any, name: str) -> Any:
    return list_of(TEXT)([value] if isinstance(value, str) else value, name)


def _are_looks(value: object) -> bool:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_LOOKS:
        return False
    return all(type(look) is int and 1 <= look <= MOST_PAIRS for look in value) and sorted(set(value)) == value


def _are_factors(value: object) -> bool:
    if not isinstance(value, list) or any(type(factor) not in (int, float) for factor in value):
        return False
    pairs = list(itertools.pairwise(value))
    return len(pairs) > 1 and all(low > 0 and 1.01 * low <= high < math.inf for low, high in pairs)


_NAME = check(
    "one line without control characters",
    lambda value: isinstance(value, str) and value == printable(value) and not {"\n", "\t"} & set(value),
)
_TUNED = check(
    "a number of the model that changes no initial value, such as model.optimizer.init_args.lr",
    lambda value: isinstance(value, str) and value.startswith("model.") and not value.startswith(ARCHITECTURE_PREFIX),
)
_FACTORS = check("at least three increasing numbers above 0, each at least 1% above the one before", _are_factors)
_OPTIONS = check("options by dotted name", has_names)
_NUMBER = check("a number above 0 and below a million", lambda value: type(value) in (int, float) and 0 < value < 1e6)
_ALPHA = check("a number above 0 and below 0.5", lambda value: type(value) is float and 0 < value < 0.5)
_LOOKS = check(f"at most {MOST_LOOKS} increasing numbers of pairs, such as {list(LOOKS)}", _are_looks)
_METRIC = check(f"{', '.join(METRICS[:-1])} or {METRICS[-1]}", lambda value: value in METRICS)
_METRICS = check(
    f"different ones of {', '.join(METRICS)}",
    lambda value: isinstance(value, list) and 0 < len(value) == len({*map(str, value)} & {*METRICS}),
)
SECONDARY_METRICS = list_of(_METRIC, len(METRICS))
_SEED = whole(0, LAST_SEED)
_TUNE = {"option": _TUNED, "factors": _FACTORS, "seeds": whole(1, MOST_PAIRS)}


def _match_in_file(value: object, name: str) -> Iterable[str]:
    """A rule's name; one that solves for an option is ``NAME=OPTION``, or ``{NAME: {option: OPTION}}``."""
    is_plain = isinstance(value, str) and value in MATCHES and not MATCHES[value].is_solved
    return check(f"one of {matches_in_words()}", lambda value: is_plain or _parsed(value)[1] is not None)(value, name)


def _parsed(match: Any) -> tuple[str, str | None]:
    """The name of the rule, and the option that it solves for."""
    if isinstance(match, str) and "=" in match:
        rule, _, solved = match.partition("=")
        match = {rule: {"option": solved}}
    if not isinstance(match, dict):
        return match, None
    if len(match) != 1:
        return "", None
    ((name, settings),) = match.items()
    option = settings.get("option") if isinstance(settings, dict) and len(settings) == 1 else None
    is_of_model = isinstance(option, str) and option.startswith(ARCHITECTURE_PREFIX)
    return name, option if is_of_model and name in MATCHES and MATCHES[name].is_solved else None


def _plan_field(schema: Schema, default: Any = dataclasses.MISSING) -> Any:
    """A field that a plan holds."""
    return dataclasses.field(default=default, metadata={"schema": schema})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a user asks for.

    Attributes:
        name: Of the experiment.
        variants: The options of each, by name.
        metric: Lower is better: ``val_loss`` (nats per token) or another of ``METRICS``, of a run's summary.
        delta: The smallest difference that matters; ``None``: no verdict is ``equivalent``.
        alpha: Probability of a false answer, over all variants, looks and added pairs; tuned arms have another one.
        looks: Numbers of pairs.
        half_width: Half the width of the interval at which a comparison ends; ``None``: it ends with a verdict.
        first_seed: Of the pairs; the others follow.
        match: What is equal on both arms: the name of a rule in ``matching.MATCHES``.
        solved: The option of the variants that the rule solves for, if it does.
        tune: The ``option`` that is tuned for each arm, the ``factors`` of its grid, and how many ``seeds``.
        baseline: Configs of ``fit``; later ones override earlier ones. A plan holds what they say.
        options: For all runs. A plan holds them with the baseline's.
        out: The folder of the experiment.
        secondary: Further metrics, which are reported with intervals and decide nothing.
    """

    name: str = _plan_field(_NAME)
    variants: Mapping[str, Options] = _plan_field(by_name(_OPTIONS))
    metric: str = _plan_field(_METRIC, METRICS[0])
    delta: float | None = _plan_field(maybe(_NUMBER), DELTA)
    alpha: float = _plan_field(_ALPHA, ALPHA)
    looks: Sequence[int] = _plan_field(_LOOKS, LOOKS)
    half_width: float | None = _plan_field(maybe(_NUMBER), None)
    first_seed: int = _plan_field(_SEED, 0)
    match: str = _plan_field(lambda value, name: one_of(*MATCHES)(value, name), Tokens.name)
    solved: str | None = _plan_field(maybe(TEXT), None)
    tune: Mapping[str, Any] | None = _plan_field(maybe(record(_TUNE)), None)
    baseline: tuple[str, ...] = ()
    options: Options = dataclasses.field(default_factory=dict)
    out: str = ""
    secondary: Sequence[str] = ()

    @classmethod
    def in_plan(cls, content: Mapping[str, Any], source: object) -> "Experiment":
        """The experiment that a plan holds.

        Raises:
            ValueError: A variant has the name of no folder, or there are more runs than anyone trains.
        """
        experiment = cls(**{name: content[name] for name in PLAN_FIELDS}, secondary=content.get("secondary", []))
        experiment.check(source)
        return experiment

    @property
    def plan_fields(self) -> dict[str, Any]:
        """What a plan holds of it, as JSON."""
        content = dataclasses.asdict(self)
        lists = {"looks": list(self.looks), "secondary": list(self.secondary)}
        return {name: content[name] for name in PLAN_FIELDS} | lists

    @property
    def folder(self) -> str:
        """The folder of the experiment, where everything goes."""
        return self.out or f"runs/{file_name(self.name)}"

    @property
    def design(self) -> Design:
        """Of the comparison of each variant."""
        return Design(self.alpha / len(self.variants), tuple(self.looks), self.delta, self.half_width)

    def cut(self, pairs: int) -> "Experiment":
        """The same with the default looks up to this many pairs."""
        return dataclasses.replace(self, looks=_cut(LOOKS, pairs, self.name))

    def seeds(self, pairs: int) -> range:
        """The seeds of this many pairs."""
        return range(self.first_seed, self.first_seed + pairs)

    def runs_of_tuning(self, extensions: int = 0) -> int:
        """The runs of a grid, ``extensions`` values longer, and of a vertex for each arm; 0: nothing is tuned."""
        if self.tune is None:
            return 0
        values = len(self.tune["factors"]) + extensions + 1
        return (1 + len(self.variants)) * values * int(self.tune["seeds"])

    def most_runs(self, extensions: int = 0) -> int:
        """The most runs of all arms: the null variant ends with the first look, and tuned arms are compared again."""
        pairs = self.looks[-1] * (1 if self.tune is None else 2)
        return 1 + self.looks[0] + (1 + len(self.variants)) * pairs + self.runs_of_tuning(extensions)

    def check(self, source: object) -> None:
        """Reject a variant with the name of no folder or of another arm, and more runs than anyone trains.

        Raises:
            ValueError: It has one.
        """
        for variant in self.variants:
            if variant in (BASELINE, AGAIN, NULL) or folder_name(variant) != variant or variant[0] == ".":
                folder = "the name of a folder without commas or backslashes"
                problem = f"must be {folder}, and not {BASELINE}, {AGAIN} or {NULL}"
                raise ValueError(f"{source}: the variant {shown(variant)} {problem}")
        if (runs := self.most_runs(2 * MOST_EXTENSIONS)) > MOST_RUNS:
            raise ValueError(f"{source}: variants, looks and tune ask for {runs} runs, expected at most {MOST_RUNS}")
        if len(self.variants) > MOST_VARIANTS:
            raise ValueError(f"{source} has {len(self.variants)} variants, expected at most {MOST_VARIANTS}")

    def seeds_in_tuning(self, pairs: int) -> str:
        """Whether this many pairs would use the seeds of tuning, in words; empty if not."""
        if self.tune is None:
            return ""
        first, last = self.first_seed, FIRST_SEED + self.tune["seeds"] - 1
        if first > last or first + pairs <= FIRST_SEED:
            return ""
        return f"seeds {FIRST_SEED} to {last} belong to tuning, and {pairs} pairs use {first} to {first + pairs - 1}"


PLAN_FIELDS: dict[str, Schema] = {
    field.name: field.metadata["schema"] for field in dataclasses.fields(Experiment) if field.metadata
}
# What a file writes in another way: looks are cut by pairs, and first_seed and solved are inside of others
_FILE = record(
    {"baseline": _texts, "variants": PLAN_FIELDS["variants"]},
    {
        **{name: schema for name, schema in PLAN_FIELDS.items() if name not in ("first_seed", "solved")},
        "metrics": _METRICS,
        "options": maybe(_OPTIONS),
        "pairs": whole(1, MOST_PAIRS),
        "seeds": record({"first": _SEED}),
        "match": _match_in_file,
        "tune": maybe(record({"option": _TUNED}, _TUNE)),
        "out": TEXT,
    },
)


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
    fields = {"name": name} | {key: value for key, value in content.items() if value is not None or key == "delta"}
    looks = fields.pop("looks", LOOKS)
    pairs = fields.pop("pairs", None)
    baseline = fields["baseline"]
    fields["baseline"] = (baseline,) if isinstance(baseline, str) else tuple(baseline)
    fields["variants"] = {variant: flat_options(options) for variant, options in fields["variants"].items()}
    fields["options"] = flat_options(fields.get("options", {}))
    fields["first_seed"] = fields.pop("seeds", {}).get("first", 0)
    if metrics := fields.pop("metrics", ()):
        if "metric" in fields:
            raise ValueError(f"{source}: metrics has the metric that decides as its first: leave out metric")
        fields["metric"], *fields["secondary"] = metrics
    fields["match"], fields["solved"] = _parsed(fields.get("match", Tokens.name))
    if tune := fields.get("tune"):
        fields["tune"] = {"option": tune["option"], "factors": list(map(float, tune.get("factors", FACTORS)))}
        fields["tune"]["seeds"] = tune.get("seeds", TUNING_SEEDS)
    experiment = Experiment(**fields, looks=_cut(looks, pairs, source))
    experiment.check(source)
    if problem := experiment.seeds_in_tuning(experiment.looks[-1]):
        raise ValueError(f"{source}: {problem}: give fewer pairs or another seeds.first")
    variants = ((options, f"variants.{variant}") for variant, options in experiment.variants.items())
    for options, section in ((experiment.options, "options"), *variants):
        if reserved := [option for option in options if option in SET_BY_EXPERIMENT]:
            raise ValueError(f"{source}: {section}: {reserved[0]} is set by the experiment: leave it out")
    return experiment


def _cut(looks: Sequence[int], pairs: int | None, source: object) -> tuple[int, ...]:
    """The looks, cut to the number of pairs if there is one: fewer than at the first look are a pilot."""
    looks = list(looks)
    if pairs is not None:
        looks = [look for look in looks if look < pairs] + [pairs]
    if looks[-1] == 1:
        word = "looks [1]" if pairs is None else "pairs 1"
        raise ValueError(f"{source}: {word}: one pair has no interval: give at least 2")
    if looks[0] == 1:
        raise ValueError(f"{source}: looks {looks}: one pair has no interval: the first look needs at least 2")
    return tuple(looks)
