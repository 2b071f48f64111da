"""Results of the runs of an experiment. :func:`load_experiment` is what every report reads. No torch."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_llm.ablate.names import AGAIN, BASELINE, NULL
from lightning_llm.ablate.next_runs import RunKey, State
from lightning_llm.ablate.plan import Plan, Replay
from lightning_llm.ablate.program import Program
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.ratios import Cost
from lightning_llm.ablate.tuning import Losses
from lightning_llm.io.records import read_record
from lightning_llm.io.shell import shell_path
from lightning_llm.runs.status import DIVERGED
from lightning_llm.statistics import pairing
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts

COST = "cost.json"
NO_BETTER = "is no better than chance"
# A run begins near the loss of guessing at random. One that ends near it has learned nothing; one that ends at so many
# times of it has diverged. A model that never changes may be at it up to rounding.
FAR, ROUNDING = 1.5, 1e-4


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has ended.

    Attributes:
        run: Which.
        folder: Its run directory.
        loss: The metric at the last step; ``None``: the run failed to train.
        failure: How it failed, and why: it diverged, or is no better than chance.
        summary: Its ``summary.json``, with ``seconds`` and the hashes of what it used; empty if it ended before that.
        program: Whose run it is.
    """

    run: RunKey
    folder: Path
    loss: float | None
    failure: str
    summary: Mapping[str, Any]
    program: Program

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
        windows = None if self.has_failed else self.program.windows(self.folder)
        return windows if windows is not None and windows["step"] == self.summary.get("steps") else None

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Losses during the run, by their names: (step, value). Reading them may take a while."""
        return self.program.curves(self.folder)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An experiment as it is now.

    Attributes:
        plan: Its plan, whose ``hash`` belongs into every report.
        results: Of the runs that have ended.
        state: What is needed next, and the verdicts.
        cost: Of ``cost.json``; ``None`` until it is measured.
    """

    plan: Plan
    results: Mapping[RunKey, Result]
    state: State
    cost: Cost | None

    @property
    def replay(self) -> Replay | None:
        """The baseline's first seed and the same again; where it is reused, those of the experiment that has both."""
        seed = self.plan.experiment.first_seed
        first, again = (self.results.get(RunKey(name, seed)) for name in (BASELINE, AGAIN))
        if first is None or again is None or first.loss is None or again.loss is None:
            return self.plan.record.reused.replay if self.plan.is_reused(RunKey(BASELINE, seed)) else None
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
            baseline: The name of the baseline's runs.
            variant: That of the variant's.
        """
        experiment = self.plan.experiment
        seeds = experiment.seeds(verdict.pairs)

        def values(name: str, metric: str) -> list[float | None]:
            return [self.metric(RunKey(name, seed), metric) for seed in seeds]

        pairs = {metric: (values(baseline, metric), values(variant, metric)) for metric in experiment.secondary}
        measured = {metric: pair for metric, pair in pairs.items() if any(value is not None for value in pair[0])}
        samples = {metric: Sample(*pair) for metric, pair in measured.items()}
        count = len(experiment.variants)
        return verdicts(samples, alpha=experiment.alpha, looks=experiment.looks, variants=count)

    def metric(self, run: RunKey, metric: str) -> float | None:
        """A number of a run's summary; ``None``: the run failed to train, or has none."""
        result = self.results.get(run)
        return None if result is None or result.has_failed else result.summary.get(metric)

    def tuned_name(self, name: str) -> str:
        """The name of the runs of a variant once it is tuned."""
        tune = self.plan.tune
        tuned = self.state.tuning.get(name)
        return name if tune is None or tuned is None or tuned.best is None else tune.tuned_name(name, tuned.best)

    @property
    def null_began_alike(self) -> bool:
        """Whether the null variant began like the baseline: with ``model.init_from``, nothing is random."""
        seed = self.plan.experiment.first_seed
        runs = [self.results.get(RunKey(name, seed)) for name in (BASELINE, NULL)]
        starts = [None if result is None else result.summary.get(pairing.INITIAL_VALUES) for result in runs]
        return starts[0] is not None and starts[0] == starts[1]


def load_experiment(out: str | Path) -> Loaded:
    """An experiment as it is now: plan, runs, verdicts and cost.

    Raises:
        ValueError: There is none, it is an idea of a stream, whose losses are not shown, or two runs that should be a
            pair are none.
    """
    return load(Plan.read(Path(out)))


def load(plan: Plan) -> Loaded:
    """The experiment of a plan that was read before: see :func:`load_experiment`."""
    if plan.is_blind:
        stream = shell_path(plan.out.parent.parent)
        raise ValueError(f"{plan.out} is an idea of a stream: lightning-llm ablate status {stream} shows its verdict")
    results = results_of(plan)
    return Loaded(plan, results, plan.state(losses_of(results)), _cost_of(plan))


def trained_here(plan: Plan, results: Mapping[RunKey, Result]) -> list[Result]:
    """The runs that this experiment has trained: not those of another one."""
    return [result for run, result in results.items() if not plan.is_reused(run)]


def run_seconds(results: Iterable[Result]) -> float:
    """Seconds that runs took together; one without a summary has no time."""
    return float(sum(result.summary.get("seconds") or 0.0 for result in results))


def losses_of(results: Mapping[RunKey, Result]) -> Losses:
    """The loss of each run that has ended."""
    return {run: result.loss for run, result in results.items()}


def _cost_of(plan: Plan) -> Cost | None:
    """The content of ``cost.json``; ``None``: there is none, or it is of another plan."""
    path = plan.out / COST
    cost = read_record(path, Cost) if path.is_file() else None
    return None if cost is None or cost.plan != plan.hash else cost


def results_of(plan: Plan, previous: Mapping[RunKey, Result] | None = None) -> dict[RunKey, Result]:
    """The runs that have ended.

    Args:
        plan: Of the experiment.
        previous: What another call has returned: these are not read again.

    Raises:
        ValueError: A run used other batches or started from other values than the baseline's of the same seed.
    """
    program = program_of(plan)
    results = dict(previous or {})
    for run, folder in plan.run_folders():
        if run not in results and plan.variant_of(run.name) and (result := _result(plan, program, run, folder)):
            results[run] = result
    for run, result in results.items():
        base = _baseline(plan, results, run.seed)
        if base in (None, result) or result.has_failed:
            continue
        if problem := _mismatch(plan, program, base, result):
            advice = "remove the folder that is wrong, and ablate run trains it again"
            if not plan.variants[str(plan.variant_of(run.name))].is_known:
                advice = "let the data of both give the same batches, and give another --out"
            if plan.is_reused(run) or plan.is_reused(base.run):
                advice = "one is of another experiment: give another --out, and --reuse none"
            raise ValueError(f"{result.folder} and {base.folder} are no pair: {problem}; {advice}")
    if problem := program.problem(results):
        raise ValueError(problem)
    return results


def _baseline(plan: Plan, results: Mapping[RunKey, Result], seed: int) -> Any:
    """The baseline's run of a seed, or the tuned baseline's, that did not fail; ``None``: there is none yet."""
    runs = [run for run in sorted(results) if run.seed == seed and plan.variant_of(run.name) == BASELINE]
    return next((results[run] for run in runs if not results[run].has_failed), None)


def _result(plan: Plan, program: Program, run: RunKey, folder: Path) -> Result | None:
    ended = program.result(folder)
    if ended is None:
        return None
    metric = plan.experiment.metric
    loss = None if ended.failure else ended.summary.get(metric)
    failure = ended.failure or _failure(metric, loss, plan.variants[str(plan.variant_of(run.name))].chance)
    return Result(run, folder, None if failure else loss, failure, ended.summary, program)


def _failure(metric: str, loss: float | None, chance: float | None) -> str:
    """How a run with this loss failed to train, and why; empty if it trained. ``None``: chance is not known."""
    if loss is None:
        return f"{DIVERGED}: its {metric} is not finite"
    if chance is None or loss < (1 - ROUNDING) * chance:
        return ""
    how = DIVERGED if loss > FAR * chance else NO_BETTER
    return f"{how}: its {metric} is {loss:.4g}, and guessing at random has {chance:.4g}"


def _mismatch(plan: Plan, program: Program, base: Result, other: Result) -> str:
    """Why two runs are no pair, apart from what the plan makes different."""
    planned = plan.variants[str(plan.variant_of(other.run.name))]
    base_steps, steps = base.summary.get("steps"), other.summary.get("steps")
    if planned.steps == plan.variants[BASELINE].steps and base_steps != steps:
        return f"they have {base_steps} and {steps} steps"
    promises = program.promises
    fields = [] if promises.same_batches else [pairing.BATCHES, pairing.VALIDATION_BATCHES]
    fields += [] if promises.same_initial_values else [pairing.INITIAL_VALUES]
    told = base.summary.keys() | other.summary.keys()  # what a program tells unasked must agree too
    excused = [*planned.excused, *(field for field in fields if field not in told)]
    return pairing.mismatch(base.summary, other.summary, excused)
