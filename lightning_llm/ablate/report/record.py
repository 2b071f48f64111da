"""The report as data: what ``report.json`` holds, whatever it is made from. No torch.

A report has *rows*, one for each comparison, and *variants*: what was compared, and what it costs. A row is the verdict
of ``statistics.verdict`` with the values that it rests on, so every number of a report is in a row or a variant. What a
report is made from is in ``from_experiment.py``, ``from_sizes.py``, ``from_stream.py``, ``from_table.py`` and
``from_runs.py``; how it is shown, in ``words.py``, ``sections.py`` and ``render.py``.

Values are as the metric has them. Where higher is better, a positive difference is an improvement.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.ratios import StepCost
from lightning_llm.ablate.tuning import Tuned
from lightning_llm.statistics.design import NOT_SHOWN, UNDECIDED
from lightning_llm.statistics.power import FurtherPairs
from lightning_llm.statistics.verdict import Verdict
from lightning_llm.statistics.windows import WindowError

VERSION = 3
Kind = Literal["experiment", "sizes", "stream", "table", "runs"]
RowKind = Literal["result", "tuned", "null", "secondary", "confirmation", "main", "interaction", "together", "sum"]
EFFECTS = ("main", "interaction", "together", "sum")  # kinds of a factorial experiment
NOT_TESTED = "not tested yet"
NO_VERDICT = "no verdict"


class Pair(msgspec.Struct, frozen=True):
    """The values of a pair. ``None``: the run failed to train.

    Attributes:
        seed: That both runs share.
        baseline: The metric of the baseline's run.
        variant: The metric of the variant's run.
    """

    seed: int | str
    baseline: float | None
    variant: float | None

    @property
    def difference(self) -> float | None:
        """The variant's value less the baseline's; ``None``: one of them failed to train."""
        return None if self.baseline is None or self.variant is None else self.variant - self.baseline


class Idea(msgspec.Struct, frozen=True, kw_only=True):
    """The idea of a stream that a row is about.

    Attributes:
        place: In the stream, from 1.
        because: Why somebody believed in it.
        options: That it changes.
        p: One-sided p of its fresh pairs; ``None``: no look at them, or its stream had another rule.
        level: The p that it must not exceed; ``None``: its stream had another rule.
        e_value: Evidence of its pairs by the rule e-LOND; ``None``: its stream had another rule.
        threshold: Evidence that it needed by that rule.
        runs: Number of runs that were trained for it.
        run_seconds: Seconds that these took together.
        plan: Hash of its plan.
        match: What is equal in a pair.
    """

    place: int
    because: str
    options: dict[str, Any]
    runs: int
    run_seconds: float
    plan: str
    match: str
    p: float | None = None
    level: float | None = None
    e_value: float | None = None
    threshold: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Verdict):
    """One comparison: a verdict, what it is about, and the values that it rests on.

    Attributes:
        variant: Name of the variant, or of the idea.
        baseline: Name of what it is compared with.
        kind: ``result`` for the metric that decides; ``tuned`` for the same with both sides tuned; ``null`` for the
            baseline with other initial values; ``secondary`` for a metric that decides nothing; ``confirmation`` for
            the fresh pairs of an idea. Of combined factors: ``main`` for the effect of one, on average over the others;
            ``interaction`` for that of one with another minus without it; ``together`` for all of them; ``sum`` for
            all of them minus the sum of each alone. A pair of these has the two sides of a seed's contrast.
        size: Of the model, in a report of several sizes; else ``None``.
        metric: Name of what is compared.
        unit: Its unit.
        higher_is_better: Whether a positive difference is an improvement.
        baseline_mean: Mean of the baseline's values over its runs.
        mean: Mean of the variant's.
        by_seed: The pairs.
        runs_of_sides: Number of runs of the baseline and of the variant, if they are no pairs.
        further_pairs: How many more pairs end the comparison; ``None``: not known, or it has ended.
        window_error: Standard errors over the validation windows; ``None``: not known.
        compute: FLOPs of a run of the baseline, in a report of several sizes.
        multiplier: How many times the baseline's compute would give the variant's value, at several sizes.
        multiplier_interval: Its ends.
        idea: In a report of a stream; else ``None``.
    """

    variant: str
    baseline: str = BASELINE
    kind: RowKind = "result"
    size: str | None = None
    metric: str
    unit: str
    higher_is_better: bool = False
    baseline_mean: float | None = None
    mean: float | None = None
    by_seed: list[Pair] = dataclasses.field(default_factory=list)
    runs_of_sides: tuple[int, int] | None = None
    further_pairs: FurtherPairs | None = None
    window_error: WindowError | None = None
    compute: float | None = None
    multiplier: float | None = None
    multiplier_interval: tuple[float, float] | None = None
    idea: Idea | None = None

    @property
    def is_tested(self) -> bool:
        """Whether the variant has had a look."""
        return self.level is not None

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        return f"{self.variant}, tuned" if self.kind == "tuned" else self.variant


def row_of(found: Verdict | None, *, by_seed: Sequence[Pair] = (), higher_is_better: bool = False, **about: Any) -> Row:
    """A row of a verdict.

    Args:
        found: By values of which lower is better; ``None``: no look yet.
        by_seed: The pairs, with the same values.
        higher_is_better: Whether the metric's values are minus these, as the row has them.
        about: Further fields of the row.
    """
    if found is None:
        found = Verdict(
            verdict=UNDECIDED,
            direction=NOT_SHOWN,
            sentence=NOT_TESTED,
            has_ended=False,
            pairs=0,
            level=None,
            diverged=0,
            baseline_diverged=0,
            note=NOT_TESTED,
            warnings=[],
        )
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(Verdict)}
    seeds_left = [pair.seed for pair in by_seed if pair.baseline is not None]
    if found.robust is not None and seeds_left:  # indices of the pairs that are left: their seeds say more
        outliers = [seeds_left[index] for index in found.robust.outliers]
        fields["robust"] = dataclasses.replace(found.robust, outliers=outliers)
    row = Row(**fields, by_seed=list(by_seed), **about)
    return _negated(row) if higher_is_better else row


def _negated(row: Row) -> Row:
    """The row in the metric's own values, from one of minus these."""
    robust = row.robust
    if robust is not None:
        without = robust.without_outliers
        skewness = robust.skewness
        robust = dataclasses.replace(
            robust,
            median=-robust.median,
            skewness=None if skewness is None else -skewness,
            without_outliers=None if without is None else -without,
        )
    return dataclasses.replace(
        row,
        higher_is_better=True,
        difference=_minus(row.difference),
        interval=None if row.interval is None else (-row.interval[1], -row.interval[0]),
        robust=robust,
        warnings=_warnings_of(row),
        baseline_mean=_minus(row.baseline_mean),
        mean=_minus(row.mean),
        by_seed=[Pair(pair.seed, _minus(pair.baseline), _minus(pair.variant)) for pair in row.by_seed],
    )


def _warnings_of(row: Row) -> list[str]:
    """The warnings of a row with the other sign: they name its median, its skewness, and a difference."""
    robust = row.robust
    if robust is None:
        return row.warnings
    named = {"median difference {:+.4f}": robust.median, "skewed ({:+.1f})": robust.skewness}
    named["the difference is {:+.4f}"] = robust.without_outliers
    warnings = row.warnings
    for words, value in named.items():
        if value is not None:
            warnings = [text.replace(words.format(value), words.format(-value)) for text in warnings]
    return warnings


def _minus(value: float | None) -> float | None:
    return None if value is None else -value


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Initial values that a variant's runs share with the baseline's.

    Attributes:
        shared: Number of parameters (tensors) with the same initial values.
        parameters: Number of parameters.
        kept: Names of those that the constructor of a part has set.
        scales: Clauses about initial weights that have another scale.
    """

    shared: int
    parameters: int
    kept: list[str]
    scales: list[str]


class Mean(msgspec.Struct, frozen=True):
    """A mean over seeds.

    Attributes:
        value: The mean.
        sd: Standard deviation over seeds; ``None``: of one seed.
    """

    value: float
    sd: float | None = None


class Variant(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The baseline, a variant, or a group of runs, with its cost.

    Attributes:
        what: What it is, in words.
        options: That it changes.
        runs: Number of its runs that trained.
        seeds: Number of their seeds.
        folders: Run directories, where found runs are compared.
        means: Of each metric, over seeds.
        steps: Optimizer steps of a run; ``None``: not known, or they differ.
        parameters: Number of parameters.
        flops_per_token: Counted FLOPs of training on a token.
        tokens_per_step: Tokens of an optimizer step.
        facts: Values that a custom matching rule compares, by name.
        time_ratio: Time of a step over that of the baseline's, as it was measured for ``match: time``.
        time_ratio_interval: Its 95% interval.
        solved: Value of the option that was solved for, so that costs match.
        ratio: How closely the cost that is matched agrees with the baseline's.
        start: What pairs share before the first step.
        step: Time and memory of a step, measured alone.
        training_s: Seconds of all steps by that measurement.
        run_seconds: Mean seconds of a run of a command.
        run_memory_gib: Mean peak memory of a run of a command, in GiB.
    """

    what: str = ""
    options: dict[str, Any] = {}
    runs: int = 0
    seeds: int = 0
    folders: list[str] = []
    means: dict[str, Mean] = {}
    steps: int | None = None
    parameters: int | None = None
    flops_per_token: float | None = None
    tokens_per_step: int | None = None
    facts: dict[str, float | None] = {}
    time_ratio: float | None = None
    time_ratio_interval: tuple[float, float] | None = None
    solved: float | None = None
    ratio: float | None = None
    start: Start | None = None
    step: StepCost | None = None
    training_s: float | None = None
    run_seconds: float | None = None
    run_memory_gib: float | None = None


class Design(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How an experiment compares: what its plan has frozen.

    Attributes:
        plan: Hash of the plan.
        program: Whose runs are compared.
        configs: Of the baseline.
        command: In place of ``fit``; empty: none.
        revisions: Titles of revisions, by variant.
        diffs: Git's summary of what each changes.
        text: That the runs train on; empty: not known.
        validation: Which part of the validation text the metric is of; empty: not known.
        looks: Planned numbers of pairs.
        tested_after: Numbers of pairs after which there is a look: the planned ones, and those that were added.
        extensions: Pairs that were added after the last look.
        first_seed: Of the pairs.
        seeds: Of the baseline's runs.
        match: What is equal in a pair.
        match_option: Option that is solved for, so that costs match; empty: none.
        rule: How looks share alpha: shares in reserve, the power of spending, and the fewest pairs of a verdict.
        seen: Seeds that earlier experiments with this baseline have used.
        reused: For each run of another experiment its name.
        reused_variants: Whether runs of variants are among them.
        reused_replay: The experiment that has trained a seed twice; empty: this one.
        threads: Of a run.
        accelerator: ``cpu`` or ``cuda``.
        commit: Of this package.
    """

    plan: str
    program: str = "fit"
    configs: list[str] = []
    command: str = ""
    revisions: dict[str, str] = {}
    diffs: dict[str, str] = {}
    text: str = ""
    validation: str = ""
    looks: list[int] = []
    tested_after: list[int] = []
    extensions: list[Any] = []
    first_seed: int = 0
    seeds: list[int] = []
    match: str = "tokens"
    match_option: str = ""
    rule: dict[str, float] = {}
    seen: dict[str, list[int]] = {}
    reused: dict[str, str] = {}
    reused_variants: bool = False
    reused_replay: str = ""
    threads: int = 1
    accelerator: str = "cpu"
    commit: str | None = None


class Checks(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Checks of an experiment on its own noise.

    Attributes:
        replay_difference: Largest difference between a seed and the same again; ``None``: not tried.
        redrawn: Which weights the null variant has redrawn; empty: there is none.
        failed_runs: How each run failed that did.
    """

    replay_difference: float | None = None
    redrawn: str = ""
    failed_runs: dict[str, str] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedVariant(Tuned):
    """Outcome of tuning for a variant.

    Attributes:
        untuned: Its own value of the option.
    """

    untuned: float | None


class Tuning(msgspec.Struct, kw_only=True, frozen=True):
    """Tuned option, its grid, and the cost of tuning.

    Attributes:
        option: That was tuned.
        seeds: Of the grid.
        variants: By name; empty: it has not ended.
        runs: Number of runs.
        run_seconds: Seconds that these took together.
    """

    option: str
    seeds: list[int]
    variants: dict[str, TunedVariant]
    runs: int
    run_seconds: float


class Spent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Cost of the runs, and how time and memory of a step were measured.

    Attributes:
        runs: Number of runs that were trained here.
        run_seconds: Seconds that these took together.
        machine: That measured a step; empty: nothing was measured.
        threads: That it had.
        date: Of the measurement.
        torch: The version.
        rounds: Interleaved steps of each pair.
        other_cores: Cores that other programs used meanwhile; ``None``: that cannot be seen.
    """

    runs: int
    run_seconds: float
    machine: str = ""
    threads: int = 0
    date: str = ""
    torch: str = ""
    rounds: int = 0
    other_cores: float | None = None


class Curve(msgspec.Struct, kw_only=True, frozen=True):
    """A variant's metric during training, at its validations.

    Attributes:
        steps: Of the validations.
        mean: Over the seeds that all variants have.
        sd: Standard deviation over these; 0 for one seed.
        pairs: Number of pairs with the baseline.
        shares: Steps of the baseline at which differences are; a variant with other steps is read at equal shares.
        difference: Means of the pairs' differences.
        half_width: Half the width of their 95% intervals, each by itself; 0 for one pair.
        at_equal_time: Difference when the faster variant ends; ``None``: not known.
    """

    steps: list[int]
    mean: list[float]
    sd: list[float]
    pairs: int = 0
    shares: list[int] = []
    difference: list[float] = []
    half_width: list[float] = []
    at_equal_time: float | None = None


class SizeFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A size of a ladder.

    Attributes:
        compute: FLOPs of a run of the baseline.
        plan: Hash of its plan.
        mean: Of the baseline.
        steps: Of a run of the baseline.
        parameters: Of the baseline.
    """

    compute: float
    plan: str
    mean: float | None
    steps: int | None
    parameters: int | None


class Predicted(msgspec.Struct, kw_only=True, frozen=True):
    """Prediction for a variant at a size.

    Attributes:
        difference: The mean.
        interval: Of this mean.
        prediction_interval: In which the difference that is observed there should be.
        answer: Whether the finding of the largest size ``holds``, ``fades`` or ``flips`` there, or is ``unknown``.
    """

    difference: float
    interval: tuple[float, float]
    prediction_interval: tuple[float, float]
    answer: str


class LearnedDrift(msgspec.Struct, kw_only=True, frozen=True):
    """How differences change from size to size, and what that was learned from (``statistics.extrapolation``).

    Attributes:
        decay: φ, by which a difference is multiplied for 4 times the compute; 1: it persists.
        base: τ, the scale of a change by chance for 4 times the compute.
        share: κ, the same as a share of the difference.
        own_steps: Number of steps from size to size of this ladder.
        other_steps: Of other ladders.
        other_ladders: Their number.
    """

    decay: float
    base: float
    share: float
    own_steps: int
    other_steps: int
    other_ladders: int


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """A stored prediction, and what was observed.

    Attributes:
        predicted: ``None``: nothing was.
        observed: Difference; ``None``: not yet, or a run failed to train.
        is_hit: Whether it is in the prediction interval.
        has_ended: Whether the size has.
    """

    predicted: Predicted | None
    observed: float | None
    is_hit: bool | None
    has_ended: bool


class StoredPrediction(msgspec.Struct, kw_only=True, frozen=True):
    """The predictions that were stored before a size was trained.

    Attributes:
        size: The size.
        compute: FLOPs of a run of the baseline.
        hash: SHA-256 of what was stored.
        variants: Outcomes by name.
    """

    size: str
    compute: float
    hash: str
    variants: dict[str, Outcome]


class Sizes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Fields of a report of several sizes.

    Attributes:
        sizes: The smallest first.
        pairs: Of each size.
        level: Probability of an interval of a prediction.
        tuned_option: Option that was tuned at the smallest size; empty: none.
        tuned_factors: By what it multiplies each variant's own value at larger sizes.
        target: Size that is predicted; empty: none.
        target_compute: FLOPs of a run of the baseline there.
        predicted: Of each variant at the target; ``None``: its differences do not allow it.
        drift: That these predictions rest on; ``None``: there are none, or an earlier version computed them.
        predictions: That were stored.
    """

    sizes: dict[str, SizeFacts]
    pairs: int
    level: float
    tuned_option: str = ""
    tuned_factors: dict[str, float] = {}
    target: str = ""
    target_compute: float | None = None
    predicted: dict[str, Predicted | None] = {}
    drift: LearnedDrift | None = None
    predictions: list[StoredPrediction] = []


class StreamFacts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Fields of a report of a stream.

    Attributes:
        rule: Name of the rule that adopts.
        looks: Numbers of fresh pairs after which an idea may be adopted; none: its rule was e-LOND.
        minimal_gain: An adopted idea improves the metric by more than this.
        most: Most pairs of an idea by the rule e-LOND, besides those that confirm it.
        configs: Of the first baseline.
        fit_options: Further options of the first baseline.
        adopted: Places of the ideas that were.
        gain: Sum of the differences that confirmed them.
        run_seconds: Seconds of all runs together.
        is_final: Whether it takes no more ideas; then rows have their pairs.
        unfinished: Idea without a verdict; empty: none.
        next_level: The p that the next idea must not exceed.
        pair_sd: Standard deviation of a pair's difference, as the median over the ideas; ``None``: not known yet.
    """

    rule: str
    looks: list[int] = []
    minimal_gain: float = 0.0
    most: int | None = None
    configs: list[str] = []
    fit_options: list[str] = []
    adopted: list[int] = []
    gain: float = 0.0
    run_seconds: float = 0.0
    is_final: bool = False
    unfinished: str = ""
    next_level: float | None = None
    pair_sd: float | None = None


class StepMemory(msgspec.Struct, kw_only=True, frozen=True):
    """The memory of a step that ``MemoryProfiler`` sampled in several groups of runs.

    Attributes:
        step: The number of the step.
        variants: Of each group, at each point of the step, bytes by category and by module.
    """

    step: int
    variants: dict[str, Any]


class ReportRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A report.

    Attributes:
        version: Of these fields.
        kind: What it is made from.
        name: Of the experiment, the stream, the table, or the text.
        folder: That it is in; empty: none.
        metric: That decides.
        unit: Its unit.
        higher_is_better: Whether a positive difference is an improvement.
        baseline: Name of what the others are compared with.
        delta: Smallest difference that matters; ``None``: none was given.
        alpha: Probability that an interval misses its true difference, over all variants.
        half_width: Of the interval that ends a comparison; ``None``: a verdict ends it.
        level: Probability of each interval.
        has_ended: Whether nothing is left to do.
        rows: Comparisons.
        variants: What was compared, the baseline first.
        notes: What a reader must know besides, in sentences.
        design: Of an experiment.
        checks: Of an experiment.
        tuning: Of an experiment; ``None``: nothing is tuned.
        spent: Of an experiment.
        curves: Of each variant, during training.
        sizes: Of an experiment at several sizes.
        stream: Of a stream.
        memory: Of a step, in groups of runs.
        environment: Device, precision, and versions.
    """

    version: int
    kind: Kind
    name: str
    folder: str = ""
    metric: str
    unit: str
    higher_is_better: bool = False
    baseline: str = BASELINE
    delta: float | None = None
    alpha: float
    half_width: float | None = None
    level: float
    has_ended: bool = True
    rows: list[Row] = []
    variants: dict[str, Variant] = {}
    notes: list[str] = []
    design: Design | None = None
    checks: Checks | None = None
    tuning: Tuning | None = None
    spent: Spent | None = None
    curves: dict[str, Curve] = {}
    sizes: Sizes | None = None
    stream: StreamFacts | None = None
    memory: StepMemory | None = None
    environment: dict[str, Any] = {}

    @property
    def results(self) -> list[Row]:
        """The rows that decide, each followed by itself with both sides tuned."""
        return [row for row in self.rows if row.kind in ("result", "tuned")]

    @property
    def effects(self) -> list[Row]:
        """The rows of effects of combined factors; none in other reports."""
        return [row for row in self.rows if row.kind in EFFECTS]

    @property
    def is_batch(self) -> bool:
        """Whether the variants are a batch of ideas, which are adopted or not."""
        return self.kind == "experiment" and any(row.e_value is not None for row in self.of_kind("result"))

    @property
    def together(self) -> float | None:
        """The probability with which all intervals are right. ``None``: there are not several, or each is by itself."""
        if self.is_batch:
            return None
        count = sum(row.interval is not None for row in self.rows if row.kind == "result")
        return 1 - self.alpha if count > 1 else None

    def row(self, variant: str, kind: RowKind = "result", size: str | None = None, metric: str | None = None) -> Row:
        """The row of a comparison.

        Raises:
            KeyError: There is none.
        """
        for row in self.rows:
            is_of_metric = metric is None or row.metric == metric
            if (row.variant, row.kind, row.size) == (variant, kind, size) and is_of_metric:
                return row
        names = dict.fromkeys(row.variant for row in self.rows if (row.kind, row.size) == (kind, size))
        raise KeyError(f"{variant!r} is none of the variants {', '.join(names) or 'of this report, which has none'}")

    def of_kind(self, kind: RowKind) -> Iterator[Row]:
        """The rows of a kind."""
        return (row for row in self.rows if row.kind == kind)

    def mean_of(self, name: str) -> float | None:
        """The baseline's mean, and that plus the paired difference for a variant, which may have other seeds."""
        mean = self.variants[self.baseline].means.get(self.metric)
        if mean is None or name == self.baseline:
            return None if mean is None else mean.value
        difference = next((row.difference for row in self.of_kind("result") if row.variant == name), None)
        return None if difference is None else mean.value + difference
