"""What the runs of an experiment have given. :func:`load_experiment` is what every report reads. No torch."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_llm.ablate.arm import AGAIN, BASELINE, NULL
from lightning_llm.ablate.next_runs import RunKey, State
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.ratios import INTERVAL
from lightning_llm.ablate.tuning import Losses
from lightning_llm.io.schema import NUMBER, POSITIVE, TEXT, by_name, list_of, maybe, record, validate, whole
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import MIB, read_json
from lightning_llm.runs.directory import STATUS, WINDOWS
from lightning_llm.runs.event_files import read_curves
from lightning_llm.runs.status import DIVERGED, FINISHED, read_summary, run_state
from lightning_llm.statistics import pairing
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts
from lightning_llm.statistics.windows import MOST_BLOCKS
from lightning_llm.training.metrics import LOSSES, TRAIN_LOSS, TRAIN_LOSS_EVAL, VAL_LOSS

COST = "cost.json"
NO_BETTER = "is no better than chance"
# A run begins near the loss of guessing at random. One that ends near it has learned nothing; one that ends at so many
# times of it has diverged. A model that never changes may be at it up to rounding.
FAR, ROUNDING = 1.5, 1e-4
NUMBERS = (*LOSSES, TRAIN_LOSS_EVAL, "seconds", "peak_memory_gib", "steps", "tokens")
CURVES = (TRAIN_LOSS, VAL_LOSS)
SETTINGS = {"trainer.precision": ("precision",), "trainer.tf32": ("tf32",)}  # what a variant may change, and its record
_BLOCKS = {"windows": whole(1), "tokens": whole(1), "nats": NUMBER}
_COST_OF_ARM = record(
    dict.fromkeys(("step_s", "step_p20_s", "step_p80_s", "ratio"), POSITIVE),
    {"peak_bytes": maybe(NUMBER), "ratio_interval": maybe(INTERVAL), "ratio_p20": NUMBER, "ratio_p80": NUMBER},
)
_MACHINE = {**dict.fromkeys(("machine", "date", "torch"), TEXT), "threads": whole(), "rounds": whole()}
_COST = record({"plan": TEXT, "sides": by_name(_COST_OF_ARM)}, {**_MACHINE, "other_cores": maybe(NUMBER)})
_WINDOWS = record({"step": whole(), **{name: list_of(kind, MOST_BLOCKS) for name, kind in _BLOCKS.items()}})


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has ended.

    Attributes:
        run: Which.
        folder: Its run directory.
        loss: The metric at the last step; ``None``: the run failed to train.
        failure: How it failed, and why: it diverged, or is no better than chance.
        summary: Its ``summary.json``, with ``seconds`` and the hashes of what it used; empty if it ended before that.
    """

    run: RunKey
    folder: Path
    loss: float | None
    failure: str
    summary: Mapping[str, Any]

    @property
    def has_failed(self) -> bool:
        """Whether the run failed to train, so that no loss of it counts."""
        return self.loss is None

    def windows(self) -> Mapping[str, Any] | None:
        """The sums of blocks of validation windows at the last step, as ``statistics.windows`` takes them.

        Returns:
            ``None``: the run has none, or they are of another end of it.

        Raises:
            ValueError: The file is damaged.
        """
        path = self.folder / WINDOWS
        if self.has_failed or not path.is_file():
            return None
        content = read_json(path, MIB)
        validate(content, _WINDOWS, path)
        if len({len(content[name]) for name in _BLOCKS}) > 1:
            raise ValueError(f"{path}: windows, tokens and nats differ in length")
        return content if content["step"] == self.summary.get("steps") else None

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """``train_loss`` and ``val_loss``: (step, value), from TensorBoard's files. Reading them takes a while."""
        return read_curves(self.folder, CURVES.__contains__)


class Replay(NamedTuple):
    """The same seed twice.

    Attributes:
        difference: The largest of curves and losses.
        source: The other experiment that has trained them; empty: this one.
    """

    difference: float
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An experiment as it is now.

    Attributes:
        plan: Its plan; ``plan.content["hash"]`` belongs into every report.
        results: Of the runs that have ended.
        state: What is needed next, and the verdicts.
        cost: Of ``cost.json``; ``None`` until it is measured.
    """

    plan: Plan
    results: Mapping[RunKey, Result]
    state: State
    cost: Mapping[str, Any] | None

    @property
    def replay(self) -> Replay | None:
        """The baseline's first seed and the same again; where it is reused, those of the experiment that has both."""
        seed = self.plan.experiment.first_seed
        first, again = (self.results.get(RunKey(name, seed)) for name in (BASELINE, AGAIN))
        if first is None or again is None or first.loss is None or again.loss is None:
            reused = self.plan.reused["replay"] if self.plan.is_reused(RunKey(BASELINE, seed)) else None
            return None if reused is None else Replay(**reused)
        first_curves, second_curves = first.curves(), again.curves()
        pairs = [(first.loss, again.loss)]
        for name in first_curves.keys() & second_curves.keys():
            both = dict(first_curves[name]), dict(second_curves[name])
            pairs += [(both[0][step], both[1][step]) for step in both[0].keys() & both[1].keys()]
        return Replay(max(abs(one - other) for one, other in pairs))

    def secondary(self, verdict: Verdict, baseline: str, variant: str) -> dict[str, Verdict]:
        """For each secondary metric what the pairs of a verdict say of it, by the same rule and without a delta.

        Args:
            verdict: Of the metric that decides.
            baseline: The name of the runs of one side.
            variant: That of the other.
        """
        experiment = self.plan.experiment
        seeds = experiment.seeds(verdict.pairs)

        def values(name: str, metric: str) -> list[float | None]:
            return [_metric(self.results.get(RunKey(name, seed)), metric) for seed in seeds]

        samples = {metric: Sample(values(baseline, metric), values(variant, metric)) for metric in experiment.secondary}
        count = len(experiment.variants)
        return verdicts(samples, alpha=experiment.alpha, looks=experiment.looks, variants=count)

    def tuned_name(self, arm: str) -> str:
        """What the runs of an arm are called once it is tuned."""
        tune, tuned = self.plan.tune, self.state.tuning.get(arm)
        return arm if tune is None or tuned is None or tuned.best is None else tune.tuned_name(arm, tuned.best)

    @property
    def null_began_alike(self) -> bool:
        """Whether the null variant began like the baseline: with ``model.init_from``, nothing is random."""
        seed = self.plan.experiment.first_seed
        runs = [self.results.get(RunKey(name, seed)) for name in (BASELINE, NULL)]
        starts = [None if result is None else result.summary.get(pairing.INITIAL_VALUES) for result in runs]
        return starts[0] is not None and starts[0] == starts[1]


def _metric(result: Result | None, metric: str) -> float | None:
    """A number of a run's summary; ``None``: the run failed to train, or has none."""
    return None if result is None or result.has_failed else result.summary.get(metric)


def load_experiment(out: str | Path) -> Loaded:
    """An experiment as it is now: plan, runs, verdicts and cost.

    Raises:
        ValueError: There is none, it was changed after the start, it is an idea of a stream, whose losses are not
            shown, or two runs that should be a pair are none.
    """
    return load(Plan.read(Path(out)))


def load(plan: Plan) -> Loaded:
    """The experiment of a plan that was read before: see :func:`load_experiment`."""
    if plan.idea is not None:
        stream = shell_path(plan.out.parent.parent)
        raise ValueError(f"{plan.out} is an idea of a stream: lightning-llm ablate status {stream} shows its verdict")
    results = results_of(plan)
    return Loaded(plan, results, plan.state(losses_of(results)), _cost_of(plan))


def trained_here(plan: Plan, results: Mapping[RunKey, Result]) -> list[Result]:
    """The runs that this experiment has trained: not those of another one."""
    return [result for run, result in results.items() if not plan.is_reused(run)]


def run_seconds(results: Iterable[Result]) -> float:
    """What runs took together; one without a summary has no time."""
    return float(sum(result.summary.get("seconds") or 0.0 for result in results))


def losses_of(results: Mapping[RunKey, Result]) -> Losses:
    """The loss of each run that has ended."""
    return {run: result.loss for run, result in results.items()}


def _cost_of(plan: Plan) -> Mapping[str, Any] | None:
    """The content of ``cost.json``; ``None``: there is none, or it is of another plan.

    Raises:
        ValueError: It is damaged.
    """
    path = plan.out / COST
    if not path.is_file():
        return None
    content = read_json(path)
    validate(content, _COST, path)
    if unknown := set(content["sides"]) - {BASELINE, *plan.experiment.variants}:
        raise ValueError(f"{path}: the plan has no side {sorted(unknown)[0]}")
    return content if content["plan"] == plan.content["hash"] else None


def results_of(plan: Plan, previous: Mapping[RunKey, Result] | None = None) -> dict[RunKey, Result]:
    """The runs that have ended.

    Args:
        plan: Of the experiment.
        previous: What another call has returned: these are not read again.

    Raises:
        ValueError: A run used other batches or started from other values than the baseline's of the same seed.
    """
    results = dict(previous or {})
    for run, folder in plan.run_folders():
        if run not in results and plan.arm(run.name) and (result := _result(plan, run, folder)):
            results[run] = result
    for run, result in results.items():
        base = _baseline(plan, results, run.seed)
        if base not in (None, result) and not result.has_failed and (problem := _mismatch(plan, base, result)):
            advice = "remove the folder that is wrong, and ablate run trains it again"
            if plan.is_reused(run) or plan.is_reused(base.run):
                advice = "one is of another experiment: give another --out, and --reuse none"
            raise ValueError(f"{result.folder} and {base.folder} are no pair: {problem}; {advice}")
    return results


def _baseline(plan: Plan, results: Mapping[RunKey, Result], seed: int) -> Any:
    """The baseline's run of a seed, or the tuned baseline's, that did not fail; ``None``: there is none yet."""
    runs = [run for run in sorted(results) if run.seed == seed and plan.arm(run.name) == BASELINE]
    return next((results[run] for run in runs if not results[run].has_failed), None)


def _result(plan: Plan, run: RunKey, folder: Path) -> Result | None:
    state = run_state(folder).description
    if state == FINISHED:
        summary = read_summary(folder, NUMBERS)
        metric, loss = plan.experiment.metric, summary.get(plan.experiment.metric)
        failure = _failure(metric, loss, plan.arms[str(plan.arm(run.name))].get("chance"))
        return Result(run, folder, None if failure else loss, failure, summary)
    if state.startswith(DIVERGED):
        return Result(run, folder, None, f"{DIVERGED}: {read_json(folder / STATUS).get('reason', '')}", {})
    return None


def _failure(metric: str, loss: float | None, chance: float | None) -> str:
    """How a run with this loss failed to train, and why; empty if it trained. ``None``: chance is not known."""
    if loss is None:
        return f"{DIVERGED}: its {metric} is not finite"
    if chance is None or loss < (1 - ROUNDING) * chance:
        return ""
    how = DIVERGED if loss > FAR * chance else NO_BETTER
    return f"{how}: its {metric} is {loss:.4g}, and guessing at random has {chance:.4g}"


def _mismatch(plan: Plan, base: Result, other: Result) -> str:
    """Why two runs are no pair, apart from what the plan makes different."""
    name = str(plan.arm(other.run.name))
    base_steps, steps = base.summary.get("steps"), other.summary.get("steps")
    base_arm, arm = plan.arms[BASELINE], plan.arms[name]
    if arm["steps"] == base_arm["steps"] and base_steps != steps:
        return f"they have {base_steps} and {steps} steps"
    options = plan.experiment.variants.get(name, {})
    excused = [field for option, fields in SETTINGS.items() if option in options for field in fields]
    excused += [pairing.NULL_VALUES] if name == NULL else []
    excused += [pairing.BATCHES, pairing.VALIDATION_BATCHES] if arm["tokenizer"] != base_arm["tokenizer"] else []
    return pairing.mismatch(base.summary, other.summary, excused)
