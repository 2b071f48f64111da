"""Pairs that are added to an experiment after its last planned look. No torch."""

from collections.abc import Sequence

from lightning_llm.ablate.experiment import MOST_PAIRS, Batch, Experiment
from lightning_llm.ablate.next_runs import Extension, State
from lightning_llm.ablate.results import Loaded
from lightning_llm.io.shell import shell_path


def extension_of(loaded: Loaded, pairs: int, variants: Sequence[str] | None) -> tuple[Extension, int]:
    """The pairs to add, and the look that they end at.

    Args:
        loaded: The experiment.
        pairs: How many.
        variants: For these; ``None``: for those whose comparison has not ended.

    Raises:
        ValueError: The plan is not used up, every comparison has ended, or these pairs cannot be added.
    """
    out = loaded.plan.out
    state = loaded.state
    experiment = loaded.plan.experiment
    if experiment.factors:
        advice = "begin another one with other seeds: --first-seed N"
        raise ValueError(f"{out} combines factors, which has a fixed number of pairs: {advice}")
    if isinstance(experiment.stop, Batch):
        raise ValueError(f"{out} is a batch, whose rule is fixed: begin another one with other seeds: --first-seed N")
    if state.needed:
        command = f"lightning-llm ablate run {shell_path(out)}"
        raise ValueError(f"{out} has not used up its plan: {command} continues it")
    if unknown := [name for name in variants or () if name not in experiment.variants]:
        raise ValueError(f"--variants {unknown[0]}: {out} has {', '.join(experiment.variants)}")
    comparisons = [state, *([] if state.tuned is None else [state.tuned])]
    if variants is None and not any(comparison.unfinished for comparison in comparisons):
        advice = "name those that you want to know better: --variants NAME"
        raise ValueError(f"{out}: every comparison has ended: {advice}")
    if not 1 <= pairs <= MOST_PAIRS:
        raise ValueError(f"--pairs must be from 1 to {MOST_PAIRS}, got {pairs}")
    extension = Extension(pairs, None if variants is None else tuple(variants))
    try:
        look = max(_look_with(extension, comparison, experiment) for comparison in comparisons)
    except ValueError as error:
        raise ValueError(f"--pairs {pairs}: {error}: give fewer") from None
    if problem := experiment.seeds_in_tuning(look):
        raise ValueError(f"--pairs {pairs}: {problem}: give fewer")
    return extension, look


def _look_with(extension: Extension, state: State, experiment: Experiment) -> int:
    """The last look that a comparison gets."""
    names = [name for name in extension.variants or state.unfinished if name in state.verdicts]
    looks = (experiment.design.look_with(state.verdicts[name].pairs + extension.pairs) for name in names)
    return max(looks, default=0)
