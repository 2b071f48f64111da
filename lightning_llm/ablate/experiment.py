"""An experiment as a user asks for it: a baseline, variants of it, sizes, and when comparing stops.

The *baseline* is an ordinary config of a program. A *variant* changes options of it. A *pair* is a run of each with
the same seed. A *look* is a planned number of pairs that gives verdicts. ``delta`` is the smallest difference that
matters.

:class:`Experiment` is the only description of one: what a file says becomes one, a plan holds it, and scheduling and
reports read it. One with ``sizes`` is a ladder (``ablate.ladder``): all of it is done at each size. An idea of a
stream (``ablate.stream``) is one with a screen and a confirmation.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from lightning_llm.ablate.command.spec import COMMAND_LINE, Command, Tree, command_of, option_named
from lightning_llm.ablate.command.spec import KEYS as OF_COMMAND
from lightning_llm.ablate.factors import MOST_NULL, PAIRS, Factor, names_revision, read_factors, trees_of, variants_of
from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX, MATCHES, Time, Tokens, matches_in_words
from lightning_llm.ablate.names import AGAIN, BASELINE, NEGATED, NULL
from lightning_llm.ablate.options import SEED_OPTION, SET_BY_EXPERIMENT, Options, flat_options, folder_name, has_names
from lightning_llm.ablate.tuning import FIRST_SEED, MOST_EXTENSIONS, Grid
from lightning_llm.accounting.sizing import parse_size
from lightning_llm.io.schema import BOOL, POSITIVE, TEXT, by_name, check, list_of, maybe, record, validate, whole
from lightning_llm.io.untrusted import file_name, printable, shown
from lightning_llm.statistics.batch import LOOKS as BATCH_LOOKS
from lightning_llm.statistics.design import Design
from lightning_llm.statistics.extrapolation import FEWEST_SIZES
from lightning_llm.training.metrics import LOSSES, unit_of_metric

METRICS = LOSSES
LOOKS = (8, 12, 16)
DELTA = 0.005
ALPHA = 0.05
MOST_PAIRS = 1000
LAST_SEED = 2**31  # so that each seed fits in 32 bits
MOST_VARIANTS = 500
MOST_RUNS = 100_000  # with those of tuning; an experiment has a hundred
MOST_LOOKS = 20  # boundaries of 61 take 5 s and 759 MB
MOST_SIZES = 12
FACTORS = (0.5, 0.71, 1.0, 1.41, 2.0)
TUNING_SEEDS = 2
OF_LADDER = ("predict", "tokens_per_parameter", "repeat")  # keys that need sizes
# A ladder has none of these: a stop at a look would exaggerate the difference of its size
FIXED_BY_LADDER = ("looks", "half_width")
NOT_IN_BATCH = (*FIXED_BY_LADDER, "pairs", "delta", "factors", "sizes", "tune", "unchanged")
MEASURED = ("seconds", "peak_memory_gib")  # of each run of a command: its secondary metrics
WORKING_TREE, UNCHANGED = "working-tree", "unchanged"  # names of variants


class Looks(msgspec.Struct, frozen=True, kw_only=True, tag_field="rule", tag="looks"):
    """Comparing stops at a planned number of pairs, as soon as there is a verdict.

    Attributes:
        pairs: These numbers, increasing.
        half_width: Half the width of the interval at which a comparison ends; ``None``: it ends with a verdict.
    """

    pairs: tuple[int, ...] = LOOKS
    half_width: float | None = None


class ScreenAndConfirm(msgspec.Struct, frozen=True, kw_only=True, tag_field="rule", tag="screen-and-confirm"):
    """Comparing stops when a screen gives an idea up, or when fresh pairs have confirmed it (``statistics.stream``).

    Attributes:
        level: The p that an adopted idea does not exceed.
        looks: Numbers of fresh pairs after which it may be adopted.
        minimal_gain: It improves the metric by more than this.
        first_confirming_seed: Of the fresh pairs; the others follow.
    """

    level: float
    looks: tuple[int, ...]
    minimal_gain: float = 0.0
    first_confirming_seed: int


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag_field="rule", tag="batch"):
    """Comparing a variant stops when its evidence is gone, or enough; then e-BH adopts (``statistics.batch``)."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """The question of a user, and how it is answered.

    Attributes:
        name: Of the experiment.
        variants: The options of each, by name.
        factors: Options or revision of each factor by name, if the variants are their combinations; else none.
        metric: Lower is better: ``val_loss`` (nats per token) or another of ``METRICS``, of a run's summary; of a
            command any name, and with a minus before it, higher is better.
        delta: The smallest difference that matters; ``None``: no verdict is ``equivalent``.
        alpha: Probability of a false answer, over all variants, looks and added pairs; tuned variants have another one.
            Of a batch, the expected share of useless variants among the adopted ones.
        stop: When comparing stops.
        sizes: Sizes of the baseline at which all of it is done, increasing; empty: at the baseline's own.
        predict: A further size, whose differences are predicted; ``None``: none.
        first_seed: Of the pairs; the others follow.
        seed_option: The option of ``fit`` that seeds the order of the data.
        match: What is equal for baseline and variant: the name of a rule in ``matching.MATCHES``.
        solved: The option of the variants that the rule solves for, if it does.
        tune: What is tuned for each variant; ``None``: nothing.
        secondary: Further metrics, which are reported with intervals and decide nothing.
        because: Why somebody believes in the variants; for the report.
        baseline: Configs of ``fit``; later ones override earlier ones.
        command: That trains, in place of ``fit``.
        options: For all runs.
        out: The folder of the experiment; empty: ``runs/NAME``.
    """

    name: str
    variants: Mapping[str, Options]
    factors: Mapping[str, Factor] = {}
    metric: str = METRICS[0]
    delta: float | None = DELTA
    alpha: float = ALPHA
    stop: Looks | ScreenAndConfirm | Batch = Looks()
    sizes: tuple[str, ...] = ()
    predict: str | None = None
    first_seed: int = 0
    seed_option: str = SEED_OPTION
    match: str = Tokens.name
    solved: str | None = None
    tune: Grid | None = None
    secondary: tuple[str, ...] = ()
    because: str = ""
    baseline: tuple[str, ...] = ()
    command: Command | None = None
    options: Options = {}
    out: str = ""

    @property
    def folder(self) -> str:
        """The folder of the experiment, where everything goes."""
        return self.out or f"runs/{file_name(self.name)}"

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs after which a comparison may end; of an idea, of its fresh pairs."""
        if isinstance(self.stop, Batch):
            return BATCH_LOOKS
        return self.stop.pairs if isinstance(self.stop, Looks) else self.stop.looks

    @property
    def metric_name(self) -> str:
        """The metric without the minus of one of which higher is better."""
        return self.metric.removeprefix(NEGATED)

    @property
    def higher_is_better(self) -> bool:
        """Whether runs have the metric with its sign changed."""
        return self.metric.startswith(NEGATED)

    @property
    def unit(self) -> str:
        """The unit of the metric; a command's is known by its name alone."""
        return self.metric_name if self.command is not None else unit_of_metric(self.metric)

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval at which a comparison ends; ``None``: no width ends it."""
        return self.stop.half_width if isinstance(self.stop, Looks) else None

    @property
    def design(self) -> Design:
        """The design of the comparison of each variant; in a batch, intervals are those of each one by itself."""
        if isinstance(self.stop, Batch):
            return Design(self.alpha, self.looks, None)
        return Design(self.alpha / len(self.variants), self.looks, self.delta, self.half_width)

    def cut(self, pairs: int) -> "Experiment":
        """The same with the default looks up to this many pairs."""
        return replace(self, stop=Looks(pairs=_cut(LOOKS, pairs, self.name), half_width=self.half_width))

    @property
    def null_runs(self) -> int:
        """How many runs the null variant has: a command has none."""
        return self.null_pairs if self.command is None else 0

    @property
    def null_pairs(self) -> int:
        """The number of seeds of a null variant: those of the first look; of a factorial experiment fewer."""
        return min(self.looks[0], MOST_NULL) if self.factors else self.looks[0]

    def seeds(self, pairs: int) -> range:
        """The seeds of this many pairs."""
        return range(self.first_seed, self.first_seed + pairs)

    def runs_of_tuning(self, extensions: int = 0) -> int:
        """The runs of a grid, ``extensions`` values longer, and of a vertex for each variant; 0: nothing is tuned."""
        if self.tune is None:
            return 0
        values = len(self.tune.factors) + extensions + 1
        return (1 + len(self.variants)) * values * self.tune.seeds

    def most_runs(self, extensions: int = 0) -> int:
        """The most runs of all variants: the null one ends with the first look, and tuned ones are compared again."""
        pairs = self.looks[-1] * (1 if self.tune is None else 2)
        return 1 + self.null_runs + (1 + len(self.variants)) * pairs + self.runs_of_tuning(extensions)

    def seeds_in_tuning(self, pairs: int) -> str:
        """Whether this many pairs would use the seeds of tuning, in words; empty if not."""
        if self.tune is None:
            return ""
        first = self.first_seed
        last = FIRST_SEED + self.tune.seeds - 1
        if first > last or first + pairs <= FIRST_SEED:
            return ""
        return f"seeds {FIRST_SEED} to {last} belong to tuning, and {pairs} pairs use {first} to {first + pairs - 1}"


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
_NAMED = check(
    "a name on one line", lambda value: isinstance(value, str) and bool(value.strip(" -")) and value.isprintable()
)
_TUNED = check(
    "a number of the model that changes no initial value, such as model.optimizer.init_args.lr",
    lambda value: isinstance(value, str) and value.startswith("model.") and not value.startswith(ARCHITECTURE_PREFIX),
)
_FACTORS = check("at least three increasing numbers above 0, each at least 1% above the one before", _are_factors)
_OPTIONS = check("options by dotted name", has_names)
_FACTOR = check("options by dotted name, or @ and a revision", lambda value: has_names(value) or names_revision(value))
_NUMBER = check("a number above 0 and below a million", lambda value: type(value) in (int, float) and 0 < value < 1e6)
ALPHA_RANGE = check("a number above 0 and below 0.5", lambda value: type(value) is float and 0 < value < 0.5)
_LOOKS = check(f"at most {MOST_LOOKS} increasing numbers of pairs, such as {list(LOOKS)}", _are_looks)
_METRIC = check(f"{', '.join(METRICS[:-1])} or {METRICS[-1]}", lambda value: value in METRICS)
_METRICS = check(
    f"different ones of {', '.join(METRICS)}",
    lambda value: isinstance(value, list) and 0 < len(value) == len({*map(str, value)} & {*METRICS}),
)
_SEED_OPTION = check(
    "the dotted name of an argument of data or model that seeds it, such as data.seed_value",
    lambda value: isinstance(value, str) and value.startswith(("data.", "model.")),
)
_SIZE = check("a number of parameters such as 100k", lambda value: type(value) in (str, int))


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
    if not isinstance(option, str):
        return name, None
    is_known = name == Time.name or (option.startswith(ARCHITECTURE_PREFIX) and name in MATCHES)
    return name, option if is_known and (name == Time.name or MATCHES[name].is_solved) else None


def _read_in_file(value: object, name: str) -> Iterable[str]:
    """A pattern, or the file that has the metric and its key there."""
    return TEXT(value, name) if isinstance(value, str) else record({"file": TEXT, "key": TEXT})(value, name)


# What a file writes in another way than Experiment: looks are cut by pairs, and first_seed and solved are inside others
_FILE = record(
    {},
    {
        "baseline": _texts,
        "variants": by_name(_OPTIONS),
        "factors": by_name(_FACTOR),
        "command": TEXT,
        "option": TEXT,
        "read": _read_in_file,
        "reseed": BOOL,
        "resume": TEXT,
        "time_limit": TEXT,
        "gpus_per_run": whole(1, 1024),
        "link": _texts,
        "setup": TEXT,
        "keep_trees": BOOL,
        "against": TEXT,
        "revisions": list_of(TEXT, MOST_VARIANTS),
        "unchanged": BOOL,
        "name": _NAME,
        "metric": _NAMED,
        "metrics": _METRICS,
        "delta": maybe(_NUMBER),
        "alpha": ALPHA_RANGE,
        "looks": _LOOKS,
        "half_width": maybe(_NUMBER),
        "batch": BOOL,
        "pairs": whole(1, MOST_PAIRS),
        "seeds": record({}, {"first": whole(0, LAST_SEED), "option": _SEED_OPTION}),
        "match": _match_in_file,
        "tune": maybe(record({"option": _TUNED}, {"factors": _FACTORS, "seeds": whole(1, MOST_PAIRS)})),
        "options": maybe(_OPTIONS),
        "out": TEXT,
        "sizes": list_of(_SIZE, MOST_SIZES),
        "predict": _SIZE,
        "tokens_per_parameter": POSITIVE,
        "repeat": BOOL,
    },
)


def experiment_of(content: Mapping[str, Any], source: object, name: str) -> Experiment:
    """The experiment that a file, or the options in its place, ask for.

    Args:
        content: The keys of an experiment file.
        source: Names it in errors.
        name: Of the experiment, if the content has none.

    Raises:
        ValueError: A key is unknown or wrong; a name cannot be that of a folder.
    """
    content = {"name": name, **{key: value for key, value in content.items() if value is not None or key == "delta"}}
    if of_fit := next((key for key in ("model", "data", "trainer") if key in content), None):
        raise ValueError(f"{source} has {of_fit}, so it is a config of fit: give it as --baseline, with a --vary")
    validate(content, _FILE, source)
    command, metric, secondary = _program(content, source)
    variants, trees = _variants(content, source)
    if command is not None and trees:
        command = replace(command, trees=trees)
    match, solved = _parsed(content.get("match", Tokens.name))
    if command is None and match == Time.name and solved is not None:
        raise ValueError(f"{source}: match time={solved}: fit scales its own steps: give match time")
    stop = _stop(content, source)
    experiment = Experiment(
        name=content["name"],
        variants=variants,
        factors=_factors(content, source),
        metric=metric,
        secondary=tuple(secondary),
        delta=content.get("delta", None if command is not None or isinstance(stop, Batch) else DELTA),
        alpha=content.get("alpha", ALPHA),
        stop=stop,
        first_seed=content.get("seeds", {}).get("first", 0),
        seed_option=content.get("seeds", {}).get("option", SEED_OPTION),
        match=match,
        solved=solved,
        tune=_grid(content.get("tune")),
        baseline=_as_tuple(content.get("baseline", ())),
        command=command,
        out=content.get("out", ""),
        **_options_and_sizes(content, source),
    )
    _refuse_unplannable(experiment, source)
    return experiment


def _program(content: Mapping[str, Any], source: object) -> tuple[Command | None, str, Sequence[str]]:
    """The command in place of ``fit``, if one is given; the metric that decides, and the secondary ones."""
    if "command" in content:
        if "baseline" in content:
            raise ValueError(f"{source}: baseline names configs of fit, and command is in place of fit: give one")
        if "metrics" in content:
            raise ValueError(f"{source}: a command has one metric, which read finds: give metric in place of metrics")
        command, name = command_of(content, source)
        return command, content.get("metric", name), MEASURED
    if useless := next((key for key in (*OF_COMMAND, "unchanged") if key in content), None):
        raise ValueError(f"{source}: {useless} is for a command, and there is none: give command, or leave it out")
    if "baseline" not in content:
        raise ValueError(f"{source}: there is no baseline: give configs of fit as baseline, or a command that trains")
    metric, *secondary = _metrics(content, source)
    return None, metric, secondary


def _variants(content: Mapping[str, Any], source: object) -> tuple[dict[str, Options], dict[str, Tree]]:
    """The variants, and the trees of all if they are revisions of one repository."""
    given = [key for key in ("variants", "factors", "against", "revisions", "unchanged") if content.get(key)]
    if not given:
        accepted = "variants, factors, against (a revision), revisions (several) or unchanged (the same twice)"
        raise ValueError(f"{source}: nothing is compared: give {accepted}")
    factors = _factors(content, source)
    against = str(content.get("against", ""))
    if given == ["factors", "against"] and (trees := trees_of(factors, against)):
        return variants_of(factors), trees
    if len(given) > 1:
        listed = " and ".join(option_named(key, source) for key in given)
        raise ValueError(f"{listed} say what is compared in two ways: give one")
    if "variants" in content:
        return {variant: flat_options(options) for variant, options in content["variants"].items()}, {}
    if factors:
        if revision := next((factor for factor in factors.values() if isinstance(factor, str)), None):
            advice = f"give {option_named('against', source)} REV too, the code that it changes"
            raise ValueError(f"{option_named('factors', source)} has the revision {revision}: {advice}")
        return variants_of(factors), {}
    if content.get("unchanged"):
        return {UNCHANGED: {}}, {}
    revisions = content.get("revisions") or [content["against"], ""]
    if len(revisions) < 2:
        name = option_named("revisions", source)
        raise ValueError(f"{name} has one, which is compared with nothing: give two or more, or one as against")
    names = [BASELINE, *(folder_name(revision) if revision else WORKING_TREE for revision in revisions[1:])]
    if len({*names}) < len(names):
        raise ValueError(f"{option_named('revisions', source)} has one twice: give each once")
    return {name: {} for name in names[1:]}, {
        name: Tree(revision=revision) for name, revision in zip(names, revisions, strict=True)
    }


def _factors(content: Mapping[str, Any], source: object) -> dict[str, Factor]:
    """The factors, if there are any."""
    if "factors" not in content:
        return {}
    section = "--factor" if source == COMMAND_LINE else f"{source}: factors"
    if useless := next((key for key in (*FIXED_BY_LADDER, "sizes", "tune") if content.get(key)), None):
        advice = "combinations of factors have a fixed number of pairs (pairs: 16) at one size, and nothing is tuned"
        raise ValueError(f"{section} with {option_named(useless, source)}: {advice}: leave one out")
    return read_factors(content["factors"], section)


def _as_tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _metrics(content: Mapping[str, Any], source: object) -> Sequence[str]:
    """The metric that decides, and the secondary ones."""
    metrics: Sequence[str] = content.get("metrics", ())
    if metrics and "metric" in content:
        raise ValueError(f"{source}: metrics has the metric that decides as its first: leave out metric")
    if "metric" in content:
        validate({"metric": content["metric"]}, record({"metric": _METRIC}), source)
    return metrics or (content.get("metric", METRICS[0]),)


def _stop(content: Mapping[str, Any], source: object) -> Looks | Batch:
    if content.get("batch"):
        if useless := next((key for key in NOT_IN_BATCH if content.get(key)), None):
            problem = "a batch compares variants by its own looks, at one size, without delta, tuning and factors"
            raise ValueError(f"{option_named(useless, source)}: {problem}: leave it out")
        return Batch()
    if "factors" in content:
        return Looks(pairs=_cut((), content.get("pairs", PAIRS), source))
    if "sizes" not in content:
        pairs = _cut(content.get("looks", LOOKS), content.get("pairs"), source)
        return Looks(pairs=pairs, half_width=content.get("half_width"))
    if fixed := [key for key in FIXED_BY_LADDER if key in content]:
        problem = f"a ladder has no {fixed[0]}"
        raise ValueError(f"{source}: {problem}: it has a fixed number of pairs (pairs: 8) at every size")
    return Looks(pairs=_cut((), content.get("pairs", LOOKS[0]), source))


def _grid(tune: Mapping[str, Any] | None) -> Grid | None:
    if tune is None:
        return None
    factors = tuple(map(float, tune.get("factors", FACTORS)))
    return Grid(option=tune["option"], factors=factors, seeds=tune.get("seeds", TUNING_SEEDS))


def _options_and_sizes(content: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The options of all runs, and the fields of a ladder."""
    options = flat_options(content.get("options", {}))
    if "sizes" not in content:
        if alone := next((key for key in OF_LADDER if key in content), None):
            raise ValueError(f"{source}: {alone} is a key of a ladder: give sizes too, or leave it out")
        return {"options": options}
    sizes = tuple(map(str, content["sizes"]))
    predicted = [str(content["predict"])] if "predict" in content else []
    numbers = [parse_size(size) for size in (*sizes, *predicted)]
    if not sizes or any(low >= high for low, high in itertools.pairwise(numbers)):
        listed = ", ".join([*sizes, *predicted])
        raise ValueError(f"{source}: sizes, and predict after them, must increase, got {listed}")
    if predicted and len(sizes) < FEWEST_SIZES:
        raise ValueError(f"{source}: predict needs {FEWEST_SIZES} sizes or more, got {len(sizes)}")
    of_size = {key: content[key] for key in ("tokens_per_parameter", "repeat") if key in content}
    return {
        "sizes": sizes,
        "predict": predicted[0] if predicted else None,
        "options": {**options, **of_size},
    }


def _refuse_unplannable(experiment: Experiment, source: object) -> None:
    """Refuse names that no folder can have, more runs than anyone trains, and options that an experiment sets."""
    for variant in experiment.variants:
        if variant in (BASELINE, AGAIN, NULL) or folder_name(variant) != variant or variant[0] == ".":
            folder = "the name of a folder without commas or backslashes"
            problem = f"must be {folder}, and not {BASELINE}, {AGAIN} or {NULL}"
            raise ValueError(f"{source}: the variant {shown(variant)} {problem}")
    runs = experiment.most_runs(2 * MOST_EXTENSIONS)
    if runs > MOST_RUNS:
        raise ValueError(f"{source}: variants, looks and tune ask for {runs} runs, expected at most {MOST_RUNS}")
    if len(experiment.variants) > MOST_VARIANTS:
        raise ValueError(f"{source} has {len(experiment.variants)} variants, expected at most {MOST_VARIANTS}")
    if problem := experiment.seeds_in_tuning(experiment.looks[-1]):
        raise ValueError(f"{source}: {problem}: give fewer pairs or another seeds.first")
    sections = [(experiment.options, "options")]
    sections += [(options, f"variants.{variant}") for variant, options in experiment.variants.items()]
    for options, section in sections:
        if reserved := [option for option in options if option in (*SET_BY_EXPERIMENT, experiment.seed_option)]:
            raise ValueError(f"{source}: {section}: {reserved[0]} is set by the experiment: leave it out")


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
